"""Bench of the softmax unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.fixedpoint import bounds
from golden.nonlinear import softmax as golden
from golden.nonlinear.exp import IbertConstants
from golden.nonlinear.softmax import Mode, SoftmaxConfig, Statistics
from hw.catalog import Entry
from hw.nonlinear.softmax import Softmax
from tb.bench import Bench, Case, Generator
from tb.packing import Packer, Row

#: Scales of a row at run time: usual, so coarse that the polynomial has few bits, and so fine that the overflow guard
#: shifts the input.
SCALES = tuple(Fraction(*pair) for pair in ((1, 256), (1, 3), (3, 20000), (1, 24), (1, 1 << 15), (1, 1 << 17)))
#: Elements of the longest row that the bench sends.
LONGEST = 640


class EveryBit(Packer):
    """Compares masked lanes too: their probability is 0, not just anything."""

    def mask(self, rows: Sequence[Row]) -> NDArray[np.uint8]:
        ones = (np.arange(8 * self.bytes) < self.bits).astype(np.uint8)
        return np.tile(np.packbits(ones, bitorder="little"), (sum(map(self.beats, rows)), 1))


class SoftmaxBench(Bench):
    config: SoftmaxConfig
    unit: Softmax

    def __init__(self, entry: Entry, config: SoftmaxConfig) -> None:
        super().__init__(entry, config)
        self.output = EveryBit(self.output.layout, config.lanes)

    # -- rows --------------------------------------------------------------------------------------------------------
    def row(
        self, x: Any, keep: Any = None, mode: Mode = Mode.STORED, chain: bool = False, scale: int | Fraction = 0
    ) -> Row:
        fields: dict[str, Any] = {}
        if self.config.streaming:
            fields |= {"mode": int(mode), "chain": int(chain)}
        if self.config.run_time_scale:
            chosen = scale if isinstance(scale, Fraction) else SCALES[scale % len(SCALES)]
            fields["constants"] = asdict(self.config.exp.constants(chosen))
        return Row({"x": np.asarray(x, np.int64)}, fields, None if keep is None else np.asarray(keep, bool))

    @property
    def longest(self) -> int:
        """Elements of the longest stored row sent here."""
        return min(self.config.buffer, LONGEST)

    @property
    def octave(self) -> int:
        """Scores per factor of two of the exponential (of the usual scale)."""
        if self.config.form == "base2":
            return 1 << self.config.fraction_bits
        return max(1, 177 if self.config.run_time_scale else self.config.exp.frozen.ln2)

    def clip(self, x: Any) -> NDArray[np.int64]:
        return np.rint(np.asarray(x, float)).astype(np.int64).clip(*bounds(self.config.score_bits))

    def draw(self, generator: Generator, n: int, kind: int) -> NDArray[np.int64]:
        """Scores: uniform over the range, bell-shaped over a few octaves, nearly flat, or a few peaks on a floor."""
        low, high = bounds(self.config.score_bits)
        if kind == 0:
            return generator.integers(low, high + 1, n)
        if kind == 1:
            return self.clip(generator.normal(0, 3 * self.octave, n))
        if kind == 2:
            return self.clip(high - generator.integers(0, max(2, self.octave // 8), n))
        peaks = generator.random(n) < 0.1
        return self.clip(np.where(peaks, high - generator.integers(0, 3 * self.octave, n), low + 1))

    # -- cases -------------------------------------------------------------------------------------------------------
    def directed(self) -> list[Case]:
        lanes, (low, high) = self.config.lanes, bounds(self.config.score_bits)
        corners = np.array([high, low, 0, -1, 1, high - 1, low + 1])
        n = min(3 * lanes + 1, self.longest)
        at = np.arange(n)
        lengths = self.lengths(min(self.longest, 5 * lanes + 2))
        rising = self.clip(high - self.octave * at[::-1])
        cases = [Case("corners", [self.row(corners[k : k + self.longest]) for k in range(len(corners))])]
        cases += [Case(f"length {k}", [self.row(np.resize(corners, k), scale=k)]) for k in lengths]
        cases.append(Case("all equal", [self.row(np.full(k, x)) for k in lengths for x in (low, 0, high)]))
        cases.append(Case("the longest that fits", [self.row(np.full(self.longest, high), scale=1)]))
        cases.append(Case("alternating signs", [self.row(np.where(at % 2, low, high))]))
        cases.append(Case("maximum last", [self.row(rising), self.row(np.where(at == n - 1, high, low))]))
        cases.append(Case("maximum first", [self.row(rising[::-1]), self.row(np.where(at == 0, high, low))]))
        steps = np.array([0, 1, 2, 5, 0, 9]) * self.octave
        cases.append(Case("powers of a half", [self.row(self.clip(high - np.resize(steps, n)))]))
        cases.append(Case("all masked", [self.row(np.full(k, high), np.zeros(k)) for k in lengths]))
        mixed = [(np.where(np.arange(k) % 3 == 0, low, high), np.arange(k) % 3 == 0) for k in lengths]
        cases.append(Case("lowest scores beside masked highest ones", [self.row(x, keep) for x, keep in mixed]))
        cases.append(Case("masked head", [self.row(np.full(n, high), at >= min(n - 1, lanes + 1))]))
        cases.append(Case("masked tail", [self.row(np.full(n, high), at < 1)]))
        cases.append(Case("one kept", [self.row(np.full(n, 0), at == k) for k in range(0, n, max(1, n // 4))]))
        if self.config.run_time_scale:
            cases.append(Case("every scale", [self.row(rising, scale=k) for k in range(len(SCALES))]))
        room = self.config.beats(self.config.max_row) * lanes
        beyond = self.config.buffer_beats * lanes + 1
        if beyond <= min(room, 4 * LONGEST):
            rows = [self.row(np.resize(corners, k)) for k in (beyond, min(room, 2 * beyond + lanes))]
            cases.append(Case("longer than the buffer", [rows[0], self.row(rising), rows[1], self.row(rising)]))
        if self.config.streaming:
            cases += self.streamed(min(room // 2, n), rising)
        return cases

    def streamed(self, n: int, rising: NDArray[np.int64]) -> list[Case]:
        """Corners of the modes reduce and normalise. Two rows of n elements may be chained."""
        low, high = bounds(self.config.score_bits)
        if n == 0:
            return [Case("normalised after reset", [self.row([high, low][: self.longest], mode=Mode.NORMALISE)])]
        far = np.full(n, high) - np.arange(n) % 2
        near, middle = np.full(n, low), np.resize(rising, n)
        reduce, normalise = Mode.REDUCE, Mode.NORMALISE
        none = np.zeros(n)
        return [
            Case("normalised after reset", [self.row(far, mode=normalise), self.row(middle)]),
            Case("chained after reset", [self.row(far, mode=reduce, chain=True), self.row(middle, mode=normalise)]),
            Case("reduced, then normalised", [
                self.row(middle, mode=reduce), self.row(middle, mode=normalise), self.row(middle[::-1], mode=normalise),
                self.row(far, mode=reduce), self.row(far, mode=normalise), self.row(far, mode=reduce),
            ]),
            Case("two rows under one normalisation", [
                self.row(middle, mode=reduce), self.row(far, mode=reduce, chain=True),
                self.row(middle, mode=normalise), self.row(far, mode=normalise),
                self.row(far, mode=reduce), self.row(near, mode=reduce, chain=True), self.row(near, mode=normalise),
            ]),
            Case("a stored row under a longer one's normalisation", [
                self.row(middle, mode=reduce), self.row(far[: self.longest], chain=True),
                self.row(middle, mode=normalise),
            ]),
            Case("chained with masked rows", [
                self.row(middle, none, reduce), self.row(middle, mode=reduce, chain=True),
                self.row(far, none, reduce, chain=True), self.row(middle, mode=normalise),
                self.row(middle, none, normalise), self.row(far, none, reduce), self.row(far, mode=normalise),
            ]),
            Case("normalised by statistics of lower scores", [
                self.row(near, mode=reduce), self.row(far, mode=normalise), self.row(near, mode=normalise)
            ]),
            Case("mode 3 counts as normalise", [self.row(far, mode=reduce), self.row(far, mode=3)]),  # type: ignore
        ]  # fmt: skip

    def random(self, generator: Generator) -> list[Row]:
        rows = []
        lanes = self.config.lanes
        room = self.config.beats(self.config.max_row) * lanes
        used = 0  # elements under the current statistics
        beyond = (self.config.buffer_beats + 2) * lanes
        most = beyond if beyond <= 12 * lanes else 5 * lanes + 1
        for k in range(16):
            n = int(generator.integers(1, min(room, most) + 1))
            mode = Mode(generator.choice([0, 0, 0, 1, 2])) if self.config.streaming else Mode.STORED
            chain = bool(generator.random() < 0.3) and self.config.streaming
            if chain and used + n + lanes > room:
                chain = False
            if mode != Mode.NORMALISE:
                used = self.config.beats(n) * lanes + (used if chain else 0)
            keep = None if k % 2 else generator.random(n) < generator.choice([0.1, 0.5, 0.9])
            rows.append(self.row(self.draw(generator, n, int(generator.integers(0, 4))), keep, mode, chain, k))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """The longest row of all, at the top of the range; then stored rows of up to the buffer (at most LONGEST
        beats), and every fourth in the modes reduce and normalise."""
        rows: list[Row] = []
        total, most = 0, min(self.config.buffer, LONGEST * self.config.lanes)
        if self.config.streaming and self.config.beats(self.config.max_row) <= 1 << 15:
            x = np.full(self.config.max_row, bounds(self.config.score_bits)[1])
            rows += [self.row(x, mode=Mode.REDUCE, scale=2), self.row(x, mode=Mode.NORMALISE, scale=2)]
        while total < beats:
            n = int(generator.integers(1, most + 1))
            x = self.draw(generator, n, len(rows) % 4)
            keep = None if len(rows) % 3 else generator.random(n) < 0.8
            modes = [Mode.REDUCE, Mode.NORMALISE] if self.config.streaming and len(rows) % 4 == 0 else [Mode.STORED]
            rows += [self.row(x, keep, mode, scale=len(rows) // 4) for mode in modes]
            total += self.config.beats(n)
        return rows

    def timed(self, generator: Generator) -> list[Row]:
        modes = list(Mode) if self.config.streaming else [Mode.STORED]
        lengths = self.lengths(min(self.longest, 5 * self.config.lanes))
        rows = [self.row(self.draw(generator, n, 1), mode=mode, scale=2) for n in lengths[:5] for mode in modes]
        if self.config.buffer_beats < min(LONGEST, self.config.beats(self.config.max_row)):
            rows.append(self.row(self.draw(generator, self.config.buffer_beats * self.config.lanes + 1, 1), scale=2))
        return rows

    def row_cycles(self, row: Row) -> int:
        return self.unit.row_cycles(len(row), Mode(row.row.get("mode", Mode.STORED)))

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Attention scores: on the static log2-domain scale (base2), or token-wise on the row's own scale (ibert)."""
        rows = []
        for name, scores in capture.items():
            if not name.endswith("/scores"):
                continue
            for k, (values, n) in enumerate(zip(scores, capture[name.removesuffix("scores") + "lengths"], strict=True)):
                if k % 4 or n > self.config.buffer:
                    continue
                logits = np.asarray(values[:n], np.float64)
                scale = Fraction(1)
                if self.config.form == "base2":
                    # Any constant may be taken off: the largest score goes to the top of the range.
                    x = self.clip((logits - logits.max()) / np.log(2) * self.octave + bounds(self.config.score_bits)[1])
                else:
                    scale = Fraction(1, 1 << self.config.scale_log2)
                    if self.config.run_time_scale:
                        top = bounds(self.config.score_bits)[1]
                        scale = min(
                            max(Fraction(float(np.abs(logits).max())) / top, Fraction(1, 1 << 17)), Fraction(2, 3)
                        )
                    x = self.clip(logits / float(scale))
                rows.append(self.row(x, scale=scale))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        """A row for each head and query, up to the last key that it sees, in the mode that stores it."""
        rows, outputs = [], []
        for scores, found in zip(tensors["x"], tensors["p"], strict=True):
            for x, keep, p in zip(scores, tensors["keep"], found, strict=True):
                n = int(np.flatnonzero(keep)[-1]) + 1
                rows.append(self.row(x[:n], keep[:n]))
                outputs.append(Row({"p": p[:n]}))
        return rows, outputs

    # -- golden ------------------------------------------------------------------------------------------------------
    def expected(self, rows: Sequence[Row]) -> list[Row]:
        """Output rows since reset: statistics live on from row to row."""
        config = self.config
        highest = (1 << config.exponent_bits) - 1
        held = Statistics(np.array([highest]), np.array([0]))
        found = []
        for row in rows:
            x, keep = np.asarray(row.data["x"])[None], row.kept[None]
            mode, chain = row.row.get("mode", 0), row.row.get("chain", 0)
            constants = IbertConstants(**row.row["constants"]) if config.run_time_scale else None
            if not mode & Mode.NORMALISE:
                held = golden.reduce(config, x, keep, constants, held if chain else None)
            fields: dict[str, Any] = {"empty": int(held.empty[0]), "overlong": 0}
            if config.streaming:
                fields |= {"statistics": 0, "exponent": 0, "total": 0}
            overlong = mode == Mode.STORED and config.beats(len(row)) > config.buffer_beats
            if mode == Mode.REDUCE or overlong:
                fields["overlong"] = int(overlong)
                if config.streaming:
                    fields |= {"statistics": 1, "exponent": int(held.exponent[0]), "total": int(held.total[0])}
                found.append(Row({"p": np.zeros(0, np.int64)}, fields))
                continue
            p = golden.normalise(config, x, held, keep, constants)[0]
            found.append(Row({"p": p}, fields, row.keep))
        return found


BENCH = SoftmaxBench
