"""``python -m synth.host``: send rows to a unit on a board, and compare what comes back with golden, bit by bit.

This is the host's side of :mod:`hw.link`. It uses the benches of ``tb`` for its rows, as the only module here.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import click
import numpy as np

from golden.commandline import CheckFailed, run, show
from golden.config import UnitConfig
from hw.catalog import Entry, find
from hw.link import (
    ACCEPTED,
    BEAT,
    ESCAPE,
    FAULT,
    FAULTS,
    FLIP,
    HELLO,
    HELLO_BYTES,
    OUTPUT,
    RESET,
    TABLE,
    Identity,
    LinkConfig,
    escaped,
    identity,
)
from tb.bench import Bench, bench_of
from tb.packing import Row


class HostEnd:
    """Host's end of the link, without a port: what to write to the line, and what the bytes read from it mean.

    Parameters
    ----------
    expected : Identity
        The device's, as :func:`hw.link.identity` gives it; ``buffer_bytes`` is taken from the device.

    Attributes
    ----------
    beats : deque of bytes
        Output beats that came in and were not yet taken.
    ready : bool
        Whether the device has answered the last reset.
    """

    def __init__(self, expected: Identity) -> None:
        self.expected = expected
        self.credit = 0
        self.ready = False
        self.beats: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._unacknowledged: deque[int] = deque()
        self._out = bytearray()
        self._frame = bytearray()
        self._flip = False
        self._listening = False

    def reset(self) -> None:
        """Empty both ends; what comes in before the device's answer is dropped."""
        self.ready = self._listening = self._flip = False
        for waiting in (self.beats, self._frames, self._unacknowledged):
            waiting.clear()
        self._frame.clear()
        self._out[:] = bytes([RESET])

    def send_beat(self, beat: bytes) -> None:
        """Queue one input beat of ``i_bytes`` bytes."""
        self._queue(BEAT, beat, self.expected.i_bytes)

    def send_table(self, write: bytes) -> None:
        """Queue one table write of ``table_bytes`` bytes."""
        self._queue(TABLE, write, self.expected.table_bytes)

    def _queue(self, header: int, data: bytes, size: int) -> None:
        if not size or len(data) != size:
            raise ValueError(f"a frame {chr(header)} has {size} bytes, not {len(data)}")
        self._frames.append(bytes([header]) + data)

    @property
    def queued(self) -> int:
        """Frames that are not on the line yet."""
        return len(self._frames)

    @property
    def unacknowledged(self) -> int:
        """Frames on the line, or held by the device."""
        return len(self._unacknowledged)

    def outgoing(self) -> bytes:
        """Bytes for the line, as many as the credit allows; they count as written."""
        while self.ready and self._frames and len(self._frames[0]) <= self.credit:
            frame = self._frames.popleft()
            self.credit -= len(frame)
            self._unacknowledged.append(len(frame))
            self._out += escaped(frame)
        found = bytes(self._out)
        self._out.clear()
        return found

    def incoming(self, data: bytes) -> None:
        """Take bytes from the line. CheckFailed if the device reports a fault or breaks the protocol, ValueError if
        it holds another unit."""
        for byte in data:
            if byte == RESET:
                self._listening, self._flip = True, False
                self._frame.clear()
            elif not self._listening:
                continue
            elif byte == ESCAPE:
                self._flip = True
            else:
                self._frame.append(byte ^ FLIP if self._flip else byte)
                self._flip = False
                self._complete()

    def _complete(self) -> None:
        sizes = {HELLO: HELLO_BYTES, ACCEPTED: 0, FAULT: 1, OUTPUT: self.expected.o_bytes}
        header, body = self._frame[0], bytes(self._frame[1:])
        if header not in sizes:
            raise CheckFailed(f"the device sent a frame with the unknown header 0x{header:02x}")
        if len(body) < sizes[header]:
            return
        self._frame.clear()
        if header == HELLO:
            self._greet(Identity.unpack(body))
        elif header == FAULT:
            raise CheckFailed(f"the device reports: {FAULTS.get(body[0], f'fault {body[0]}')}")
        elif header == OUTPUT:
            self.beats.append(body)
        elif not self._unacknowledged:
            raise CheckFailed("the device acknowledged a frame that was not sent")
        else:
            self.credit += self._unacknowledged.popleft()

    def _greet(self, found: Identity) -> None:
        wanted = self.expected
        if found.version != wanted.version:
            raise ValueError(f"the device speaks version {found.version} of the protocol, not {wanted.version}")
        # The buffer is the device's own affair; all else must agree.
        own = Identity(wanted.i_bytes, wanted.o_bytes, wanted.table_bytes, found.buffer_bytes, wanted.digest)
        if found != own:
            raise ValueError("the device holds another unit or configuration than the one asked for")
        # An answer to an earlier reset may still have come through: what is on the line goes on to count.
        self.credit = found.buffer_bytes - sum(self._unacknowledged)
        self.ready = True


class Port(Protocol):
    """What the host needs of a serial port, as pyserial gives it with ``timeout=0``: neither call waits for long."""

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes, /) -> Any: ...


def exchange(
    port: Port,
    host: HostEnd,
    done: Callable[[], bool],
    patience: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Move bytes both ways until ``done()``. CheckFailed if nothing comes in for ``patience`` seconds of ``clock``."""
    waiting = bytearray()
    last = clock()
    while not done():
        waiting += host.outgoing()
        if waiting:
            count = port.write(bytes(waiting))
            del waiting[: len(waiting) if count is None else count]
        data = port.read(4096)
        if data:
            host.incoming(data)
            last = clock()
        elif clock() - last > patience:
            state = f"{host.unacknowledged} frames not acknowledged, {host.queued} not sent"
            raise CheckFailed(f"no answer for {patience:g} s ({state})" if host.ready else "the device does not answer")
        else:
            pause(0.001)


def settle(
    port: Port,
    quiet: float = 0.1,
    limit: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Reset the device and read until the line is quiet, so that no answer to an earlier reset is on its way."""
    port.write(bytes([RESET]))
    start = last = clock()
    while clock() - last < quiet:
        if port.read(4096):
            last = clock()
        if last - start > limit:
            raise CheckFailed("the line does not come to rest after a reset")
        pause(0.005)


@dataclass
class Outcome:
    """What a run of rows gave: counts, the first differences as text, and the seconds between first and last byte."""

    rows: int
    beats: int
    mismatched_rows: int
    differences: list[str]
    seconds: float


def compare(port: Port, host: HostEnd, bench: Bench, rows: Sequence[Row], **waiting: Any) -> Outcome:
    """Reset, load the table, send ``rows``, and compare every bit that counts with golden."""
    expect, _ = bench.pack_expected(rows)
    send = bench.pack_input(rows)
    host.reset()
    exchange(port, host, lambda: host.ready, **waiting)
    start = time.monotonic()
    for address, data in bench.table():
        layout = bench.unit.signature.members["table"].signature.members["payload"].shape
        word = address | data << layout["data"].offset
        host.send_table(word.to_bytes(host.expected.table_bytes, "little"))
    for word in send.words:
        host.send_beat(word.to_bytes(host.expected.i_bytes, "little"))
    exchange(port, host, lambda: len(host.beats) >= len(expect.words), **waiting)
    exchange(port, host, lambda: not host.unacknowledged, **waiting)
    seconds = time.monotonic() - start
    got = [int.from_bytes(beat, "little") for beat in host.beats]
    masks = expect.masks if expect.masks is not None else [-1] * len(got)
    lasts = expect.lasts if expect.lasts is not None else [True] * len(got)
    differences: list[str] = []
    wrong: set[int] = set()
    row = 0
    for k, (word, wanted, mask, last) in enumerate(zip(got, expect.words, masks, lasts, strict=False)):
        if (word ^ wanted) & mask:
            wrong.add(row)
            if len(differences) < 5:
                differences.append(f"row {row}, beat {k}: {bench.explain(k, word & mask, wanted & mask)}")
        row += last
    if len(got) > len(expect.words):
        differences.append(f"{len(got) - len(expect.words)} beats more than golden gives")
    return Outcome(len(rows), len(send.words), len(wrong), differences, seconds)


def rows_of(bench: Bench, limit: int, seed: int = 0, captured: bool = True) -> tuple[str, list[Row]]:
    """Rows to send, and where they are from: captured tensors of the reference checkpoint where the unit has a
    counterpart in the model, else those of the bench. At most ``limit``, spread over all there are (0: all)."""
    source, rows = "captured", []
    if captured:
        from golden.llm.capture import reference_capture

        rows = bench.real(reference_capture())
    if not rows:
        source = "directed and random"
        rows = [row for case in bench.directed() for row in case.rows] + bench.random(np.random.default_rng(seed))
    if limit and len(rows) > limit:
        rows = [rows[k] for k in np.linspace(0, len(rows) - 1, limit).astype(int)]
    return source, rows


def board_configuration(entry: Entry, name: str | None, settings: Sequence[str] = ()) -> tuple[str, UnitConfig]:
    """Name and configuration of a unit on a board: that of the catalog unless one is named, settings applied."""
    chosen = name or entry.board
    return chosen, entry.configuration(chosen, list(settings))


def open_port(name: str, baud: int) -> Any:
    """The serial port, without waiting reads or writes. ValueError, one line, if it is not there."""
    try:
        import serial
    except ImportError:
        raise ValueError("pyserial is not installed: pip install pyserial") from None
    try:
        # Writes wait for at most a second: the credit is smaller than what any driver buffers.
        return serial.Serial(name, baud, timeout=0, write_timeout=1)
    except (serial.SerialException, OSError) as problem:
        reason = os.strerror(problem.errno) if problem.errno else "cannot be opened"
        raise ValueError(f"port {name}: {reason}") from None


@click.command()
@click.option("--port", "name", required=True, metavar="DEVICE", help="serial port, as /dev/ttyUSB0 or COM3")
@click.option("--unit", "unit_name", required=True, help="unit that the board holds")
@click.option("--config", "configuration", help="named configuration (default: the catalog's for boards)")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("--baud", type=int, default=115200, show_default=True, help="as the bitstream was built for")
@click.option("--rows", type=click.IntRange(min=0), default=64, show_default=True, help="rows to send; 0: all")
@click.option("--seed", type=int, default=0, show_default=True, help="of random rows")
@click.option("--synthetic", is_flag=True, help="the bench's directed and random rows instead of captured ones")
@click.option("--timeout", "patience", type=float, default=5.0, show_default=True, help="seconds without an answer")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def main(
    name: str,
    unit_name: str,
    configuration: str | None,
    settings: tuple[str, ...],
    baud: int,
    rows: int,
    seed: int,
    synthetic: bool,
    patience: float,
    as_json: bool,
) -> None:
    """Send rows to the unit on a board and compare what it returns with the golden model, bit by bit."""
    entry = find(unit_name)
    chosen, config = board_configuration(entry, configuration, settings)
    bench = bench_of(unit_name, config)
    host = HostEnd(identity(bench.unit, LinkConfig()))
    port = open_port(name, baud)
    try:
        settle(port)
        click.echo("host: taking rows", err=True)
        source, chosen_rows = rows_of(bench, rows, seed, not synthetic)
        click.echo(f"host: sending {len(chosen_rows)} rows ({source})", err=True)
        found = compare(port, host, bench, chosen_rows, patience=patience)
    except port_errors() as problem:
        raise CheckFailed(f"port {name}: {problem}") from None
    finally:
        port.close()
    row = {
        "unit": unit_name,
        "configuration": chosen,
        "source": source,
        "rows": found.rows,
        "beats": found.beats,
        "mismatches": found.mismatched_rows,
        "seconds": round(found.seconds, 3),
        "rows_per_second": round(found.rows / max(found.seconds, 1e-9), 1),
    }
    show([row], as_json, f"{unit_name} on {name} against golden")
    for line in found.differences:
        click.echo(f"host: {line}", err=True)
    if found.differences:
        raise click.exceptions.Exit(1)


def port_errors() -> tuple[type[Exception], ...]:
    """What pyserial raises when a port goes away."""
    import serial

    return (serial.SerialException,)


if __name__ == "__main__":
    run(main, "host")
