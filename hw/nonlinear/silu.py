"""Component of :mod:`golden.nonlinear.silu`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from amaranth.hdl import Module, Mux, Signal, Value, signed, unsigned

from golden.nonlinear.silu import LOG2E, SiluConfig
from hw.arithmetic import magnitude as absolute
from hw.arithmetic import round_shift, saturate
from hw.nonlinear.exp import constants_layout, lookup, shift_down, split_lanes, split_stages
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout


def _times_log2e(x: Any) -> Value:
    """``x * LOG2E`` in five additions: ``LOG2E = 23 * 1024 + 85``, ``23 = 3 * 8 - 1`` and ``85 = 5 * 17``."""
    assert LOG2E == 23 * 1024 + 5 * 17
    three, five = x + (x << 1), x + (x << 2)
    product = (((three << 3) - x) << 10) + (five + (five << 4))
    return product[: len(x) + LOG2E.bit_length()].as_unsigned()


def lookups(m: Module, tables: Sequence[Sequence[int]], index: Any) -> list[Value]:
    """The words of several tables at one index, through one multiplexer tree (which simulates faster than several)."""
    widths = [max(1, max(table).bit_length()) for table in tables]
    offsets = [sum(widths[:k]) for k in range(len(widths))]
    words = [
        sum(word << offset for word, offset in zip(row, offsets, strict=True)) for row in zip(*tables, strict=True)
    ]
    found = Signal(sum(widths), name="words")
    m.d.comb += found.eq(lookup(words, index, sum(widths)))
    return [found[offset : offset + width] for offset, width in zip(offsets, widths, strict=True)]


class Silu(Unit):
    """``o.y = sat(rs(silu(i.gate) * i.up, out_shift))`` for each lane, as golden ``swiglu``.

    ``i``: {gate, up (with ``multiply``), keep, last}, with ``run_time_scale`` also {constants, normalize}; ``o``: {y,
    keep, last}. One beat per cycle. Latency in cycles: silu takes 7 (base2), 8 (ibert, frozen),
    9 (ibert, scale at run time), 3 (piecewise) or 1 (table), ``multiply`` one more, and a shift or saturation of y one
    more.
    """

    def __init__(self, config: SiluConfig) -> None:
        data: dict[str, Any] = {"gate": signed(config.gate_bits)}
        if config.multiply:
            data["up"] = signed(config.up_bits)
        row = None
        if config.run_time_scale:
            row = {"constants": constants_layout(config.exp), "normalize": unsigned(config.normalize_bits)}
        super().__init__(
            config,
            i=row_layout(config.lanes, data, row),
            o=row_layout(config.lanes, {"y": signed(config.out_bits)}),
        )
        if config.form == "table":
            stages = 1
        elif config.form == "piecewise":
            stages = 3
        else:
            # |x|; t or (after the split) the normalised mantissa; e and its chord; tau; silu.
            stages = 5 + split_stages(config.exp)
        self.latency = stages + config.multiply + config.narrows

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes = range(config.lanes)
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        carry: dict[str, Any] = {"keep": i.payload.keep, "last": i.payload.last}
        if config.multiply:
            carry["up"] = [i.payload.up[k] for k in lanes]
        if config.run_time_scale:
            carry |= {"constants": i.payload.constants, "normalize": i.payload.normalize}
        pipe = Pipeline(m, advance, i.valid, carry)

        gate = [i.payload.gate[k] for k in lanes]
        magnitude, negative = [absolute(x) for x in gate], [x < 0 for x in gate]
        if config.form == "table":
            loss = [lookup(config.loss_table, x, max(1, max(config.loss_table).bit_length())) for x in magnitude]
        else:
            tau = self._piecewise if config.form == "piecewise" else self._reciprocal
            magnitude, negative, fraction = tau(pipe, magnitude, negative)
            # Half down, because the loss is subtracted: relu(x) - loss is x * sigma rounded half up.
            below_half = (config.one >> 1) - 1
            loss = [(x * f + below_half) >> config.sigma_bits for x, f in zip(magnitude, fraction, strict=True)]
        silu = [
            (Mux(n, 0, x[: config.gate_bits - 1]) - y[: config.loss_bits]).as_signed()[: config.gate_bits]
            for n, x, y in zip(negative, magnitude, loss, strict=True)
        ]
        product = [x.as_signed() for x in pipe.stage(silu)]
        if config.multiply:
            up = pipe.carry.pop("up")
            product = [x * y for x, y in zip(product, up, strict=True)]
            product = [x.as_signed() for x in pipe.stage([x[: config.product_bits] for x in product])]
        if config.narrows:
            product = pipe.stage([saturate(round_shift(x, config.out_shift), config.out_bits) for x in product])

        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.y[k].eq(value) for k, value in enumerate(product)]
        return m

    def _reciprocal(self, pipe: Pipeline, magnitude: Sequence[Any], negative: Sequence[Any]) -> Any:
        """(|x|, x < 0, tau) at the end of the exponential and the chords of e / (1 + e)."""
        config = self.config
        # |x| and the sign keep up with tau as carried values.
        pipe.carry["magnitude"], pipe.carry["negative"] = pipe.stage(list(magnitude), list(negative))
        x = pipe["magnitude"]
        if config.form == "base2":
            t = [saturate(round_shift(_times_log2e(v), config.t_shift), config.exp.in_bits, False) for v in x]
            mantissa, exponent = split_lanes(pipe, config.exp, pipe.stage(t))
        else:
            mantissa, exponent = split_lanes(pipe, config.exp, x, row="constants")
            pipe.carry.pop("constants", None)
            factor = pipe["normalize"] if config.run_time_scale else config.frozen.normalize
            scaled = [round_shift(v * factor, config.normalize_shift) for v in mantissa]
            half = config.one >> 1
            # At most one by construction, and at least a half; both show in the two highest bits.
            scaled = [Mux(v[config.sigma_bits - 1 : config.sigma_bits + 1].any(), v, half) for v in scaled]
            scaled = [v[: config.exp.out_bits] for v in scaled]
            mantissa, exponent = pipe.stage(scaled, exponent)
            pipe.carry.pop("normalize", None)
        e = [shift_down(v, z, config.exp.out_bits) for v, z in zip(mantissa, exponent, strict=True)]
        fraction = self._chords(pipe, e, config.reciprocal_knots, config.reciprocal_rest_bits)
        return pipe.carry.pop("magnitude"), pipe.carry.pop("negative"), fraction

    def _piecewise(self, pipe: Pipeline, magnitude: Sequence[Any], negative: Sequence[Any]) -> Any:
        """(|x|, x < 0, tau) at the end of the chords of the sigmoid."""
        config = self.config
        pipe.carry["magnitude"], pipe.carry["negative"] = list(magnitude), list(negative)
        # Beyond the last knot the tables repeat their last entries: tau and slope 0.
        fraction = self._chords(pipe, magnitude, config.segment_knots, config.segment_rest_bits)
        return pipe.carry.pop("magnitude"), pipe.carry.pop("negative"), fraction

    def _chords(self, pipe: Pipeline, x: Sequence[Any], knots: Sequence[int], rest_bits: int) -> list[Any]:
        """Golden ``_chord`` on each lane, two stages: lookup, then interpolation."""
        steps = [b - a for a, b in pairwise(knots)]
        slopes = [*(abs(s) for s in steps), 0]
        falling = knots[0] > knots[-1]
        base, slope, rest = [], [], []
        for value in map(Value.cast, x):
            found = lookups(pipe.m, [knots, slopes], value[rest_bits:])
            base.append(found[0])
            slope.append(found[1])
            rest.append(value[:rest_bits])
        base, slope, rest = pipe.stage(base, slope, rest)
        step = [round_shift(s * r, rest_bits) if rest_bits else 0 for s, r in zip(slope, rest, strict=True)]
        tau = [(b - s if falling else b + s)[: self.config.sigma_bits] for b, s in zip(base, step, strict=True)]
        return pipe.stage(tau)  # type: ignore[no-any-return]
