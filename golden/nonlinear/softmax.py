"""Integer softmax over rows of fixed-point scores, in two passes that share one set of exponential lanes.

Formula, for the kept elements of a row (*LLM Inference in a Flash*, sections 3.1.3 and 3.2.4)::

    t        = (2**(score_bits - 1) - 1) - x                      never negative; the reference point cancels
    m, z     = exp.split(t)                                       exp(-t) ~ m * 2**-z
    zmin     = min z so far                                       the running maximum, rounded up to a power of two
    total    = (total >> (zmin_before - zmin)) + sum over the beat of floor(m * 2**sum_guard_bits >> (z - zmin))
    excess   = bit_length(total) - (sum_guard_bits + mantissa_low_bits)
    divisor  = the top divisor_bits bits of total
    r        = min(floor(2**(reciprocal_bits + divisor_bits - 1) / divisor), 2**reciprocal_bits - 1)
    q        = floor(m * r * 2**-(max(z - zmin + excess, 0) + product_shift))       guard_bits below the output's LSB
    p        = first difference of (cumulative sum of q + half) >> guard_bits       (diffuse)
               (q + half) >> guard_bits                                             (nearest)

and p saturates at ``2**probability_bits - 1``. Masked elements take no part: their p is 0.

Rounding. The shifts of the two passes floor by definition: what the floor drops is paid for by guard bits (one more
than rounding would need), and the only rounding is that of p, half up. ``diffuse`` rounds the *running* sum, so that
a row keeps its mass however long it is: nearest rounding cannot (3000 equal elements at 12 bits are 1.37 LSB each).

Error. Against the exact ratio of the same m * 2**-z, q is off by less than half an LSB when ``within_one_lsb`` holds
(in LSB: sum at most +1/4, cut of the divisor +1/8, reciprocal -1/4, cut of q -1/8), so that p is within 1 LSB of the
correctly rounded value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, as_int, bit_length, bounds, check, extremes, round_shift, within
from golden.nonlinear import exp as exponential
from golden.nonlinear.exp import ExpConfig, IbertConstants


class Mode(IntEnum):
    """What a row asks for (the row field ``mode``; 3 counts as NORMALISE)."""

    #: Probabilities of a row of at most ``buffer`` elements, which the unit stores between its two passes.
    STORED = 0
    #: Statistics of a row of any length: one output beat with ``exponent`` and ``total``.
    REDUCE = 1
    #: Probabilities of a row, in one pass, under the statistics of the last STORED or REDUCE row.
    NORMALISE = 2


@dataclass(frozen=True)
class SoftmaxConfig(UnitConfig):
    """Configuration of the softmax unit.

    Input: ``x``, signed ``score_bits``, with one ``keep`` bit each (holes anywhere). Output: ``p``, unsigned
    ``probability_bits`` in units of ``2**-probability_bits``.
    """

    lanes: int = integer(8, 1, 64, "elements per beat")
    score_bits: int = integer(16, 8, 16, "width of a score")
    probability_bits: int = integer(16, 8, 16, "width of a probability")
    form: str = choice("base2", ("base2", "ibert"), "algorithm of the exponential")
    fraction_bits: int = integer(10, 0, 14, "base2: fraction bits of a score (a log2-domain logit)")
    rom_bits: int = integer(4, 1, 10, "base2: address bits of the ROM over the fraction")
    interpolate: bool = flag(True, "base2: interpolate between ROM entries")
    scale_log2: int = integer(8, 1, 15, "ibert: the scale is 2**-scale_log2 (when it is frozen)")
    run_time_scale: bool = flag(False, "ibert: the polynomial's constants travel with the row")
    mantissa_bits: int = integer(16, 4, 20, "width of the exponential's mantissa (out_bits of ExpConfig)")
    buffer: int = integer(4096, 1, 1 << 18, "elements of the longest stored row (rounded up to a whole beat)")
    max_row: int = integer(1 << 18, 1, 1 << 18, "elements of the longest row, or chain of rows")
    reciprocal_bits: int = integer(19, 6, 24, "width of the reciprocal")
    guard_bits: int = integer(10, 2, 16, "bits of q below the output's LSB")
    rounding: str = choice("diffuse", ("diffuse", "nearest"), "rounding of the probabilities")
    streaming: bool = flag(True, "rows also come in the modes reduce and normalise, and may be chained")

    def validate(self) -> None:
        if self.form == "base2" and self.fraction_bits > self.score_bits:
            raise ValueError(f"fraction_bits must be at most score_bits = {self.score_bits}, not {self.fraction_bits}")
        if self.run_time_scale and self.form != "ibert":
            raise ValueError(f"run_time_scale needs the ibert form, not {self.form}")
        if self.buffer > self.max_row:
            raise ValueError(f"buffer must be at most max_row = {self.max_row}, not {self.buffer}")
        # Widths that hold whatever the data, from the largest m and r.
        term = self.mantissa_range[1] << self.sum_guard_bits
        product = self.mantissa_range[1] * ((1 << self.reciprocal_bits) - 1)
        within("beat_sum", 0, self.lanes * term, self.beat_sum_bits, signed=False)
        within("total", 0, self.beats(self.max_row) * self.lanes * term, self.total_bits, signed=False)
        within("excess", 0, self.excess_limit, self.excess_bits, signed=False)
        within("product", 0, product, self.product_bits, signed=False)
        within("q", 0, (product << self.pad_bits) >> (self.pad_bits + self.product_shift), self.q_bits, signed=False)
        within("shift", 0, (1 << self.exponent_bits) - 1 + self.excess_limit, self.shift_bits, signed=False)

    @cached_property
    def exp(self) -> ExpConfig:
        """The exponential inside."""
        return ExpConfig(
            lanes=self.lanes,
            form=self.form,
            in_bits=self.score_bits,
            out_bits=self.mantissa_bits,
            fraction_bits=self.fraction_bits if self.form == "base2" else 0,
            rom_bits=self.rom_bits,
            interpolate=self.interpolate,
            scale_log2=self.scale_log2,
            run_time_scale=self.run_time_scale,
        )

    def beats(self, elements: int) -> int:
        """Beats of a row."""
        return -(-elements // self.lanes)

    @cached_property
    def buffer_beats(self) -> int:
        """Depth of the row memory."""
        return self.beats(self.buffer)

    @cached_property
    def row_bits(self) -> int:
        """Bits that a sum over the longest row grows by (max_row rounded up to a whole beat)."""
        return (self.beats(self.max_row) * self.lanes - 1).bit_length()

    # -- the exponential's two halves ------------------------------------------------------------------------------
    @cached_property
    def exponent_bits(self) -> int:
        """Width of z."""
        return self.exp.exponent_bits

    @cached_property
    def mantissa_range(self) -> tuple[int, int]:
        """Smallest and largest m. Base 2 cuts the one value ``2**(mantissa_bits - 1)`` to the next below, which saves
        a bit everywhere. At run time the smallest is 1: a coarse scale leaves the polynomial few bits."""
        if self.form == "base2":
            return 1 << (self.mantissa_bits - 2), (1 << (self.mantissa_bits - 1)) - 1
        if self.run_time_scale:
            return 1, (1 << self.mantissa_bits) - 1
        k, top = self.exp.frozen, (1 << self.mantissa_bits) - 1
        ends = [int(round_shift((k.b - rest) ** 2 + k.c, k.out_shift)) for rest in (k.ln2 - 1, 0)]
        return min(ends[0], top), min(ends[1], top)

    @cached_property
    def mantissa_low_bits(self) -> int:
        """Bits of the smallest m: what a row's total has at least."""
        return self.mantissa_range[0].bit_length()

    @cached_property
    def term_bits(self) -> int:
        """Bits of the largest m."""
        return self.mantissa_range[1].bit_length()

    # -- pass 1 ------------------------------------------------------------------------------------------------------
    @cached_property
    def sum_guard_bits(self) -> int:
        """Fraction bits of the sum's terms: what max_row floors drop stays below a quarter of an output LSB. (With
        run-time scales: as long as the polynomial fills its mantissa, scale <= 2**(-mantissa_bits / 2).)"""
        low = self.mantissa_bits - 1 if self.run_time_scale else self.mantissa_low_bits
        return max(0, self.row_bits + self.probability_bits + 3 - low)

    @cached_property
    def total_bits(self) -> int:
        """Width of the sum: largest term times longest row."""
        return self.term_bits + self.sum_guard_bits + self.row_bits

    @cached_property
    def beat_sum_bits(self) -> int:
        """Width of the sum of one beat."""
        return self.term_bits + self.sum_guard_bits + (self.lanes - 1).bit_length()

    # -- reciprocal --------------------------------------------------------------------------------------------------
    @cached_property
    def divisor_bits(self) -> int:
        """Bits of the total that the division sees."""
        return self.reciprocal_bits + 1

    @cached_property
    def excess_limit(self) -> int:
        """Largest number of bits that a total has beyond its least."""
        return self.total_bits - self.sum_guard_bits - self.mantissa_low_bits

    @cached_property
    def excess_bits(self) -> int:
        return max(1, self.excess_limit.bit_length())

    # -- pass 2 ------------------------------------------------------------------------------------------------------
    @cached_property
    def product_bits(self) -> int:
        """Width of m * r."""
        return self.term_bits + self.reciprocal_bits

    @cached_property
    def product_shift(self) -> int:
        """Constant part of the shift from m * r to q (negative: to the left)."""
        return self.reciprocal_bits + self.mantissa_low_bits - 1 - self.probability_bits - self.guard_bits

    @cached_property
    def pad_bits(self) -> int:
        """Zeros below the product, so that one shifter gives the terms of pass 1 and the q of pass 2."""
        return max(0, self.sum_guard_bits - (self.reciprocal_bits - 1), -self.product_shift)

    @cached_property
    def shift_bits(self) -> int:
        """Width of the shift z - zmin + excess."""
        return ((1 << self.exponent_bits) - 1 + self.excess_limit).bit_length()

    @cached_property
    def q_bits(self) -> int:
        """Width of q: 1.0, what lies above it when a row is normalised by foreign statistics, and the guard bits."""
        return self.product_bits - self.product_shift

    @cached_property
    def within_one_lsb(self) -> bool:
        """Every p is proven within 1 LSB of the correctly rounded value of the algorithm's own exponential."""
        return self.reciprocal_bits >= self.probability_bits + 3 and self.guard_bits >= 3 and not self.run_time_scale

    @cached_property
    def one(self) -> int:
        """The largest probability, which stands for 1.0."""
        return (1 << self.probability_bits) - 1


@dataclass(frozen=True)
class Statistics:
    """What a row leaves for its normalisation: ``exponent`` = zmin (unsigned ``exponent_bits``; all ones if nothing
    was kept) and ``total`` (unsigned ``total_bits``; 0 if nothing was kept), one of each a row."""

    exponent: Int
    total: Int

    @property
    def empty(self) -> NDArray[np.bool_]:
        return self.total == 0


def row_constants(config: SoftmaxConfig, scales: Sequence[Fraction]) -> IbertConstants:
    """The run-time constants of several rows, one scale each, as columns that broadcast over the elements."""
    rows = [config.exp.constants(scale) for scale in scales]
    columns = {
        item.name: np.array([getattr(row, item.name) for row in rows], dtype=np.int64)[:, None]
        for item in fields(IbertConstants)
    }
    return IbertConstants(**columns)  # type: ignore[arg-type]


def _rows(config: SoftmaxConfig, scores: ArrayLike, keep: ArrayLike | None) -> tuple[Int, NDArray[np.bool_] | None]:
    """Scores as (rows, elements), checked, and which of them to keep (None: all)."""
    x = check("x", scores, config.score_bits)
    if x.ndim == 0:
        raise ValueError("scores must be rows, not a single number")
    if x.shape[-1] == 0:
        raise ValueError("a row needs at least one element")
    if x.shape[-1] > config.beats(config.max_row) * config.lanes:
        raise ValueError(f"a row may have at most max_row = {config.max_row} elements, not {x.shape[-1]}")
    kept = None if keep is None else np.broadcast_to(np.asarray(keep, dtype=bool), x.shape).reshape(-1, x.shape[-1])
    return x.reshape(-1, x.shape[-1]), kept


def split(
    config: SoftmaxConfig, scores: ArrayLike, keep: ArrayLike | None = None, constants: IbertConstants | None = None
) -> tuple[Int, Int]:
    """(m, z) of each element; masked ones get (0, all ones)."""
    x, kept = _rows(config, scores, keep)
    top = bounds(config.score_bits)[1]
    mantissa, exponent = exponential.split(config.exp, top - x, constants)
    if config.form == "base2":
        mantissa = np.minimum(mantissa, config.mantissa_range[1], out=mantissa)
    if kept is not None:
        hidden = ~kept
        np.copyto(mantissa, 0, where=hidden)
        np.copyto(exponent, (1 << config.exponent_bits) - 1, where=hidden)
    mantissa = check("m", mantissa, config.term_bits, signed=False)
    return mantissa, check("z", exponent, config.exponent_bits, signed=False)


def reduce(
    config: SoftmaxConfig,
    scores: ArrayLike,
    keep: ArrayLike | None = None,
    constants: IbertConstants | None = None,
    chained: Statistics | None = None,
) -> Statistics:
    """Pass 1: the statistics of each row, continued from ``chained`` where that is given.

    Parameters
    ----------
    scores : int array (..., n), signed ``score_bits``
    keep : bool array, broadcast against scores; all by default
    constants : IbertConstants with ``run_time_scale``: of one row, or columns made by :func:`row_constants`
    chained : Statistics of as many rows
    """
    return _reduce(config, *split(config, scores, keep, constants), chained)


def _beat_minima(exponent: Int, lanes: int) -> Int:
    """Smallest exponent of each beat, (rows, beats), of (rows, elements)."""
    rows, n = exponent.shape
    beats = -(-n // lanes)
    if n % lanes:
        rest = np.repeat(exponent[:, -1:], -n % lanes, axis=1)
        exponent = np.concatenate((exponent, rest), axis=1)
    flat = exponent.reshape(-1)
    while lanes % 2 == 0:  # many short minima are much slower than a few long ones
        flat, lanes = np.minimum(flat[0::2], flat[1::2]), lanes // 2
    return np.minimum.reduce(flat.reshape(rows, beats, lanes), axis=2)


def _reduce(config: SoftmaxConfig, mantissa: Int, exponent: Int, chained: Statistics | None = None) -> Statistics:
    rows, n = mantissa.shape
    highest = (1 << config.exponent_bits) - 1
    before = np.full(rows, highest) if chained is None else as_int("exponent", chained.exponent)
    total = np.zeros(rows, dtype=np.int64) if chained is None else as_int("total", chained.total)
    beats = _beat_minima(exponent, config.lanes)
    zmin = np.minimum.accumulate(np.concatenate((before[:, None], beats), axis=1), axis=1)
    down = exponent - np.repeat(zmin[:, 1:], config.lanes, axis=1)[:, :n]
    np.minimum(down, 62, out=down)
    term = mantissa << config.sum_guard_bits
    term >>= down
    # Between beats in which some row's reference drops, the sums merely add up.
    drop = np.minimum(zmin[:, :-1] - zmin[:, 1:], 62)
    dropped = drop.any(axis=0)
    dropped[0] = True
    cuts = np.flatnonzero(dropped)
    sums = np.add.reduceat(term, cuts * config.lanes, axis=1)
    for k, cut in enumerate(cuts.tolist()):
        total = (total >> drop[:, cut]) + sums[:, k]
        if chained is not None:  # a single row cannot be too long
            check("total", total, config.total_bits, signed=False)
    return Statistics(zmin[:, -1], total)


def reciprocal(config: SoftmaxConfig, statistics: Statistics) -> tuple[Int, Int]:
    """(r, excess) of each row's statistics; r of an empty row is of no account (0 here)."""
    total = check("total", statistics.total, config.total_bits, signed=False)
    low = config.sum_guard_bits + config.mantissa_low_bits
    excess = np.maximum(bit_length(total) - low, 0)
    down = excess + (low - config.divisor_bits)
    if low >= config.divisor_bits:
        divisor = total >> down
    else:  # the smallest totals have fewer bits than the division takes
        divisor = np.where(down >= 0, total >> np.maximum(down, 0), total << np.maximum(-down, 0))
    divisor = check("divisor", divisor, config.divisor_bits, signed=False)
    dividend = 1 << (config.reciprocal_bits + config.divisor_bits - 1)
    quotient = np.where(divisor > 0, dividend // np.maximum(divisor, 1), 0)
    return np.minimum(quotient, (1 << config.reciprocal_bits) - 1), excess


def normalise(
    config: SoftmaxConfig,
    scores: ArrayLike,
    statistics: Statistics,
    keep: ArrayLike | None = None,
    constants: IbertConstants | None = None,
) -> Int:
    """Pass 2: the probabilities of each row under ``statistics`` (all 0 where those are empty). A score far above all
    that the statistics have seen gets what one of about their whole total would get: at most 1, as always."""
    p = _normalise(config, *split(config, scores, keep, constants), statistics)
    return p.reshape(np.shape(scores))


def _normalise(config: SoftmaxConfig, mantissa: Int, exponent: Int, statistics: Statistics) -> Int:
    r, excess = reciprocal(config, statistics)
    product = mantissa * r[:, None]  # r is 0 where nothing was kept
    reference = as_int("exponent", statistics.exponent) - excess
    shift = exponent - reference[:, None]
    np.maximum(shift, 0, out=shift)
    if shift.size and extremes(reference)[0] < -config.excess_limit:
        counts = (mantissa > 0) & ~statistics.empty[:, None]
        check("shift", np.where(counts, shift, 0), config.shift_bits, signed=False)
    q = product
    q <<= config.pad_bits
    q >>= np.minimum(shift, 62, out=shift)
    q >>= config.pad_bits + config.product_shift
    half = 1 << (config.guard_bits - 1)
    if config.rounding == "diffuse":
        running = np.cumsum(q, axis=1)
        running += half
        running >>= config.guard_bits
        p = running
        p[:, 1:] -= running[:, :-1].copy()
    else:
        p = q
        p += half
        p >>= config.guard_bits
    return check("p", np.minimum(p, config.one, out=p), config.probability_bits, signed=False)


def softmax(
    config: SoftmaxConfig, scores: ArrayLike, keep: ArrayLike | None = None, constants: IbertConstants | None = None
) -> tuple[Int, NDArray[np.bool_]]:
    """Probabilities of each row (..., n), and for each row whether it is empty (everything masked: all zeros).

    Raises ValueError for a row without elements or of more than ``max_row`` (rounded up to a whole beat), OverflowError
    for a score that does not fit, TypeError for floats.
    """
    mantissa, exponent = split(config, scores, keep, constants)
    statistics = _reduce(config, mantissa, exponent)
    p = _normalise(config, mantissa, exponent, statistics)
    return p.reshape(np.shape(scores)), statistics.empty.reshape(np.shape(scores)[:-1])


def exact(m: ArrayLike, z: ArrayLike, bits: int) -> list[int]:
    """For tests: ``round_half_up(2**bits * m * 2**-z / sum(m * 2**-z))`` of one row, in exact rationals."""
    mantissas, exponents = [int(v) for v in np.asarray(m)], [int(v) for v in np.asarray(z)]
    kept = [e for v, e in zip(mantissas, exponents, strict=True) if v]
    if not kept:
        return [0] * len(mantissas)
    # All over one power of two: what lies 2**-512 below the largest cannot move a rounding by a representable amount.
    least, depth = min(kept), min(max(kept) - min(kept), 512)
    values = [
        v << (depth - (e - least)) if v and e - least <= depth else 0 for v, e in zip(mantissas, exponents, strict=True)
    ]
    total = sum(values)
    return [((v << (bits + 1)) + total) // (2 * total) for v in values]
