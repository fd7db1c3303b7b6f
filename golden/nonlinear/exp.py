"""Integer exponential of a non-positive argument: ``e = exp(-t * scale)`` for unsigned ``t``.

Three forms behind one interface, chosen by the configuration:

``base2``
    ``2**(-t / 2**fraction_bits)``: the integer part of the exponent is a shift, the fraction goes through a small ROM
    with linear interpolation (or the ROM alone). The scale is static and costs nothing.
``ibert``
    The second-order polynomial of *LLM Inference in a Flash* section 3.1.3 (I-BERT): range reduction by ln 2, then
    ``0.3585 * (p + 1.353)**2 + 0.344`` in integers. The scale is frozen, or given with each row at run time; the
    row's constants then include the input shift that keeps the polynomial below 2**31 (the paper's overflow guard).
``table``
    One table over the whole input: the cheapest form below about ten bits.

All of them first give a *split* value ``mantissa * 2**-exponent``, from which softmax rescales by pure shifts.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import ceil, floor, isqrt

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, check, round_shift

#: ``exp(p) ~ A * (p + B)**2 + C`` on (-ln 2, 0] (I-BERT, equation 12), and ln 2 to forty digits.
POLY_A, POLY_B, POLY_C = Fraction("0.3585"), Fraction("1.353"), Fraction("0.344")
LN2 = Fraction("0.6931471805599453094172321214581765680755")
#: Width of the polynomial's value: the paper's INT32.
POLY_BITS = 31
#: Functions of an argument of up to this many bits are computed once for every argument, and looked up from then on.
TABULATED_BITS = 16


def power_of_half(exponent: Fraction, bits: int) -> int:
    """``round(2**(bits - exponent))`` for a non-negative exponent with a power of two as denominator, from exact
    integer square roots: the same on every machine."""
    whole, rest = divmod(exponent.numerator, exponent.denominator)
    guard = 64
    result = 1 << (bits + guard)
    # factor runs through 2**(-1/2), 2**(-1/4), …, one for each bit of the fraction.
    factor, weight = isqrt(1 << (2 * guard - 1)), exponent.denominator >> 1
    while weight:
        if rest & weight:
            result = (result * factor) >> guard
        factor, weight = isqrt(factor << guard), weight >> 1
    return ((result >> whole) + (1 << (guard - 1))) >> guard


@dataclass(frozen=True)
class IbertConstants:
    """Integers of the polynomial for one scale (one row, at run time). ``t' = rs(t, in_shift)``;
    ``z = t' // ln2``; ``r = t' - z * ln2``; ``mantissa = rs((b - r)**2 + c, out_shift)``.

    ``reciprocal`` and ``ln2_bits`` make the division exact by one multiplication:
    ``t' // ln2 == (t' * reciprocal) >> (in_bits + ln2_bits)`` for every ``t'`` of ``in_bits``.
    """

    in_shift: int
    ln2: int
    ln2_bits: int
    reciprocal: int
    b: int
    c: int
    out_shift: int


@dataclass(frozen=True)
class ExpConfig(UnitConfig):
    """Configuration of the exponential unit.

    Input: ``t``, unsigned ``in_bits``. Output: ``e``, unsigned ``out_bits``; ``e(0) = one``.
    Rounding: half up at the ROM, the interpolation product and the final shift; ``t // ln2`` floors by definition.
    """

    lanes: int = integer(8, 1, 128, "elements per beat")
    form: str = choice("base2", ("base2", "ibert", "table"), "algorithm")
    in_bits: int = integer(16, 2, 24, "width of t")
    out_bits: int = integer(16, 4, 24, "width of e")
    fraction_bits: int = integer(10, 0, 20, "base2 and table: fraction bits of t")
    rom_bits: int = integer(4, 1, 10, "base2: address bits of the ROM over the fraction")
    interpolate: bool = flag(True, "base2: interpolate between ROM entries")
    scale_log2: int = integer(8, 1, 24, "ibert: the scale is 2**-scale_log2 (when it is frozen)")
    run_time_scale: bool = flag(False, "ibert: the polynomial's constants travel with the row")

    def validate(self) -> None:
        if self.form != "ibert" and self.fraction_bits > self.in_bits:
            raise ValueError(f"fraction_bits must be at most in_bits = {self.in_bits}, not {self.fraction_bits}")
        if self.form == "table" and self.in_bits > 12:
            raise ValueError(f"in_bits must lie in 2..12 for the table form, not {self.in_bits}")
        if self.run_time_scale and self.form != "ibert":
            raise ValueError(f"run_time_scale needs the ibert form, not {self.form}")

    # -- base2 -------------------------------------------------------------------------------------------------------
    @property
    def rom_address_bits(self) -> int:
        """Address bits of the ROM: never more than there are fraction bits."""
        return min(self.rom_bits, self.fraction_bits)

    @cached_property
    def rest_bits(self) -> int:
        """Fraction bits below the ROM address."""
        return self.fraction_bits - self.rom_address_bits

    @property
    def interpolates(self) -> bool:
        return self.interpolate and self.rest_bits > 0

    @cached_property
    def rom(self) -> tuple[int, ...]:
        """Mantissas at the ROM's addresses (in the middle of each step where the rest is dropped)."""
        steps = 1 << self.rom_address_bits
        offset = Fraction(1, 2) if self.rest_bits and not self.interpolate else Fraction(0)
        return tuple(power_of_half((k + offset) / steps, self.out_bits - 1) for k in range(steps))

    @cached_property
    def slopes(self) -> tuple[int, ...]:
        """What the mantissa loses over each ROM step."""
        ends = (*self.rom[1:], 1 << (self.out_bits - 2))
        return tuple(a - b for a, b in zip(self.rom, ends))

    @property
    def slope_bits(self) -> int:
        return max(1, max(self.slopes).bit_length())

    @cached_property
    def table(self) -> tuple[int, ...]:
        """Table form: e for every t."""
        one = self.out_bits - 1
        return tuple(power_of_half(Fraction(t, 1 << self.fraction_bits), one) for t in range(1 << self.in_bits))

    # -- ibert -------------------------------------------------------------------------------------------------------
    def constants(self, scale: Fraction) -> IbertConstants:
        """The polynomial's integers for ``scale`` (what the controller computes once per row).

        Raises ValueError if the scale is not in (0, ln 2]: then ``floor(ln 2 / scale)`` is 0 and nothing remains
        of the range reduction (the paper's naive INT8 softmax dies of this).
        """
        scale = Fraction(scale)
        if not 0 < scale <= LN2:
            raise ValueError(f"the scale of the ibert form must lie in (0, ln 2], not {float(scale):g}")
        in_shift = 0
        while True:
            b, c = floor(POLY_B / scale), floor(POLY_C / (POLY_A * scale * scale))
            if b * b + c < 1 << POLY_BITS:
                break
            in_shift, scale = in_shift + 1, scale * 2
        ln2 = floor(LN2 / scale)
        ln2_bits = (ln2 - 1).bit_length()
        reciprocal = ceil(Fraction(1 << (self.in_bits + ln2_bits), ln2))
        return IbertConstants(
            in_shift=in_shift,
            ln2=ln2,
            ln2_bits=ln2_bits,
            reciprocal=reciprocal,
            b=b,
            c=c,
            out_shift=max(0, (b * b + c).bit_length() - self.out_bits),
        )

    @cached_property
    def frozen(self) -> IbertConstants:
        """Constants of the frozen scale."""
        return self.constants(Fraction(1, 1 << self.scale_log2))

    @property
    def constant_bits(self) -> dict[str, int]:
        """Width of each run-time constant (all unsigned)."""
        largest = self.constants(Fraction(1, 1 << 15))  # guarded: the finest scale that the polynomial sees
        ln2 = largest.ln2.bit_length() + 1
        return {
            "in_shift": 4,
            "ln2": ln2,
            "ln2_bits": ln2.bit_length(),
            "reciprocal": self.in_bits + 1,
            "b": largest.b.bit_length() + 1,
            "c": POLY_BITS,
            "out_shift": POLY_BITS.bit_length(),
        }

    # -- common ------------------------------------------------------------------------------------------------------
    @property
    def one(self) -> int:
        """e(0) of a frozen scale: the integer that stands for 1.0 (of the ROM without interpolation: nominal)."""
        if self.form == "ibert":
            k = self.frozen
            return int(round_shift(k.b * k.b + k.c, k.out_shift))
        return 1 << (self.out_bits - 1)

    @cached_property
    def exponent_bits(self) -> int:
        """Width of the split value's exponent."""
        if self.form == "base2":
            return max(1, self.in_bits - self.fraction_bits)
        if self.form == "ibert" and not self.run_time_scale:
            return max(1, (((1 << self.in_bits) - 1) // self.frozen.ln2).bit_length())
        return self.in_bits

    @property
    def tail_bits(self) -> int:
        """ibert, frozen: from ``t = 2**tail_bits`` on, e is 0 (the exponent shifts everything out)."""
        return (self.frozen.ln2 * (self.out_bits + 2) - 1).bit_length() + self.frozen.in_shift

    @property
    def scale(self) -> Fraction:
        """For tests and documents: the argument that one step of t stands for, as a power of e (ibert) or 2."""
        if self.form == "ibert":
            return Fraction(1, 1 << self.scale_log2)
        return Fraction(1, 1 << self.fraction_bits)


def split(config: ExpConfig, t: ArrayLike, constants: IbertConstants | None = None) -> tuple[Int, Int]:
    """``exp(-t * scale) ~ mantissa * 2**-exponent``.

    Parameters
    ----------
    t : int array, unsigned ``in_bits``
    constants : IbertConstants, needed (and only allowed) with ``run_time_scale``

    Returns
    -------
    mantissa : unsigned ``out_bits``; exponent : unsigned ``exponent_bits``.
    """
    t = check("t", t, config.in_bits, signed=False)
    if config.run_time_scale != (constants is not None):
        raise ValueError("constants are needed with run_time_scale, and only then")
    if config.form == "table":
        raise ValueError("the table form has no mantissa and exponent")
    if config.form == "base2":
        fraction = t & ((1 << config.fraction_bits) - 1)
        tabulated = config.fraction_bits <= TABULATED_BITS
        mantissa = _mantissas(config)[fraction] if tabulated else _mantissa(config, fraction)
        return mantissa, t >> config.fraction_bits
    k = constants or config.frozen
    shifted = check("shifted", round_shift(t, k.in_shift), config.in_bits, signed=False)
    exponent = shifted // k.ln2
    rest = shifted - exponent * k.ln2
    polynomial = check("polynomial", (k.b - rest) ** 2 + k.c, POLY_BITS, signed=False)
    mantissa = round_shift(polynomial, k.out_shift)
    # Rounding may carry out of the word at the very top: 2**out_bits - 1 is as close.
    mantissa = np.minimum(mantissa, (1 << config.out_bits) - 1)
    return mantissa, check("exponent", exponent, config.exponent_bits, signed=False)


def _mantissa(config: ExpConfig, fraction: Int) -> Int:
    """base2: ``2**-(fraction / 2**fraction_bits)``, with one bit before the point."""
    address = fraction >> config.rest_bits
    mantissa = np.array(config.rom, dtype=np.int64)[address]
    if config.interpolates:
        rest = fraction & ((1 << config.rest_bits) - 1)
        product = rest * np.array(config.slopes, dtype=np.int64)[address]
        product = check("product", product, config.rest_bits + config.slope_bits, signed=False)
        mantissa = mantissa - round_shift(product, config.rest_bits)
    return check("mantissa", mantissa, config.out_bits, signed=False)


@lru_cache(maxsize=32)
def _mantissas(config: ExpConfig) -> Int:
    """:func:`_mantissa` of every fraction; its widths are thereby proven for all of them."""
    table = _mantissa(config, np.arange(1 << config.fraction_bits))
    table.setflags(write=False)
    return table


def exp(config: ExpConfig, t: ArrayLike, constants: IbertConstants | None = None) -> Int:
    """``e = rs(mantissa, exponent)``: unsigned ``out_bits``, non-increasing in ``t``, 0 in the far tail."""
    if config.form == "table":
        t = check("t", t, config.in_bits, signed=False)
        return np.array(config.table, dtype=np.int64)[t]
    mantissa, exponent = split(config, t, constants)
    return round_shift(mantissa, exponent)
