"""Bench of the SiLU unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.llm.capture import floats
from golden.nonlinear.exp import IbertConstants
from golden.nonlinear.silu import SiluConfig, SiluConstants, swiglu
from tb.bench import Bench, Case, Generator
from tb.packing import Row

#: Scales of a row at run time, coarse to so fine that the polynomial's overflow guard shifts the gate.
SCALES = (
    Fraction(1, 16),
    Fraction(1, 128),
    Fraction(3, 2000),
    Fraction(1, 2048),
    Fraction(3, 20000),
    Fraction(1, 1 << 17),
)


class SiluBench(Bench):
    config: SiluConfig

    def scales(self) -> list[Fraction]:
        """The run-time scales that are fine enough for the configured width of sigma."""
        found = []
        for scale in SCALES:
            try:
                self.config.constants(scale)
            except ValueError:
                continue
            found.append(scale)
        return found

    def row(self, gate: Any, up: Any = None, scale: int = 0, keep: Any = None) -> Row:
        gate = np.asarray(gate, np.int64)
        data = {"gate": gate}
        if self.config.multiply:
            low, high = bounds(self.config.up_bits)
            data["up"] = np.where(np.arange(len(gate)) % 2, low, high) if up is None else np.asarray(up, np.int64)
        row: dict[str, Any] = {}
        if self.config.run_time_scale:
            scales = self.scales()
            constants = self.config.constants(scales[scale % len(scales)])
            row = {"constants": asdict(constants.exp), "normalize": constants.normalize}
        return Row(data, row, keep)

    def corners(self) -> np.ndarray:
        """Ends, zero and its neighbours, and the gates around real 8 and 12, where tails begin."""
        low, high = bounds(self.config.gate_bits)
        unit = 1 << self.config.gate_fraction_bits
        found = [low, high, 0, -1, 1, low + 1, high - 1]
        found += [sign * (at * unit + d) for at in (8, 12) for sign in (-1, 1) for d in (-1, 0, 1)]
        return np.array([x for x in found if low <= x <= high])

    def directed(self) -> list[Case]:
        lanes = self.config.lanes
        low, high = bounds(self.config.gate_bits)
        corners, many = self.corners(), range(len(SCALES) if self.config.run_time_scale else 1)
        cases = [Case("corners", [self.row(np.resize(corners, 2 * lanes * len(corners)), scale=k) for k in many])]
        cases += [Case(f"length {n}", [self.row(np.resize(corners, n), scale=n)]) for n in self.lengths(40)]
        cases.append(Case("all zero", [self.row(np.zeros(2 * lanes + 1), np.zeros(2 * lanes + 1), k) for k in many]))
        alternating = np.where(np.arange(2 * lanes + 1) % 2, low, high)
        cases.append(Case("alternating signs", [self.row(alternating, scale=k) for k in many]))
        cases.append(Case("around zero", [self.row(np.arange(-20, 21).clip(low, high), scale=k) for k in many]))
        keep = np.arange(3 * lanes) % 3 != 1
        cases.append(Case("lanes left out", [self.row(np.resize(corners, 3 * lanes), keep=keep)]))
        if self.config.gate_bits <= 12:
            cases.append(Case("every gate", [self.row(np.arange(low, high + 1))]))
        return cases

    def draw(self, generator: Generator, n: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Gates and ups: uniform, bell-shaped of about two units, or small."""
        up_low, up_high = bounds(self.config.up_bits)
        low, high = bounds(self.config.gate_bits)
        if kind == 0:
            gate = generator.integers(low, high + 1, n)
        elif kind == 1:
            gate = np.rint(generator.normal(0, 2 << self.config.gate_fraction_bits, n)).astype(np.int64)
        else:
            gate = generator.integers(-40, 41, n)
        return gate.clip(low, high), generator.integers(up_low, up_high + 1, n)

    def random(self, generator: Generator) -> list[Row]:
        rows = []
        for k in range(12):
            n = int(generator.integers(1, 6 * self.config.lanes + 2))
            rows.append(self.row(*self.draw(generator, n, k % 3), scale=k))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """Every gate once and again with random ups, in rows of 512 beats: the exhaustive run."""
        low, high = bounds(self.config.gate_bits)
        every = np.tile(np.arange(low, high + 1), 1 + beats * self.config.lanes // (high + 1 - low))
        _, up = self.draw(generator, len(every), 0)
        size = 512 * self.config.lanes
        return [self.row(every[k : k + size], up[k : k + size], k // size) for k in range(0, len(every), size)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Gates and ups of the model's SwiGLU; ups on the power of two that their row's largest one allows."""
        rows = []
        for name, gates in floats(capture).items():
            if not name.endswith("/gate"):
                continue
            ups = capture[name.removesuffix("gate") + "up"]
            for k in range(0, len(gates), 8):
                scale = Fraction(1, 1 << self.config.gate_fraction_bits)
                if self.config.run_time_scale:
                    scales = self.scales()
                    scale = scales[k // 8 % len(scales)]
                gate = np.rint(gates[k].astype(np.float64) / float(scale)).clip(*bounds(self.config.gate_bits))
                top = bounds(self.config.up_bits)[1]
                up = np.rint(ups[k].astype(np.float64) * (top / max(float(np.abs(ups[k]).max()), 1e-30)))
                rows.append(self.row(gate.astype(np.int64), up.astype(np.int64), k // 8))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        rows = [Row({"gate": g, "up": u}) for g, u in zip(tensors["gate"], tensors["up"], strict=True)]
        return rows, [Row({"y": y}) for y in tensors["y"]]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        found = []
        for row in rows:
            constants = None
            if self.config.run_time_scale:
                constants = SiluConstants(IbertConstants(**row.row["constants"]), row.row["normalize"])
            y = swiglu(self.config, row.data["gate"], row.data.get("up"), constants)
            found.append(Row({"y": y}, keep=row.keep))
        return found


BENCH = SiluBench
