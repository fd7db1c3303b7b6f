"""Serial host link of a unit on an FPGA board: beats in and beats out over one UART, with nothing lost on the way.

The line carries 8 data bits, no parity, one stop bit, in both directions. Two byte values are never data:

* ``RESET`` (0xC0), wherever it comes, empties the link and the unit; the device answers with the same byte and a
  ``HELLO`` frame. Whatever the line carried before, a host that has seen this answer knows where it stands.
* ``ESCAPE`` (0xDB) says that the next byte comes with bit 5 inverted; it stands before each data byte that equals
  one of the two.

Frames are a header byte and a fixed number of bytes, lowest first:

==========  ======  ==============  =======================================================================
direction   header  bytes           meaning
==========  ======  ==============  =======================================================================
to device   ``B``   input beat      one beat, packed as ``i.payload``, padded with zeros to whole bytes
to device   ``T``   table write     one write, packed as ``table.payload``; only where the unit has a table
to host     ``H``   ``HELLO_BYTES`` version, bytes of ``B``, ``O``, ``T`` and of the receive buffer (16 bits
                                    each, lowest byte first), four bytes that identify unit and configuration
to host     ``A``   none            the unit has taken the oldest frame that was not yet acknowledged
to host     ``O``   output beat     one beat, packed as ``o.payload``
to host     ``E``   code            the first fault since reset; from here on all bytes up to a reset are ignored
==========  ======  ==============  =======================================================================

Flow control is by credit: the device has a receive buffer of ``buffer_bytes``, and the host never has more than that
many bytes (headers counted, escapes not) of frames that are not yet acknowledged. A stalled unit so stops the host,
and a busy transmitter stops the unit through ``o.ready``. Faults: an unknown header, a host that ignores the credit,
and a byte without a stop bit (``FAULTS``).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any

from amaranth.hdl import Cat, Const, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream
from amaranth.lib.fifo import SyncFIFOBuffered
from amaranth.lib.wiring import Component, In, Out

from golden.config import UnitConfig, integer
from hw.unit import Unit

VERSION = 1
RESET, ESCAPE, FLIP = 0xC0, 0xDB, 0x20
BEAT, TABLE, HELLO, ACCEPTED, OUTPUT, FAULT = b"BTHAOE"
#: Code of a fault -> what it means.
FAULTS = {1: "unknown header byte", 2: "more bytes than the receive buffer holds", 3: "byte without a stop bit"}
_HELLO = struct.Struct("<BHHHH4s")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class LinkConfig(UnitConfig):
    """The line's speed and the device's receive buffer.

    The bit time is ``divisor = round(clock_hz / baud)`` clock cycles. ValueError if it is below 4, or if the speed
    that results is more than 2 % off, which is what a receiver of ten bits tolerates with room to spare.
    """

    clock_hz: int = integer(25_000_000, 1, 1_000_000_000, "frequency of the clock")
    baud: int = integer(115_200, 1, 100_000_000, "bits per second on the line")
    buffer_bytes: int = integer(512, 16, 32_768, "bytes of the receive buffer")

    def validate(self) -> None:
        if self.divisor < 4:
            raise ValueError(f"baud must be at most a quarter of the clock's {self.clock_hz} Hz, not {self.baud}")
        actual = self.clock_hz / self.divisor
        if abs(actual / self.baud - 1) > 0.02:
            raise ValueError(f"a clock of {self.clock_hz} Hz gives {actual:.0f} baud instead of {self.baud}")

    @property
    def divisor(self) -> int:
        """Clock cycles per bit."""
        return (2 * self.clock_hz + self.baud) // (2 * self.baud)


@dataclass(frozen=True)
class Identity:
    """What a device says about itself: the frames' sizes and which unit it holds.

    Attributes
    ----------
    i_bytes, o_bytes, table_bytes : int
        Bytes of a beat in, a beat out, a table write (0 where there is no table), without header.
    buffer_bytes : int
        The host's credit.
    digest : bytes
        Four bytes of the SHA-256 of the component's name and configuration.
    version : int
        Of the protocol.
    """

    i_bytes: int
    o_bytes: int
    table_bytes: int
    buffer_bytes: int
    digest: bytes
    version: int = VERSION

    def pack(self) -> bytes:
        sizes = self.i_bytes, self.o_bytes, self.table_bytes, self.buffer_bytes
        return _HELLO.pack(self.version, *sizes, self.digest)

    @classmethod
    def unpack(cls, data: bytes) -> Identity:
        version, i_bytes, o_bytes, table_bytes, buffer_bytes, digest = _HELLO.unpack(data)
        return cls(i_bytes, o_bytes, table_bytes, buffer_bytes, digest, version)


def identity(unit: Unit, link: LinkConfig) -> Identity:
    """What :class:`SerialLink` around ``unit`` says about itself."""
    members = unit.signature.members

    def size(port: str) -> int:
        return -(-members[port].signature.members["payload"].shape.size // 8) if port in members else 0

    name = f"{type(unit).__name__} {unit.config!r}"
    digest = hashlib.sha256(name.encode()).digest()[:4]
    return Identity(size("i"), size("o"), size("table"), link.buffer_bytes, digest)


def escaped(data: bytes) -> bytes:
    """Data bytes as they go over the line."""
    return b"".join(bytes([ESCAPE, x ^ FLIP]) if x in (RESET, ESCAPE) else bytes([x]) for x in data)


class Receiver(Component):
    """UART receiver: ``valid`` (``broken``) is high for one cycle per byte with (without) its stop bit, in the middle
    of that bit. Each bit is sampled once, in its middle; a start bit that is gone by then is ignored."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        super().__init__({"rx": In(1, init=1), "data": Out(8), "valid": Out(1), "broken": Out(1)})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        # Two registers against metastability, a third to see the falling edge: after a break the line must rise first.
        line = Signal(3, init=0b111)
        busy = Signal()
        timer = Signal(range(self.divisor))
        count = Signal(range(10))
        data = Signal(8, reset_less=True)
        sample = Signal()
        m.d.comb += [self.data.eq(data), sample.eq(busy & (timer == 0))]
        m.d.sync += line.eq(Cat(self.rx, line))
        with m.If(~busy):
            m.d.sync += [busy.eq(line[2] & ~line[1]), timer.eq(self.divisor // 2 - 1), count.eq(0)]
        with m.Else():
            m.d.sync += timer.eq(Mux(sample, self.divisor - 1, timer - 1))
        with m.If(sample):
            m.d.sync += count.eq(count + 1)
            with m.If(count == 0):
                m.d.sync += busy.eq(~line[1])
            with m.Elif(count == 9):
                m.d.sync += busy.eq(0)
                m.d.comb += [self.valid.eq(line[1]), self.broken.eq(~line[1])]
            with m.Else():
                m.d.sync += data.eq(Cat(data[1:], line[1]))
        return m


class Transmitter(Component):
    """UART transmitter of a stream of bytes; ten bit times a byte."""

    def __init__(self, divisor: int) -> None:
        self.divisor = divisor
        super().__init__({"i": In(stream.Signature(8)), "tx": Out(1, init=1)})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        timer = Signal(range(self.divisor))
        left = Signal(range(11))
        bits = Signal(10, init=0x3FF)
        m.d.comb += [self.i.ready.eq(left == 0), self.tx.eq(bits[0])]
        with m.If(self.i.ready):
            with m.If(self.i.valid):
                m.d.sync += [bits.eq(Cat(0, self.i.payload, 1)), left.eq(10), timer.eq(self.divisor - 1)]
        with m.Elif(timer == 0):
            m.d.sync += [bits.eq(Cat(bits[1:], 1)), left.eq(left - 1), timer.eq(self.divisor - 1)]
        with m.Else():
            m.d.sync += timer.eq(timer - 1)
        return m


class _Framer(Component):
    """All between the two UARTs: everything in here, the unit included, starts anew at a reset command."""

    def __init__(self, unit: Any, me: Identity) -> None:
        self.unit, self.identity = unit, me
        super().__init__(
            {
                "data": In(8),
                "valid": In(1),
                "broken": In(1),
                "o": Out(stream.Signature(8)),
                "fault": Out(2),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        m.submodules.unit = self.unit
        m.submodules.buffer = buffer = SyncFIFOBuffered(width=8, depth=self.identity.buffer_bytes)
        waiting = Signal()  # a frame was taken by the unit and is to be acknowledged
        acknowledged = Signal()
        self._receive(m, buffer)
        self._assemble(m, buffer, waiting, acknowledged)
        self._send(m, waiting, acknowledged)
        return m

    def _receive(self, m: Module, buffer: Any) -> None:
        """Bytes of the line, escapes undone, into the buffer. The first fault closes it."""
        flip = Signal()
        write = Signal()
        m.d.comb += [
            write.eq(self.valid & (self.fault == 0) & (self.data != ESCAPE)),
            buffer.w_data.eq(self.data ^ Mux(flip, FLIP, 0)),
            buffer.w_en.eq(write),
        ]
        with m.If(self.valid):
            m.d.sync += flip.eq(self.data == ESCAPE)
        with m.If(self.fault == 0):
            with m.If(self.broken):
                m.d.sync += self.fault.eq(3)
            with m.Elif(write & ~buffer.w_rdy):
                m.d.sync += self.fault.eq(2)

    def _assemble(self, m: Module, buffer: Any, waiting: Signal, acknowledged: Signal) -> None:
        """Frames out of the buffer, each held until the unit takes it and its acknowledgement is on the way."""
        frames = {BEAT: (self.unit.i, self.identity.i_bytes)}
        if self.identity.table_bytes:
            frames[TABLE] = (self.unit.table, self.identity.table_bytes)
        longest = max(size for _, size in frames.values())
        frame = Signal(8 * longest, reset_less=True)
        left = Signal(range(longest))
        kind = Signal(len(frames))
        with m.FSM(name="assembler"):
            with m.State("HEADER"):
                m.d.comb += buffer.r_en.eq(1)
                with m.If(buffer.r_rdy), m.Switch(buffer.r_data):
                    for k, (code, (_, size)) in enumerate(frames.items()):
                        with m.Case(code):
                            m.d.sync += [kind.eq(1 << k), left.eq(size - 1)]
                            m.next = "BYTES"
                    with m.Default():
                        with m.If(self.fault == 0):
                            m.d.sync += self.fault.eq(1)
                        m.next = "STOP"
            with m.State("BYTES"):
                m.d.comb += buffer.r_en.eq(1)
                with m.If(buffer.r_rdy):
                    m.d.sync += [frame.eq(Cat(frame[8:], buffer.r_data)), left.eq(left - 1)]
                    with m.If(left == 0):
                        m.next = "OFFER"
            with m.State("OFFER"):
                for k, (port, size) in enumerate(frames.values()):
                    payload = Value.cast(port.payload)
                    # Bytes are shifted in at the top, so a frame shorter than the longest lies there.
                    word = frame[8 * (longest - size) :][: len(payload)]
                    m.d.comb += [port.valid.eq(kind[k]), payload.eq(word)]
                    with m.If(kind[k] & port.ready):
                        m.next = "TAKEN"
            with m.State("TAKEN"):
                m.d.comb += waiting.eq(1)
                with m.If(acknowledged):
                    m.next = "HEADER"
            with m.State("STOP"):
                m.d.comb += buffer.r_en.eq(1)

    def _send(self, m: Module, waiting: Signal, acknowledged: Signal) -> None:
        """Whole messages onto the line: hello, then the fault, acknowledgements, and beats of the unit."""
        result, o = self.unit.o, self.o
        hello = bytes([RESET, HELLO]) + self.identity.pack()
        longest = max(len(hello), 1 + self.identity.o_bytes)
        message = Signal(8 * longest, reset_less=True)
        left = Signal(range(longest + 1))
        greet = Signal(init=1)
        raw = Signal()  # the first byte of the hello message is a control byte
        flip = Signal()
        told = Signal()
        special = Signal()
        byte = message[:8]
        m.d.comb += [
            special.eq(((byte == RESET) | (byte == ESCAPE)) & ~raw & ~flip),
            o.valid.eq(left != 0),
            o.payload.eq(Mux(special, ESCAPE, byte ^ Mux(flip, FLIP, 0))),
        ]

        def load(*parts: Any) -> None:
            word = Cat(*parts)
            m.d.sync += [message.eq(word), left.eq(len(word) // 8)]

        with m.If(left != 0):
            with m.If(o.ready):
                m.d.sync += flip.eq(special)
                with m.If(~special):
                    m.d.sync += [message.eq(message[8:]), left.eq(left - 1), raw.eq(0)]
        with m.Elif(greet):
            load(Const(int.from_bytes(hello, "little"), 8 * len(hello)))
            m.d.sync += [greet.eq(0), raw.eq(1)]
        with m.Elif((self.fault != 0) & ~told):
            load(Const(FAULT, 8), self.fault, Const(0, 6))
            m.d.sync += told.eq(1)
        with m.Elif(waiting):
            load(Const(ACCEPTED, 8))
            m.d.comb += acknowledged.eq(1)
        with m.Else():
            m.d.comb += result.ready.eq(1)
            with m.If(result.valid):
                word = Value.cast(result.payload)
                load(Const(OUTPUT, 8), word, Const(0, 8 * self.identity.o_bytes - len(word)))


class SerialLink(Component):
    """The link around ``unit`` (see the module's text): pins ``rx`` and ``tx``, and ``fault``, which is 0 or the code
    of the first fault since reset.

    A beat costs ``i_bytes + 1`` byte times in and ``o_bytes + 2`` out (escapes apart), ten bit times each; the
    two directions work at the same time. Latency from a frame's last stop bit to the unit is at most 6 cycles.

    Parameters
    ----------
    unit : Unit
        Any component with ``config``, streams ``i`` and ``o``, and possibly ``table``.
    config : LinkConfig
        ValueError if its buffer holds less than two of the longest frames.
    """

    def __init__(self, unit: Unit, config: LinkConfig | None = None) -> None:
        self.config = config if config is not None else LinkConfig()
        self.unit = unit
        self.identity = identity(unit, self.config)
        frames = 2 * (1 + max(self.identity.i_bytes, self.identity.table_bytes))
        if self.config.buffer_bytes < frames:
            given = self.config.buffer_bytes
            raise ValueError(f"buffer_bytes must be at least {frames} for this unit's frames, not {given}")
        super().__init__({"rx": In(1, init=1), "tx": Out(1, init=1), "fault": Out(2)})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        divisor = self.config.divisor
        m.submodules.receiver = receiver = Receiver(divisor)
        m.submodules.transmitter = transmitter = Transmitter(divisor)
        # The UARTs go on through a reset command: a byte on the line is never cut short.
        restart = Signal()
        framer = _Framer(self.unit, self.identity)
        m.submodules.framer = ResetInserter(restart)(framer)
        m.d.comb += [
            receiver.rx.eq(self.rx),
            self.tx.eq(transmitter.tx),
            restart.eq(receiver.valid & (receiver.data == RESET)),
            framer.data.eq(receiver.data),
            framer.valid.eq(receiver.valid),
            framer.broken.eq(receiver.broken),
            transmitter.i.valid.eq(framer.o.valid),
            transmitter.i.payload.eq(framer.o.payload),
            framer.o.ready.eq(transmitter.i.ready),
            self.fault.eq(framer.fault),
        ]
        return m
