"""The serial link around units, in simulation: host encoder in, bytes over the line, host decoder out, golden."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import tty
import warnings
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Array, Module, Signal, unsigned
from amaranth.lib.wiring import Component
from amaranth.sim import Simulator

from golden.commandline import CheckFailed
from golden.config import UnitConfig, integer
from hw.catalog import UNITS, find
from hw.link import BEAT, ESCAPE, FAULTS, RESET, TABLE, Identity, LinkConfig, SerialLink, escaped, identity
from hw.unit import Unit, row_layout, table_layout
from synth.host import HostEnd, compare, exchange, rows_of, settle
from tb.bench import bench_of

FAST = LinkConfig(clock_hz=4, baud=1, buffer_bytes=64)


class Board:
    """A serial port whose other end is a simulated link. ``read`` lets the simulation run on for some cycles.

    ``bit`` is the host's bit time in clock cycles (the device's own when not given), which may be a fraction.
    """

    def __init__(self, unit: Any, config: LinkConfig = FAST, bit: float | None = None, step: int = 400) -> None:
        self.link = SerialLink(unit, config)
        self.step, self.cycles = step, 0
        self.to_device: deque[int] = deque()
        self.to_host = bytearray()
        self.bit = 1e-6 * (bit or config.divisor)
        self.break_line = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.simulator = Simulator(self.link)
        self.simulator.add_clock(1e-6)
        self.simulator.add_testbench(self._send, background=True)
        self.simulator.add_testbench(self._receive, background=True)

    async def _send(self, ctx: Any) -> None:
        while True:
            if self.break_line:
                self.break_line = False
                ctx.set(self.link.rx, 0)
                await ctx.delay(11 * self.bit)
                ctx.set(self.link.rx, 1)
                await ctx.delay(2 * self.bit)
            if not self.to_device:
                await ctx.delay(8e-6)
                continue
            byte = self.to_device.popleft()
            for level in (0, *(byte >> k & 1 for k in range(8)), 1):
                ctx.set(self.link.rx, level)
                await ctx.delay(self.bit)

    async def _receive(self, ctx: Any) -> None:
        while True:
            await ctx.negedge(self.link.tx)
            await ctx.delay(self.bit / 2)
            assert ctx.get(self.link.tx) == 0
            byte = 0
            for k in range(8):
                await ctx.delay(self.bit)
                byte |= ctx.get(self.link.tx) << k
            await ctx.delay(self.bit)
            assert ctx.get(self.link.tx) == 1, "no stop bit"
            self.to_host.append(byte)

    def write(self, data: bytes, /) -> int:
        self.to_device.extend(data)
        return len(data)

    def read(self, size: int, /) -> bytes:
        self.cycles += self.step
        self.simulator.run_until(self.cycles * 1e-6)
        found = bytes(self.to_host[:size])
        del self.to_host[:size]
        return found

    def clock(self) -> float:
        """Simulated time in units of 10,000 cycles, for ``exchange``."""
        return self.cycles / 10_000

    @property
    def waiting(self) -> dict[str, Any]:
        return {"clock": self.clock, "pause": lambda seconds: None}


def host_of(board: Board) -> HostEnd:
    return HostEnd(identity(board.link.unit, LinkConfig()))


def small(unit: str) -> Any:
    if unit not in UNITS:
        pytest.skip(f"{unit} is not in the catalog")
    return bench_of(unit, find(unit).configuration("small"))


def rows(bench: Any, count: int) -> list:
    """Rows spread over the bench's directed and random ones, without the long ones."""
    return [row for row in rows_of(bench, 2 * count, captured=False)[1] if len(row) <= 30][:count]


def run(board: Board, host: HostEnd, bench: Any, chosen: list) -> Any:
    found = compare(board, host, bench, chosen, **board.waiting)
    assert not found.differences, found.differences
    return found


@dataclass(frozen=True)
class EchoConfig(UnitConfig):
    lanes: int = integer(4, 1, 64, "elements per beat")
    slow: int = integer(0, 0, 1 << 16, "cycles between beats")


class Echo(Unit):
    """``o.y = i.x + table[i.x & 3]`` modulo 256, one beat at a time, each after ``slow`` cycles."""

    def __init__(self, config: EchoConfig) -> None:
        super().__init__(
            config,
            i=row_layout(config.lanes, {"x": unsigned(8)}),
            o=row_layout(config.lanes, {"y": unsigned(8)}),
            table=table_layout(4, unsigned(8)),
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        i, o = self.i, self.o
        table = Array(Signal(8, name=f"entry{k}") for k in range(4))
        rest = Signal(range(self.config.slow + 1), init=self.config.slow)
        m.d.comb += [self.table.ready.eq(1), i.ready.eq(~o.valid & (rest == 0))]
        with m.If(self.table.valid):
            m.d.sync += table[self.table.payload.address].eq(self.table.payload.data)
        with m.If(o.valid & o.ready):
            m.d.sync += o.valid.eq(0)
        with m.If(rest != 0):
            m.d.sync += rest.eq(rest - 1)
        with m.If(i.valid & i.ready):
            m.d.sync += [o.valid.eq(1), rest.eq(self.config.slow)]
            m.d.sync += [o.payload.keep.eq(i.payload.keep), o.payload.last.eq(i.payload.last)]
            for k in range(self.config.lanes):
                m.d.sync += o.payload.y[k].eq(i.payload.x[k] + table[i.payload.x[k][:2]])
        return m


# -- the line ----------------------------------------------------------------------------------------------------------
def test_rows_sent_back_to_back_come_back_equal_to_golden():
    bench = small("exp")
    board = Board(bench.entry.component(bench.config))
    found = run(board, host_of(board), bench, rows(bench, 12))
    assert found.rows == 12 and found.mismatched_rows == 0 and found.beats > 20


def test_a_unit_that_stores_its_rows_gives_the_same_over_the_link():
    bench = small("softmax")
    config = FAST.replace(buffer_bytes=128)
    board = Board(bench.entry.component(bench.config), config)
    run(board, host_of(board), bench, rows(bench, 8))


def test_every_byte_value_passes_in_both_directions_and_tables_are_written():
    board = Board(Echo(EchoConfig()))
    host = host_of(board)
    host.reset()
    exchange(board, host, lambda: host.ready, **board.waiting)
    table = [0, 0xDB - 0xC1, 7, 0xC0]
    for address, data in enumerate(table):
        host.send_table((address | data << 2).to_bytes(2, "little"))
    values = np.arange(256, dtype=np.uint8)
    for x in values.reshape(-1, 4):
        host.send_beat(x.tobytes() + b"\x0f")
    exchange(board, host, lambda: len(host.beats) == 64 and not host.unacknowledged, **board.waiting)
    got = b"".join(beat[:4] for beat in host.beats)
    assert got == (values + np.array(table, np.uint8)[values & 3]).astype(np.uint8).tobytes()


@pytest.mark.parametrize("slow", [0, 1500])
def test_the_credit_is_used_up_but_nothing_is_lost_when_the_unit_or_the_line_is_slow(slow):
    board = Board(Echo(EchoConfig(slow=slow)), step=200)
    host = host_of(board)
    host.reset()
    exchange(board, host, lambda: host.ready, **board.waiting)
    sent = [bytes([k, 0xC0, 255 - k, 0xDB, k % 16]) for k in range(24)]
    for beat in sent:
        host.send_beat(beat)
    lowest = []

    def done() -> bool:
        lowest.append(host.credit)
        return len(host.beats) == 24

    exchange(board, host, done, **board.waiting)
    exchange(board, host, lambda: not host.unacknowledged, **board.waiting)
    assert [beat[:4] for beat in host.beats] == [beat[:4] for beat in sent]
    assert min(lowest) < 6, "the receive buffer was never full"
    assert host.credit == FAST.buffer_bytes


def test_reset_in_mid_row_and_mid_frame_empties_the_unit():
    bench = small("exp")
    board = Board(bench.entry.component(bench.config))
    host = host_of(board)
    row = max(rows(bench, 8), key=len)
    beats = bench.pack_input([row]).words
    size = host.expected.i_bytes
    for cut in (1, size + 2, 3 * size):
        host.reset()
        exchange(board, host, lambda: host.ready, **board.waiting)
        frames = b"".join(escaped(bytes([BEAT]) + word.to_bytes(size, "little")) for word in beats)
        board.write(frames[:cut])
        host.reset()  # right behind them, while results may be on their way
        exchange(board, host, lambda: host.ready, **board.waiting)
        run(board, host, bench, [row])


def test_reset_is_heard_while_the_buffer_is_full_and_the_unit_stalls():
    board = Board(Echo(EchoConfig(slow=60_000)))
    host = host_of(board)
    for _ in range(2):
        host.reset()
        exchange(board, host, lambda: host.ready, **board.waiting)
        for _ in range(30):
            host.send_beat(bytes(5))
        exchange(board, host, lambda: host.credit < 6, **board.waiting)
        for _ in range(20):
            host.incoming(board.read(100))
        assert not host.beats and host.unacknowledged == 10


def test_garbage_before_the_first_frame_is_forgotten():
    bench = small("exp")
    board = Board(bench.entry.component(bench.config))
    generator = random.Random(5)
    for k in range(3):
        board.write(bytes(generator.randrange(256) for _ in range(5 + k)) + bytes([BEAT, 1, ESCAPE]))
        run(board, host_of(board), bench, rows(bench, 2))


# -- faults ------------------------------------------------------------------------------------------------------------
def fault_of(board: Board, host: HostEnd) -> str:
    with pytest.raises(CheckFailed) as caught:
        exchange(board, host, lambda: False, **board.waiting)
    return str(caught.value)


def ready(board: Board) -> HostEnd:
    host = host_of(board)
    host.reset()
    exchange(board, host, lambda: host.ready, **board.waiting)
    return host


def test_an_unknown_header_is_reported_once_and_all_is_ignored_until_reset():
    board = Board(Echo(EchoConfig()))
    host = ready(board)
    board.write(b"Q" + bytes([BEAT, 1, 2, 3, 4, 15]) * 30)
    assert fault_of(board, host) == f"the device reports: {FAULTS[1]}"
    board.step = 20_000
    assert board.read(4096) == b""
    board.step = 400
    host = ready(board)
    host.send_beat(bytes([1, 2, 3, 4, 15]))
    exchange(board, host, lambda: len(host.beats) == 1, **board.waiting)


def test_a_table_write_to_a_unit_without_a_table_is_an_unknown_header():
    bench = small("exp")
    board = Board(bench.entry.component(bench.config))
    host = ready(board)
    with pytest.raises(ValueError, match="a frame T has 0 bytes, not 2"):
        host.send_table(bytes(2))
    board.write(bytes([TABLE, 0, 0]))
    assert fault_of(board, host) == f"the device reports: {FAULTS[1]}"


def test_a_host_that_ignores_the_credit_is_told():
    board = Board(Echo(EchoConfig(slow=60_000)))
    host = ready(board)
    board.write(bytes([BEAT, 1, 2, 3, 4, 15]) * 13)
    assert fault_of(board, host) == f"the device reports: {FAULTS[2]}"


def test_a_byte_without_stop_bit_is_told():
    board = Board(Echo(EchoConfig()))
    host = ready(board)
    board.break_line = True
    assert fault_of(board, host) == f"the device reports: {FAULTS[3]}"
    ready(board)


def test_a_silent_device_and_a_foreign_one_are_told_apart():
    class Dead:
        cycles = 0

        def read(self, size: int, /) -> bytes:
            self.cycles += 1
            return b""

        def write(self, data: bytes, /) -> int:
            return len(data)

    dead = Dead()
    host = HostEnd(identity(Echo(EchoConfig()), FAST))
    host.reset()
    with pytest.raises(CheckFailed, match="the device does not answer"):
        exchange(dead, host, lambda: False, clock=lambda: dead.cycles, pause=lambda seconds: None)
    board = Board(Echo(EchoConfig()))
    host = HostEnd(identity(Echo(EchoConfig(slow=1)), FAST))
    host.reset()
    with pytest.raises(ValueError, match="the device holds another unit or configuration than the one asked for"):
        exchange(board, host, lambda: host.ready, **board.waiting)


# -- the UART ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bit", [16 * 0.97, 16 * 1.03])
def test_clocks_that_are_three_percent_apart_understand_each_other(bit):
    board = Board(Echo(EchoConfig()), FAST.replace(clock_hz=16), bit=bit, step=2000)
    host = ready(board)
    sent = [bytes([0x00, 0xFF, 0x55, k, 15]) for k in range(6)]
    for beat in sent:
        host.send_beat(beat)
    exchange(board, host, lambda: len(host.beats) == 6, **board.waiting)
    assert [beat[:4] for beat in host.beats] == [beat[:4] for beat in sent]


@pytest.mark.parametrize(
    "clock_hz, baud, divisor", [(25_000_000, 115_200, 217), (12_000_000, 115_200, 104), (48_000_000, 3_000_000, 16)]
)
def test_bit_time(clock_hz, baud, divisor):
    assert LinkConfig(clock_hz=clock_hz, baud=baud).divisor == divisor


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"clock_hz": 8000, "baud": 3000}, "baud must be at most a quarter of the clock's 8000 Hz, not 3000"),
        ({"clock_hz": 12_000_000, "baud": 921_600}, None),
        ({"clock_hz": 12_000_000, "baud": 2_700_000}, "a clock of 12000000 Hz gives 3000000 baud instead of 2700000"),
        ({"baud": 0}, "baud must lie in 1..100000000, not 0"),
        ({"buffer_bytes": 8}, "buffer_bytes must lie in 16..32768, not 8"),
    ],
)  # fmt: skip
def test_impossible_lines_are_refused(settings, message):
    if message is None:
        LinkConfig(**settings)
        return
    with pytest.raises(ValueError) as caught:
        LinkConfig(**settings)
    assert str(caught.value) == message


def test_a_buffer_below_two_frames_is_refused():
    with pytest.raises(ValueError, match=r"^buffer_bytes must be at least 132 for this unit's frames, not 64$"):
        SerialLink(Echo(EchoConfig(lanes=57)), FAST)


def test_identity_survives_packing_and_tells_configurations_apart():
    first, second = (identity(Echo(EchoConfig(lanes=n)), FAST) for n in (4, 5))
    assert Identity.unpack(first.pack()) == first
    assert (first.i_bytes, first.o_bytes, first.table_bytes, first.buffer_bytes) == (5, 5, 2, 64)
    assert first.digest != second.digest


def test_escapes_leave_the_reset_byte_out_of_the_data():
    every = bytes(range(256))
    line = escaped(every)
    assert RESET not in line and len(line) == 258


# -- the host script ---------------------------------------------------------------------------------------------------
def host_script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "synth.host", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_host_script_compares_rows_over_a_terminal_port():
    pytest.importorskip("serial")
    bench = small("exp")
    board = Board(bench.entry.component(bench.config), FAST.replace(buffer_bytes=512))
    master, slave = os.openpty()
    tty.setraw(slave)
    os.set_blocking(master, False)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                board.write(os.read(master, 4096))
            except BlockingIOError:
                pass
            data = board.read(4096)
            if data:
                os.write(master, data)
            else:
                time.sleep(0.001)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        port = os.ttyname(slave)
        common = ("--port", port, "--unit", "exp", "--config", "small", "--synthetic", "--json")
        good = host_script(*common, "--rows", "6", "--timeout", "20")
        foreign = host_script(*common, "--set", "lanes=4", "--rows", "1", "--timeout", "20")
    finally:
        stop.set()
        thread.join()
        os.close(master)
        os.close(slave)
    assert good.returncode == 0, good.stderr
    (found,) = json.loads(good.stdout)
    assert found["rows"] == 6 and found["mismatches"] == 0 and found["source"] == "directed and random"
    assert foreign.returncode == 2
    assert foreign.stderr.splitlines()[-1] == (
        "host: error: the device holds another unit or configuration than the one asked for"
    )


def test_a_difference_from_golden_is_found_and_named():
    bench = small("exp")
    unit = bench.entry.component(bench.config)

    class Faulty(Component):
        config = unit.config

        def __init__(self) -> None:
            super().__init__(dict(unit.signature.members))

        def elaborate(self, platform: Any) -> Module:
            m = Module()
            m.submodules.unit = unit
            m.d.comb += [
                unit.i.valid.eq(self.i.valid),
                unit.i.payload.eq(self.i.payload),
                self.i.ready.eq(unit.i.ready),
                self.o.valid.eq(unit.o.valid),
                self.o.payload.eq(unit.o.payload),
                self.o.payload.e[1].eq(unit.o.payload.e[1] ^ 1),
                unit.o.ready.eq(self.o.ready),
            ]
            return m

    board = Board(Faulty())
    host = host_of(board)
    t = bench.row(np.arange(5))
    found = compare(board, host, bench, [t, t], **board.waiting)
    assert found.mismatched_rows >= 1
    assert found.differences[0].startswith("row 0, beat 0: e: got [[")


def test_an_absent_port_is_one_line_and_status_two():
    pytest.importorskip("serial")
    done = host_script("--port", "/dev/no-such-port", "--unit", "exp")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "host: error: port /dev/no-such-port: No such file or directory\n"
    done = host_script("--port", "/dev/no-such-port", "--unit", "sofmax")
    assert done.returncode == 2 and done.stderr.startswith("host: error: there is no unit 'sofmax'; the catalog has ")


def test_settling_a_line_drops_what_was_on_its_way():
    board = Board(Echo(EchoConfig()))
    board.write(bytes([BEAT, 1, 2, 3, 4, 15]) * 5)
    settle(board, **board.waiting)
    assert not board.to_host and not board.to_device
    babbling = SimpleNamespace(read=lambda size: b"x", write=len)
    ticks = iter(range(1000))
    with pytest.raises(CheckFailed, match="the line does not come to rest after a reset"):
        settle(babbling, quiet=3, clock=lambda: next(ticks), pause=lambda seconds: None)


def test_an_answer_to_an_earlier_reset_does_not_upset_the_credit():
    host = HostEnd(Identity(2, 2, 0, 64, b"abcd"))
    answer = bytes([RESET]) + b"H" + escaped(host.expected.pack())
    host.reset()
    host.incoming(answer)
    for _ in range(3):
        host.send_beat(bytes(2))
    assert len(host.outgoing()) == 1 + 9
    host.incoming(answer)
    assert host.credit == 64 - 9
    host.incoming(b"AAA")
    assert host.credit == 64 and not host.unacknowledged
    with pytest.raises(CheckFailed, match="the device acknowledged a frame that was not sent"):
        host.incoming(b"A")
    with pytest.raises(CheckFailed, match="the device sent a frame with the unknown header 0x5a"):
        host.incoming(b"Z")
