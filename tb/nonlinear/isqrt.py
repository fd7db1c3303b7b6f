"""Bench of the square root unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.nonlinear.isqrt import IsqrtConfig, isqrt
from tb.bench import Bench, Case, Generator
from tb.packing import Row


class IsqrtBench(Bench):
    config: IsqrtConfig

    @property
    def top(self) -> int:
        return (1 << self.config.in_bits) - 1

    def row(self, x: Any) -> Row:
        return Row({"x": np.clip(np.asarray(x, np.int64), 0, self.top)})

    def directed(self) -> list[Case]:
        lanes, bits = self.config.lanes, self.config.in_bits
        corners = np.array([0, self.top, 1, 2, 3, self.top // 2, self.top // 2 + 1, self.top - 1])
        cases = [Case("corners", [self.row(corners)])]
        cases += [Case(f"length {n}", [self.row(corners[np.arange(n) % len(corners)])]) for n in self.lengths(40)]
        cases.append(Case("all zero", [self.row(np.zeros(2 * lanes + 1))]))
        powers = np.int64(1) << np.arange(bits)
        cases.append(Case("around powers of two", [self.row(np.concatenate([powers - 1, powers, powers + 1]))]))
        cases.append(Case("around squares", [self.row(self._squares(np.random.default_rng(0), 60))]))
        if bits <= 10:
            cases.append(Case("every input", [self.row(np.arange(1 << bits))]))
        return cases

    def _squares(self, generator: Generator, count: int) -> np.ndarray:
        """Perfect squares of all sizes and their neighbours."""
        size = generator.integers(0, (self.config.in_bits + 1) // 2, count)
        roots = (np.int64(1) << size) + generator.integers(0, np.int64(1) << size)
        return (roots * roots)[:, None].repeat(3, 1).ravel() + np.tile([-1, 0, 1], count)

    def random(self, generator: Generator) -> list[Row]:
        rows = []
        for k in range(10):
            n = int(generator.integers(1, 4 * self.config.lanes + 2))
            wide = generator.integers(0, self.top + 1, n)
            # Every other row has all magnitudes alike.
            rows.append(self.row(wide >> generator.integers(0, self.config.in_bits, n) if k % 2 else wide))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        beats = max(1, beats // self.unit.initiation_interval)
        size = 64 * self.config.lanes
        rows = []
        for k in range(-(-beats // 64)):
            x = generator.integers(0, self.top + 1, size) >> generator.integers(0, self.config.in_bits, size)
            rows.append(self.row(x if k % 3 else self._squares(generator, size // 3 + 1)[:size]))
        return rows

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Sums of squares of the norms' token-wise quantised inputs, brought to the unit's width."""
        rows = []
        for name, values in capture.items():
            if name.endswith(("/attention_norm", "/mlp_norm")):
                widest = np.frexp(np.abs(values).max(axis=-1, keepdims=True))[1]
                total = (np.rint(np.ldexp(values, 15 - widest)).astype(np.int64) ** 2).sum(axis=-1)
                length = int(total.max()).bit_length()
                rows.append(self.row(total >> max(0, length - self.config.in_bits)))
        return rows

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            result = isqrt(self.config, row.data["x"])
            data = {"root": result[0], "exponent": result[1]} if isinstance(result, tuple) else {"root": result}
            found.append(Row(data))
        return found


BENCH = IsqrtBench
