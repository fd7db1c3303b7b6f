"""Bench of the exponential unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np

from golden.nonlinear.exp import ExpConfig, IbertConstants, exp
from tb.bench import Bench, Case, Generator
from tb.packing import Row

#: Scales of a row at run time: coarse, usual, and so fine that the overflow guard shifts the input.
SCALES = (Fraction(1, 16), Fraction(1, 256), Fraction(3, 20000), Fraction(1, 1 << 15), Fraction(1, 1 << 17))


class ExpBench(Bench):
    config: ExpConfig

    def row(self, t: Any, scale: int = 0) -> Row:
        row = {}
        if self.config.run_time_scale:
            row["constants"] = asdict(self.config.constants(SCALES[scale % len(SCALES)]))
        return Row({"t": np.asarray(t, np.int64)}, row)

    def directed(self) -> list[Case]:
        lanes, top = self.config.lanes, (1 << self.config.in_bits) - 1
        every = np.arange(1 << self.config.in_bits)
        corners = np.array([0, 1, 2, top // 2, top // 2 + 1, top - 1, top])
        cases = [Case(f"length {n}", [self.row(corners[np.arange(n) % len(corners)], n)]) for n in self.lengths(40)]
        cases.append(Case("all zero", [self.row(np.zeros(2 * lanes + 1))]))
        cases.append(Case("all at the top", [self.row(np.full(2 * lanes + 1, top), k) for k in range(len(SCALES))]))
        cases.append(Case("around each halving", [self.row(self._halvings(), k) for k in range(len(SCALES))]))
        if len(every) <= 4096:
            cases.append(Case("every input", [self.row(every)]))
        return cases

    def _halvings(self) -> np.ndarray:
        """Inputs around the steps of the exponent."""
        step = 1 << self.config.fraction_bits if self.config.form != "ibert" else self.config.frozen.ln2
        edges = np.arange(0, min(1 << self.config.in_bits, 40 * step), step)
        return np.unique(np.clip(np.concatenate([edges - 1, edges, edges + 1]), 0, (1 << self.config.in_bits) - 1))

    def random(self, generator: Generator) -> list[Row]:
        top = 1 << self.config.in_bits
        rows = []
        for k in range(12):
            n = int(generator.integers(1, 6 * self.config.lanes + 2))
            high = top if k % 3 else max(2, top >> 6)  # small arguments matter most
            rows.append(self.row(generator.integers(0, high, n), k))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """Every input once and again in rows of 512 beats: the exhaustive run."""
        every = np.tile(
            np.arange(1 << self.config.in_bits), 1 + beats * self.config.lanes // (1 << self.config.in_bits)
        )
        size = 512 * self.config.lanes
        return [self.row(every[k : k + size], k // size) for k in range(0, len(every), size)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Distances of attention scores from their row's maximum, on the unit's scale."""
        rows = []
        for name, scores in capture.items():
            if not name.endswith("/scores"):
                continue
            for k, (values, n) in enumerate(zip(scores, capture[name.replace("scores", "lengths")], strict=True)):
                if k % 16:
                    continue
                scale = SCALES[k % len(SCALES)] if self.config.run_time_scale else self.config.scale
                unit = float(scale) * (1 if self.config.form == "ibert" else np.log(2))
                distance = (values[:n].max() - values[:n]) / unit
                t = np.minimum(np.round(distance), (1 << self.config.in_bits) - 1).astype(np.int64)
                rows.append(self.row(t, k))
        return rows

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            constants = None
            if self.config.run_time_scale:
                constants = IbertConstants(**row.row["constants"])
            found.append(Row({"e": exp(self.config, row.data["t"], constants)}, keep=row.keep))
        return found


BENCH = ExpBench
