"""Bench of the residual adder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bit_length, bounds
from golden.nonlinear.residual import ResidualConfig, residual
from tb.bench import Bench, Case, Generator
from tb.packing import Row


class ResidualBench(Bench):
    config: ResidualConfig

    def row(self, a: Any, b: Any, shift: int, keep: Any = None) -> Row:
        shift = min(max(shift, -self.config.max_right), self.config.max_left)
        return Row({"a": np.asarray(a, np.int64), "b": np.asarray(b, np.int64)}, {"shift": shift}, keep)

    def shifts(self) -> list[int]:
        left, right = self.config.max_left, self.config.max_right
        return sorted({-right, -(right // 2), -min(right, 1), 0, min(left, 1), left // 2, left})

    def corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Every pair of ends and values around zero."""
        ends = [
            [low, low + 1, -1, 0, 1, high - 1, high]
            for low, high in map(bounds, (self.config.a_bits, self.config.b_bits))
        ]
        a, b = np.meshgrid(*ends)
        return a.ravel(), b.ravel()

    def directed(self) -> list[Case]:
        config = self.config
        a, b = self.corners()
        cases = [Case("corners", [self.row(a, b, shift) for shift in self.shifts()])]
        for n in self.lengths(40):
            cases.append(Case(f"length {n}", [self.row(a[:n], b[:n], n % 5 - 2)]))
        cases.append(Case("all zero", [self.row(np.zeros(5), np.zeros(5), 0)]))
        ties = []
        low, high = bounds(config.b_bits)
        for right in {1, config.max_right // 2, config.max_right}:
            if 1 <= right < config.b_bits:
                points = (2 * np.arange(-6, 7) + 1) << (right - 1)
                near = np.clip(np.concatenate([points, points - 1, points + 1]), low, high)
                ties.append(self.row(np.arange(len(near)) % 5 - 2, near, -right))
        cases.append(Case("half-way points", ties or [self.row([1], [1], -1)]))
        edges = []  # sums around both ends of y
        for shift in self.shifts():
            for end in bounds(config.a_bits):
                b = np.clip(np.arange(-3, 4), low, high)
                aligned = b << shift if shift >= 0 else b >> -shift
                edges.append(self.row(np.clip(end - aligned, *bounds(config.a_bits)), b, shift))
        cases.append(Case("around saturation", edges))
        a, b = self.corners()
        cases.append(Case("saturated ones are masked", [self.row(a, b, 0, keep=np.abs(a) < 2)]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        config, rows = self.config, []
        for k in range(14):
            n = int(generator.integers(1, 5 * config.lanes + 2))
            a_bits, b_bits = (int(generator.integers(2, w + 1)) for w in (config.a_bits, config.b_bits))
            if k % 2:
                a_bits, b_bits = config.a_bits, config.b_bits
            (a_low, a_high), (b_low, b_high) = bounds(a_bits), bounds(b_bits)
            rows.append(
                self.row(
                    generator.integers(a_low, a_high + 1, n),
                    generator.integers(b_low, b_high + 1, n),
                    int(generator.integers(-config.max_right, config.max_left + 1)),
                    generator.random(n) < 0.8 if k % 7 == 6 else None,
                )
            )
        return rows

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """The stream with 16 fraction bits, and each branch at the power-of-two scale that fills its width."""
        config, rows = self.config, []
        for name, branch in sorted(capture.items()):
            if not name.endswith("_out"):
                continue
            stream = np.round(np.asarray(capture[name.replace("_out", "_residual")], np.float64) * (1 << 16)).astype(
                np.int64
            )
            stream >>= max(0, int(bit_length(np.abs(stream).max())) + 1 - config.a_bits)
            for a, values in list(zip(stream, np.asarray(branch, np.float64), strict=True))[::16]:
                fine = np.round(values * (1 << 30)).astype(np.int64)  # 30 fraction bits
                drop = max(0, int(bit_length(np.abs(fine).max())) + 1 - config.b_bits)
                rows.append(self.row(a, fine >> drop, drop - 14))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        shift = int(tensors["shift"])
        rows = [Row({"a": a, "b": b}, {"shift": shift}) for a, b in zip(tensors["a"], tensors["b"], strict=True)]
        return rows, [Row({"y": y}) for y in tensors["y"]]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            result = residual(self.config, row.data["a"], row.data["b"], row.row["shift"])
            beats = -(-len(row) // self.config.lanes)
            saturated = np.zeros(beats * self.config.lanes, bool)
            saturated[: len(row)] = result.saturated & row.kept
            flags = saturated.reshape(beats, -1).any(axis=1)
            found.append(Row({"y": result.y}, {"saturated": flags}, row.keep))
        return found


BENCH = ResidualBench
