"""A stallable pipeline: stages of registers that all move together, and a skid buffer to cut the ready chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from amaranth.hdl import Array, Module, Mux, Shape, Signal, Value, ValueCastable  # noqa: F401
from amaranth.lib import stream
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
