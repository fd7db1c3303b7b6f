"""Monitors: a component between free inputs, and assertions about its streams.

The prover chooses every input in every cycle, reset included; what the component holds before its first reset is
free as well (:data:`FREE_START`), so that a control register that reset misses is found.
"""

from __future__ import annotations

from typing import Any

from amaranth.hdl import (
    Assert,
    Assume,
    ClockDomain,
    ClockSignal,
    Elaboratable,
    Module,
    ResetSignal,
    Signal,
    Value,
)

#: Yosys command that forgets the power-on values of the component's registers.
FREE_START = "setattr -unset init top.dut*/w:*"


class Monitor(Elaboratable):
    """A component ``dut`` with streams ``i``, ``o`` and maybe ``table``, driven by free inputs.

    Reset is high in the first cycle and free afterwards. The monitor's registers live in the domain ``watch``, which
    the same reset clears. ``accept`` and ``deliver`` are high in the cycles in which a beat is transferred.

    Parameters
    ----------
    dut : Component
    fault : str
        Planted between monitor and component: ``eager`` (it sees o.ready high always, as if its pipeline ignored it),
        ``no_reset`` (reset never reaches it), ``retract`` (valid drops after a stalled cycle).
    """

    def __init__(self, dut: Any, fault: str = "") -> None:
        self.dut, self.fault = dut, fault
        self.clk, self.rst = Signal(name="clk"), Signal(name="rst")
        self.i_valid = Signal(name="i_valid")
        self.i_payload = Signal(Value.cast(dut.i.payload).shape(), name="i_payload")
        self.o_ready = Signal(name="o_ready")
        self.ports = [self.clk, self.rst, self.i_valid, self.i_payload, self.o_ready]
        if hasattr(dut, "table"):
            self.table_valid = Signal(name="table_valid")
            self.table_payload = Signal(Value.cast(dut.table.payload).shape(), name="table_payload")
            self.ports += [self.table_valid, self.table_payload]

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        dut = m.submodules.dut = self.dut
        m.domains.sync, m.domains.watch = ClockDomain("sync"), ClockDomain("watch")
        m.d.comb += [
            ClockSignal("sync").eq(self.clk),
            ClockSignal("watch").eq(self.clk),
            ResetSignal("sync").eq(0 if self.fault == "no_reset" else self.rst),
            ResetSignal("watch").eq(self.rst),
            dut.i.valid.eq(self.i_valid),
            Value.cast(dut.i.payload).eq(self.i_payload),
            dut.o.ready.eq(1 if self.fault == "eager" else self.o_ready),
        ]
        if hasattr(dut, "table"):
            m.d.comb += [
                dut.table.valid.eq(self.table_valid),
                Value.cast(dut.table.payload).eq(self.table_payload),
            ]
        first = Signal(init=1, reset_less=True)
        m.d.watch += first.eq(0)
        with m.If(first):
            m.d.comb += Assume(self.rst)
        self.payload = Value.cast(dut.o.payload)
        self.valid = Signal(name="seen_valid")
        if self.fault == "retract":
            stalled = Signal()
            m.d.watch += stalled.eq(dut.o.valid & ~self.o_ready)
            m.d.comb += self.valid.eq(dut.o.valid & ~stalled)
        else:
            m.d.comb += self.valid.eq(dut.o.valid)
        self.accept, self.deliver = Signal(name="accept"), Signal(name="deliver")
        m.d.comb += [self.accept.eq(dut.i.valid & dut.i.ready), self.deliver.eq(self.valid & self.o_ready)]
        # What was there before the first reset is nobody's promise.
        with m.If(~first):
            self.watch(m)
        return m

    def watch(self, m: Module) -> None:
        """Add the monitor's registers and assertions; they start in the cycle after the first one in reset."""
        raise NotImplementedError


class Rules(Monitor):
    """Stream rules: while ``o.valid & ~o.ready`` valid is not retracted and no payload bit changes, and the cycle
    after one in reset has ``o.valid`` low. Nothing is assumed of the sender."""

    def watch(self, m: Module) -> None:
        stalled, after_reset = Signal(), Signal(init=1, reset_less=True)
        held = Signal.like(self.payload, name="held", reset_less=True)
        m.d.watch += [stalled.eq(self.valid & ~self.o_ready), held.eq(self.payload), after_reset.eq(self.rst)]
        with m.If(stalled):
            m.d.comb += Assert(self.valid)
            m.d.comb += Assert(self.payload == held)
        with m.If(after_reset):
            m.d.comb += Assert(~self.valid)


class Order(Monitor):
    """A buffer of ``capacity`` words never drops, duplicates, changes or reorders one.

    ``inside`` counts the words that were accepted and not yet delivered; output is valid exactly while there are any,
    and input is refused only when all places are taken. The prover marks one accepted word of its choice, at any
    time: when as many words have been delivered as were inside before it, the next one delivered must be this one.
    """

    def __init__(self, dut: Any, capacity: int, fault: str = "") -> None:
        super().__init__(dut, fault)
        self.capacity = capacity
        self.mark = Signal(name="mark")
        self.ports.append(self.mark)

    def watch(self, m: Module) -> None:
        inside, ahead = Signal(range(self.capacity + 2)), Signal(range(self.capacity + 2))
        marked, done = Signal(), Signal()
        word = Signal.like(self.payload, name="word", reset_less=True)
        m.d.watch += inside.eq(inside + self.accept - self.deliver)
        m.d.comb += [
            Assert(inside <= self.capacity),
            Assert(self.valid == (inside != 0)),
            Assert(self.dut.i.ready | (inside == self.capacity)),
        ]
        with m.If(marked):
            with m.If(self.deliver):
                m.d.watch += ahead.eq(ahead - 1)
                with m.If(ahead == 0):
                    m.d.comb += Assert(self.payload == word)
                    m.d.watch += [marked.eq(0), done.eq(1)]
        with m.Elif(self.accept & self.mark & ~done):
            m.d.watch += [marked.eq(1), ahead.eq(inside - self.deliver), word.eq(self.i_payload)]


class Delay(Monitor):
    """An element-wise unit is a delay line of ``depth`` places: what is carried along comes out as it went in.

    The reference moves by one place in each cycle in which ``i.ready`` is high and holds for each place whether a beat
    is there, its ``keep`` and its ``last``. Equality at the output, and a line that moves on from a beat exactly when
    that is taken, mean that no beat is invented, lost, duplicated or reordered, and that never more than ``depth`` are
    under way. The data fields are left free: arithmetic is compared
    with golden by simulation.
    """

    FIELDS = ("keep", "last")

    def __init__(self, dut: Any, depth: int, fault: str = "") -> None:
        super().__init__(dut, fault)
        self.depth = depth

    def watch(self, m: Module) -> None:
        there: Any = self.accept
        carried = [Value.cast(getattr(self.dut.i.payload, name)) for name in self.FIELDS]
        for place in range(self.depth):
            beat = Signal(name=f"there{place}")
            moved = [
                Signal.like(value, name=f"{name}{place}", reset_less=True)
                for name, value in zip(self.FIELDS, carried, strict=True)
            ]
            with m.If(self.dut.i.ready):
                m.d.watch += beat.eq(there)
                m.d.watch += [register.eq(value) for register, value in zip(moved, carried, strict=True)]
            there, carried = beat, moved
        m.d.comb += Assert(self.valid == there)
        with m.If(self.valid):
            m.d.comb += Assert(self.dut.i.ready == self.o_ready)
            for name, value in zip(self.FIELDS, carried, strict=True):
                m.d.comb += Assert(Value.cast(getattr(self.dut.o.payload, name)) == value)


class Count(Monitor):
    """Beats delivered never outnumber beats accepted, and at most ``capacity`` are under way. For an element-wise
    unit that works on ``capacity`` beats at a time."""

    def __init__(self, dut: Any, capacity: int, fault: str = "") -> None:
        super().__init__(dut, fault)
        self.capacity = capacity

    def watch(self, m: Module) -> None:
        inside = Signal(range(self.capacity + 2))
        m.d.watch += inside.eq(inside + self.accept - self.deliver)
        m.d.comb += Assert(inside <= self.capacity)
        with m.If(self.valid):
            m.d.comb += Assert(inside != 0)


class Quotient(Monitor):
    """``dividend == quotient * divisor + remainder`` with ``remainder < divisor``; divisor 0 gives all ones."""

    def watch(self, m: Module) -> None:
        o = self.dut.o.payload
        asked = Signal(self.dut.i.payload.shape(), reset_less=True)
        with m.If(self.accept):
            m.d.watch += asked.eq(self.dut.i.payload)
        with m.If(self.valid):
            with m.If(asked.divisor == 0):
                m.d.comb += Assert(o.quotient == (1 << self.dut.dividend_bits) - 1)
            with m.Else():
                m.d.comb += Assert(asked.dividend == o.quotient * asked.divisor + o.remainder)
                m.d.comb += Assert(o.remainder < asked.divisor)


class Root(Monitor):
    """``root**2 <= radicand < (root + 1)**2``."""

    def watch(self, m: Module) -> None:
        asked = Signal(self.dut.bits, reset_less=True)
        with m.If(self.accept):
            m.d.watch += asked.eq(self.dut.i.payload)
        with m.If(self.valid):
            m.d.comb += Assert(self.payload * self.payload <= asked)
            m.d.comb += Assert((self.payload + 1) * (self.payload + 1) > asked)
