"""Residual addition: ``y = sat(a + rs(b * 2**shift))``.

a is the residual stream (INT32 with 16 fraction bits), b what a branch adds to it, with a power-of-two scale of its
own that travels with the row: ``shift = fraction bits of a - fraction bits of b``. A positive shift moves b to the
left, a negative one to the right, rounding half up. The sum is exact before it saturates: whatever b overflows to,
y is the representable value nearest to the true sum, and never wraps.

Source: *LLM Inference in a Flash* section 3.1.3 (integer-only residual path).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.config import UnitConfig, flag, integer
from golden.fixedpoint import Int, bounds, check, extremes, round_shift, saturate, within


@dataclass(frozen=True)
class ResidualConfig(UnitConfig):
    """Configuration of the residual adder.

    Input: a and y, signed ``a_bits``; b, signed ``b_bits``; shift, -``max_right`` to ``max_left``, one per row.
    Rounding: half up where b moves to the right. Saturation: y, on both sides.
    """

    lanes: int = integer(8, 1, 64, "elements per beat")
    a_bits: int = integer(32, 4, 40, "width of a and y")
    b_bits: int = integer(32, 2, 32, "width of b")
    max_left: int = integer(16, 0, 24, "largest shift of b to the left")
    max_right: int = integer(15, 0, 31, "largest shift of b to the right")
    flag_saturated: bool = flag(True, "say of each beat whether an element of it saturated")

    def validate(self) -> None:
        # Widths that hold whatever the data; a shift to the right brings b nearer to 0.
        low, high = (edge << self.max_left for edge in bounds(self.b_bits))
        within("aligned", low, high, self.aligned_bits)
        within("total", low + bounds(self.a_bits)[0], high + bounds(self.a_bits)[1], self.total_bits)

    @cached_property
    def shift_bits(self) -> int:
        """Width of the signed shift."""
        return 1 + max(self.max_left.bit_length(), (self.max_right - 1).bit_length() if self.max_right else 0)

    @cached_property
    def amount_bits(self) -> int:
        """Width of ``max_left - shift``: by how much ``b * 2**max_left`` moves to the right."""
        return (self.max_left + self.max_right).bit_length()

    @cached_property
    def aligned_bits(self) -> int:
        return self.b_bits + self.max_left

    @cached_property
    def total_bits(self) -> int:
        return max(self.a_bits, self.aligned_bits) + 1


class Residual(NamedTuple):
    """Result of :func:`residual`: y (…, n), and whether each element saturated."""

    y: Int
    saturated: NDArray[np.bool_]


def residual(config: ResidualConfig, a: ArrayLike, b: ArrayLike, shift: ArrayLike) -> Residual:
    """Add rows b (…, n), signed ``b_bits``, with one shift each (…), to rows a (…, n), signed ``a_bits``.

    Raises ValueError if a shift is not in -``max_right`` to ``max_left``.
    """
    a, b = check("a", a, config.a_bits), check("b", b, config.b_bits)
    shift = check("shift", shift, config.shift_bits)[..., None]
    if shift.size:
        low, high = extremes(shift)
        if low < -config.max_right or high > config.max_left:
            wrong = low if low < -config.max_right else high
            raise ValueError(f"shift must lie in {-config.max_right}..{config.max_left}, not {wrong}")
    total = a + round_shift(b, -shift)
    y = saturate(total, config.a_bits)
    return Residual(y, y != total)
