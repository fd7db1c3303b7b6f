"""Bench of the requantiser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import Int, bit_length, bounds
from golden.nonlinear.requantize import RequantizeConfig, requantize
from tb.bench import Bench, Case, Generator
from tb.packing import Row

#: Longest row of a case; a block that is longer is only met by the tests of the golden function.
LONGEST = 600


class RequantizeBench(Bench):
    config: RequantizeConfig

    def row(self, x: Any, multiplier: int | None = None, shift: int | None = None, keep: Any = None) -> Row:
        x = np.asarray(x, np.int64)
        if self.config.form != "static":
            return Row({"x": x}, {}, keep)
        top = (1 << self.config.multiplier_bits) - 1
        multiplier = top - top // 3 if multiplier is None else min(multiplier, top)
        if shift is None:  # the largest product just fits, or just does not
            largest = int(np.abs(x).max(initial=1)) * multiplier
            shift = max(0, largest.bit_length() - self.config.out_bits + len(x) % 2)
        return Row({"x": x}, {"multiplier": multiplier, "shift": min(shift, self.config.max_shift)}, keep)

    def halfway(self) -> list[Row]:
        """Every kind of half-way point, both signs, around each with its neighbours."""
        config = self.config
        low, high = bounds(config.in_bits)
        odd = 2 * np.arange(-6, 6) + 1  # the last of them is the point itself that rounds up to the row's end
        rows = []
        for s in (1, 2, config.largest_shift // 2, config.largest_shift):
            if not 1 <= s <= config.largest_shift or s >= config.in_bits - 1:
                continue
            if config.form == "group":
                for c in (4, 5, 6, 7):
                    points = odd * c * (1 << s) // 8
                    near = np.concatenate([points, points - 1, points + 1])
                    peak = config.limit * c * (1 << s) // 4
                    rows.append(self.row(np.clip([*near, peak], low, high)))
            else:
                points = odd << (s - 1)
                peak = ((1 << (config.out_bits - 1)) << s) - 1 if config.form == "token" else 0
                near = np.clip([*points, *(points - 1), *(points + 1), peak], low, high)
                rows.append(self.row(near, 1, s))
        return rows or [self.row(np.clip(odd, low, high))]

    def directed(self) -> list[Case]:
        config = self.config
        lanes = config.lanes
        low, high = bounds(config.in_bits)
        corners = np.array([low, high, 0, -1, 1, low + 1, high - 1])
        block = config.block if config.form != "static" else 3 * lanes
        lengths = {
            *self.lengths(40),
            *(n for n in (block - 1, block, block + 1, 2 * block + 1) if 1 <= n <= LONGEST),
        }
        cases = [Case(f"length {n}", [self.row(corners[np.arange(n) % len(corners)])]) for n in sorted(lengths)]
        cases.append(Case("rows of one", [self.row([x]) for x in corners]))
        for name, value in (("all zero", 0), ("all lowest", low), ("all highest", high)):
            cases.append(Case(name, [self.row(np.full(2 * lanes + 1, value))]))
        size = min(block, LONGEST)
        ramp = np.arange(size) % 7 - 3
        peaks = [self.row(np.where(np.arange(size) == at, x, ramp)) for at in (0, size - 1) for x in (low, high)]
        cases.append(Case("largest first and last", peaks))
        powers = [self.row([sign * (1 << k) + d, 0, 1]) for k in range(config.in_bits - 1) for sign in (-1, 1)
                  for d in (-1, 0) if sign * (1 << k) + d >= low]  # fmt: skip
        cases.append(Case("around each power of two", powers))
        cases.append(Case("half-way points", self.halfway()))
        masked = np.where(np.arange(2 * lanes + 1) % 3 == 1, low, 5)
        cases.append(Case("largest is masked", [self.row(masked, keep=masked > 0)]))
        if config.form == "static":
            settings = [(m, s) for m in (0, 1, (1 << config.multiplier_bits) - 1) for s in (0, 1, config.max_shift)]
            cases.append(Case("multiplier and shift", [self.row(corners, m, s) for m, s in settings]))
        elif 3 * block <= 3 * LONGEST:
            steps = np.arange(3 * block) // block
            cases.append(Case("blocks of different scale", [self.row(np.where(steps == 1, high, steps))]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        config, rows = self.config, []
        for k in range(14):
            n = int(generator.integers(1, 5 * config.lanes + 2))
            if config.form == "group" and k % 5 == 0:
                n = min(LONGEST, int(generator.integers(1, 3 * config.group + 2)))
            low, high = bounds(int(generator.integers(2, config.in_bits + 1)))
            x = generator.integers(low, high + 1, n)
            if k % 3 == 0:  # a few large values above many small ones
                x = np.where(generator.random(n) < 0.9, x >> min(6, config.in_bits // 2), x)
            multiplier = int(generator.integers(0, 1 << config.multiplier_bits))
            shift = int(generator.integers(0, config.max_shift + 1)) if k % 4 == 3 else None
            rows.append(self.row(x, multiplier, shift, generator.random(n) < 0.8 if k % 7 == 6 else None))
        return rows

    def timed(self, generator: Generator) -> list[Row]:
        lanes = self.config.lanes
        block = self.config.block if self.config.form != "static" else lanes
        lengths = [1, lanes + 1, 5 * lanes, block, block + 1, 3 * block + lanes + 1]
        limit = min(block, LONGEST) if self.config.form == "token" else 4 * LONGEST
        return [self.row(generator.integers(-99, 99, n)) for n in lengths if n <= limit]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """What the two halves of a layer add to the residual stream, and the stream: 16 fraction bits, as wide as x
        allows."""
        rows = []
        sites = ("attention_out", "mlp_out", "attention_residual", "mlp_residual", "product")
        for name, values in sorted(capture.items()):
            if name.partition("/")[2] not in sites:
                continue
            x = np.round(np.asarray(values, np.float64) * (1 << 16)).astype(np.int64)
            x >>= max(0, int(bit_length(np.abs(x).max())) + 1 - self.config.in_bits)
            rows += [self.row(token) for token in x[::16]]
        return rows

    def replays(self, config: Any) -> bool:
        """The length of a row that a token-wise unit has room for does not show in shorter ones."""
        if not isinstance(config, RequantizeConfig) or config.form != "token" or config.max_row > self.config.max_row:
            return super().replays(config)
        return config.replace(max_row=self.config.max_row) == self.config

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        rows, outputs = [], []
        settings = {name: int(tensors[name]) for name in ("multiplier", "shift") if name in tensors}
        x, q = (tensors[name].reshape(-1, tensors[name].shape[-1]) for name in ("x", "q"))
        scales = {name: tensors[name].reshape(len(x), -1) for name in ("e", "c") if name in tensors}
        for k, (values, codes) in enumerate(zip(x, q, strict=True)):
            rows.append(Row({"x": values}, settings))
            outputs.append(Row({"q": codes}, self._scale(len(values), **{n: scale[k] for n, scale in scales.items()})))
        return rows, outputs

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            result = requantize(self.config, row.data["x"], row.kept, row.row.get("multiplier"), row.row.get("shift"))
            found.append(Row({"q": result.q}, self._scale(len(row), result.e, result.c), row.keep))
        return found

    def _scale(self, n: int, e: Int | None = None, c: Int | None = None) -> dict[str, Any]:
        """Scale of each beat of a row of n elements, from those of its blocks."""
        codes = {"e": e, "code": None if c is None else c - 4}
        beats = -(-n // self.config.lanes)
        return {name: np.repeat(v, self.config.block_beats)[:beats] for name, v in codes.items() if v is not None}


BENCH = RequantizeBench
