"""Bench of the RMSNorm unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import Int, bounds
from golden.nonlinear.requantize import Requantized
from golden.nonlinear.rmsnorm import RmsNormConfig, integer_eps, quantize_gamma, rmsnorm
from tb.bench import Bench, Case, Generator
from tb.packing import Row


class RmsNormBench(Bench):
    config: RmsNormConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        generator = np.random.default_rng(7)
        low, high = bounds(self.config.gamma_bits)
        size = -(-self.longest // self.config.lanes) * self.config.lanes
        #: Weights near one with a few of both signs and both ends, as trained models have them.
        gamma = np.rint((1 + 0.3 * generator.standard_normal(size)) * (high + 1) * 0.4).astype(np.int64)
        self.gamma = np.clip(gamma, low, high)
        self.gamma[:: max(1, size // 5)] = generator.permutation(np.array([low, high, 0, -1, low // 3, 1]))[
            : len(self.gamma[:: max(1, size // 5)])
        ]

    @property
    def longest(self) -> int:
        """Longest row driven at all; of the table, what it uses is loaded."""
        return min(self.config.hidden, 512 * self.config.lanes)

    @property
    def largest(self) -> int:
        """Longest row driven at random."""
        return min(self.config.hidden, 5 * self.config.lanes + 1)

    def row(self, x: Any, eps: int = 0, shift: int | None = None, keep: Any = None) -> Row:
        """By default the shift is the one at which typical elements fill about a third of the output word."""
        config, x = self.config, np.asarray(x, np.int64)
        if shift is None:
            spread = max(0, (len(x) - 1).bit_length() // 2 - 2)  # a typical element is 1 / sqrt(n) of the norm
            shift = max(-(1 << (config.shift_bits - 1)), config.gamma_bits - 1 - config.out_bits - spread)
        return Row({"x": x}, {"eps": eps, "shift": shift}, keep)

    def directed(self) -> list[Case]:
        config, lanes = self.config, self.config.lanes
        low, high = bounds(config.in_bits)
        long = self.largest
        alternating = np.where(np.arange(long) % 2, low, high)
        one_hot = np.zeros(long, np.int64)
        one_hot[long // 2] = high
        first, last = bounds(config.shift_bits)
        every_eps = [0, 1, (1 << config.eps_bits) // 3, (1 << config.eps_bits) - 1]
        corners = np.array([low, high, 0, 1, -1, high // 2, low // 2])
        cases = [
            Case("full scale", [self.row(alternating), self.row(np.full(long, low)), self.row(np.full(long, high))])
        ]
        lengths = [n for n in self.lengths(long) if n <= config.hidden]
        cases += [Case(f"length {n}", [self.row(corners[np.arange(n) % len(corners)])]) for n in lengths]
        cases += [
            Case("zeros", [self.row(np.zeros(long)), self.row(np.zeros(1), eps=1), self.row(alternating)]),
            Case("one element not zero", [self.row(one_hot), self.row(one_hot // high), self.row(-one_hot)]),
            Case("constant", [self.row(np.full(long, value)) for value in (1, -1, high // 3)]),
            Case("masked elements", [self.row(alternating, keep=np.arange(long) % 3 > 0)]),
            Case("every eps", [self.row(corners[: config.hidden], eps=eps) for eps in every_eps]),
            Case("every shift", [self.row(alternating[:lanes], shift=s) for s in range(first, last + 1)]),
            Case(
                "short rows in turn",
                [self.row(corners[k : k + 1 + k % (lanes + 1)][: config.hidden]) for k in range(6)],
            ),
        ]
        if config.beats <= 32:
            cases.append(Case("longest row", [self.row(np.resize(corners, self.longest))]))
        return cases

    def random(self, generator: Generator) -> list[Row]:
        config = self.config
        low, high = bounds(config.in_bits)
        rows = []
        for k in range(8):
            n = int(generator.integers(1, self.largest + 1))
            if k % 4 == 0:
                x = generator.integers(low, high + 1, n)
            else:
                x = np.rint(generator.standard_normal(n) * high / 4)
                if k % 4 == 1:  # one channel far above the rest
                    x = np.rint(x / 1000)
                    x[generator.integers(n)] = high
                if k % 4 == 2:
                    x = np.rint(x * 2.0 ** -generator.integers(0, config.in_bits))
            eps = int(generator.integers(0, 1 << config.eps_bits)) >> int(generator.integers(0, config.eps_bits))
            rows.append(self.row(np.clip(x, low, high), eps if k % 2 else 0))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """Rows of full length."""
        config, rows = self.config, []
        low, high = bounds(config.in_bits)
        for k in range(max(2, beats * config.lanes // self.longest)):
            x = generator.standard_normal(self.longest) * high / (3 if k % 2 else 30)
            rows.append(self.row(np.clip(np.rint(x), low, high), eps=k))
        return rows

    def timed(self, generator: Generator) -> list[Row]:
        lengths = {1, self.config.lanes + 1, self.longest}
        return [self.row(generator.integers(-5, 6, n)) for n in sorted(lengths) if n <= self.longest]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """The norms' inputs, token-wise with one power of two a row, at the model's epsilon. The table keeps what it
        has: a row starts at element 0 of it whatever layer it comes from."""
        config, rows = self.config, []
        _, shift = quantize_gamma(config, np.ones(1), 1, 2.0 ** (1 - config.out_bits))
        for name, values in capture.items():
            if not name.endswith(("/attention_norm", "/mlp_norm")):
                continue
            for k, value in enumerate(values[:: max(1, len(values) // 16)]):
                part = value[: self.longest].astype(np.float64)
                # Not finer than epsilon asks for: 2**-8 is above its root.
                scale = 2.0 ** (max(int(np.frexp(np.abs(part).max())[1]), -8) - config.in_bits + 1)
                low, high = bounds(config.in_bits)
                x = np.clip(np.rint(part / scale), low, high).astype(np.int64)
                rows.append(self.row(x, integer_eps(config, 1e-5, len(x), scale), shift - k % 3))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        n, eps, shift = tensors["x"].shape[-1], tensors["eps"].ravel(), int(tensors["shift"])
        rows = [
            Row({"x": x}, {"eps": int(own), "shift": shift})
            for x, own in zip(tensors["x"].reshape(-1, n), eps, strict=True)
        ]
        if self.config.out == "token":
            return rows, [Row({"y": y}) for y in tensors["y"].reshape(-1, n)]
        parts = (tensors[name].reshape(len(rows), -1) for name in ("q", "e", "c"))
        return rows, [Row({"q": q}, self._scale(e, c, n)) for q, e, c in zip(*parts, strict=True)]

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        """The gains of the norm that was recorded; what lies beyond them in the table keeps its values."""
        self.gamma[: len(tensors["gamma"])] = tensors["gamma"]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            result = rmsnorm(self.config, row.data["x"], self.gamma, row.row["eps"], row.row["shift"], row.kept)
            if isinstance(result, Requantized):
                assert result.e is not None and result.c is not None
                found.append(Row({"q": result.q}, self._scale(result.e, result.c, len(row)), row.keep))
            else:
                found.append(Row({"y": result}, {}, row.keep))
        return found

    def _scale(self, e: Int, c: Int, n: int) -> dict[str, Any]:
        """Scale of each beat of a row of n elements, from those of its groups."""
        beats, per_group = -(-n // self.config.lanes), self.config.requantizer.block_beats
        return {name: np.repeat(v, per_group)[:beats] for name, v in {"e": e, "code": c - 4}.items()}

    def table(self) -> list[tuple[int, int]]:
        config, words = self.config, []
        mask = (1 << config.gamma_bits) - 1
        for address, part in enumerate(self.gamma.reshape(-1, config.lanes)):
            words.append((address, sum((int(g) & mask) << (k * config.gamma_bits) for k, g in enumerate(part))))
        return words


BENCH = RmsNormBench
