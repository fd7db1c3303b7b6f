"""What a unit's testbench provides, and what all benches share.

A unit's file in ``tb/`` defines ``BENCH``, a subclass of :class:`Bench` with

* ``directed()``: the corners, each with a name that becomes a coverage bin;
* ``random(generator)``: seeded random rows from every distribution that matters;
* ``real(capture)``: rows made from the float tensors that ``golden.llm.capture`` took from the reference checkpoint;
* ``recorded(tensors)``: rows of what the integer pipeline recorded of this unit, inputs and outputs as they are;
* ``expected(rows)``: the golden function's output rows for a sequence of input rows since reset;
* ``table()``: writes into the unit's table, where it has one, and ``adopt(tensors)``: takes a model's table instead.

Simulator loops, stalls, resets, cycle counts, packing and coverage are shared and live in ``tb/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from amaranth.hdl import Shape

from golden.llm.capture import recorded
from hw.catalog import Entry, find
from hw.unit import Unit
from tb.packing import Packer, Row
from tb.stream import STALLS, Beats, Mismatch

Generator = np.random.Generator


@dataclass
class Case:
    """Rows with a name: one coverage bin."""

    name: str
    rows: list[Row]


@dataclass
class Replay:
    """Rows that the integer pipeline sent through the unit at one place of a layer, and what it got back: per row, the
    fields that the pipeline uses."""

    place: str
    tensors: Mapping[str, Any]
    rows: list[Row]
    outputs: list[Row]


class Bench:
    """Base class of all benches.

    Attributes
    ----------
    config : the unit's configuration; unit : the component; entry : the catalog entry.
    """

    def __init__(self, entry: Entry, config: Any) -> None:
        self.entry = entry
        self.config = config
        self.unit: Unit = entry.component(config)
        self.unit._MustUse__silence = True  # read for its signature and latency, simulated by others
        lanes = self.config.lanes
        signature = self.unit.signature.members
        self.input = Packer(signature["i"].signature.members["payload"].shape, lanes)
        self.output = Packer(signature["o"].signature.members["payload"].shape, lanes)

    # -- provided by the unit's bench --------------------------------------------------------------------------------
    def directed(self) -> list[Case]:
        raise NotImplementedError

    def random(self, generator: Generator) -> list[Row]:
        raise NotImplementedError

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """Rows from captured float tensors; empty where the unit has no counterpart in the model."""
        return []

    def replays(self, config: Any) -> bool:
        """Whether this bench's unit can stand where the pipeline has a unit of configuration ``config``: where they
        are equal, unless overridden."""
        return bool(config == self.config)

    def recorded(self, tensors: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
        """Input rows and output rows of what ``golden.llm.capture`` recorded of this unit at one place."""
        raise NotImplementedError

    def adopt(self, tensors: Mapping[str, Any]) -> None:
        """Take the model's table from what was recorded at a place, for ``table()`` and ``expected()``."""

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        raise NotImplementedError

    def table(self) -> list[tuple[int, int]]:
        """(address, data) writes before the first row; data is the unsigned bit pattern."""
        return []

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        """Rows of about ``beats`` beats in total for the high-rate run; random rows repeated unless overridden."""
        rows: list[Row] = []
        total = 0
        while total < beats:
            for row in self.random(generator):
                rows.append(row)
                total += self.input.beats(row)
        return rows

    def timed(self, generator: Generator) -> list[Row]:
        """Rows that are run alone, unstalled, to compare the cycle count with ``Unit.row_cycles``: one of each
        interesting length unless overridden."""
        rows = {len(row): row for row in self.random(generator)}
        return list(rows.values())[:6]

    def row_cycles(self, row: Row) -> int:
        """Documented cycles of one row that runs alone."""
        return self.unit.row_cycles(len(row))

    # -- shared ------------------------------------------------------------------------------------------------------
    def replay(self, capture: Mapping[str, Any]) -> list[Replay]:
        """What the integer pipeline sent through units of this configuration, place by place; empty where it has none
        of them."""
        found = []
        for unit in recorded(capture):
            if self.replays(unit.config):
                found.append(Replay(str(unit), unit.tensors, *self.recorded(unit.tensors)))
        return found

    def agreed(self, replay: Replay) -> list[Row]:
        """The recorded output rows, with those fields of the golden function's that the pipeline does not use.

        Raises Mismatch where the golden function, called again, gives anything else than what was recorded."""
        golden = self.expected(replay.rows)
        for k, (wanted, row) in enumerate(zip(replay.outputs, golden, strict=True)):
            for name, value in {**wanted.data, **wanted.row}.items():
                again = row.data[name] if name in wanted.data else row.row[name]
                if not np.array_equal(value, again):
                    raise Mismatch(f"{replay.place}, row {k}: recorded {name} is not what the golden function gives")
        return [
            Row({**row.data, **wanted.data}, {**row.row, **wanted.row}, row.keep)
            for wanted, row in zip(replay.outputs, golden, strict=True)
        ]

    def lengths(self, maximum: int) -> list[int]:
        """Row lengths around the lane count, up to a maximum."""
        lanes = self.config.lanes
        wanted = {1, lanes - 1, lanes, lanes + 1, 2 * lanes, 2 * lanes + 1, 3 * lanes - 1, maximum}
        return sorted(n for n in wanted if 1 <= n <= maximum)

    def bins(self) -> set[str]:
        """Coverage bins that a full run must hit."""
        cases = {f"case: {case.name}" for case in self.directed()}
        stalls = {f"stalls: {name}" for name in (*STALLS, "last beat")}
        return (
            cases
            | stalls
            | {"reset: while accepting", "reset: while producing", "cycles: documented"}
            | {f"input: {name} {end}" for name in self.extremes() for end in ("lowest", "highest")}
        )

    def extremes(self) -> dict[str, tuple[int, int]]:
        """Lowest and highest value of each per-element input field (as packed, signed where it is signed)."""
        rows = self.directed()[0].rows
        found = {}
        for name, item in self.input.layout:
            if name in rows[0].data:
                shape = Shape.cast(item.shape.elem_shape)
                width = shape.width
                found[str(name)] = (
                    (-(1 << (width - 1)), (1 << (width - 1)) - 1) if shape.signed else (0, (1 << width) - 1)
                )
        return found

    def hit_extremes(self, rows: Sequence[Row]) -> set[str]:
        """Which ends of the input fields occur in the kept elements of ``rows``."""
        hit = set()
        for name, (low, high) in self.extremes().items():
            for row in rows:
                values = np.asarray(row.data[name])[row.kept]
                if (values == low).any():
                    hit.add(f"input: {name} lowest")
                if (values == high).any():
                    hit.add(f"input: {name} highest")
        return hit

    def pack_input(self, rows: Sequence[Row], seed: int = 0) -> Beats:
        return Beats(words(self.input.pack(rows, np.random.default_rng(seed))))

    def pack_expected(self, rows: Sequence[Row], expected: list[Row] | None = None) -> tuple[Beats, list[Row]]:
        """Expected output beats of input rows, and the rows they came from: the golden function's unless given."""
        expected = self.expected(rows) if expected is None else expected
        last = [flag for row in expected for flag in [False] * (self.output.beats(row) - 1) + [True]]
        return Beats(words(self.output.pack(expected)), words(self.output.mask(expected)), last), expected

    def explain(self, k: int, got: int, wanted: int) -> str:
        """The fields in which an output beat differs."""
        lines = [np.frombuffer(w.to_bytes(self.output.bytes, "little"), np.uint8)[None] for w in (got, wanted)]
        first, second = (self.output.unpack(line) for line in lines)
        return "; ".join(
            f"{n}: got {first[n].tolist()}, golden {second[n].tolist()}"
            for n in first
            if not np.array_equal(first[n], second[n])
        )


def words(beats: Any) -> list[int]:
    """Packed beats as integers."""
    return [int.from_bytes(line.tobytes(), "little") for line in beats]


def bench_of(unit: str, config: Any) -> Bench:
    """The bench of a unit for a configuration."""
    entry = find(unit)
    bench: Bench = import_module(entry.bench).BENCH(entry, config)
    return bench
