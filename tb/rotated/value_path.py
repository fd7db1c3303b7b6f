"""Bench of the value path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import Int
from golden.float16 import from_integer, parts
from golden.rotated.value_path import ValuePathConfig, value_path
from golden.rotated.write_path import WritePathConfig, write_path
from tb.bench import Bench, Case, Generator
from tb.packing import Packer, Row
from tb.rotated.signs import beat_words, table_signs
from tb.rotated.vectors import filling, heads

ONE = 1 << 16


class ValuePathBench(Bench):
    """A row is the stored vectors of one sum."""

    config: ValuePathConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        c = self.config
        self.output = Packer(self.unit.o.payload.shape(), c.drain_lanes)
        self.signs = table_signs(c.patterns, c.size)

    def row(self, index: Any, norm: Any, p: Any, k: int = 0, top: int | None = None) -> Row:
        """By default top is what it has to be."""
        index, norm, p = (np.asarray(v, np.int64) for v in (index, norm, p))
        top = int(parts(norm)[1].max()) if top is None else top
        last = np.zeros(len(norm), np.int64)
        last[-1] = 1
        per_beat = {"norm": norm, "p": p, "last": last, "top": top, "pattern": k % self.config.patterns}
        return Row({"index": index.ravel()}, per_beat)

    def stored(self, generator: Generator, count: int, spread: int = 6) -> tuple[Int, Int, Int]:
        """Random indices, norms within some octaves, probabilities that add up to at most 1."""
        c = self.config
        high = int(generator.integers(-24 + spread, 6))
        norm = from_integer(generator.integers(1024, 2048, count), generator.integers(high - spread, high, count))
        share = generator.random(count) ** 4
        p = np.minimum((share / share.sum() * ONE).astype(np.int64), ONE - 1)
        return generator.integers(0, 1 << c.bits, (count, c.size)), norm, p

    def directed(self) -> list[Case]:
        c, generator = self.config, np.random.default_rng(5)
        top = (1 << c.bits) - 1
        flat = np.ones(c.size, np.int64)
        ends = np.stack([0 * flat, top * flat, np.arange(c.size) % (top + 1), (top // 2) * flat, (top + 1) // 2 * flat])
        largest, one = 0x7BFF, 0x3C00
        count = min(c.max_row, 5)
        cases = [
            Case("one vector", [self.row(e[None], [one], [ONE - 1], k) for k, e in enumerate(ends)]),
            Case("largest norm", [self.row(e[None], [largest], [ONE - 1], k) for k, e in enumerate(ends)]),
            Case("zero norms", [self.row(ends[:count], [0] * count, [ONE // count] * count)]),
            Case("zero probabilities", [self.row(ends[:count], [one] * count, [0] * count)]),
            Case(
                "norms far apart",
                [self.row(ends[:2][: c.max_row], [largest, 1][: c.max_row], [9, 65_000][: c.max_row])],
            ),
            # Weights add up to more than 1: bins and moments stay exact, z saturates.
            Case(
                "not normalised",
                [self.row(e[None].repeat(count, 0), [largest] * count, [ONE - 1] * count) for e in ends],
            ),
            Case("every pattern", [self.row(ends[2:3], [one], [40_000], k) for k in range(c.patterns)]),
            Case(
                "every top", [self.row(ends[3:], [1, 2], [33, 44], 0, t) for t in range(1, 31)] if c.max_row > 1 else []
            ),
            Case("lengths", [self.row(*self.stored(generator, n)) for n in (1, 2, 3, 2 * c.size) if n <= c.max_row]),
        ]
        return [case for case in cases if case.rows]

    def random(self, generator: Generator) -> list[Row]:
        limit = min(self.config.max_row, 12)
        rows = []
        for k in range(6):
            stored = self.stored(generator, int(generator.integers(1, limit + 1)), 1 + 4 * (k % 3))
            rows.append(self.row(*stored, int(generator.integers(99))))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        count = min(self.config.max_row, max(1, beats // 4))
        return [self.row(*self.stored(generator, count), k) for k in range(max(2, beats // count))]

    def timed(self, generator: Generator) -> list[Row]:
        return [self.row(*self.stored(generator, n)) for n in (1, 7) if n <= self.config.max_row]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Values through the write path, under probabilities that fall off."""
        c = self.config
        bits = 16
        values = [filling(x, bits) for x in heads(capture, c.size, "value")][: c.max_row]
        if not values:
            return []
        write = WritePathConfig(lanes=c.size, size=c.size, in_bits=bits, bits=c.bits, patterns=1)
        x, exponent = np.stack([x for x, _ in values]), np.array([e for _, e in values])
        index, norm = write_path(write, x, self.signs[0], exponent)
        rows = []
        for decay in (0.5, 0.9, 0.99):
            share = decay ** np.arange(len(norm), dtype=np.float64)
            rows.append(self.row(index, norm, (share / share.sum() * (ONE - 1)).astype(np.int64)))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        rows, outputs = [], []
        p = tensors["p"].reshape(-1, tensors["p"].shape[-1])
        y = tensors["y"].reshape(len(p), self.config.size)
        for weights, top, result in zip(p, tensors["top"].ravel(), y, strict=True):
            rows.append(self.row(tensors["index"], tensors["norm"], weights, 0, int(top)))
            outputs.append(Row({"y": result}))
        return rows, outputs

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        """The model's pattern in place of the first."""
        self.signs[0] = tensors["signs"]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        c, found = self.config, []
        for row in rows:
            fields = row.row
            index = row.data["index"].reshape(-1, c.size)
            y = value_path(c, index, fields["norm"], fields["p"], fields["top"], self.signs[fields["pattern"]])
            found.append(Row({"y": y}))
        return found

    def table(self) -> list[tuple[int, int]]:
        return list(enumerate(beat_words(self.signs, self.config.drain_lanes)))


BENCH = ValuePathBench
