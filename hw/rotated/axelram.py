"""Component of :mod:`golden.rotated.axelram`."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module, Signal, Value, signed, unsigned

from golden.rotated.axelram import AxelramConfig
from hw.memory import Queue, RowMemory
from hw.rotated.read_path import Lookup, Table, read_table_layout, score_layout
from hw.rotated.write_path import WritePath
from hw.unit import Unit, beat_layout


class Axelram(Unit):
    """Write path, memory and read path, as golden ``Axelram``.

    ``i``: {x, query, address, exponent, shift, pattern}. Without ``query``: writes x, scaled by ``2**exponent``, to
    ``address``. With it: scores x, at ``shift``, against what lies at the addresses 0 to ``address``. ``o``: {score,
    last}, one beat per address, in order. ``table``: address k holds sign pattern k, bit i set for +1; load it between
    rows.

    One write per cycle. A query waits for the writes before it and for its table; then it takes one address per cycle,
    and whatever follows it waits until the last one was read.
    """

    def __init__(self, config: AxelramConfig) -> None:
        self.write_path = WritePath(config.write)
        self.table_part, self.lookup = Table(config.read), Lookup(config.read)
        for part in (self.write_path, self.table_part, self.lookup):
            part._MustUse__silence = True  # read for their cycles even where nothing is elaborated
        row = {
            "query": unsigned(1),
            "address": unsigned(config.address_bits),
            "exponent": signed(config.write.exponent_bits),
            "shift": unsigned(config.read.shift_bits),
            "pattern": unsigned(config.read.pattern_bits),
        }
        super().__init__(
            config,
            i=beat_layout({"x": signed(config.in_bits)}, config.size, row),
            o=score_layout(config.read),
            table=read_table_layout(config.read),
        )
        #: Cycles from a write to the first read that may follow it, and from an address to its score.
        self.write_cycles = self.write_path.row_latency
        self.latency = 1 + self.lookup.latency

    def read_cycles(self, writes: int, reads: int) -> int:
        """Cycles of so many writes, a query at once after them, and its reads, to the last score."""
        waits = max(self.table_part.query_cycles, self.write_cycles if writes else 0)
        return writes + waits + reads + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        m.submodules.write_path, m.submodules.table = write_path, table = self.write_path, self.table_part
        m.submodules.lookup = lookup = self.lookup
        m.submodules.vectors = vectors = RowMemory(config.capacity, config.size * config.bits + 16)

        # -- sign patterns go to both paths ----------------------------------------------------------------------------
        m.d.comb += self.table.ready.eq(1)
        for port in (write_path.table, table.load):
            m.d.comb += [
                port.valid.eq(self.table.valid),
                port.payload.address.eq(self.table.payload.address),
                port.payload.data.eq(self.table.payload.data),
            ]

        # -- commands --------------------------------------------------------------------------------------------------
        depth = self.write_path.row_latency + 2
        m.submodules.addresses = addresses = Queue(unsigned(config.address_bits), depth)
        in_flight = Signal(range(depth + 2))
        sweeping, fetched = Signal(), Signal()
        write, query = i.valid & ~i.payload.query, i.valid & i.payload.query
        can_write = ~sweeping & write_path.i.ready & addresses.i.ready
        can_query = ~sweeping & ~fetched & table.query.ready
        m.d.comb += [
            i.ready.eq((write & can_write) | (query & can_query)),
            write_path.i.valid.eq(write & ~sweeping & addresses.i.ready),
            addresses.i.valid.eq(write & ~sweeping & write_path.i.ready),
            addresses.i.payload.eq(i.payload.address),
            table.query.valid.eq(query & can_query),
            table.query.payload.shift.eq(i.payload.shift),
            table.query.payload.pattern.eq(i.payload.pattern),
            write_path.i.payload.exponent.eq(i.payload.exponent),
            write_path.i.payload.pattern.eq(i.payload.pattern),
        ]
        for k in range(config.size):
            m.d.comb += [table.query.payload.x[k].eq(i.payload.x[k]), write_path.i.payload.x[k].eq(i.payload.x[k])]

        # -- writes ----------------------------------------------------------------------------------------------------
        landed = write_path.o.valid
        m.d.comb += [
            write_path.o.ready.eq(1),
            addresses.o.ready.eq(landed),
            vectors.write_address.eq(addresses.o.payload),
            vectors.write_data.eq(Value.cast(write_path.o.payload)),
            vectors.write_enable.eq(landed),
        ]
        m.d.sync += in_flight.eq(in_flight + (write & can_write) - landed)

        # -- reads -----------------------------------------------------------------------------------------------------
        address, final = (Signal(config.address_bits, name=name, reset_less=True) for name in ("address", "final"))
        shift = Signal(config.read.shift_bits, reset_less=True)
        final_fetched = Signal(reset_less=True)
        move = ~fetched | lookup.i.ready
        fetch = sweeping & table.query.ready & ~in_flight.any() & move
        with m.If(query & can_query):
            m.d.sync += [sweeping.eq(1), address.eq(0), final.eq(i.payload.address), shift.eq(i.payload.shift)]
        with m.If(fetch):
            m.d.sync += [address.eq(address + 1), final_fetched.eq(address == final)]
            with m.If(address == final):
                m.d.sync += sweeping.eq(0)
        with m.If(move):
            m.d.sync += fetched.eq(fetch)
        m.d.comb += [
            vectors.read_address.eq(address),
            vectors.read_enable.eq(fetch),
            lookup.i.valid.eq(fetched),
            lookup.i.payload.shift.eq(shift),
            lookup.i.payload.last.eq(final_fetched),
            lookup.entries.eq(table.entries),
            o.valid.eq(lookup.o.valid),
            lookup.o.ready.eq(o.ready),
            o.payload.eq(lookup.o.payload),
        ]
        bits = config.size * config.bits
        m.d.comb += [
            Value.cast(lookup.i.payload.index).eq(vectors.read_data[:bits]),
            lookup.i.payload.norm.eq(vectors.read_data[bits:]),
        ]
        return m
