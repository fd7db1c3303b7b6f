"""Rotary position embedding in integers, for every position to 262,143 without a table of positions.

Pair j of a head joins elements j and j + head_dim/2 (Hugging Face's half-split order) and turns by
``position * frequency_j``; with c and s of ``f = trig_bits - 2`` fraction bits,

    ``y_lo = sat(rs(lo*c - hi*s, f))``, ``y_hi = sat(rs(hi*c + lo*s, f))``.

**The angle.** ``frequency_j`` is kept in turns, ``step_j = round(frequency_j / (2*pi) * 2**phase_bits)``,
and ``phase = (position * step_j) mod 2**phase_bits``: one product of which only the low bits are kept, so that whole
turns fall away exactly, whatever the position. A step is off by at most ``2**-(phase_bits+1)`` of a turn, the phase
therefore by ``position * 2**-(phase_bits+1)``: with 36 bits and positions below 2**18 less than ``2*pi * 2**-19`` =
1.2e-5 rad, a fifth of a Q1.14 step (32 bits would give 1.9e-4 rad, three steps). Cutting the phase to ``angle_bits`` =
19 costs at most ``2*pi * 2**-20`` = 6e-6 rad more, because an angle stands for the middle of what it was cut from.

**Cosine and sine** come from chords over one octant (both functions at once, ``2**segment_bits`` chords), mirrored and
exchanged. As angles stand for middles, the mirror image of a is exactly ``~a``. Chords carry ``GUARD_BITS`` more
fraction bits, and their ends lie beyond the curve by half of what a chord between points of the curve would leave.

**Size at the defaults** (head_dim 128): 64 steps of 36 bits = 2,304 bits per model, and 64 chords of 53 bits = 3,392
bits; a table of cosines and sines for 262,144 positions would take 262,144 * 64 * 2 * 16 = 537 million bits.
**Error** over all positions to 262,143 and all 64 frequencies, for theta 10,000, theta 500,000 and Llama 3's scaling:
c and s are within 6.1e-5 of the exact ones, less than one step of Q1.14 (rounding alone costs half a step).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, as_int, check, largest, round_shift, saturate

#: Fraction bits that cosine and sine have beyond their own while they are interpolated.
GUARD_BITS = 2
_DECIMAL, _WIDE = Context(prec=50), Context(prec=60)
PI = Decimal("3.14159265358979323846264338327950288419716939937510")


@lru_cache(maxsize=64)
def frequencies(
    head_dim: int,
    theta: float = 10000,
    factor: float | None = None,
    low: float = 1,
    high: float = 4,
    original: int = 8192,
) -> tuple[Fraction, ...]:
    """Turns per position of each pair, to more than forty digits: ``theta**(-2j/head_dim) / (2*pi)``.

    ``factor`` (with ``low``, ``high``, ``original``) is Llama 3's scaling: a pair that turns more than ``high`` times
    over the ``original`` context is kept, one below ``low`` turns is slowed down by ``factor``, and those between are
    blended. Decimal arithmetic is the same on every machine.
    """
    found = []
    exponent = _DECIMAL.ln(Decimal(theta))
    for j in range(head_dim // 2):
        power = _DECIMAL.divide(_DECIMAL.multiply(Decimal(2 * j), exponent), Decimal(head_dim))
        radians = _DECIMAL.exp(-power)
        turns = Fraction(_DECIMAL.divide(radians, _DECIMAL.multiply(2, PI)))
        if factor is not None:
            kept = (original * turns - Fraction(low)) / (Fraction(high) - Fraction(low))
            kept = min(max(kept, Fraction(0)), Fraction(1))
            turns *= kept + (1 - kept) / Fraction(factor)
        found.append(turns)
    return tuple(found)


@lru_cache(maxsize=8)
def _cosine_sine(count: int, full: int) -> tuple[tuple[Fraction, Fraction], ...]:
    """cos and sin of ``k / full`` of a turn for k < count, to about 45 digits, by their power series."""

    def series(x: Decimal, first: int) -> Decimal:
        term, total, n = (Decimal(1) if first == 0 else x), Decimal(0), first
        while abs(term) > Decimal("1e-60"):
            total = _WIDE.add(total, term)
            term = _WIDE.divide(_WIDE.multiply(term, -_WIDE.multiply(x, x)), Decimal((n + 1) * (n + 2)))
            n += 2
        return total

    found = []
    for k in range(count):
        x = _WIDE.divide(_WIDE.multiply(Decimal(2 * k), PI), Decimal(full))
        found.append((Fraction(series(x, 0)), Fraction(series(x, 1))))
    return tuple(found)


def _nearest(x: Fraction) -> int:
    return (2 * x.numerator + x.denominator) // (2 * x.denominator)


@dataclass(frozen=True)
class RopeConfig(UnitConfig):
    """Configuration of the rotary unit.

    Input: one head per row; pair j as lo (element j) and hi (element j + head_dim/2), signed ``data_bits``; the row's
    position, unsigned ``position_bits``. Output: lo and hi, signed ``out_bits``, on the same scale. A row may hold
    fewer pairs than the head has (they are the first ones), never more.
    Rounding: half up once per output, then saturation; the phase is cut to ``angle_bits`` by definition.
    """

    lanes: int = integer(8, 1, 64, "pairs per beat")
    head_dim: int = integer(128, 8, 256, "elements of a head, even")
    data_bits: int = integer(16, 4, 18, "width of the elements")
    out_bits: int = integer(16, 4, 20, "width of the turned elements")
    position_bits: int = integer(18, 1, 20, "width of the position")
    phase_bits: int = integer(36, 8, 40, "fraction bits of a turn in the steps")
    angle_bits: int = integer(19, 6, 24, "fraction bits of a turn that cosine and sine are taken of")
    segment_bits: int = integer(6, 1, 6, "log2 of the number of chords over an octant")
    trig_bits: int = integer(16, 6, 18, "width of cosine and sine, of which two bits are sign and 1.0")
    frozen: bool = flag(False, "the steps are constants; otherwise they are written through the table stream")
    scaling: str = choice("none", ("none", "llama3"), "frozen: Llama 3's scaling (8, 1 to 4 turns over 8192)")
    theta: int = integer(10000, 2, 100_000_000, "frozen: base of the frequencies")

    def validate(self) -> None:
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if self.angle_bits > self.phase_bits:
            raise ValueError(f"angle_bits must be at most phase_bits = {self.phase_bits}, not {self.angle_bits}")
        if self.segment_bits > self.angle_bits - 4:
            raise ValueError(f"segment_bits must lie in 1..{self.angle_bits - 4}, not {self.segment_bits}")

    @cached_property
    def pairs(self) -> int:
        return self.head_dim // 2

    @property
    def beats(self) -> int:
        """Beats of a whole head."""
        return -(-self.pairs // self.lanes)

    @cached_property
    def fraction_bits(self) -> int:
        """Fraction bits of cosine and sine."""
        return self.trig_bits - 2

    @property
    def rest_bits(self) -> int:
        """Bits of the angle within a chord."""
        return self.angle_bits - 3 - self.segment_bits

    @cached_property
    def sum_bits(self) -> int:
        """Signed width of ``lo*c - hi*s``: each product is at most ``2**(data_bits - 1 + fraction_bits)``."""
        return self.data_bits + self.fraction_bits + 1

    def step_table(
        self,
        theta: float,
        factor: float | None = None,
        low: float = 1,
        high: float = 4,
        original: int = 8192,
    ) -> tuple[int, ...]:
        """Steps of all pairs for a model, each within half a unit of ``frequency / (2*pi) * 2**phase_bits``."""
        turns = frequencies(self.head_dim, theta, factor, low, high, original)
        return tuple(_nearest(f * (1 << self.phase_bits)) for f in turns)

    @cached_property
    def frozen_steps(self) -> tuple[int, ...]:
        """Steps of a unit whose frequencies are constants."""
        return self.step_table(self.theta, 8 if self.scaling == "llama3" else None)

    @property
    def table_bits(self) -> dict[str, int]:
        """Size in bits of the steps, of the chords, and of the naive table of every position's cosines and sines."""
        (cosine, cosine_slope), (sine, sine_slope) = self.chords
        chord = sum(max(t).bit_length() for t in (cosine, cosine_slope, sine, sine_slope))
        return {
            "steps": self.pairs * self.phase_bits,
            "chords": chord << self.segment_bits,
            "naive": self.pairs * 2 * self.trig_bits << self.position_bits,
        }

    @cached_property
    def chords(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """((start of each chord, what it loses over its width) of the cosine, (start, what it gains) of the sine) over
        an octant, with ``fraction_bits + GUARD_BITS`` fraction bits. A start is the value at the middle of the chord's
        first angle."""
        steps = 1 << self.segment_bits
        one = 1 << (self.fraction_bits + GUARD_BITS)
        # Half of what a chord of width h leaves between itself and a curve f: h*h/8 * |f''| / 2, f'' = -f.
        width = Fraction(PI) / 4 / steps
        lift = 1 + width * width / 16
        ends = _cosine_sine(steps + 1, 8 * steps)
        tables = []
        for which in (0, 1):
            sign = -1 if which == 0 else 1
            exact = [point[which] * (lift if k else 1) * one for k, point in enumerate(ends)]
            slope = [b - a for a, b in pairwise(exact)]
            middle = [a + s / (2 << self.rest_bits) for a, s in zip(exact, slope, strict=False)]
            tables.append((tuple(map(_nearest, middle)), tuple(_nearest(sign * s) for s in slope)))
        return tuple(tables)


def phase(config: RopeConfig, position: ArrayLike, steps: ArrayLike) -> Int:
    """``(position * step) mod 2**phase_bits``: a fraction of a turn. The arguments broadcast."""
    position = check("position", position, config.position_bits, signed=False)
    steps = check("steps", steps, config.phase_bits, signed=False)
    product = check("product", position * steps, config.position_bits + config.phase_bits, signed=False)
    return product & ((1 << config.phase_bits) - 1)


def cosine_sine(config: RopeConfig, turn: ArrayLike) -> tuple[Int, Int]:
    """Cosine and sine of a phase: signed ``trig_bits`` with ``fraction_bits`` fraction bits, at most 1.0 each."""
    turn = check("turn", turn, config.phase_bits, signed=False)
    angle = turn >> (config.phase_bits - config.angle_bits)
    octant, inside = angle >> (config.angle_bits - 3), angle & ((1 << (config.angle_bits - 3)) - 1)
    # Odd octants run backwards; the mirror image of the middle of an angle is the middle of its complement.
    inside = np.where(octant & 1, inside ^ ((1 << (config.angle_bits - 3)) - 1), inside)
    address, rest = inside >> config.rest_bits, inside & ((1 << config.rest_bits) - 1)
    values = []
    for (start, slope), sign in zip(config.chords, (-1, 1), strict=True):
        base = np.array(start, dtype=np.int64)[address]
        product = np.array(slope, dtype=np.int64)[address] * rest
        value = round_shift((base << config.rest_bits) + sign * product, config.rest_bits + GUARD_BITS)
        values.append(check("value", np.minimum(value, 1 << config.fraction_bits), config.trig_bits - 1, signed=False))
    cosine, sine = values
    # Octants 1, 2, 5 and 6 lie nearer to the other axis.
    exchange = ((octant + 1) & 2) != 0
    cosine, sine = np.where(exchange, sine, cosine), np.where(exchange, cosine, sine)
    cosine = np.where((octant >= 2) & (octant <= 5), -cosine, cosine)
    sine = np.where(octant >= 4, -sine, sine)
    return check("cosine", cosine, config.trig_bits), check("sine", sine, config.trig_bits)


def rope(
    config: RopeConfig,
    lo: ArrayLike,
    hi: ArrayLike,
    position: ArrayLike,
    steps: Sequence[int] | Int | None = None,
) -> tuple[Int, Int]:
    """The unit's golden function: pairs ``(..., n)`` with ``n <= head_dim/2``, turned to positions ``(...)``.

    Parameters
    ----------
    lo, hi : int arrays (..., n), signed ``data_bits``
    position : int array (...), unsigned ``position_bits``
    steps : int array (head_dim/2,), unsigned ``phase_bits``; None when frozen

    Returns
    -------
    lo, hi : int64 arrays of the same shape, signed ``out_bits``.

    Raises TypeError for arrays that do not hold integers, OverflowError for values outside their width.
    """
    lo, hi = check("lo", lo, config.data_bits), check("hi", hi, config.data_bits)
    table = _steps(config, steps)
    if not 1 <= lo.shape[-1] <= config.pairs or lo.shape != hi.shape:
        raise ValueError(f"lo and hi must both hold 1 to {config.pairs} pairs, not {lo.shape} and {hi.shape}")
    turned = _turn(config, np.stack((lo, hi), axis=-2), position, table)
    return turned[..., 0, :], turned[..., 1, :]


def _steps(config: RopeConfig, steps: Sequence[int] | Int | None) -> Int:
    """The steps of all pairs, checked for their number."""
    if config.frozen != (steps is None):
        raise ValueError("steps are needed without frozen, and only then")
    table = as_int("steps", config.frozen_steps if steps is None else steps)
    if table.shape != (config.pairs,):
        raise ValueError(f"steps must hold {config.pairs} values, not {table.shape}")
    return table


@lru_cache(maxsize=2)
def _turns(config: RopeConfig, position: bytes, shape: tuple[int, ...], steps: bytes) -> tuple[Int, Int]:
    """What lo and hi (…, 2, n) are multiplied with, and what the other of them is: ``(c, c)`` and ``(-s, s)``.

    All heads of all layers turn by the same angles; the arrays come as bytes, so that they can be looked up."""
    positions = np.frombuffer(position, np.int64).reshape(shape)[..., None]
    cosine, sine = cosine_sine(config, phase(config, positions, np.frombuffer(steps, np.int64)))
    own, other = cosine[..., None, :], np.stack((-sine, sine), axis=-2)
    own.setflags(write=False)
    other.setflags(write=False)
    return own, other


def _turn(config: RopeConfig, x: Int, position: ArrayLike, steps: Int) -> Int:
    """Pairs (…, 2, n), lo and hi, turned."""
    position = as_int("position", position)
    own, other = _turns(config, position.tobytes(), position.shape, steps[: x.shape[-1]].tobytes())
    total = x * own
    total += x[..., ::-1, :] * other
    return saturate(round_shift(check("sum", total, config.sum_bits), config.fraction_bits), config.out_bits)


def rotate(config: RopeConfig, x: ArrayLike, position: ArrayLike, steps: Sequence[int] | Int | None = None) -> Int:
    """:func:`rope` on whole head vectors ``(..., head_dim)``: splits them into halves and joins the results."""
    x = as_int("x", x)
    if x.ndim == 0 or x.shape[-1] != config.head_dim:
        raise ValueError(f"x must hold heads of {config.head_dim} elements, not an array of shape {x.shape}")
    if x.size and largest(x) >> (config.data_bits - 1):
        check("lo", x[..., : config.pairs], config.data_bits), check("hi", x[..., config.pairs :], config.data_bits)
    pairs = x.reshape(*x.shape[:-1], 2, config.pairs)
    return _turn(config, pairs, position, _steps(config, steps)).reshape(x.shape)
