"""Component of :mod:`golden.rotated.write_path`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from amaranth.hdl import Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import stream
from amaranth.lib.data import ArrayLayout, StructLayout
from amaranth.lib.wiring import Component, In, Out

from golden.nonlinear.isqrt import IsqrtConfig
from golden.rotated.write_path import WritePathConfig
from hw import float16
from hw.arithmetic import adder_tree, magnitude, square
from hw.memory import Queue, RowMemory
from hw.nonlinear.isqrt import digit_stages
from hw.pipeline import Collect, Pipeline, Spread
from hw.rotated.fwht import Fwht
from hw.rotated.lloyd_max import Threshold, lane, scale
from hw.rotated.signs import flip, load
from hw.unit import Unit, beat_layout, table_layout

#: Levels of an adder tree, and bits of a root, per pipeline stage.
LEVELS_PER_STAGE = 3
DIGITS_PER_STAGE = 2


class Norm(Component):
    """Root of the sum of squares of a row, which takes ``beats`` beats: ``floor(sqrt(sum of x**2))``.

    Fully pipelined; the result is valid ``latency`` cycles after the row's last beat was accepted.
    Ports: stream ``i`` of {x, exponent}, stream ``o`` of {norm, exponent}; the last beat's exponent goes along.
    """

    def __init__(self, config: WritePathConfig) -> None:
        self.config = config
        self.root = IsqrtConfig(in_bits=config.square_bits, digits=DIGITS_PER_STAGE)
        self.levels = (config.lanes - 1).bit_length()
        self.latency = (
            1 + -(-self.levels // LEVELS_PER_STAGE) + (config.beats > 1) + -(-config.root_bits // DIGITS_PER_STAGE)
        )
        exponent = signed(config.exponent_bits)
        i = StructLayout({"x": ArrayLayout(signed(config.in_bits), config.lanes), "exponent": exponent})
        o = StructLayout({"norm": unsigned(config.root_bits), "exponent": exponent})
        super().__init__({"i": In(stream.Signature(i)), "o": Out(stream.Signature(o))})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        pipe = Pipeline(m, advance, i.valid, {"exponent": i.payload.exponent})
        sizes = [Signal(config.in_bits - 1, name=f"size{k}") for k in range(config.lanes)]
        m.d.comb += [size.eq(magnitude(i.payload.x[k])) for k, size in enumerate(sizes)]
        sums = pipe.stage([square(size) for size in sizes])
        for _ in range(0, self.levels, LEVELS_PER_STAGE):
            step = 1 << LEVELS_PER_STAGE
            sums = pipe.stage([adder_tree(sums[k : k + step]) for k in range(0, len(sums), step)])
        total = sums[0]
        if config.beats > 1:
            total = self._accumulate(m, pipe, total)
        total = Cat(total)[: config.square_bits]
        (norm,) = digit_stages(pipe, self.root, [total])
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.norm.eq(norm), o.payload.exponent.eq(pipe["exponent"])]
        return m

    def _accumulate(self, m: Module, pipe: Pipeline, part: Value) -> Value:
        """One more stage: the sum over a row's beats, of which only the last goes on."""
        config = self.config
        total = Signal(config.square_bits, name="total", reset_less=True)
        beat = Signal(range(config.beats), name="sum_beat")
        last = beat == config.beats - 1
        done = Signal()
        exponent = Signal(signed(config.exponent_bits), name="total_exponent", reset_less=True)
        with m.If(pipe.advance):
            m.d.sync += [done.eq(pipe.valid & last), exponent.eq(pipe["exponent"])]
            with m.If(pipe.valid):
                m.d.sync += [beat.eq(beat + 1), total.eq(Mux(beat.any(), total, 0) + part)]
        pipe.valid = done
        pipe.carry["exponent"] = exponent
        return total


class WritePath(Unit):
    """``index`` and ``norm`` of each row, as golden ``write_path``.

    ``i``: {x, exponent, pattern}; ``o``: {index, norm}, the norm with every beat. A row has ``size / lanes`` beats;
    exponent and pattern go with each. ``table``: sign patterns, ``lanes`` bits a word; address ``pattern * beats +
    beat``, bit i set for +1; load it between rows.

    One beat per cycle, without a gap from row to row as long as the transform's ``cycles`` do not exceed a row's beats
    (else a row every ``cycles``). Latency ``row_latency`` from a row's last beat in to its first beat out: that of the
    norm, which takes longer than the transform. The rows that meanwhile wait for the transform lie in a memory of their
    own.

    The transform is of ``-s * x``: what comes out is ``-y``, which one inversion folds to a magnitude for the
    comparators, with ties to the lower index.
    """

    def __init__(self, config: WritePathConfig) -> None:
        row = {"exponent": signed(config.exponent_bits), "pattern": unsigned(config.pattern_bits)}
        super().__init__(
            config,
            i=beat_layout({"x": signed(config.in_bits)}, config.lanes, row),
            o=beat_layout({"index": unsigned(config.bits)}, config.lanes, {"norm": unsigned(16)}),
            table=table_layout(config.patterns * config.beats, config.lanes),
        )
        self.norm = Norm(config)
        self.transform = Fwht(config.transform)
        for part in (self.norm, self.transform):
            part._MustUse__silence = True  # read for their cycles even where nothing is elaborated
        # One stage for the thresholds; with several beats the whole row is handed over.
        slower = self.norm.latency + 1
        turned = self.queue_latency + self.transform.latency
        self.row_latency = 2 + max(slower, turned) + (config.beats > 1) + 1
        self.latency = config.beats + self.row_latency - 1

    @property
    def interval(self) -> int:
        """Cycles from one row to the next."""
        return max(self.config.beats, self.transform.initiation_interval)

    @property
    def queue_depth(self) -> int:
        """Rows that wait in memory for the transform, while it waits for their norms; 0 where none has to."""
        waiting = self.norm.latency + 1
        return 0 if self.config.beats > 1 and waiting <= self.interval else -(-waiting // self.interval) + 2

    @property
    def queue_latency(self) -> int:
        """Cycles from a row's last beat to the transform."""
        return (self.config.beats > 1) + (Queue.latency if self.queue_depth else 0)

    def row_cycles(self, elements: int) -> int:
        """Of one row."""
        return self.config.beats + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, o = self.config, self.o
        valid, ready, x, exponent = self._signs(m)

        # -- to the norm and to the transform at once ------------------------------------------------------------------
        m.submodules.norm, m.submodules.transform = norm, transform = self.norm, self.transform
        waiting: list[Any] = []
        if config.beats > 1:
            m.submodules.collect = collect = Collect(signed(config.in_bits), config.lanes, config.beats)
            waiting.append(collect)
        if self.queue_depth:
            m.submodules.queue = queue = Queue(ArrayLayout(signed(config.in_bits), config.size), self.queue_depth)
            waiting.append(queue)
        for before, after in pairwise([*waiting, transform]):
            m.d.comb += [after.i.valid.eq(before.o.valid), before.o.ready.eq(after.i.ready)]
            m.d.comb += Value.cast(after.i.payload).eq(Value.cast(before.o.payload))
        first = waiting[0]
        m.d.comb += [
            ready.eq(norm.i.ready & first.i.ready),
            first.i.valid.eq(valid & norm.i.ready),
            norm.i.valid.eq(valid & first.i.ready),
            norm.i.payload.exponent.eq(exponent),
        ]
        for k, value in enumerate(x):
            m.d.comb += [first.i.payload[k].eq(value), norm.i.payload.x[k].eq(value)]

        # -- thresholds and stored norm --------------------------------------------------------------------------------
        scaled_ready = Signal()
        m.d.comb += norm.o.ready.eq(scaled_ready)
        found = scale(m, config.quantizer, norm.o.payload.norm)
        stored = float16.from_integer(m, norm.o.payload.norm, norm.o.payload.exponent, "stored")
        scaled = Pipeline(m, scaled_ready, norm.o.valid, name="scaled")
        floors, beyond, half = scaled.stage([t.floor for t in found], [t.beyond for t in found], stored)
        take = Signal()
        m.d.comb += scaled_ready.eq(~scaled.valid | take)

        # -- they meet the transformed row -----------------------------------------------------------------------------
        advance = Signal()
        m.d.comb += advance.eq(~o.valid | o.ready)
        y, both, row_ready = transform.o.payload.y, Signal(), Signal()
        m.d.comb += [
            both.eq(transform.o.valid & scaled.valid),
            take.eq(transform.o.valid & row_ready),
            transform.o.ready.eq(scaled.valid & row_ready),
        ]
        if config.beats == 1:
            m.d.comb += row_ready.eq(advance)
            out = Pipeline(m, advance, both, name="out")
        else:
            m.submodules.spread = spread = Spread(signed(config.transform.out_bits), config.lanes, config.beats)
            m.d.comb += [spread.i.valid.eq(both), row_ready.eq(spread.i.ready), spread.o.ready.eq(advance)]
            m.d.comb += Value.cast(spread.i.payload).eq(Value.cast(y))
            held = Pipeline(m, row_ready, both, name="row")
            floors, beyond, half = held.stage(floors, beyond, half)
            y, out = spread.o.payload, Pipeline(m, advance, spread.o.valid, name="out")
        thresholds = [Threshold(*pair) for pair in zip(floors, beyond, strict=True)]
        index, half = out.stage([~lane(m, y[k], thresholds, "upper", f"reached{k}") for k in range(config.lanes)], half)
        m.d.comb += [o.valid.eq(out.valid), o.payload.norm.eq(half)]
        m.d.comb += [o.payload.index[k].eq(value) for k, value in enumerate(index)]
        return m

    def _signs(self, m: Module) -> tuple[Value, Signal, list[Value], Value]:
        """The beats as ``-s * x``, two stages on: valid, what to drive its ready with, elements, exponent."""
        config, i = self.config, self.i
        m.submodules.signs = rom = RowMemory(config.patterns * config.beats, config.lanes)
        load(m, rom, self.table.payload.address, self.table.payload.data, self.table.valid)
        advance, ready = Signal(), Signal()
        beat = Signal(range(config.beats), name="beat")
        with m.If(i.valid & i.ready):
            m.d.sync += beat.eq(beat + 1)
        pipe = Pipeline(m, advance, i.valid, {"exponent": i.payload.exponent}, name="signs")
        m.d.comb += [
            self.table.ready.eq(1),
            i.ready.eq(advance),
            rom.read_address.eq(Cat(beat, i.payload.pattern)),
            rom.read_enable.eq(advance),
        ]
        x = pipe.stage([i.payload.x[k] for k in range(config.lanes)])
        x = pipe.stage(flip(x, rom.read_data, positive=0))
        m.d.comb += advance.eq(~pipe.valid | ready)
        return pipe.valid, ready, x, pipe["exponent"]
