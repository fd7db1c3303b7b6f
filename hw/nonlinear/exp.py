"""Component of :mod:`golden.nonlinear.exp`, and the lane that softmax and SiLU build in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Module, Mux, Signal, Value, unsigned
from amaranth.lib.data import StructLayout

from golden.nonlinear.exp import ExpConfig, IbertConstants
from hw.arithmetic import round_shift, round_shift_by, square
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout


def lookup(table: Sequence[int], index: Any, width: int) -> Value:
    """``table[index]`` as logic: a multiplexer tree over constants, which synthesis shrinks. Words beyond the end of
    the table repeat its last one."""
    index = Value.cast(index)
    words = [*table, *[table[-1]] * ((1 << len(index)) - len(table))]

    def select(part: Sequence[int], bits: int) -> Value:
        if len(set(part)) == 1:
            return C(part[0], width)
        half = len(part) // 2
        return Mux(index[bits - 1], select(part[half:], bits - 1), select(part[:half], bits - 1))

    return select(words[: 1 << len(index)], len(index))


def constants_layout(config: ExpConfig) -> StructLayout:
    """Per-row constants of the polynomial, as they travel with a row."""
    return StructLayout({name: unsigned(bits) for name, bits in config.constant_bits.items()})


def split_stages(config: ExpConfig) -> int:
    """Pipeline stages of :func:`split_lanes`."""
    if config.form == "base2":
        return 2 if config.interpolates else 1
    return 4 if config.run_time_scale else 3


def split_lanes(pipe: Pipeline, config: ExpConfig, t: Sequence[Any], row: str = "") -> tuple[list, list]:
    """Append the split exponential of each lane to ``pipe``: golden ``split``. :func:`split_stages` stages.

    ``row`` names the carried per-row constants (of :func:`constants_layout`) when the scale comes at run time.
    Returns (mantissas, exponents) at the pipe's new end; what else must keep up goes through ``pipe.carry``.
    """
    if config.form == "base2":
        return _split_base2(pipe, config, t)
    return _split_ibert(pipe, config, t, row)


def _split_base2(pipe: Pipeline, config: ExpConfig, t: Sequence[Any]) -> tuple[list, list]:
    rest_bits, fraction_bits = config.rest_bits, config.fraction_bits
    base, slope, rest, exponent = [], [], [], []
    for value in t:
        address = value[rest_bits:fraction_bits] if config.rom_address_bits else C(0, 1)
        base.append(lookup(config.rom, address, config.out_bits))
        exponent.append(value[fraction_bits:] if config.in_bits > fraction_bits else C(0, 1))
        if config.interpolates:
            slope.append(lookup(config.slopes, address, config.slope_bits))
            rest.append(value[:rest_bits])
    if not config.interpolates:
        mantissa, exponent = pipe.stage(base, exponent)
        return mantissa, exponent
    base, slope, rest, exponent = pipe.stage(base, slope, rest, exponent)
    mantissa = [
        (b - round_shift(s * r, rest_bits))[: config.out_bits] for b, s, r in zip(base, slope, rest, strict=True)
    ]
    mantissa, exponent = pipe.stage(mantissa, exponent)
    return mantissa, exponent


def _split_ibert(pipe: Pipeline, config: ExpConfig, t: Sequence[Any], row: str) -> tuple[list, list]:
    frozen: IbertConstants | None = None if config.run_time_scale else config.frozen

    def constant(name: str) -> Any:
        return getattr(frozen, name) if frozen else pipe[row][name]

    if frozen:
        shifted = [round_shift(value, frozen.in_shift) for value in t]
    else:
        limit = (1 << config.constant_bits["in_shift"]) - 1
        shifted = pipe.stage([round_shift_by(value, constant("in_shift"), limit) for value in t])
    # The division by ln 2 is one exact multiplication (see IbertConstants).
    quotient = [(s * constant("reciprocal")) >> config.in_bits for s in shifted]
    exponent = [(q >> constant("ln2_bits"))[: config.exponent_bits] for q in quotient]
    shifted, exponent = pipe.stage(shifted, exponent)
    rest_bits = config.frozen.ln2.bit_length() if frozen else config.constant_bits["ln2"]
    rest = [(s - z * constant("ln2"))[:rest_bits] for s, z in zip(shifted, exponent, strict=True)]
    rest, exponent = pipe.stage(rest, exponent)
    top = (1 << config.out_bits) - 1
    mantissa = []
    for r in rest:
        distance = (constant("b") - r)[: config.frozen.b.bit_length() if frozen else config.constant_bits["b"]]
        polynomial = (square(distance) + constant("c"))[:31]
        if frozen:
            value = round_shift(polynomial, frozen.out_shift)
        else:
            value = round_shift_by(polynomial, constant("out_shift"), 31)
        # A frozen polynomial is known to stay below the top or not.
        clamps = len(value) > config.out_bits and (frozen is None or config.one == top)
        mantissa.append((Mux(value > top, top, value) if clamps else value)[: config.out_bits])
    mantissa, exponent = pipe.stage(mantissa, exponent)
    return mantissa, exponent


def shift_down(mantissa: Value, exponent: Value, out_bits: int) -> Value:
    """``rs(mantissa, exponent)``: 0 for every exponent above ``out_bits``."""
    return round_shift_by(mantissa, exponent, out_bits + 1)


class Exp(Unit):
    """``o.e = exp(-i.t * scale)`` for each lane, as golden ``exp``.

    ``i``: {t, keep, last}, with ``run_time_scale`` also ``constants``; ``o``: {e, keep, last}. One beat per cycle,
    latency 2 (base2 without interpolation), 3 (base2), 4 (ibert, frozen), 5 (ibert, run time) or 1 (table) cycles.
    """

    def __init__(self, config: ExpConfig) -> None:
        row = {"constants": constants_layout(config)} if config.run_time_scale else None
        super().__init__(
            config,
            i=row_layout(config.lanes, {"t": unsigned(config.in_bits)}, row),
            o=row_layout(config.lanes, {"e": unsigned(config.out_bits)}),
        )
        self.latency = 1 if config.form == "table" else split_stages(config) + 1

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        carry = {"keep": i.payload.keep, "last": i.payload.last}
        if config.run_time_scale:
            carry["constants"] = i.payload.constants
        pipe = Pipeline(m, advance, i.valid, carry)
        t = [i.payload.t[k] for k in range(config.lanes)]
        if config.form == "table":
            e = pipe.stage([lookup(config.table, x, config.out_bits) for x in t])
        elif config.form == "ibert" and not config.run_time_scale and config.tail_bits < config.in_bits:
            # Above tail_bits e is 0, so that the range reduction only sees the bits below.
            pipe.carry["tail"] = [x[config.tail_bits :].any() for x in t]
            narrow = config.replace(in_bits=config.tail_bits)
            mantissa, exponent = split_lanes(pipe, narrow, [x[: config.tail_bits] for x in t])
            shifted = [shift_down(a, z, config.out_bits) for a, z in zip(mantissa, exponent, strict=True)]
            e = pipe.stage([Mux(zero, 0, value) for zero, value in zip(pipe["tail"], shifted, strict=True)])
        else:
            mantissa, exponent = split_lanes(pipe, config, t, row="constants")
            e = pipe.stage([shift_down(a, z, config.out_bits) for a, z in zip(mantissa, exponent, strict=True)])
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.e[k].eq(value) for k, value in enumerate(e)]
        return m
