"""Integer SiLU, and SwiGLU's product with the up projection in the same pass.

``y = sat(rs(silu(x) * up, out_shift))`` with ``silu(x) = rs(x * sigma(x), sigma_bits)``; x is the gate, whose real
value is ``x * 2**-gate_fraction_bits`` (or ``x * scale`` with a scale per row).

Everything rests on the falling half of the sigmoid, ``tau(|x|) = sigma(-|x|)``, a fraction of ``one = 2**sigma_bits``
between 0 and a half: ``sigma(x)`` is ``one - tau`` for x >= 0 and ``tau`` for x < 0, so that the two halves fit by
construction, the tails end in exactly 0 and 1, and sigma never falls. Because ``x * sigma(x) = relu(x) - |x| * tau``,

    ``silu = relu(x) - ((|x| * tau + one/2 - 1) >> sigma_bits)``

is the same integer as ``rs(x * sigma, sigma_bits)``, from one unsigned product that is half as large.

Four forms of tau, chosen by the configuration:

``base2``
    ``e = 2**-t`` by the exponential of :mod:`golden.nonlinear.exp` with ``t = rs(|x| * log2(e))`` (a 15-bit constant),
    then ``tau = e / (1 + e)``, a chord table over one octave: no divider.
``ibert``
    The same with the second-order polynomial of *LLM Inference in a Flash* section 3.1.3 (IntSiLU): ``t = |x|``, the
    scale frozen or given with each row.
``piecewise``
    tau itself as chords over [0, 8): no exponential at all.
``table``
    silu itself as a table, correctly rounded: the cheapest form for gates of up to about ten bits.

Largest error of sigma over every INT16 gate with 11 fraction bits: base2 1.1e-4, ibert 8.2e-4, piecewise 4.0e-4; of
silu 1.2, 2.3 and 5.7 steps of the gate (``tests/test_silu.py`` holds the bounds). sigma is monotone; silu, rounded to
steps of the gate, falls and rises as the exact one does to within one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, bounds, check, round_shift, saturate
from golden.nonlinear.exp import TABULATED_BITS, ExpConfig, IbertConstants, split

#: ``log2(e)`` as a 15-bit constant with 14 fraction bits.
LOG2E, LOG2E_FRACTION_BITS = 23637, 14
#: The piecewise form covers arguments below 2**RANGE_LOG2; tau is 0 from there on (3.4e-4 of one is given up).
RANGE_LOG2 = 3

# decimal's exp is correctly rounded: the tables are the same on every machine.
_DECIMAL = Context(prec=50)


def _falling_sigmoid(x: Fraction) -> Fraction:
    """``1 / (1 + exp(x))`` to 45 digits."""
    power = _DECIMAL.exp(_DECIMAL.divide(Decimal(x.numerator), Decimal(x.denominator)))
    return Fraction(_DECIMAL.divide(Decimal(1), _DECIMAL.add(Decimal(1), power)))


def _nearest(x: Fraction) -> int:
    return (2 * x.numerator + x.denominator) // (2 * x.denominator)


@dataclass(frozen=True)
class SiluConstants:
    """What one row of the ibert form needs when the scale comes at run time: the polynomial's constants, and the
    factor that brings ``e(0)`` to ``one``: ``rs(e * normalize, sigma_bits + 2)``."""

    exp: IbertConstants
    normalize: int


@dataclass(frozen=True)
class SiluConfig(UnitConfig):
    """Configuration of the SiLU unit.

    Input: gate, signed ``gate_bits``; up, signed ``up_bits`` (only with ``multiply``). Output: y, signed ``out_bits``.
    Rounding: half up at every narrowing shift (table and chord knots: to nearest), then saturation.
    """

    lanes: int = integer(8, 1, 64, "elements per beat")
    form: str = choice("base2", ("base2", "ibert", "piecewise", "table"), "algorithm")
    gate_bits: int = integer(16, 4, 18, "width of the gate")
    gate_fraction_bits: int = integer(11, 0, 20, "the gate's scale is 2**-gate_fraction_bits (when it is frozen)")
    multiply: bool = flag(True, "multiply by up; otherwise the unit gives SiLU alone")
    up_bits: int = integer(16, 2, 18, "width of up")
    out_bits: int = integer(32, 2, 36, "width of y")
    out_shift: int = integer(0, 0, 36, "fraction bits of silu * up that y drops")
    sigma_bits: int = integer(15, 4, 18, "fraction bits of sigma")
    exp_fraction_bits: int = integer(12, 0, 14, "base2: fraction bits of the exponent")
    rom_bits: int = integer(4, 1, 8, "base2: address bits of the exponential's ROM")
    reciprocal_bits: int = integer(6, 1, 8, "base2 and ibert: address bits of the table of e / (1 + e)")
    segment_bits: int = integer(5, 1, 8, "piecewise: log2 of the number of chords over [0, 8)")
    run_time_scale: bool = flag(False, "ibert: the constants of the gate's scale travel with the row")

    def validate(self) -> None:
        if self.form == "table" and self.gate_bits > 12:
            raise ValueError(f"gate_bits must lie in 4..12 for the table form, not {self.gate_bits}")
        if self.run_time_scale and self.form != "ibert":
            raise ValueError(f"run_time_scale needs the ibert form, not {self.form}")
        if self.out_shift >= self.product_bits:
            raise ValueError(f"out_shift must lie in 0..{self.product_bits - 1}, not {self.out_shift}")
        if self.form == "ibert" and not self.run_time_scale:
            if not self.gate_fraction_bits:
                raise ValueError("gate_fraction_bits must lie in 1..20 for the ibert form, not 0")
            self.constants(Fraction(1, 1 << self.gate_fraction_bits))

    # -- widths ------------------------------------------------------------------------------------------------------
    @property
    def one(self) -> int:
        """The integer that stands for sigma = 1."""
        return 1 << self.sigma_bits

    @property
    def loss_bits(self) -> int:
        """Unsigned width of ``|x| * tau >> sigma_bits``, at most ``2**(gate_bits - 2)``."""
        return self.gate_bits - 1

    @cached_property
    def product_bits(self) -> int:
        """Signed width of ``silu * up``: silu lies in ``-2**(gate_bits - 2) .. 2**(gate_bits - 1) - 1``."""
        return self.gate_bits + self.up_bits - 1 if self.multiply else self.gate_bits

    @cached_property
    def narrows(self) -> bool:
        """Whether y is shifted or may saturate."""
        return self.out_shift > 0 or self.product_bits > self.out_bits

    # -- base2 and ibert ---------------------------------------------------------------------------------------------
    @cached_property
    def exp(self) -> ExpConfig:
        """Configuration of the exponential lane. Its input reaches far enough for e to become 0."""
        if self.form == "base2":
            octave_bits = (self.sigma_bits + 1).bit_length()
            return ExpConfig(
                lanes=self.lanes,
                in_bits=self.exp_fraction_bits + octave_bits,
                out_bits=self.sigma_bits + 1,
                fraction_bits=self.exp_fraction_bits,
                rom_bits=self.rom_bits,
            )
        return ExpConfig(
            lanes=self.lanes,
            form="ibert",
            in_bits=self.gate_bits,
            out_bits=self.sigma_bits + 1,
            scale_log2=max(1, self.gate_fraction_bits),
            run_time_scale=self.run_time_scale,
        )

    @property
    def t_shift(self) -> int:
        """base2: fraction bits that ``|x| * LOG2E`` drops."""
        return LOG2E_FRACTION_BITS + self.gate_fraction_bits - self.exp_fraction_bits

    @property
    def normalize_shift(self) -> int:
        """ibert: fraction bits of ``normalize``, so many that e(0) becomes exactly ``one``."""
        return self.sigma_bits + 2

    @property
    def normalize_bits(self) -> int:
        """Width of ``normalize``, which is at most ``2**normalize_shift``."""
        return self.normalize_shift + 1

    def constants(self, scale: Fraction) -> SiluConstants:
        """ibert: the constants of a gate scale (what the controller computes once per row).

        Raises ValueError if the scale is not in (0, ln 2], or so coarse that the polynomial has fewer than
        ``sigma_bits`` bits.
        """
        k = self.exp.constants(scale)
        polynomial = k.b * k.b + k.c
        if polynomial.bit_length() <= self.sigma_bits:
            raise ValueError(
                f"sigma_bits must be at most {polynomial.bit_length() - 1} for the ibert form at scale "
                f"{float(scale):g}, not {self.sigma_bits}"
            )
        top = min(int(round_shift(polynomial, k.out_shift)), 2 * self.one - 1)
        return SiluConstants(k, _nearest(Fraction(self.one << self.normalize_shift, top)))

    @cached_property
    def frozen(self) -> SiluConstants:
        """ibert: the constants of the frozen scale."""
        return self.constants(Fraction(1, 1 << self.gate_fraction_bits))

    @property
    def reciprocal_address_bits(self) -> int:
        return min(self.reciprocal_bits, self.sigma_bits)

    @property
    def reciprocal_rest_bits(self) -> int:
        """Bits of e below the address of the chord table."""
        return self.sigma_bits - self.reciprocal_address_bits

    @cached_property
    def reciprocal_knots(self) -> tuple[int, ...]:
        """``u / (1 + u)`` at the chords' ends. Inner knots lie above the curve by half of what the chord lies below
        it, ``h*h/8 * f''/2``, which halves the largest error; the ends are exact (0 and a half)."""
        steps = 1 << self.reciprocal_address_bits
        knots = [0]
        for k in range(1, steps):
            u = Fraction(k, steps)
            lift = 2 / (1 + u) ** 3 / (16 * steps * steps)
            knots.append(_nearest(self.one * (u / (1 + u) + lift)))
        return (*knots, self.one >> 1)

    @property
    def reciprocal_slopes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in pairwise(self.reciprocal_knots))

    # -- piecewise ---------------------------------------------------------------------------------------------------
    @property
    def segment_address_bits(self) -> int:
        return min(self.segment_bits, self.gate_fraction_bits + RANGE_LOG2)

    @property
    def segment_rest_bits(self) -> int:
        """Bits of |x| below the number of its chord."""
        return self.gate_fraction_bits + RANGE_LOG2 - self.segment_address_bits

    @cached_property
    def segment_knots(self) -> tuple[int, ...]:
        """tau at the chords' ends, inner knots below the curve by half of what the chord lies above it; a half at 0,
        and 0 at 8."""
        steps = 1 << self.segment_address_bits
        width = Fraction(1 << RANGE_LOG2, steps)
        knots = [self.one >> 1]
        for k in range(1, steps):
            tau = _falling_sigmoid(k * width)
            curvature = tau * (1 - tau) * (1 - 2 * tau)
            knots.append(_nearest(self.one * (tau - width * width * curvature / 16)))
        return (*knots, 0)

    @property
    def segment_slopes(self) -> tuple[int, ...]:
        """What tau loses over each chord."""
        return tuple(a - b for a, b in pairwise(self.segment_knots))

    # -- table -------------------------------------------------------------------------------------------------------
    @cached_property
    def loss_table(self) -> tuple[int, ...]:
        """table: ``relu(x) - silu(x)`` for each ``|x|``, rounded to nearest (it is never half-way but at 0)."""
        found = []
        for magnitude in range((1 << (self.gate_bits - 1)) + 1):
            x = Fraction(magnitude, 1 << self.gate_fraction_bits)
            found.append(_nearest(magnitude * _falling_sigmoid(x)))
        return tuple(found)


def _chord(name: str, x: Int, knots: tuple[int, ...], rest_bits: int) -> Int:
    """Value at ``x`` of the chords through ``knots``, each ``2**rest_bits`` wide; the last knot for x at its end."""
    ends = np.array(knots, dtype=np.int64)
    base, slope = ends, np.append(np.diff(ends), 0)
    address, rest = x >> rest_bits, x & ((1 << rest_bits) - 1)
    slope_bits = max(1, int(np.abs(slope).max()).bit_length())
    # Falling chords subtract the rounded product: rounding is half up on its magnitude.
    product = check(f"{name} product", np.abs(slope)[address] * rest, slope_bits + rest_bits, signed=False)
    step = round_shift(product, rest_bits)
    return base[address] - step if ends[0] > ends[-1] else base[address] + step


def tau(config: SiluConfig, magnitude: ArrayLike, constants: SiluConstants | None = None) -> Int:
    """``one * sigma(-magnitude * scale)``: unsigned ``sigma_bits``, from ``one/2`` falling to 0, never rising.

    Parameters
    ----------
    magnitude : int array, ``0 .. 2**(gate_bits - 1)``
    constants : SiluConstants, needed (and only allowed) with ``run_time_scale``
    """
    magnitude = check("magnitude", magnitude, config.gate_bits, signed=False)
    if config.run_time_scale != (constants is not None):
        raise ValueError("constants are needed with run_time_scale, and only then")
    if config.form == "table":
        raise ValueError("the table form has no sigma")
    if config.form == "piecewise":
        rest_bits = config.segment_rest_bits
        inside = np.minimum(magnitude, 1 << (config.segment_address_bits + rest_bits))
        return check("tau", _chord("tau", inside, config.segment_knots, rest_bits), config.sigma_bits, signed=False)
    if config.form == "base2":
        argument = check("argument", magnitude * LOG2E, config.gate_bits + 15, signed=False)
        t = saturate(round_shift(argument, config.t_shift), config.exp.in_bits, signed=False)
        mantissa, exponent = split(config.exp, t)
    else:
        k = constants or config.frozen
        mantissa, exponent = split(config.exp, magnitude, k.exp if config.run_time_scale else None)
        scaled = check("scaled", mantissa * k.normalize, config.exp.out_bits + config.normalize_bits, signed=False)
        # The polynomial ends an octave slightly below the half at which the next begins; the floor keeps e monotone.
        mantissa = np.maximum(round_shift(scaled, config.normalize_shift), config.one >> 1)
        mantissa = np.minimum(mantissa, config.one)
    mantissa = check("mantissa", mantissa, config.exp.out_bits, signed=False)
    e = round_shift(mantissa, exponent)
    found = _chord("reciprocal", e, config.reciprocal_knots, config.reciprocal_rest_bits)
    return check("tau", found, config.sigma_bits, signed=False)


def sigmoid(config: SiluConfig, gate: ArrayLike, constants: SiluConstants | None = None) -> Int:
    """``sigma(gate * scale)`` as a fraction of ``one``: 0 .. one, never falling, exactly ``one/2`` at 0."""
    gate = check("gate", gate, config.gate_bits)
    half = tau(config, np.abs(gate), constants)
    return np.where(gate < 0, half, config.one - half)


def silu(config: SiluConfig, gate: ArrayLike, constants: SiluConstants | None = None) -> Int:
    """``rs(x * sigma(x), sigma_bits)`` on the gate's own scale: signed ``gate_bits``; 0 in the far negative tail, the
    gate itself in the far positive one."""
    gate = check("gate", gate, config.gate_bits)
    if constants is None and not config.run_time_scale and config.gate_bits <= TABULATED_BITS:
        return _silus(config)[gate]
    return _silu(config, gate, constants)


@lru_cache(maxsize=16)
def _silus(config: SiluConfig) -> Int:
    """:func:`silu` of every gate, those below 0 from the end; its widths are thereby proven for all of them."""
    low, high = bounds(config.gate_bits)
    table = _silu(config, np.concatenate((np.arange(high + 1), np.arange(low, 0))), None)
    table.setflags(write=False)
    return table


def _silu(config: SiluConfig, gate: Int, constants: SiluConstants | None) -> Int:
    magnitude = np.abs(gate)
    if config.form == "table":
        if constants is not None:
            raise ValueError("constants are needed with run_time_scale, and only then")
        loss = np.array(config.loss_table, dtype=np.int64)[magnitude]
    else:
        product = magnitude * tau(config, magnitude, constants)
        product = check("loss product", product, config.gate_bits + config.sigma_bits - 1, signed=False)
        loss = (product + (config.one >> 1) - 1) >> config.sigma_bits
    loss = check("loss", loss, config.loss_bits, signed=False)
    return check("silu", np.maximum(gate, 0) - loss, config.gate_bits)


def swiglu(
    config: SiluConfig, gate: ArrayLike, up: ArrayLike | None = None, constants: SiluConstants | None = None
) -> Int:
    """The unit's golden function: ``y = sat(rs(silu(gate) * up, out_shift))``, signed ``out_bits``.

    Parameters
    ----------
    gate : int array, signed ``gate_bits``
    up : int array of the same shape, signed ``up_bits``; None without ``multiply``
    constants : SiluConstants, needed (and only allowed) with ``run_time_scale``

    Raises TypeError for arrays that do not hold integers, OverflowError for values outside their width.
    """
    if config.multiply != (up is not None):
        raise ValueError("up is needed with multiply, and only then")
    product = silu(config, gate, constants)
    if up is not None:
        product = product * check("up", up, config.up_bits)
    if not config.narrows:
        return check("y", product, config.out_bits)
    product = check("product", product, config.product_bits)
    return saturate(round_shift(product, config.out_shift), config.out_bits)
