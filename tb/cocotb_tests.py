"""The cocotb tests of every unit: which unit, which configuration and which rows come from the bench named in the
environment (``NEARMEM_BENCH``, a JSON object that ``tb.simulate`` writes)."""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ReadOnly, RisingEdge, SimTimeoutError, with_timeout

from tb.bench import Bench, bench_of
from tb.packing import Row
from tb.quick import session
from tb.simulate import config_from_json
from tb.stream import STALLS, Mismatch, Session

PERIOD = 10
PLAN = json.loads(os.environ["NEARMEM_BENCH"])
FAST = PLAN["simulator"] == "verilator"
BENCH: Bench = bench_of(PLAN["unit"], config_from_json(PLAN["unit"], PLAN["config"]))
#: What the run found, written after each test: coverage bins hit, and figures for the table.
REPORT: dict[str, Any] = {"hit": [], "vectors": 0, "real_rows": 0, "cycles": 0, "bins": sorted(BENCH.bins())}


def hit(*names: str) -> None:
    REPORT["hit"] = sorted(set(REPORT["hit"]) | set(names))


def save() -> None:
    Path(PLAN["report"]).write_text(json.dumps(REPORT))


async def start(dut: Any) -> Any:
    """Clock, reset, table; returns the clock edge to wait for."""
    Clock(dut.clk, PERIOD, "ns").start()
    dut.i__valid.value = 0
    dut.i__payload.value = 0
    dut.o__ready.value = 0
    if FAST:
        dut.fast.value = 0
    edge = RisingEdge(dut.clk)
    if "table" in BENCH.unit.signature.members:
        dut.table__valid.value = 0
        dut.table__payload.value = 0
    await reset(dut, edge)
    await load_table(dut, edge)
    return edge


async def load_table(dut: Any, edge: Any) -> None:
    """Write the bench's table into the unit, which has just been reset."""
    writes = BENCH.table()
    if writes:
        shape = BENCH.unit.table.payload.shape()
        for address, data in writes:
            dut.table__valid.value = 1
            dut.table__payload.value = address | data << shape["data"].offset
            while True:
                await ReadOnly()
                ready = int(dut.table__ready.value)
                await edge
                if ready:
                    break
        dut.table__valid.value = 0


async def reset(dut: Any, edge: Any, cycles: int = 2) -> None:
    dut.i__valid.value = 0
    dut.rst.value = 1
    for _ in range(cycles):
        await edge
    dut.rst.value = 0
    await ReadOnly()
    if int(dut.o__valid.value):
        raise Mismatch("o.valid is high right after reset")
    await edge


async def run(dut: Any, edge: Any, s: Session, until: Any = None, limit: int = 400_000) -> None:
    """Run a session to its end, or until ``until(session)`` holds."""
    width = len(dut.i__payload)
    mask = (1 << width) - 1
    while not s.done and not (until and until(s)):
        if s.cycle > limit:
            raise Mismatch(f"no end after {limit} cycles: {s.sent} beats in, {s.taken} of {len(s.expect.words)} out")
        valid, word, ready = s.drive()
        dut.i__valid.value = valid
        dut.i__payload.value = word & mask
        dut.o__ready.value = ready
        await ReadOnly()
        o_valid = int(dut.o__valid.value)
        s.observe(int(dut.i__ready.value), o_valid, int(dut.o__payload.value) if o_valid else None, ready)
        await edge
    dut.i__valid.value = 0
    if s.done:
        REPORT["vectors"] += s.sent
        REPORT["cycles"] += s.cycle
        dut.o__ready.value = 1
        for _ in range(4):
            await ReadOnly()
            if int(dut.o__valid.value):
                raise Mismatch("a beat follows the last one that the golden function gives")
            await edge
    dut.o__ready.value = 0


async def fast(
    dut: Any, edge: Any, rows: Sequence[Row], stall: float = 0.0, seed: int = 1, expected: list[Row] | None = None
) -> dict[str, float]:
    """Stream rows through the DPI-C side at full speed and compare every output bit that counts, with what golden
    gives or with the output rows that are given."""
    packed = BENCH.input.pack(rows, np.random.default_rng(seed))
    expected = BENCH.expected(rows) if expected is None else expected
    wanted, mask = BENCH.output.pack(expected), BENCH.output.mask(expected)
    got = np.zeros_like(wanted)
    lib = ctypes.CDLL(None)
    pointer, chance = ctypes.c_void_p, int(2**32 * (1 - stall)) if stall else 0
    lib.stream_set.argtypes = [pointer, pointer, ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_int,
                               ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64]  # fmt: skip
    lib.stream_taken.restype = ctypes.c_long
    lib.stream_set(
        packed.ctypes.data, got.ctypes.data, len(packed), len(wanted), packed.shape[1], got.shape[1],
        chance, chance, seed,
    )  # fmt: skip
    dut.fast.value = 1
    begin = time.process_time()
    cycles = 64 * (len(packed) + len(wanted)) + 100_000
    try:
        await with_timeout(RisingEdge(dut.done), cycles * PERIOD, "ns")
    except SimTimeoutError:
        raise Mismatch(f"only {lib.stream_taken()} of {len(wanted)} beats after {cycles} cycles") from None
    seconds = time.process_time() - begin
    taken_cycles = int(dut.cycles.value) + 1
    await edge
    dut.fast.value = 0
    wrong = np.flatnonzero(((got ^ wanted) & mask).any(axis=1))
    if len(wrong):
        k = int(wrong[0])
        told = BENCH.explain(
            k, int.from_bytes(got[k].tobytes(), "little"), int.from_bytes(wanted[k].tobytes(), "little")
        )
        raise Mismatch(f"{len(wrong)} of {len(wanted)} beats differ from golden, the first is beat {k}: {told}")
    REPORT["vectors"] += len(packed)
    REPORT["cycles"] += taken_cycles
    return {"beats": len(packed), "cycles": taken_cycles, "seconds": seconds}


@cocotb.test()
async def directed_corners(dut: Any) -> None:
    """Every named corner, unstalled."""
    edge = await start(dut)
    for case in BENCH.directed():
        await reset(dut, edge)
        await run(dut, edge, session(BENCH, case.rows))
        hit(f"case: {case.name}", *BENCH.hit_extremes(case.rows))
    hit("stalls: none")
    save()


@cocotb.test()
async def random_rows_with_stalls(dut: Any) -> None:
    """Random rows under every stall pattern, also with the receiver absent on each last beat."""
    edge = await start(dut)
    for k, stalls in enumerate((*STALLS, "last beat")):
        generator = np.random.default_rng(PLAN["seed"] + k)
        rows = BENCH.random(generator)
        await reset(dut, edge)
        await run(dut, edge, session(BENCH, rows, stalls, PLAN["seed"] + k))
        hit(f"stalls: {stalls}", *BENCH.hit_extremes(rows))
    save()


@cocotb.test()
async def reset_in_mid_row(dut: Any) -> None:
    """A reset at any time leaves the unit empty: the rows that follow are as from power-on."""
    edge = await start(dut)
    generator = np.random.default_rng(PLAN["seed"] + 100)
    for cut in range(1, 9):
        rows = BENCH.random(generator)
        stalls = "both random" if cut % 2 else "none"
        await reset(dut, edge)
        await run(dut, edge, session(BENCH, rows, stalls, cut), until=lambda s, cut=cut: s.cycle >= cut)
        await reset(dut, edge, cycles=1 + cut % 3)
        hit("reset: while accepting")
        await run(dut, edge, session(BENCH, rows, stalls, cut), until=lambda s, cut=cut: s.taken >= cut)
        await reset(dut, edge, cycles=1)
        hit("reset: while producing")
        await run(dut, edge, session(BENCH, rows, "none", cut))
    save()


@cocotb.test()
async def documented_cycles(dut: Any) -> None:
    """A row alone takes exactly the cycles that the component documents."""
    edge = await start(dut)
    for row in BENCH.timed(np.random.default_rng(PLAN["seed"] + 200)):
        await reset(dut, edge)
        alone = session(BENCH, [row])
        await run(dut, edge, alone)
        wanted = BENCH.row_cycles(row)
        if alone.row_cycles != wanted:
            raise Mismatch(f"a row of {len(row)} took {alone.row_cycles} cycles, {wanted} are documented")
    hit("cycles: documented")
    save()


@cocotb.test(skip=not FAST or not PLAN["beats"])
async def volume(dut: Any) -> None:
    """Many rows at the simulator's full speed, back to back: every bit, and the sustained rate."""
    edge = await start(dut)
    rows = BENCH.volume(np.random.default_rng(PLAN["seed"] + 300), PLAN["beats"])
    hit(*BENCH.hit_extremes(rows))
    await reset(dut, edge)
    figures = await fast(dut, edge, rows)
    REPORT["cycles_per_beat"] = round(figures["cycles"] / figures["beats"], 3)
    REPORT["beats_per_second"] = round(figures["beats"] / max(figures["seconds"], 1e-9))
    await reset(dut, edge)
    await fast(dut, edge, rows[: max(1, len(rows) // 8)], stall=0.4)
    save()


@cocotb.test(skip=not PLAN["capture"])
async def real_tensors(dut: Any) -> None:
    """What the integer pipeline sent through units of this configuration, against what it got back; for others, the
    reference checkpoint's float tensors on the unit's own scales."""
    from golden.llm.capture import load

    edge = await start(dut)
    capture = load(PLAN["capture"])
    replays = BENCH.replay(capture)
    for replay in replays:
        BENCH.adopt(replay.tensors)
        rows, outputs = replay.rows, BENCH.agreed(replay)
        await reset(dut, edge)
        await load_table(dut, edge)
        try:
            if FAST:
                await fast(dut, edge, rows, 0.3, PLAN["seed"], outputs)
            else:
                rows, outputs = rows[-3:], outputs[-3:]
                await run(dut, edge, session(BENCH, rows, "both random", PLAN["seed"], outputs))
        except Mismatch as problem:
            raise Mismatch(f"{replay.place}: {problem}") from None
        REPORT["real_rows"] += len(rows)
    rows = [] if replays else BENCH.real(capture)
    if rows:
        await reset(dut, edge)
        if FAST:
            await fast(dut, edge, rows, stall=0.3, seed=PLAN["seed"])
        else:
            rows = rows[:20]
            await run(dut, edge, session(BENCH, rows, "both random", PLAN["seed"]))
        REPORT["real_rows"] = len(rows)
    save()
