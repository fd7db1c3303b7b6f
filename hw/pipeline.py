"""A stallable pipeline: stages of registers that all move together; a skid buffer to cut the ready chain; and changes
of width between beats and whole rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amaranth.hdl import Array, Module, Mux, Shape, Signal, Value, ValueCastable  # noqa: F401
from amaranth.lib import stream
from amaranth.lib.data import ArrayLayout
from amaranth.lib.wiring import Component, In, Out


class Pipeline:
    """Builds a pipeline inside a module, stage by stage.

    Every register moves in the cycles in which ``advance`` is high; a unit usually drives it with
    ``~o.valid | o.ready``, so that the whole pipeline holds still while its result is not taken. ``valid`` follows the
    data and is the only state that reset clears.

    Parameters
    ----------
    m : Module
    advance : Value, 1 bit
    valid : Value, 1 bit
        Whether the values that enter the first stage are there.
    carry : mapping of name to Value
        Values that travel along unchanged (keep, last, per-row fields); read them with ``pipe["keep"]``.
    name : str
        Prefix of the registers' names.
    """

    def __init__(self, m: Module, advance: Any, valid: Any, carry: Mapping[str, Any] | None = None, name: str = "s"):
        self.m, self.advance, self.valid, self.name = m, advance, valid, name
        self.carry = dict(carry or {})
        self.depth = 0

    def __getitem__(self, key: str) -> Any:
        return self.carry[key]

    def stage(self, *values: Any) -> Any:
        """Register valid, everything carried, and ``values`` (each a Value or a list of Values, one per lane).
        Returns the registered values in the same form; a single value comes back bare."""
        self.depth += 1
        prefix = f"{self.name}{self.depth}"
        valid = Signal(name=f"{prefix}_valid")
        with self.m.If(self.advance):
            self.m.d.sync += valid.eq(self.valid)
        self.valid = valid
        self.carry = {key: self._register(value, f"{prefix}_{key}") for key, value in self.carry.items()}
        moved = [self._register(value, f"{prefix}_v{k}") for k, value in enumerate(values)]
        return moved[0] if len(moved) == 1 else tuple(moved)

    def _register(self, value: Any, name: str) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._register(v, f"{name}_{k}") for k, v in enumerate(value)]
        if isinstance(value, ValueCastable):
            register: Any = Signal(value.shape(), name=name, reset_less=True)
        else:
            register = Signal(Value.cast(value).shape(), name=name, reset_less=True)
        with self.m.If(self.advance):
            self.m.d.sync += register.eq(value)
        return register


class SkidBuffer(Component):
    """Two-entry buffer that registers both directions: no combinational path from either side to the other.

    Latency 1 cycle, one word per cycle. Ports: stream ``i`` in, stream ``o`` out, of one payload ``shape``.
    """

    def __init__(self, shape: Any) -> None:
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        i, o = self.i, self.o
        # `spare` holds the word that was accepted in the cycle in which the output was found stalled.
        spare = Signal.like(Value.cast(i.payload), name="spare", reset_less=True)
        full = Signal()
        valid = Signal()
        word = Signal.like(Value.cast(o.payload), name="word", reset_less=True)
        m.d.comb += [i.ready.eq(~full), o.valid.eq(valid), Value.cast(o.payload).eq(word)]
        with m.If(o.ready | ~valid):
            m.d.sync += [full.eq(0), valid.eq(i.valid | full), word.eq(Mux(full, spare, Value.cast(i.payload)))]
        with m.Elif(i.valid & ~full):
            m.d.sync += [full.eq(1)]
        with m.If(~full):
            m.d.sync += spare.eq(Value.cast(i.payload))
        return m


class Collect(Component):
    """Whole rows from their beats: the row that ``beats`` beats of ``lanes`` elements make, the first beat lowest.

    Registers that shift by a beat. A row is valid one cycle after its last beat was accepted; while it is taken, the
    next row's first beat is accepted. Ports: stream ``i`` of ``lanes`` elements of ``shape``, stream ``o`` of all.
    """

    def __init__(self, shape: Any, lanes: int, beats: int) -> None:
        self.shape, self.lanes, self.beats = shape, lanes, beats
        super().__init__(
            {
                "i": In(stream.Signature(ArrayLayout(shape, lanes))),
                "o": Out(stream.Signature(ArrayLayout(shape, lanes * beats))),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        i, o = self.i, self.o
        row = [Signal(self.shape, name=f"row{k}", reset_less=True) for k in range(self.lanes * self.beats)]
        count = Signal(range(self.beats + 1))
        full = count == self.beats
        m.d.comb += [o.valid.eq(full), i.ready.eq(~full | o.ready)]
        m.d.comb += [o.payload[k].eq(value) for k, value in enumerate(row)]
        with m.If(i.valid & i.ready):
            moved = row[self.lanes :] + [i.payload[k] for k in range(self.lanes)]
            m.d.sync += [a.eq(b) for a, b in zip(row, moved, strict=True)]
            m.d.sync += count.eq(Mux(full, 1, count + 1))
        with m.Elif(o.ready & full):
            m.d.sync += count.eq(0)
        return m


class Spread(Component):
    """Beats of whole rows: the reverse of :class:`Collect`.

    Registers that shift by a beat. The first beat is valid one cycle after the row was accepted; while the last one is
    taken, the next row is accepted. Ports: stream ``i`` of ``lanes * beats`` elements of ``shape``, stream ``o`` of
    ``lanes``.
    """

    def __init__(self, shape: Any, lanes: int, beats: int) -> None:
        self.shape, self.lanes, self.beats = shape, lanes, beats
        super().__init__(
            {
                "i": In(stream.Signature(ArrayLayout(shape, lanes * beats))),
                "o": Out(stream.Signature(ArrayLayout(shape, lanes))),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        i, o = self.i, self.o
        row = [Signal(self.shape, name=f"row{k}", reset_less=True) for k in range(self.lanes * self.beats)]
        left = Signal(range(self.beats + 1))
        m.d.comb += [o.valid.eq(left.any()), i.ready.eq(~left.any() | ((left == 1) & o.ready))]
        m.d.comb += [o.payload[k].eq(row[k]) for k in range(self.lanes)]
        with m.If(i.valid & i.ready):
            m.d.sync += [a.eq(i.payload[k]) for k, a in enumerate(row)]
            m.d.sync += left.eq(self.beats)
        with m.Elif(o.valid & o.ready):
            m.d.sync += [a.eq(b) for a, b in zip(row, row[self.lanes :])]
            m.d.sync += left.eq(left - 1)
        return m
