"""Storage of rows and tables, in a module of its own so that synthesis can count it apart from the logic."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Module
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import Component, In, Out


class RowMemory(Component):
    """Simple dual-port memory: one synchronous write port, one synchronous read port (data one cycle after ``read``).

    ``read_data`` holds its value while ``read_enable`` is low, as an SRAM macro or block RAM does. Reading the address
    that is written in the same cycle gives the old word.
    """

    def __init__(self, depth: int, width: int, init: Any = ()) -> None:
        self.depth, self.width, self.init = depth, width, init
        address = max(1, (depth - 1).bit_length())
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
