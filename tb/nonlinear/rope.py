"""Bench of the rotary unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.nonlinear.rope import RopeConfig, rope
from hw.catalog import Entry
from tb.bench import Bench, Case, Generator
from tb.packing import Row


class RopeBench(Bench):
    config: RopeConfig

    def __init__(self, entry: Entry, config: RopeConfig) -> None:
        super().__init__(entry, config)
        #: Llama 3's frequencies, unless the unit holds its own.
        self.steps: tuple[int, ...] | None = None if config.frozen else config.step_table(500_000, factor=8)

    def table(self) -> list[tuple[int, int]]:
        writes = []
        for address in range(self.config.beats if self.steps else 0):
            beat = (self.steps or ())[address * self.config.lanes : (address + 1) * self.config.lanes]
            writes.append((address, sum(s << (k * self.config.phase_bits) for k, s in enumerate(beat))))
        return writes

    def row(self, lo: Any, hi: Any, position: int, keep: Any = None) -> Row:
        data = {"lo": np.asarray(lo, np.int64), "hi": np.asarray(hi, np.int64)}
        return Row(data, {"position": int(position) & ((1 << self.config.position_bits) - 1)}, keep)

    def positions(self) -> list[int]:
        """The first, the last, and those around powers of two."""
        top = (1 << self.config.position_bits) - 1
        powers = [1 << k for k in range(0, self.config.position_bits, 6)]
        return sorted({0, 1, top - 1, top, *(p for q in powers for p in (q - 1, q, q + 1) if 0 <= p <= top)})

    def directed(self) -> list[Case]:
        low, high = bounds(self.config.data_bits)
        # Most corners need no whole head: a few beats keep simulations short.
        n = min(self.config.pairs, 2 * self.config.lanes + 1)
        full = np.ones(n, np.int64)
        corners = np.resize([low, high, 0, -1, 1, high - 1, low + 1], n)
        pairs = [(low, low), (low, high), (high, low), (high, high), (0, high), (low, 0)]
        cases = [
            Case("extremes", [self.row(a * full, b * full, p) for a, b in pairs for p in (0, 1 << 12, -1)]),
            Case("position 0", [self.row(corners, corners[::-1], 0)]),
            Case("positions", [self.row(corners, np.roll(corners, 3), p) for p in self.positions()]),
            Case("all zero", [self.row(0 * full, 0 * full, p) for p in (0, 77, -1)]),
            Case("alternating signs", [self.row(np.where(np.arange(n) % 2, low, high), low * full, 12345)]),
            Case("lanes left out", [self.row(corners, corners, 99, keep=np.arange(n) % 3 != 1)]),
        ]
        cases += [
            Case(f"length {k}", [self.row(np.resize(corners, k), np.resize(corners[::-1], k), 5 + k)])
            for k in self.lengths(self.config.pairs)
        ]
        return cases

    def random(self, generator: Generator) -> list[Row]:
        low, high = bounds(self.config.data_bits)
        rows = []
        for k in range(8):
            n = self.config.pairs if k == 3 else int(generator.integers(1, 3 * self.config.lanes + 2))
            n = min(n, self.config.pairs)
            if k % 2:
                lo, hi = generator.integers(low, high + 1, (2, n))
            else:  # bell-shaped, as heads are
                lo, hi = np.rint(generator.normal(0, high / 6, (2, n))).clip(low, high).astype(np.int64)
            top = 1 << self.config.position_bits
            rows.append(self.row(lo, hi, int(generator.integers(0, top if k % 4 else min(top, 512)))))
        return rows

    def timed(self, generator: Generator) -> list[Row]:
        return super().timed(generator)[:3]

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """Whole heads at random positions."""
        low, high = bounds(self.config.data_bits)
        count = -(-beats // self.config.beats)
        values = generator.integers(low, high + 1, (count, 2, self.config.pairs))
        positions = generator.integers(0, 1 << self.config.position_bits, count)
        return [self.row(lo, hi, position) for (lo, hi), position in zip(values, positions, strict=True)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Queries and keys of the model at their positions and far beyond; of a larger head the first pairs."""
        low, high = bounds(self.config.data_bits)
        rows = []
        for name, heads in capture.items():
            if not name.endswith(("/query", "/key")) or heads.shape[-1] < self.config.head_dim:
                continue
            half, n = heads.shape[-1] // 2, self.config.pairs
            unit = max(float(np.abs(heads).max()), 1e-30) / high
            for k in range(0, len(heads), 16):
                far = int(capture["positions"][k]) + (k // 16 % 4) * 65_537
                for head in np.rint(heads[k].astype(np.float64) / unit).clip(low, high).astype(np.int64):
                    rows.append(self.row(head[:n], head[half : half + n], far))
        return rows

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        """A row for each head."""
        shape = (-1, 2, self.config.pairs)
        position = np.broadcast_to(tensors["position"], tensors["x"].shape[:-1]).ravel()
        rows = [self.row(lo, hi, p) for (lo, hi), p in zip(tensors["x"].reshape(shape), position, strict=True)]
        return rows, [Row({"lo": lo, "hi": hi}) for lo, hi in tensors["y"].reshape(shape)]

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        self.steps = tuple(int(step) for step in tensors["steps"])

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        groups: dict[int, list[int]] = defaultdict(list)
        for k, row in enumerate(rows):
            groups[len(row)].append(k)
        found: list[Any] = [None] * len(rows)
        for members in groups.values():
            lo, hi = (np.stack([rows[k].data[name] for k in members]) for name in ("lo", "hi"))
            position = np.array([rows[k].row["position"] for k in members])
            for k, low, high in zip(members, *rope(self.config, lo, hi, position, self.steps), strict=True):
                found[k] = Row({"lo": low, "hi": high}, keep=rows[k].keep)
        return found


BENCH = RopeBench
