"""Bench of the Walsh-Hadamard transform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.rotated.fwht import FwhtConfig, fwht, hadamard
from tb.bench import Bench, Case, Generator
from tb.packing import Row
from tb.rotated.vectors import corners, filling, heads, random_vector, random_vectors


class FwhtBench(Bench):
    config: FwhtConfig

    def row(self, x: Any) -> Row:
        return Row({"x": np.asarray(x, np.int64)})

    def directed(self) -> list[Case]:
        size, bits = self.config.size, self.config.in_bits
        cases = [Case(name, [self.row(x) for x in group]) for name, group in corners(size, bits).items()]
        low, high = bounds(bits)
        basis = hadamard(size).product(np.eye(size, dtype=np.int64))[:: max(1, size // 16)]
        # Every other element of y is 0, and this one as large as it can be.
        cases.append(Case("rows of H at full scale", [self.row(np.where(h > 0, high, low)) for h in basis]))
        cases.append(Case("negative full scale", [self.row(np.where(h > 0, low, high)) for h in basis]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        return [self.row(random_vector(generator, self.config.size, self.config.in_bits, k)) for k in range(9)]

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        return [self.row(x) for x in random_vectors(generator, beats, self.config.size, self.config.in_bits)]

    def timed(self, generator: Generator) -> list[Row]:
        return [self.row(x) for x in random_vectors(generator, 2, self.config.size, self.config.in_bits)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Keys, each filling the word."""
        return [self.row(filling(x, self.config.in_bits)[0]) for x in heads(capture, self.config.size, "key")]

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        size = self.config.size
        return (
            [self.row(x) for x in tensors["x"].reshape(-1, size)],
            [Row({"y": y}) for y in tensors["y"].reshape(-1, size)],
        )

    def replays(self, config: Any) -> bool:
        """Every form gives the same bits."""
        return isinstance(config, FwhtConfig) and (config.size, config.in_bits) == (
            self.config.size,
            self.config.in_bits,
        )

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        y = fwht(self.config, np.stack([row.data["x"] for row in rows]))
        return [Row({"y": part}) for part in y]


BENCH = FwhtBench
