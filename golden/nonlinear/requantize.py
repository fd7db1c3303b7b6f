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
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, integer
from golden.fixedpoint import (
    Int,
    as_int,
    bit_length,
    bounds,
    check,
    extremes,
    round_shift,
    saturate,
    unsigned_top,
    within,
)


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
            self._prove_static()
            return
        if self.out_bits >= self.in_bits:
            raise ValueError(f"out_bits must be below in_bits = {self.in_bits}, not {self.out_bits}")
        name = "group" if self.form == "group" else "max_row"
        if self.block % self.lanes:
            raise ValueError(f"{name} must be a multiple of lanes = {self.lanes}, not {self.block}")
        if self.form == "token":
            self._prove_token()
        else:
            self._prove_group()

    # -- widths that hold whatever the data, proven when the configuration is made -------------------------------------
    def _prove_static(self) -> None:
        steepest = (1 << self.multiplier_bits) - 1
        low, high = bounds(self.in_bits)
        within("product", low * steepest, high * steepest, self.product_bits)

    def _prove_token(self) -> None:
        # e leaves out_bits - 1 bits of the widest element, and only rounding up at the very top leaves the range of q.
        top = bounds(self.out_bits)[1]
        within("e", 0, self.in_bits - 1 - (self.out_bits - 1), self.exponent_bits, signed=False)
        within("rounded", -top - 1, top + 1, self.out_bits + 1)

    def _prove_group(self) -> None:
        # The largest element of a group gives at most ``limit`` steps of c * 2**e, and c is at most 7.
        reach = 2 * 7 * self.limit
        within("eighths", -reach - 1, reach, self.eighths_bits)
        within("halves", -reach // 2 - 1, reach // 2 + 3, self.halves_bits)
        within("dividend", 0, reach // 2 + 3 + (7 << (self.out_bits - 1)), self.halves_bits, signed=False)

    @cached_property
    def block(self) -> int:
        """Elements that share a scale (token and group form). A longer row gets a new scale every ``block``."""
        return self.group if self.form == "group" else self.max_row

    @cached_property
    def block_beats(self) -> int:
        return self.block // self.lanes

    @cached_property
    def limit(self) -> int:
        """Largest magnitude of q in the group form."""
        return (1 << (self.out_bits - 1)) - 1

    @cached_property
    def largest_shift(self) -> int:
        """Largest shift s of x: token ``e = s``, group ``e = s - 2``."""
        return self.max_shift if self.form == "static" else self.in_bits - self.out_bits

    @cached_property
    def shift_bits(self) -> int:
        return max(1, self.largest_shift.bit_length())

    @cached_property
    def exponent_bits(self) -> int:
        """Width of e: unsigned in the token form, signed in the group form."""
        return self.shift_bits if self.form == "token" else max(2, (self.largest_shift - 2).bit_length() + 1)

    @cached_property
    def product_bits(self) -> int:
        """static: width of the signed product."""
        return self.in_bits + self.multiplier_bits

    @cached_property
    def eighths_bits(self) -> int:
        """group: width of ``floor(8x / 2**s)``, at most ``14 * limit`` in magnitude."""
        return self.out_bits + 4

    @cached_property
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
    x = as_int("x", x)
    if x.ndim == 0:
        raise ValueError("x must be rows, not a single number")
    if (config.form == "static") != (multiplier is not None) or (config.form == "static") != (shift is not None):
        raise ValueError("multiplier and shift are needed in the static form, and only there")
    if keep is not None:
        x = np.where(keep, check("x", x, config.in_bits), 0)
    if multiplier is not None and shift is not None:
        return Requantized(_static(config, x, multiplier, shift))
    return _token(config, x) if config.form == "token" else _group(config, x)


def _static(config: RequantizeConfig, x: Int, multiplier: ArrayLike, shift: ArrayLike) -> Int:
    x = check("x", x, config.in_bits)
    multiplier = check("multiplier", multiplier, config.multiplier_bits, signed=False)[..., None]
    shift = check("shift", shift, config.shift_bits, signed=False)[..., None]
    if shift.size and int(shift.max()) > config.max_shift:
        raise ValueError(f"shift must lie in 0..{config.max_shift}, not {int(shift.max())}")
    return saturate(round_shift(x * multiplier, shift), config.out_bits)


def _blocks(config: RequantizeConfig, x: Int) -> Int:
    """Rows cut into blocks, (…, blocks, block), a single one as short as the row; what is missing at the end of the
    last of several is 0. The same memory where it can be."""
    *rows, n = x.shape
    if 0 < n <= config.block:
        return x[..., None, :]
    blocks = -(-n // config.block)
    if n % config.block:
        padded = np.zeros((*rows, blocks * config.block), np.int64)
        padded[..., :n] = x
        x = padded
    return x.reshape(*rows, blocks, config.block)


def _rows(blocks: Int, n: int) -> Int:
    """Blocks joined to rows of n elements again."""
    *rows, count, block = blocks.shape
    joined = blocks.reshape(*rows, count * block)
    return joined if count * block == n else joined[..., :n]


def _token(config: RequantizeConfig, x: Int) -> Requantized:
    blocks = _blocks(config, x)
    # ~x is the magnitude less one of a negative x: its bit length is the word's width without the sign.
    widest = np.maximum(np.maximum.reduce(blocks, axis=-1), ~np.minimum.reduce(blocks, axis=-1))
    if widest.size and unsigned_top(widest) >> (config.in_bits - 1):
        check("x", x, config.in_bits)
    e = bit_length(widest >> (config.out_bits - 1))
    rounded = round_shift(blocks, e[..., None])
    return Requantized(_rows(np.minimum(rounded, bounds(config.out_bits)[1]), x.shape[-1]), e)


def scale(config: RequantizeConfig, largest: ArrayLike) -> tuple[Int, Int]:
    """Scale ``c * 2**e`` of groups whose largest magnitude is ``largest``: (e, c)."""
    s, c = _scale(config, check("largest", largest, config.in_bits, signed=False))
    return s - 2, c


def _scale(config: RequantizeConfig, largest: Int) -> tuple[Int, Int]:
    """``s = e + 2``, and c."""
    s, quarters = bit_length(largest >> config.out_bits), largest << 2
    # The smallest c with limit * c * 2**(s-2) >= largest. Eight or more of them are half as many of twice the size.
    c = -(-quarters // (config.limit << s))
    coarser = (c > 7).astype(np.int64)
    s, c = s + coarser, np.maximum((c + coarser) >> coarser, 4)
    check("slack", (config.limit * c << s) - quarters, 63, signed=False)
    if s.size:
        low, high = extremes(s)
        within("s", low, high, config.shift_bits, signed=False)
        within("e", low - 2, high - 2, config.exponent_bits)
    return s, c


def _group(config: RequantizeConfig, x: Int) -> Requantized:
    blocks = _blocks(config, x)
    largest = np.maximum.reduce(np.abs(blocks).view(np.uint64), axis=-1).view(np.int64)
    if largest.size and unsigned_top(largest) >> (config.in_bits - 1):
        check("x", x, config.in_bits)
    s, c = _scale(config, largest)
    return Requantized(_rows(_quotient(config, blocks, s[..., None], c[..., None]), x.shape[-1]), s - 2, c)


def _quotient(config: RequantizeConfig, x: Int, s: Int, c: Int) -> Int:
    """``floor(x / (c * 2**(s-2)) + 1/2)`` where that is at most ``limit`` in magnitude."""
    offset = 1 << (config.out_bits - 1)
    eighths = x << 3
    eighths >>= s
    # halves = (eighths + c) >> 1, made non-negative by an offset of 2**(out_bits-1) in q, so that the hardware's
    # division has no sign. (Twice the offset is added before the shift.)
    dividend = eighths
    dividend += c * (1 + 2 * offset)
    dividend >>= 1
    if config.halves_bits > 28:
        quotient = dividend // c
    else:  # exact by one multiplication: c < 8, so that dividend * c < 2**shift
        shift = config.halves_bits + 3
        quotient = dividend
        quotient *= (1 << shift) // c + 1
        quotient >>= shift
    quotient -= offset
    return quotient
