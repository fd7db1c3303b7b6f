"""Component of :mod:`golden.rotated.signs`, and the flip that the paths build in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import Module, Mux, Signal, Value, signed, unsigned

from golden.rotated.signs import SignsConfig
from hw.memory import RowMemory
from hw.unit import Unit, beat_layout, table_layout


def symmetric(value: Value) -> Value:
    """A signed word in which the most negative value became the negative of the largest: its lowest bit is set."""
    lowest = value[-1] & ~value[:-1].any()
    return (value | lowest)[: len(value)].as_signed()


def flip(values: Sequence[Value], signs: Value, positive: int = 1) -> list[Value]:
    """Each value, symmetric, negated where its bit of ``signs`` is not ``positive``."""
    found = []
    for value, sign in zip(map(symmetric, values), signs, strict=True):
        found.append(Mux(sign == positive, value, -value)[: len(value)].as_signed())
    return found


class Signs(Unit):
    """``o.y = sat(s * i.x)`` with the pattern ``i.pattern``, as golden ``signs``: a row is one beat.

    ``i``: {x, pattern}; ``o``: {y}; ``table`` (form ``loaded``): address k holds pattern k, bit i set for +1; load it
    between rows. One row per cycle, latency 2: the ROM is read, then the row is flipped.
    """

    def __init__(self, config: SignsConfig) -> None:
        super().__init__(
            config,
            i=beat_layout({"x": signed(config.in_bits)}, config.size, {"pattern": unsigned(config.pattern_bits)}),
            o=beat_layout({"y": signed(config.in_bits)}, config.size),
            table=table_layout(config.patterns, config.size) if config.form == "loaded" else None,
        )
        self.latency = 2

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        m.submodules.rom = rom = RowMemory(config.patterns, config.size, config.rom if config.form == "seeded" else ())
        if config.form == "loaded":
            load(m, rom, self.table.payload.address, self.table.payload.data, self.table.valid)
            m.d.comb += self.table.ready.eq(1)
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        m.d.comb += [rom.read_address.eq(i.payload.pattern), rom.read_enable.eq(advance)]
        x = [Signal(signed(config.in_bits), name=f"x{k}", reset_less=True) for k in range(config.size)]
        valid = Signal()
        with m.If(advance):
            m.d.sync += [valid.eq(i.valid), o.valid.eq(valid)]
            m.d.sync += [a.eq(i.payload.x[k]) for k, a in enumerate(x)]
            m.d.sync += [o.payload.y[k].eq(v) for k, v in enumerate(flip(x, rom.read_data))]
        return m


def load(m: Module, memory: RowMemory, address: Value, data: Value, enable: Value) -> None:
    """Connect a memory's write port."""
    m.d.comb += [memory.write_address.eq(address), memory.write_data.eq(data), memory.write_enable.eq(enable)]
