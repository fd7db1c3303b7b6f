"""Storage of rows and tables, in a module of its own so that synthesis can count it apart from the logic."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module, Mux, Signal, Value
from amaranth.lib import stream
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import Component, In, Out

from golden.fixedpoint import address_bits


class RowMemory(Component):
    """Simple dual-port memory: one synchronous write port, one synchronous read port (data one cycle after ``read``).

    ``read_data`` holds its value while ``read_enable`` is low, as an SRAM macro or block RAM does. Reading the address
    that is written in the same cycle gives the old word.
    """

    def __init__(self, depth: int, width: int, init: Any = ()) -> None:
        self.depth, self.width, self.init = depth, width, init
        address = address_bits(depth)
        super().__init__(
            {
                "write_address": In(address),
                "write_data": In(width),
                "write_enable": In(1),
                "read_address": In(address),
                "read_enable": In(1),
                "read_data": Out(width),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        m.submodules.memory = memory = Memory(shape=self.width, depth=self.depth, init=self.init)
        write, read = memory.write_port(), memory.read_port(domain="sync")
        m.d.comb += [
            write.addr.eq(self.write_address),
            write.data.eq(self.write_data),
            write.en.eq(self.write_enable),
            read.addr.eq(self.read_address),
            read.en.eq(self.read_enable),
            self.read_data.eq(read.data),
        ]
        return m


class Queue(Component):
    """First in, first out, in a :class:`RowMemory`: up to ``depth + 1`` words.

    Latency 2 cycles, one word per cycle. Ports: stream ``i`` in, stream ``o`` out, of one payload ``shape``.
    """

    latency = 2

    def __init__(self, shape: Any, depth: int) -> None:
        self.depth = depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        i, o, depth = self.i, self.o, self.depth
        m.submodules.words = words = RowMemory(depth, Value.cast(i.payload).shape().width)
        write, read = (Signal(len(words.write_address), name=name) for name in ("write", "read"))
        used = Signal(range(depth + 1))  # words in the memory; one more is on the output
        put, get, valid = Signal(), Signal(), Signal()
        m.d.comb += [
            i.ready.eq(used != depth),
            put.eq(i.valid & i.ready),
            get.eq(used.any() & (~valid | o.ready)),
            words.write_address.eq(write),
            words.write_data.eq(Value.cast(i.payload)),
            words.write_enable.eq(put),
            words.read_address.eq(read),
            words.read_enable.eq(get),
            o.valid.eq(valid),
            Value.cast(o.payload).eq(words.read_data),
        ]
        m.d.sync += used.eq(used + put - get)
        for pointer, move in ((write, put), (read, get)):
            with m.If(move):
                m.d.sync += pointer.eq(Mux(pointer == depth - 1, 0, pointer + 1))
        with m.If(get):
            m.d.sync += valid.eq(1)
        with m.Elif(o.ready):
            m.d.sync += valid.eq(0)
        return m
