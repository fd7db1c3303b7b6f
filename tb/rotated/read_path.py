"""Bench of the read path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import Int, bounds
from golden.float16 import from_integer
from golden.rotated.read_path import ReadPathConfig, centroids_of, read_path
from golden.rotated.write_path import WritePathConfig, write_path
from tb.bench import Bench, Case, Generator
from tb.packing import Packer, Row
from tb.rotated.signs import beat_words, table_signs
from tb.rotated.vectors import corners, filling, heads, random_vector, random_vectors


class ReadPathBench(Bench):
    """A row is a query and the stored vectors that it is scored against."""

    config: ReadPathConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        c = self.config
        self.output = Packer(self.unit.o.payload.shape(), 1)
        self.signs = table_signs(c.patterns, c.size)
        if c.codebook == "programmable":
            top = (1 << c.centroid_bits) - 1
            self.centroids = np.linspace(top / (2 * c.half), top, c.half).astype(np.int64)
        else:
            self.centroids = centroids_of(c, None)

    def row(self, query: Any, index: Any, norm: Any, k: int = 0, shift: int | None = None) -> Row:
        """By default the shift at which a typical score fills half of the word."""
        c = self.config
        index, norm = np.asarray(index, np.int64), np.asarray(norm, np.int64)
        if shift is None:
            shift = c.in_bits if c.form == "binary16" else max(0, c.scaled_bits - c.score_bits - 6)
        count = len(norm)
        beats = np.arange(count + 1)
        per_beat = {
            "query": (beats == 0).astype(np.int64),
            "norm": np.concatenate(([0], norm)),
            "shift": np.where(beats == 0, min(shift, (1 << c.shift_bits) - 1), 0),
            "pattern": np.where(beats == 0, k % c.patterns, 0),
        }
        return Row({"data": np.concatenate((np.asarray(query, np.int64), index.ravel()))}, per_beat)

    def stored(self, generator: Generator, count: int) -> tuple[Int, Int]:
        """Random indices, and norms of every magnitude."""
        c = self.config
        norms = from_integer(generator.integers(1, 1 << 11, count), generator.integers(-24, 6, count))
        return generator.integers(0, 1 << c.bits, (count, c.size)), norms

    def directed(self) -> list[Case]:
        c, generator = self.config, np.random.default_rng(5)
        low, high = bounds(c.in_bits)
        top = (1 << c.bits) - 1
        flat = np.ones(c.size, np.int64)
        ends = np.stack([0 * flat, top * flat, np.arange(c.size) % (top + 1), (top // 2) * flat, (top + 1) // 2 * flat])
        norms = np.array([0x0000, 0x0001, 0x03FF, 0x0400, 0x7BFF])
        some = [self.stored(generator, 3) for _ in range(9)]
        cases = []
        for name, group in corners(c.size, c.in_bits).items():
            rows = [self.row(q, *some[k % 9], k) for k, q in enumerate(group)]
            cases.append(Case(name, rows))
        full = [v * s for v in (high, low + 1) for s in self.signs[:2]]
        cases.append(Case("ends of the codebook", [self.row(q, ends, norms, k % 2) for k, q in enumerate(full)]))
        ramp = np.clip(np.arange(c.size) * 7 - 3 * c.size, low, high)
        every = [self.row(ramp, ends, norms[::-1], 0, shift) for shift in range(1 << c.shift_bits)]
        cases.append(Case("every shift", every))
        cases.append(Case("every pattern", [self.row(ramp, *some[k % 9], k) for k in range(c.patterns)]))
        words = np.full(c.size, high), np.full(c.size, low)
        cases.append(Case("full scale", [self.row(q, ends, norms, k) for k, q in enumerate(words)]))
        for count in (1, 2, c.size + 1):
            cases.append(Case(f"{count} vectors", [self.row(ramp, *self.stored(generator, count))]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        c, rows = self.config, []
        for k in range(6):
            shift = int(generator.integers(0, 1 << c.shift_bits)) if k % 2 else None
            query = random_vector(generator, c.size, c.in_bits, k)
            stored = self.stored(generator, int(generator.integers(1, 9)))
            rows.append(self.row(query, *stored, int(generator.integers(99)), shift))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        c = self.config
        queries = random_vectors(generator, 4, c.size, c.in_bits)
        return [self.row(q, *self.stored(generator, max(2, beats // 4)), k) for k, q in enumerate(queries)]

    def timed(self, generator: Generator) -> list[Row]:
        query = random_vectors(generator, 1, self.config.size, self.config.in_bits)[0]
        return [self.row(query, *self.stored(generator, count)) for count in (1, 5)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Keys through the write path, and queries."""
        c = self.config
        keys = [filling(x, c.in_bits) for x in heads(capture, c.size, "key")]
        if not keys:
            return []
        write = WritePathConfig(lanes=c.size, size=c.size, in_bits=c.in_bits, bits=c.bits, patterns=1)
        x, exponent = np.stack([x for x, _ in keys]), np.array([e for _, e in keys])
        stored = write_path(write, x, self.signs[0], exponent)
        queries = [filling(q, c.in_bits)[0] for q in heads(capture, c.size, "query")]
        return [self.row(q, *stored) for q in queries[::16]]

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        c = self.config
        rows, outputs = [], []
        size = c.size
        scores = tensors["score"].reshape(-1, tensors["score"].shape[-1])
        queries, shifts = tensors["query"].reshape(-1, size), tensors["shift"].ravel()
        for q, shift, score in zip(queries, shifts, scores, strict=True):
            rows.append(self.row(q, tensors["index"], tensors["norm"], 0, int(shift)))
            outputs.append(Row({"score": score}))
        return rows, outputs

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        """The model's pattern in place of the first, and its centroids."""
        self.signs[0] = tensors["signs"]
        if self.config.codebook == "programmable":
            self.centroids = tensors["centroids"]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        c, found = self.config, []
        for row in rows:
            data = row.data["data"].reshape(-1, c.size)
            score = read_path(
                c,
                data[0],
                self.signs[row.row["pattern"][0]],
                data[1:],
                row.row["norm"][1:],
                row.row["shift"][0],
                self.centroids if c.codebook == "programmable" else None,
            )
            found.append(Row({"score": score}))
        return found

    def table(self) -> list[tuple[int, int]]:
        words = beat_words(self.signs, self.config.size)
        if self.config.codebook == "programmable":
            words += [int(c) for c in self.centroids]
        return list(enumerate(words))


BENCH = ReadPathBench
