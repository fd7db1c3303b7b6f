"""Component of :mod:`golden.nonlinear.rope`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib.data import ArrayLayout

from golden.fixedpoint import address_bits
from golden.nonlinear.rope import GUARD_BITS, RopeConfig
from hw.arithmetic import round_shift, saturate
from hw.memory import RowMemory
from hw.nonlinear.exp import lookup
from hw.nonlinear.silu import lookups
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout, table_layout


class Rope(Unit):
    """Turns one head per row to the row's position, as golden ``rope``.

    ``i``: {lo, hi, keep, last, position}, lane k of beat b holding elements ``b * lanes + k`` of both halves; ``o``:
    {lo, hi, keep, last}. One beat per cycle, latency 8 cycles: steps, partial phases, angle, chords, cosine and sine,
    their octant, products, sums.

    Unless ``frozen``, ``table`` writes the steps of one beat at a time: address b, data an array of ``lanes`` steps (0
    for pairs that the head does not have). It is always ready; a row that is under way while its steps are written
    takes old or new ones. The table survives reset.
    """

    latency = 8

    def __init__(self, config: RopeConfig) -> None:
        data, result = signed(config.data_bits), signed(config.out_bits)
        table = None
        if not config.frozen:
            table = table_layout(config.beats, ArrayLayout(unsigned(config.phase_bits), config.lanes))
        super().__init__(
            config,
            i=row_layout(config.lanes, {"lo": data, "hi": data}, {"position": unsigned(config.position_bits)}),
            o=row_layout(config.lanes, {"lo": result, "hi": result}),
            table=table,
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes = range(config.lanes)
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]

        # Number of the beat within its head.
        beat = Signal(address_bits(config.beats))
        with m.If(i.valid & i.ready):
            m.d.sync += beat.eq(Mux(i.payload.last | (beat == config.beats - 1), 0, beat + 1))

        carry = {name: i.payload[name] for name in ("keep", "last", "position")}
        for name in ("lo", "hi"):
            carry[name] = [i.payload[name][k] for k in lanes]
        pipe = Pipeline(m, advance, i.valid, carry)
        steps = self._steps(m, pipe, beat, advance)

        # phase = position * step without the bits above the binary point, from two halves of the position.
        position, bits = pipe.carry.pop("position"), config.phase_bits
        cut = config.position_bits // 2
        first = [(s * position[:cut])[:bits] if cut else C(0, 1) for s in steps]
        second = [(s * position[cut:])[: max(1, bits - cut)] for s in steps]
        first, second = pipe.stage(first, second)
        phase = [(a + (b << cut))[:bits] for a, b in zip(first, second, strict=True)]
        angle = pipe.stage([p[bits - config.angle_bits :] for p in phase])
        cosine, sine = self._cosine_sine(pipe, angle)

        lo, hi = pipe.carry.pop("lo"), pipe.carry.pop("hi")
        products = pipe.stage(
            [a * c for a, c in zip(lo, cosine, strict=True)],
            [b * s for b, s in zip(hi, sine, strict=True)],
            [b * c for b, c in zip(hi, cosine, strict=True)],
            [a * s for a, s in zip(lo, sine, strict=True)],
        )
        low_c, high_s, high_c, low_s = products
        sums = (
            [a - b for a, b in zip(low_c, high_s, strict=True)],
            [a + b for a, b in zip(high_c, low_s, strict=True)],
        )
        low, high = pipe.stage(*([self._narrow(s) for s in half] for half in sums))

        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.lo[k].eq(low[k]) for k in lanes]
        m.d.comb += [o.payload.hi[k].eq(high[k]) for k in lanes]
        return m

    def _steps(self, m: Module, pipe: Pipeline, beat: Signal, advance: Signal) -> list[Any]:
        """The steps of the beat that the new stage holds: one stage."""
        config = self.config
        if config.frozen:
            padded = [*config.frozen_steps, *[0] * (config.beats * config.lanes - config.pairs)]
            columns = [padded[k :: config.lanes] for k in range(config.lanes)]
            found: list[Any] = pipe.stage(
                [
                    lookup(column, beat, config.phase_bits) if config.beats > 1 else C(column[0], config.phase_bits)
                    for column in columns
                ]
            )
            return found
        m.submodules.steps = memory = RowMemory(config.beats, config.lanes * config.phase_bits)
        m.d.comb += [
            self.table.ready.eq(1),
            memory.write_address.eq(self.table.payload.address),
            memory.write_data.eq(Value.cast(self.table.payload.data)),
            memory.write_enable.eq(self.table.valid),
            memory.read_address.eq(beat),
            memory.read_enable.eq(advance),
        ]
        pipe.stage()
        return [memory.read_data.word_select(k, config.phase_bits) for k in range(config.lanes)]

    def _cosine_sine(self, pipe: Pipeline, angle: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Golden ``cosine_sine`` on each lane: three stages."""
        config = self.config
        inside_bits, rest_bits = config.angle_bits - 3, config.rest_bits
        # The rounding constant of the final cut is already in the starts.
        (cosine, loss), (sine, gain) = (
            ([v + (1 << (GUARD_BITS - 1)) for v in start], slope) for start, slope in config.chords
        )
        octants, tables, rests = [], [], []
        for word in angle:
            octant = word[inside_bits:]
            inside = word[:inside_bits] ^ octant[0].replicate(inside_bits)
            octants.append(octant)
            rests.append(inside[:rest_bits])
            tables.append(lookups(pipe.m, [cosine, loss, sine, gain], inside[rest_bits:]))
        octants, tables, rests = pipe.stage(octants, tables, rests)

        one = 1 << config.fraction_bits
        values = []
        for (cosine_start, lost, sine_start, gained), rest in zip(tables, rests, strict=True):
            pair = []
            for start, product in ((cosine_start, -(lost * rest)), (sine_start, gained * rest)):
                value = (Cat(C(0, rest_bits), start) + product) >> (rest_bits + GUARD_BITS)
                value = value[: config.trig_bits]
                pair.append(Mux(value > one, one, value)[: config.trig_bits - 1])
            values.append(pair)
        octants, values = pipe.stage(octants, values)

        cosines, sines = [], []
        for octant, (near, far) in zip(octants, values, strict=True):
            exchange = octant[0] ^ octant[1]
            c, s = Mux(exchange, far, near), Mux(exchange, near, far)
            cosines.append(Mux(octant[1] ^ octant[2], -c, c)[: config.trig_bits].as_signed())
            sines.append(Mux(octant[2], -s, s)[: config.trig_bits].as_signed())
        cosines, sines = pipe.stage(cosines, sines)
        return cosines, sines

    def _narrow(self, x: Value) -> Value:
        return saturate(round_shift(x, self.config.fraction_bits), self.config.out_bits)
