"""A bench in Amaranth's own simulator: no build time, so it suits many configurations and few rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from amaranth.hdl import Module, ResetInserter, Signal, Value
from amaranth.sim import Simulator

from tb.bench import Bench
from tb.packing import Row
from tb.stream import Mismatch, Session


def simulate(
    bench: Bench,
    runs: Sequence[tuple[Session, int | None]],
    limit: int = 200_000,
) -> None:
    """Run sessions one after the other on one fresh component, with a reset before each; a session with a number is
    cut by that reset after so many cycles.

    Raises Mismatch when the unit differs from golden, breaks a stream rule, or is not done after ``limit`` cycles.
    """
    dut: Any = bench.entry.component(bench.config)
    reset = Signal()
    m = Module()
    m.submodules.dut = ResetInserter(reset)(dut)
    payload = Value.cast(dut.i.payload)
    result = Value.cast(dut.o.payload)

    async def testbench(ctx: Any) -> None:
        writes = bench.table()
        for address, data in writes:
            ctx.set(dut.table.payload.address, address)
            ctx.set(Value.cast(dut.table.payload.data), data)
            ctx.set(dut.table.valid, 1)
            while not ctx.get(dut.table.ready):
                await ctx.tick()
            await ctx.tick()
        if writes:
            ctx.set(dut.table.valid, 0)
        for session, cut in runs:
            ctx.set(dut.i.valid, 0)
            ctx.set(reset, 1)
            await ctx.tick()
            ctx.set(reset, 0)
            if ctx.get(dut.o.valid):
                raise Mismatch("o.valid is high right after reset")
            while not session.done and (cut is None or session.cycle < cut):
                if session.cycle > limit:
                    raise Mismatch(f"no end after {limit} cycles: {session.sent} beats in, {session.taken} out")
                valid, word, ready = session.drive()
                ctx.set(dut.i.valid, valid)
                ctx.set(payload, word & ((1 << len(payload)) - 1))
                ctx.set(dut.o.ready, ready)
                seen = ctx.get(dut.i.ready), ctx.get(dut.o.valid), ctx.get(result)
                session.observe(*seen, ready)
                await ctx.tick()
            ctx.set(dut.i.valid, 0)
            ctx.set(dut.o.ready, 1)
            for _ in range(8 if cut is None else 0):
                if ctx.get(dut.o.valid):
                    raise Mismatch("a beat follows the last one that the golden function gives")
                await ctx.tick()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulator = Simulator(m)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()


def session(
    bench: Bench, rows: Sequence[Row], stalls: str = "none", seed: int = 0, expected: list[Row] | None = None
) -> Session:
    """A session that sends ``rows`` and expects what golden gives for them, or the output rows that are given."""
    expect, _ = bench.pack_expected(rows, expected)
    return Session(bench.pack_input(rows, seed), expect, stalls, seed, bench.explain)


def check_unit(bench: Bench, seed: int = 0, brief: bool = False) -> None:
    """Directed and random rows with and without stalls, resets in mid-row, and the documented cycle count; ``brief``
    keeps to one kind of stall and one reset."""
    generator = np.random.default_rng(seed)
    directed = [row for case in bench.directed() for row in case.rows]
    rows = bench.random(generator)
    runs: list[tuple[Session, int | None]] = [(session(bench, directed), None)]
    for stalls in ("both random",) if brief else ("both random", "slow receiver", "last beat"):
        runs.append((session(bench, rows, stalls, seed), None))
    for cut in (3,) if brief else (1, 3, 7):
        runs.append((session(bench, rows, "none", seed), cut))
        runs.append((session(bench, rows, "both random", seed), 3 * cut))
        runs.append((session(bench, rows, "none", seed), None))
    timed = [(row, session(bench, [row])) for row in bench.timed(generator)][: 2 if brief else None]
    simulate(bench, runs + [(alone, None) for _, alone in timed])
    for row, alone in timed:
        wanted = bench.row_cycles(row)
        if alone.row_cycles != wanted:
            raise Mismatch(f"a row of {len(row)} took {alone.row_cycles} cycles, {wanted} are documented")
