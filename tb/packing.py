"""Rows of a stream, and their packing into the bits of its beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from amaranth.hdl import Shape
from amaranth.lib.data import ArrayLayout, StructLayout
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass
class Row:
    """One row of a stream.

    Attributes
    ----------
    data : dict of int arrays (n,)
        The per-element fields.
    row : dict
        The per-row fields: an integer (or an array of one per beat), or a dict of them for a structure.
    keep : bool array (n,), optional
        Elements that count; all of them by default.
    """

    data: dict[str, Any]
    row: dict[str, Any] = field(default_factory=dict)
    keep: Any = None

    def __len__(self) -> int:
        return len(next(iter(self.data.values())))

    @property
    def kept(self) -> NDArray[np.bool_]:
        return np.ones(len(self), bool) if self.keep is None else np.asarray(self.keep, bool)


def leaves(layout: Any, offset: int = 0, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], int, int, int]]:
    """(path, lowest bit, width of one element, elements) of every field of a layout; structures are opened."""
    if isinstance(layout, StructLayout):
        found = []
        for name, item in layout:
            found += leaves(item.shape, offset + item.offset, (*path, str(name)))
        return found
    if isinstance(layout, ArrayLayout):
        return [(path, offset, Shape.cast(layout.elem_shape).width, layout.length)]
    return [(path, offset, Shape.cast(layout).width, 1)]


class Packer:
    """Packs rows into beats of a row layout: one line of bytes per beat, lowest bit first.

    Parameters
    ----------
    layout : StructLayout
        As made by ``hw.unit.row_layout``.
    lanes : int
    """

    def __init__(self, layout: StructLayout, lanes: int) -> None:
        self.layout, self.lanes = layout, lanes
        self.fields = leaves(layout)
        self.bits = layout.size
        self.bytes = -(-self.bits // 8)

    def beats(self, row: Row) -> int:
        return max(1, -(-len(row) // self.lanes))

    def pack(self, rows: Sequence[Row], filler: np.random.Generator | None = None) -> Bytes:
        """Beats of all rows, one after the other: uint8 (beats, bytes). Lanes that are not kept hold random bits when
        a ``filler`` is given (a unit must not look at them), else zeros."""
        return self._place(rows, lambda path, width: self._values(rows, path, filler, width))

    def mask(self, rows: Sequence[Row]) -> Bytes:
        """Bits that a comparison looks at: everything except the data of lanes that are not kept."""

        def values(path: tuple[str, ...], width: int) -> NDArray[np.int64]:
            ones = (1 << width) - 1
            if path[0] in rows[0].data:
                return np.where(self._keep(rows), ones, 0)
            return np.full((sum(map(self.beats, rows)), self.lanes if path == ("keep",) else 1), ones)

        return self._place(rows, values)

    def unpack(self, beats: Bytes) -> dict[str, NDArray[np.int64]]:
        """Fields of beats, for messages: unsigned words, (beats,) or (beats, lanes)."""
        bits = np.unpackbits(beats, axis=1, bitorder="little")
        found = {}
        for path, offset, width, count in self.fields:
            words = bits[:, offset : offset + width * count].reshape(len(beats), count, width).astype(np.int64)
            values = (words << np.arange(width)).sum(axis=2)
            found[".".join(path)] = values[:, 0] if count == 1 else values
        return found

    def _keep(self, rows: Sequence[Row]) -> NDArray[np.bool_]:
        total = sum(map(self.beats, rows))
        keep = np.zeros(total * self.lanes, bool)
        start = 0
        for row in rows:
            keep[start : start + len(row)] = row.kept
            start += self.beats(row) * self.lanes
        return keep.reshape(total, self.lanes)

    def _values(
        self, rows: Sequence[Row], path: tuple[str, ...], filler: np.random.Generator | None, width: int
    ) -> NDArray[np.int64]:
        name = path[0]
        beats = [self.beats(row) for row in rows]
        if name == "keep":
            return self._keep(rows).astype(np.int64)
        if name == "last":
            last = np.zeros((sum(beats), 1), np.int64)
            last[np.cumsum(beats) - 1] = 1
            return last
        if name in rows[0].data:
            total = sum(beats) * self.lanes
            if filler is None:
                values = np.zeros(total, np.int64)
            else:
                values = filler.integers(0, 1 << width, total, dtype=np.int64)
            start = 0
            for row, count in zip(rows, beats, strict=True):
                kept = row.kept
                values[start : start + len(row)][kept] = np.asarray(row.data[name], np.int64)[kept]
                start += count * self.lanes
            return values.reshape(-1, self.lanes)
        per_row = []
        for row in rows:
            value: Any = row.row
            for step in path:
                if not isinstance(value, Mapping) or step not in value:
                    raise KeyError(f"a row lacks the field {'.'.join(path)}")
                value = value[step]
            per_row.append(value)
        # One value on all beats of the row, or an array of one per beat (scales of blocks within a row).
        spread = [np.broadcast_to(np.asarray(v, np.int64), (count,)) for v, count in zip(per_row, beats, strict=True)]
        return np.concatenate(spread)[:, None]

    def _place(self, rows: Sequence[Row], values: Any) -> Bytes:
        packed = np.zeros((sum(map(self.beats, rows)), self.bytes), np.uint8)
        for path, offset, width, count in self.fields:
            # `keep` is one word of `lanes` bits: the same bits as an array of 1-bit words.
            if path == ("keep",):
                width, count = 1, self.lanes
            words = values(path, width)
            first, lead = divmod(offset, 8)
            if lead == 0 and width in (8, 16, 32):
                raw = np.ascontiguousarray(words.astype(f"<i{width // 8}")).view(np.uint8)
                packed[:, first : first + raw.shape[1]] = raw
                continue
            bits = np.zeros((len(words), lead + width * count), np.uint8)
            one_hot = (words[:, :, None] >> np.arange(width)) & 1
            bits[:, lead:] = one_hot.reshape(len(words), -1)
            raw = np.packbits(bits, axis=1, bitorder="little")
            packed[:, first : first + raw.shape[1]] |= raw
        return packed
