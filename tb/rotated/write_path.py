"""Bench of the write path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.rotated.write_path import WritePathConfig, write_path
from tb.bench import Bench, Case, Generator
from tb.packing import Row
from tb.rotated.signs import beat_words, table_signs
from tb.rotated.vectors import corners, filling, heads, random_vector, random_vectors


class WritePathBench(Bench):
    config: WritePathConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        self.signs = table_signs(self.config.patterns, self.config.size)

    def row(self, x: Any, k: int = 0, exponent: int = 0) -> Row:
        return Row({"x": np.asarray(x, np.int64)}, {"pattern": k % self.config.patterns, "exponent": exponent})

    def directed(self) -> list[Case]:
        c = self.config
        groups = corners(c.size, c.in_bits)
        cases = [
            Case(name, [self.row(x, k, -((3 * k) % 40)) for k, x in enumerate(group)]) for name, group in groups.items()
        ]
        ramp = np.arange(c.size) - c.size // 2
        plain = np.clip(ramp, *bounds(c.in_bits))
        cases.append(Case("every pattern", [self.row(plain, k) for k in range(c.patterns)]))
        # Norms from below the smallest subnormal to beyond the largest binary16.
        least, most = bounds(c.exponent_bits)
        cases.append(Case("every exponent", [self.row(plain, 1, e) for e in range(least, most + 1)]))
        high = bounds(c.in_bits)[1]
        # Rows of H: one coordinate holds everything, the others are ties at zero.
        cases.append(
            Case(
                "one coordinate", [self.row(v * self.signs[k % c.patterns], k) for k in range(3) for v in (1, -1, high)]
            )
        )
        return cases

    def _exponent(self, generator: Generator) -> int:
        return int(generator.integers(*bounds(self.config.exponent_bits))) // int(generator.integers(1, 9))

    def random(self, generator: Generator) -> list[Row]:
        c = self.config
        return [
            self.row(
                random_vector(generator, c.size, c.in_bits, k), int(generator.integers(99)), self._exponent(generator)
            )
            for k in range(9)
        ]

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        c = self.config
        vectors = random_vectors(generator, max(2, beats // c.beats), c.size, c.in_bits)
        return [self.row(x, k, -(k % 30)) for k, x in enumerate(vectors)]

    def timed(self, generator: Generator) -> list[Row]:
        return [self.row(x) for x in random_vectors(generator, 2, self.config.size, self.config.in_bits)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Keys and values, each filling the word."""
        rows: list[Row] = []
        for k, site in enumerate(("key", "value")):
            for x in heads(capture, self.config.size, site):
                vector, exponent = filling(x, self.config.in_bits)
                rows.append(self.row(vector, len(rows) + k, exponent))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        size = self.config.size
        x, exponent = tensors["x"].reshape(-1, size), tensors["exponent"].ravel()
        index, norm = tensors["index"].reshape(-1, size), tensors["norm"].ravel()
        rows = [self.row(a, 0, int(e)) for a, e in zip(x, exponent, strict=True)]
        return rows, [Row({"index": i}, {"norm": int(n)}) for i, n in zip(index, norm, strict=True)]

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        """The model's pattern in place of the first."""
        self.signs[0] = tensors["signs"]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        signs = self.signs[[row.row["pattern"] for row in rows]]
        x, exponent = np.stack([row.data["x"] for row in rows]), np.array([row.row["exponent"] for row in rows])
        index, norm = write_path(self.config, x, signs, exponent)
        return [Row({"index": i}, {"norm": int(n)}) for i, n in zip(index, norm, strict=True)]

    def table(self) -> list[tuple[int, int]]:
        return list(enumerate(beat_words(self.signs, self.config.lanes)))


BENCH = WritePathBench
