"""Bench of the comparator bank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.rotated.fwht import FwhtConfig, fwht
from golden.rotated.lloyd_max import LloydMaxConfig, quantize
from tb.bench import Bench, Case, Generator
from tb.packing import Row
from tb.rotated.vectors import filling, heads


class LloydMaxBench(Bench):
    config: LloydMaxConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        c = self.config
        #: Programmable thresholds: two of them equal, the last as large as it can be.
        self.thresholds = np.linspace(1, bounds(c.in_bits)[1], c.count).astype(np.int64)
        if c.count > 2:
            self.thresholds[1] = self.thresholds[2]

    def row(self, y: Any, norm: int = 0, keep: Any = None) -> Row:
        low, high = bounds(self.config.in_bits)
        y = np.clip(np.asarray(y, np.int64), low, high)
        return Row({"y": y}, {"norm": norm} if self.config.form == "scaled" else {}, keep)

    def edges(self, norm: int) -> Any:
        """Values around every threshold of a norm, both signs, zero and the ends."""
        c = self.config
        if c.form == "programmable":
            floors = self.thresholds
        else:
            positive = np.array(c.positive, np.int64)
            floors = positive if c.form == "frozen" else (positive * norm) >> c.fraction_bits
        near = np.concatenate([floors + k for k in (-1, 0, 1, 2)] + [np.arange(-2, 3)])
        return np.concatenate([near, -near, bounds(c.in_bits)])

    def norms(self) -> list[int]:
        bits = self.config.norm_bits
        return sorted({0, 1, 2, 3, 5, (1 << bits) // 3, 1 << (bits - 1), (1 << bits) - 1})

    def directed(self) -> list[Case]:
        c = self.config
        cases = [Case("around thresholds", [self.row(self.edges(norm), norm) for norm in self.norms()])]
        if c.form == "scaled":
            # Thresholds that are integers in units of y: multiples of 2**fraction_bits.
            whole = [1 << s for s in range(c.norm_bits) if s <= c.fraction_bits]
            cases.append(Case("ties", [self.row(self.edges(norm), norm) for norm in whole]))
            cases.append(Case("norm zero", [self.row(np.arange(-3, 4), 0)]))
        for n in self.lengths(3 * c.lanes):
            cases.append(Case(f"length {n}", [self.row(np.arange(n) - n // 2, 3)]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        c, rows = self.config, []
        for k in range(12):
            n = int(generator.integers(1, 3 * c.lanes + 2))
            norm = int(generator.integers(1, 1 << c.norm_bits)) >> int(generator.integers(0, c.norm_bits))
            deviation = float(norm) if c.form == "scaled" else float(1 << c.fraction_bits)
            y = np.rint(generator.standard_normal(n) * deviation)
            if k % 3 == 0:
                y = generator.integers(*bounds(c.in_bits), n, endpoint=True)
            if k % 3 == 1:
                y = generator.choice(self.edges(norm), n)
            rows.append(self.row(y, norm, generator.random(n) < 0.8 if k % 6 == 5 else None))
        return rows

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Transformed keys and their norms; scaled ones only, in vectors of as many elements as a transform has that
        fills the word."""
        c = self.config
        size = 128
        bits = c.in_bits - 7
        if c.form != "scaled" or not 6 <= bits <= 32 or c.norm_bits < bits + 3:
            return []
        rows = []
        for x in heads(capture, size, "key"):
            vector, _ = filling(x, bits)
            y = fwht(FwhtConfig(size=size, in_bits=bits), vector)
            rows.append(self.row(y, int(np.sqrt((vector * vector).sum()))))
        return rows

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        thresholds = self.thresholds if self.config.form == "programmable" else ()
        for row in rows:
            index = quantize(self.config, row.data["y"], row.row.get("norm", 0), thresholds)
            found.append(Row({"index": index}, {}, row.keep))
        return found

    def table(self) -> list[tuple[int, int]]:
        return list(enumerate(self.thresholds.tolist())) if self.config.form == "programmable" else []


BENCH = LloydMaxBench
