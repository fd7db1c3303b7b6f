"""Component of :mod:`golden.rotated.value_path`."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned

from golden.rotated.value_path import PROBABILITY_BITS, PRODUCT_BITS, ValuePathConfig
from hw import float16
from hw.arithmetic import add_or_subtract, adder_tree, equals, round_shift, round_shift_by, saturate
from hw.memory import RowMemory
from hw.nonlinear.requantize import narrow_by
from hw.pipeline import Collect, Pipeline, Spread
from hw.rotated.fwht import Fwht
from hw.rotated.read_path import cell, pick
from hw.rotated.signs import flip, load
from hw.unit import Unit, beat_layout, table_layout


class ValuePath(Unit):
    """Sum of stored vectors times probabilities, as golden ``value_path``.

    ``i``: {index, norm, p, top, pattern, last}: one stored vector a beat, ``last`` on a row's last; top and pattern of
    that beat count for the output, each beat's top for its own weight. ``o``: {y}, a row's vector in ``size /
    drain_lanes`` beats. ``table``: sign patterns, ``drain_lanes`` bits a word; address ``pattern * beats + beat``, bit
    i set for +1; load it between rows.

    One stored vector per cycle. After a row's last one its bins are emptied, ``drain_lanes`` coordinates a cycle, and
    the next row is accepted; codebook, transform and output of the one overlap with the other's vectors. ``latency``
    cycles on top of one a vector, to the last beat of y.
    """

    def __init__(self, config: ValuePathConfig) -> None:
        self.beats = config.size // config.drain_lanes
        row = {
            "norm": unsigned(16),
            "p": unsigned(PROBABILITY_BITS),
            "top": unsigned(5),
            "pattern": unsigned(config.pattern_bits),
            "last": unsigned(1),
        }
        super().__init__(
            config,
            i=beat_layout({"index": unsigned(config.bits)}, config.size, row),
            o=beat_layout({"y": signed(config.out_bits)}, config.drain_lanes),
            table=table_layout(config.patterns * self.beats, config.drain_lanes),
        )
        self.transform = Fwht(config.transform)
        self.transform._MustUse__silence = True  # read for its cycles even where nothing is elaborated
        # Weight 2, bins 1, start 1, codebook 2; transform; spread 1, rounding and signs 2, less the first beat in each.
        self.latency = 2 * self.beats + self.transform.latency + 8

    def row_cycles(self, elements: int) -> int:
        """Of a row of stored vectors."""
        return elements // self.config.size + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i = self.config, self.i
        advance = Signal()
        m.d.comb += i.ready.eq(advance)

        # -- weights ---------------------------------------------------------------------------------------------------
        carried = {name: i.payload[name] for name in ("index", "top", "pattern", "last")}
        pipe = Pipeline(m, advance, i.valid, carried, name="weight")
        mantissa, biased = float16.parts(i.payload.norm)
        finer = (i.payload.top - biased)[:5]
        product, finer = pipe.stage((i.payload.p * mantissa)[:PRODUCT_BITS], finer)
        amount = config.drop + finer
        weight = pipe.stage(round_shift_by(product, amount, config.drop + 31)[: config.weight_bits])

        # -- bins ------------------------------------------------------------------------------------------------------
        # A row that has ended waits in the bins, then leaves them; meanwhile nothing is added.
        waiting, draining, shifting, free = Signal(), Signal(), Signal(), Signal()
        first = Signal(init=1)
        add = Signal()
        m.d.comb += [advance.eq(~(waiting | draining)), add.eq(pipe.valid & advance)]
        bins = [
            [
                Signal(signed(config.bin_bits), name=f"bin{k}_{j}", reset_less=True)
                for j in range(1 << (config.bits - 1))
            ]
            for k in range(config.size)
        ]
        for k, row in enumerate(bins):
            which, negative = cell(pipe["index"][k])
            before = Mux(first, 0, pick(row, which))
            after = add_or_subtract(before, Cat(weight, C(0, 1)), negative)
            following = bins[(k + config.drain_lanes) % config.size]
            for j, word in enumerate(row):
                with m.If(add):
                    m.d.sync += word.eq(Mux(equals(which, j), after, Mux(first, 0, word)))
                with m.Elif(shifting):
                    m.d.sync += word.eq(following[j])
        last_top, last_pattern = Signal(5, reset_less=True), Signal(config.pattern_bits, reset_less=True)
        drain_top, drain_pattern = Signal(5, reset_less=True), Signal(config.pattern_bits, reset_less=True)
        with m.If(add):
            m.d.sync += [first.eq(pipe["last"]), waiting.eq(pipe["last"])]
            m.d.sync += [last_top.eq(pipe["top"]), last_pattern.eq(pipe["pattern"])]

        # -- codebook --------------------------------------------------------------------------------------------------
        m.submodules.collect = collect = Collect(signed(config.z_bits), config.drain_lanes, self.beats)
        moved = Signal()
        m.d.comb += moved.eq(collect.i.ready)
        # Whose bins these are stays written down until the transform has taken the row.
        held, beat = Signal(), Signal(range(self.beats))
        start, finish = Signal(), Signal()
        m.d.comb += [
            start.eq(waiting & ~held),
            shifting.eq(draining & moved),
            finish.eq(shifting & (beat == self.beats - 1)),
            free.eq(collect.o.valid & collect.o.ready),
        ]
        with m.If(start):
            m.d.sync += [draining.eq(1), waiting.eq(0), held.eq(1)]
            m.d.sync += [drain_top.eq(last_top), drain_pattern.eq(last_pattern)]
        with m.If(free):
            m.d.sync += held.eq(0)
        with m.If(finish):
            m.d.sync += draining.eq(0)
        with m.If(shifting):
            m.d.sync += beat.eq(Mux(finish, 0, beat + 1))
        code = Pipeline(m, moved, draining, name="code")
        products = code.stage(
            [
                word * C(c, signed(c.bit_length() + 1))
                for row in bins[: config.drain_lanes]
                for word, c in zip(row, config.centroids, strict=True)
            ]
        )
        half = len(config.centroids)
        z = []
        for k in range(config.drain_lanes):
            moment = Value.cast(adder_tree(products[k * half : (k + 1) * half]))[: config.moment_bits].as_signed()
            z.append(saturate(round_shift(moment, config.z_drop), config.z_bits))
        z = code.stage(z)
        m.d.comb += collect.i.valid.eq(code.valid)
        m.d.comb += [collect.i.payload[k].eq(value) for k, value in enumerate(z)]

        # -- transform -------------------------------------------------------------------------------------------------
        m.submodules.transform = transform = self.transform
        m.submodules.spread = spread = Spread(signed(config.transform.out_bits), config.drain_lanes, self.beats)
        m.d.comb += [
            transform.i.valid.eq(collect.o.valid),
            collect.o.ready.eq(transform.i.ready),
            Value.cast(transform.i.payload).eq(Value.cast(collect.o.payload)),
            spread.i.valid.eq(transform.o.valid),
            transform.o.ready.eq(spread.i.ready),
            Value.cast(spread.i.payload).eq(Value.cast(transform.o.payload)),
        ]
        turn_top, turn_pattern = Signal(5, reset_less=True), Signal(config.pattern_bits, reset_less=True)
        out_top, out_pattern = Signal(5, reset_less=True), Signal(config.pattern_bits, reset_less=True)
        with m.If(free):
            m.d.sync += [turn_top.eq(drain_top), turn_pattern.eq(drain_pattern)]
        with m.If(spread.i.valid & spread.i.ready):
            m.d.sync += [out_top.eq(turn_top), out_pattern.eq(turn_pattern)]
        self._output(m, spread, out_top, out_pattern)
        return m

    def _output(self, m: Module, spread: Spread, top: Value, pattern: Value) -> None:
        """Rounding, then signs."""
        config, o, table = self.config, self.o, self.table
        m.submodules.signs = rom = RowMemory(config.patterns * self.beats, config.drain_lanes)
        load(m, rom, table.payload.address, table.payload.data, table.valid)
        advance, beat = Signal(), Signal(range(self.beats), name="out_beat")
        m.d.comb += [
            table.ready.eq(1),
            advance.eq(~o.valid | o.ready),
            spread.o.ready.eq(advance),
            rom.read_address.eq(Cat(beat, pattern)),
            rom.read_enable.eq(advance),
        ]
        with m.If(spread.o.valid & advance):
            m.d.sync += beat.eq(beat + 1)
        pipe = Pipeline(m, advance, spread.o.valid, name="out")
        amount = (config.out_drop - top)[: config.out_drop.bit_length()]
        y = [
            narrow_by(m, spread.o.payload[k], amount, config.out_bits, f"y{k}")[: config.out_bits].as_signed()
            for k in range(config.drain_lanes)
        ]
        y = pipe.stage([value[: config.out_bits].as_signed() for value in y])
        y = pipe.stage(flip(y, rom.read_data))
        m.d.comb += o.valid.eq(pipe.valid)
        m.d.comb += [o.payload.y[k].eq(value) for k, value in enumerate(y)]
