"""Base class of all units: one input stream of beats, one output stream of beats, a known latency."""

from __future__ import annotations

from typing import Any

from amaranth.lib import stream
from amaranth.lib.data import ArrayLayout, StructLayout
from amaranth.lib.wiring import Component, In, Out

from golden.config import UnitConfig
from golden.fixedpoint import address_bits


def row_layout(lanes: int, data: dict[str, Any], row: dict[str, Any] | None = None) -> StructLayout:
    """Layout of one beat of a row stream.

    Parameters
    ----------
    lanes : int
        Elements per beat.
    data : dict
        Name and shape of each per-element field; each becomes an array of ``lanes``.
    row : dict, optional
        Name and shape of the per-row fields (scales, flags) that travel with every beat of the row.

    ``keep`` has one bit a lane (AXI4-Stream TKEEP) and ``last`` marks the row's last beat (TLAST); only that beat may
    be partial, unless a unit says otherwise.
    """
    return beat_layout(data, lanes, {"keep": lanes, "last": 1} | (row or {}))


def beat_layout(data: dict[str, Any], lanes: int, row: dict[str, Any] | None = None) -> StructLayout:
    """Layout of one beat of a stream whose rows have a fixed number of whole beats: :func:`row_layout` without
    ``keep`` and ``last``."""
    fields: dict[str, Any] = {name: ArrayLayout(shape, lanes) for name, shape in data.items()}
    return StructLayout(fields | (row or {}))


def table_layout(depth: int, shape: Any) -> StructLayout:
    """Layout of one write into a per-model table (gamma, codebook): ``address`` and ``data``."""
    return StructLayout({"address": address_bits(depth), "data": shape})


class Unit(Component):
    """A unit with stream ``i`` in and stream ``o`` out, and, where it has per-model tables, a write stream ``table``.

    Attributes
    ----------
    config : UnitConfig
        What it was built from.
    passes : int
        How often the unit goes through a row: 1 for element-wise units, 2 where the row is stored first.
    latency : int
        Constant of :meth:`row_cycles`.
    """

    passes: int = 1
    latency: int = 0

    def __init__(
        self, config: UnitConfig, i: StructLayout, o: StructLayout, table: StructLayout | None = None, **ports: Any
    ) -> None:
        self.config: Any = config
        members: dict[str, Any] = {"i": In(stream.Signature(i)), "o": Out(stream.Signature(o))}
        if table is not None:
            members["table"] = In(stream.Signature(table))
        super().__init__(members | ports)

    def row_cycles(self, elements: int) -> int:
        """Clock cycles from the one in which a row's first beat is accepted to the one in which its last result beat
        is taken, both included, when neither side stalls and the unit was empty:
        ``passes * ceil(elements / lanes) + latency``."""
        return self.passes * -(-elements // self.config.lanes) + self.latency

    @property
    def initiation_interval(self) -> int:
        """Cycles between two beats accepted within a row."""
        return 1
