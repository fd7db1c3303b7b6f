"""Requantisation: wide integers to narrow ones, in three forms chosen by the configuration.

``token``
    Signed ``in_bits`` to ``out_bits`` (INT32 to token-wise INT16) with one power of two per row:
    ``e = max(0, w - out_bits)`` with w the width of the smallest two's complement word that holds the whole row,
    ``q = sat(rs(x, e))``, ``x ~ q * 2**e``. Rows that fit already pass unchanged (e = 0, there is no left shift).
    A row whose smallest value is ``-2**(out_bits-1)`` fits; only rounding up at the very top saturates.
``group``
    Signed ``in_bits`` to ``out_bits`` (INT32 to INT8) with one scale ``c * 2**e`` per group of ``group`` elements,
    c in {4, 5, 6, 7}: the finest such scale, not below 1, at which the largest magnitude of the group fits
    ``+-(2**(out_bits-1) - 1)``; ``q = floor(x / (c * 2**e) + 1/2)``, ``x ~ q * c * 2**e``. A bit length and five
    comparators find the scale. The quotient is exact: the error is never above half a step, nothing saturates.
``static``
    ``q = sat(rs(x * multiplier, shift))``, multiplier and shift given with each row (dyadic requantisation).

The group form's quotient needs no wide product: with ``s = e + 2``, floors nest, so that
``q = (floor(floor(8x / 2**s) + c) / 2) // c`` acts on ``out_bits + 4`` bits whatever ``in_bits`` is.

Source: *LLM Inference in a Flash* section 3.1.3 (token-wise INT16, group-wise INT8, dyadic multiplier).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, integer
from golden.fixedpoint import Int, bit_length, bounds, check, round_shift, saturate


@dataclass(frozen=True)
class RequantizeConfig(UnitConfig):
    """Configuration of the requantiser.

    Input: x, signed ``in_bits``. Output: q, signed ``out_bits``, and per block of the row (token, group) its scale.
    Rounding: half up (towards plus infinity). Saturation: token at the top only, group never, static on both sides.

    Raises
    ------
    ValueError
        Beside the range of each field: ``out_bits`` not below ``in_bits`` (token, group), ``group`` or ``max_row``
        that do not divide into whole beats.
    """

    lanes: int = integer(8, 1, 64, "elements per beat")
    form: str = choice("group", ("token", "group", "static"), "kind of scale")
    in_bits: int = integer(32, 8, 40, "width of x")
    out_bits: int = integer(8, 4, 32, "width of q")
    group: int = integer(128, 1, 1024, "group: elements that share a scale, a multiple of lanes")
    max_row: int = integer(4096, 1, 1 << 18, "token: elements that can share a scale, a multiple of lanes")
    multiplier_bits: int = integer(8, 1, 16, "static: width of the unsigned multiplier")
    max_shift: int = integer(31, 0, 62, "static: largest shift")

    def validate(self) -> None:
        if self.form == "static":
            return
        if self.out_bits >= self.in_bits:
            raise ValueError(f"out_bits must be below in_bits = {self.in_bits}, not {self.out_bits}")
        name = "group" if self.form == "group" else "max_row"
        if self.block % self.lanes:
            raise ValueError(f"{name} must be a multiple of lanes = {self.lanes}, not {self.block}")

    @property
    def block(self) -> int:
        """Elements that share a scale (token and group form). A longer row gets a new scale every ``block``."""
        return self.group if self.form == "group" else self.max_row

    @property
    def block_beats(self) -> int:
        return self.block // self.lanes

    @property
    def limit(self) -> int:
        """Largest magnitude of q in the group form."""
        return (1 << (self.out_bits - 1)) - 1

    @property
    def largest_shift(self) -> int:
        """Largest shift s of x: token ``e = s``, group ``e = s - 2``."""
        return self.max_shift if self.form == "static" else self.in_bits - self.out_bits

    @property
    def shift_bits(self) -> int:
        return max(1, self.largest_shift.bit_length())

    @property
    def exponent_bits(self) -> int:
        """Width of e: unsigned in the token form, signed in the group form."""
        return self.shift_bits if self.form == "token" else max(2, (self.largest_shift - 2).bit_length() + 1)

    @property
    def product_bits(self) -> int:
        """static: width of the signed product."""
        return self.in_bits + self.multiplier_bits

    @property
    def eighths_bits(self) -> int:
        """group: width of ``floor(8x / 2**s)``, at most ``14 * limit`` in magnitude."""
        return self.out_bits + 4

    @property
    def halves_bits(self) -> int:
        """group: width of ``floor((eighths + c) / 2)``."""
        return self.out_bits + 3


class Requantized(NamedTuple):
    """Result of :func:`requantize`: q (…, n), and per block of the row e and c, each (…, blocks) or None where the
    form has none. ``x ~ q * c * 2**e``."""

    q: Int
    e: Int | None = None
    c: Int | None = None


def per_element(config: RequantizeConfig, values: ArrayLike, n: int) -> Int:
    """Spread values per block, (…, blocks), over the n elements of their row: (…, n)."""
    return np.repeat(np.asarray(values, np.int64), config.block, axis=-1)[..., :n]


def requantize(
    config: RequantizeConfig,
    x: ArrayLike,
    keep: ArrayLike | None = None,
    multiplier: ArrayLike | None = None,
    shift: ArrayLike | None = None,
) -> Requantized:
    """Requantise rows (…, n), each on its own.

    Parameters
    ----------
    x : int array (…, n), signed ``in_bits``
    keep : bool array (…, n), optional
        Elements that count; q is 0 elsewhere. All by default.
    multiplier, shift : int arrays (…), needed (and only allowed) in the static form
        One per row: unsigned ``multiplier_bits``, and 0 to ``max_shift``.
    """
    x = check("x", x, config.in_bits)
    if x.ndim == 0:
        raise ValueError("x must be rows, not a single number")
    if keep is not None:
        x = np.where(keep, x, 0)
    if (config.form == "static") != (multiplier is not None) or (config.form == "static") != (shift is not None):
        raise ValueError("multiplier and shift are needed in the static form, and only there")
    if multiplier is not None and shift is not None:
        return Requantized(_static(config, x, multiplier, shift))
    return _token(config, x) if config.form == "token" else _group(config, x)


def _static(config: RequantizeConfig, x: Int, multiplier: ArrayLike, shift: ArrayLike) -> Int:
    multiplier = check("multiplier", multiplier, config.multiplier_bits, signed=False)[..., None]
    shift = check("shift", shift, config.shift_bits, signed=False)[..., None]
    if shift.size and int(shift.max()) > config.max_shift:
        raise ValueError(f"shift must lie in 0..{config.max_shift}, not {int(shift.max())}")
    product = check("product", x * multiplier, config.product_bits)
    return saturate(round_shift(product, shift), config.out_bits)


def _blocks(config: RequantizeConfig, x: Int) -> Int:
    """Rows cut into blocks, (…, blocks, block); what is missing at the end is 0."""
    blocks = -(-x.shape[-1] // config.block)
    padded = np.zeros((*x.shape[:-1], blocks * config.block), np.int64)
    padded[..., : x.shape[-1]] = x
    return padded.reshape(*x.shape[:-1], blocks, config.block)


def _token(config: RequantizeConfig, x: Int) -> Requantized:
    # x ^ (x >> 63) is the magnitude less one for x < 0: its bit length is the word's width without the sign.
    spread = check("spread", x ^ (x >> 63), config.in_bits - 1, signed=False)
    widest = np.bitwise_or.reduce(_blocks(config, spread), axis=-1)
    e = check("e", bit_length(widest >> (config.out_bits - 1)), config.exponent_bits, signed=False)
    rounded = round_shift(x, per_element(config, e, x.shape[-1]))
    # Only 2**(out_bits-1) itself can be out of range.
    rounded = check("rounded", rounded, config.out_bits + 1)
    return Requantized(np.minimum(rounded, bounds(config.out_bits)[1]), e)


def scale(config: RequantizeConfig, largest: ArrayLike) -> tuple[Int, Int]:
    """Scale ``c * 2**e`` of groups whose largest magnitude is ``largest``: (e, c)."""
    largest = check("largest", largest, config.in_bits, signed=False)
    s = bit_length(largest >> config.out_bits)
    # limit * k * 2**(s-2) < largest: a scale of k * 2**e is too fine.
    quarters = 4 * largest
    c = 4 + sum((config.limit * k << s) < quarters for k in (4, 5, 6, 7))
    coarser = c == 8
    c = np.where(coarser, 4 + ((config.limit * 8 << s) < quarters), c)
    s = check("s", s + coarser, config.shift_bits, signed=False)
    return check("e", s - 2, config.exponent_bits), c


def _group(config: RequantizeConfig, x: Int) -> Requantized:
    e, c = scale(config, np.abs(_blocks(config, x)).max(axis=-1))
    n = x.shape[-1]
    s, divisor = per_element(config, e, n) + 2, per_element(config, c, n)
    eighths = check("eighths", (8 * x) >> s, config.eighths_bits)
    halves = check("halves", (eighths + divisor) >> 1, config.halves_bits)
    # Made non-negative, so that the hardware's division has no sign: an offset of 2**(out_bits-1) in q.
    dividend = check("dividend", halves + (divisor << (config.out_bits - 1)), config.halves_bits, signed=False)
    q = check("q", dividend // divisor - (1 << (config.out_bits - 1)), config.out_bits)
    return Requantized(q, e, c)
