"""Write path: a vector to indices of a fixed codebook, and a norm.

``w = H (s * x)``, ``r = isqrt(sum of x**2)``, ``index = #{thresholds t * r < w}`` per coordinate: sign flip
(:mod:`golden.rotated.signs`), Walsh-Hadamard transform (:mod:`golden.rotated.fwht`), comparators
(:mod:`golden.rotated.lloyd_max`, form ``scaled``). The thresholds are scaled by the norm where the paper scales the
vector by its inverse: ``2**(bits - 1) - 1`` multiplications a vector instead of ``size`` and a division. What is stored
is ``size * bits`` bits of indices and the norm ``r * 2**exponent`` in binary16, rounded to nearest even (beyond 65504
it saturates). The most negative x counts as the negative of the largest. A vector of zeros has the norm 0 and all
indices ``2**(bits - 1) - 1``.

Source: AXELRAM (write path, Fig. 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from numpy.typing import ArrayLike

from golden.config import UnitConfig, integer, power_of_two
from golden.fixedpoint import Int, address_bits, check, isqrt, within
from golden.float16 import from_integer
from golden.rotated.fwht import FwhtConfig, fwht
from golden.rotated.lloyd_max import MAX_BITS, LloydMaxConfig, quantize
from golden.rotated.signs import flip, symmetric


@dataclass(frozen=True)
class WritePathConfig(UnitConfig):
    """Configuration of the write path.

    Input: x, signed ``in_bits``, rows of ``size``; exponent, signed ``exponent_bits``, and pattern, the sign pattern's
    number, one each a row. Output: index, unsigned ``bits``; norm, binary16, one a row.
    """

    lanes: int = power_of_two(128, 1, 256, "elements per beat: size for a row per cycle")
    size: int = power_of_two(128, 2, 256, "elements of a row, a power of two")
    in_bits: int = integer(16, 2, 20, "width of x")
    bits: int = integer(3, 1, MAX_BITS, "bits of an index")
    patterns: int = integer(64, 1, 256, "sign patterns in the table")
    dimension: int = integer(0, 0, 256, "codebook of a sphere in so many dimensions, 0 of a normal distribution")

    def validate(self) -> None:
        if self.lanes > self.size:
            raise ValueError(f"lanes must be at most size = {self.size}, not {self.lanes}")
        largest = (1 << (self.in_bits - 1)) - 1
        within("square_sum", 0, self.size * largest * largest, self.square_bits, signed=False)
        _ = self.quantizer

    @cached_property
    def beats(self) -> int:
        """Beats of a row."""
        return self.size // self.lanes

    @cached_property
    def transform(self) -> FwhtConfig:
        """Parallel for a row per cycle; else with the fewest butterflies that keep up with the beats."""
        if self.lanes == self.size:
            return FwhtConfig(size=self.size, in_bits=self.in_bits)
        butterflies = 1
        stages = self.size.bit_length() - 1
        while butterflies < self.size // 2 and stages * self.size > 2 * butterflies * self.beats:
            butterflies *= 2
        return FwhtConfig(size=self.size, in_bits=self.in_bits, form="folded", butterflies=butterflies)

    @cached_property
    def square_bits(self) -> int:
        """Width of the sum of squares."""
        return 2 * self.in_bits - 2 + self.transform.stages

    @cached_property
    def root_bits(self) -> int:
        """Width of its root, the norm in units of x."""
        return (self.square_bits + 1) // 2

    @cached_property
    def quantizer(self) -> LloydMaxConfig:
        return LloydMaxConfig(
            lanes=self.lanes,
            bits=self.bits,
            in_bits=self.transform.out_bits,
            norm_bits=self.root_bits,
            dimension=self.dimension,
        )

    @property
    def exponent_bits(self) -> int:
        """Width of a row's exponent."""
        return 8

    @cached_property
    def pattern_bits(self) -> int:
        """Width of a pattern's number."""
        return address_bits(self.patterns)

    @cached_property
    def vector_bits(self) -> int:
        """What a vector takes in memory: its indices and its norm."""
        return self.size * self.bits + 16


class Written(NamedTuple):
    """Vectors as they are stored: indices (…, size), unsigned ``bits``; norm (…), binary16."""

    indices: Int
    norm: Int


def write_path(config: WritePathConfig, x: ArrayLike, signs: ArrayLike, exponent: ArrayLike = 0) -> Written:
    """Quantize rows x (…, size) of ``x * 2**exponent`` (exponent (…)) with one sign pattern (size,) or one a row."""
    x = symmetric(x, config.in_bits)
    exponent = check("exponent", exponent, config.exponent_bits)
    turned = fwht(config.transform, flip(x, signs, config.in_bits))
    square_sum = check("square_sum", (x * x).sum(axis=-1), config.square_bits, signed=False)
    norm = check("norm", isqrt(square_sum), config.root_bits, signed=False)
    return Written(quantize(config.quantizer, turned, norm), from_integer(norm, exponent))
