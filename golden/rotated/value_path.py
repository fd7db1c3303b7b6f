"""Value path: the sum of many stored vectors, each times a probability, with one transform for all of them.

The paper's macro reads keys only. A stored value is ``norm * s * H C[index] / size``, so that the sum over tokens can
be taken before codebook, transform and signs::

    w   = rs(p * m, drop + top - X)                 norm = m * 2**(X - 25); top: the largest X of the row
    bin[i][j] += +-w                                the cell j and the sign that index[i] stands for; exact
    z[i] = sat(rs(sum over j of C[j] * bin[i][j], z_drop))
    y    = s * sat(rs(H z, 53 + log2(size) - fraction_bits - z_drop - drop - top))

which takes one addition per coordinate and token, and ``size * 2**(bits - 1)`` products and one transform per row,
whatever its length. p is unsigned with 16 fraction bits (1 is ``2**16``); y has ``fraction_bits``. z does not saturate
as long as a row's p add up to at most 1.

Source: this project's (the counterpart of AXELRAM's read path).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from golden import float16
from golden.config import UnitConfig, integer, power_of_two
from golden.fixedpoint import Int, address_bits, as_int, check, matmul, round_shift, saturate
from golden.rotated.fwht import FwhtConfig, fwht
from golden.rotated.lloyd_max import CODE_BITS, FRACTION_BITS, MAX_BITS, check_dimension, codebook
from golden.rotated.read_path import memberships
from golden.rotated.signs import flip

PROBABILITY_BITS = 16
#: Width of probability times mantissa.
PRODUCT_BITS = PROBABILITY_BITS + 11


@dataclass(frozen=True)
class ValuePathConfig(UnitConfig):
    """Configuration of the value path.

    Input: a row of stored vectors (index, unsigned ``bits``; norm, binary16), each with its probability p, unsigned 16
    bits; top, 5 bits, and pattern, the sign pattern's number, one each a row. Output: y, signed ``out_bits``, one
    vector a row, ``drain_lanes`` elements a beat.
    """

    size: int = power_of_two(128, 2, 256, "elements of a vector, a power of two")
    bits: int = integer(3, 1, MAX_BITS, "bits of an index")
    weight_bits: int = integer(24, 10, 27, "width of a weight")
    max_row: int = integer(4096, 1, 1 << 18, "most vectors in a row")
    z_bits: int = integer(28, 8, 32, "width of a coordinate before the transform")
    fraction_bits: int = integer(16, 0, 24, "fraction bits of y")
    out_bits: int = integer(32, 8, 32, "width of y")
    drain_lanes: int = power_of_two(8, 1, 256, "coordinates per cycle of the codebook and of the output")
    patterns: int = integer(64, 1, 256, "sign patterns in the table")
    dimension: int = integer(0, 0, 256, "codebook of a sphere in so many dimensions, 0 of a normal distribution")

    def validate(self) -> None:
        if self.drain_lanes > self.size:
            raise ValueError(f"drain_lanes must be at most size = {self.size}, not {self.drain_lanes}")
        check_dimension(self.dimension)
        if self.z_drop < 0:
            limit = self.weight_bits + CODE_BITS + 1
            raise ValueError(f"z_bits must be at most weight_bits + {CODE_BITS + 1} = {limit}, not {self.z_bits}")
        if self.out_drop < 30:
            raise ValueError(
                f"fraction_bits, less what z_bits = {self.z_bits} keeps, must leave a shift of 30, not {self.out_drop}"
            )

    @property
    def lanes(self) -> int:
        """Elements per beat: a vector is one beat."""
        return self.size

    @cached_property
    def transform(self) -> FwhtConfig:
        return FwhtConfig(size=self.size, in_bits=self.z_bits, form="folded", butterflies=self.size // 2)

    @cached_property
    def centroids(self) -> tuple[int, ...]:
        """Positive centroids, ascending, with ``FRACTION_BITS`` fraction bits."""
        return codebook(self.bits, FRACTION_BITS, self.dimension).centroids

    @cached_property
    def drop(self) -> int:
        """Bits that a weight of the largest norm is rounded by."""
        return PRODUCT_BITS - self.weight_bits

    @cached_property
    def bin_bits(self) -> int:
        """Width of a bin, signed."""
        return self.weight_bits + 1 + (self.max_row - 1).bit_length()

    @cached_property
    def moment_bits(self) -> int:
        """Width of a coordinate's sum of centroids times bins: the bins share the row's weights between them."""
        return self.bin_bits + CODE_BITS

    @cached_property
    def z_drop(self) -> int:
        """Bits that such a sum is rounded by."""
        return self.weight_bits + CODE_BITS + 1 - self.z_bits

    @cached_property
    def out_drop(self) -> int:
        """Bits that y is rounded by, and ``top``."""
        return 53 + self.transform.stages - self.fraction_bits - self.z_drop - self.drop

    @cached_property
    def pattern_bits(self) -> int:
        """Width of a pattern's number."""
        return address_bits(self.patterns)


def weights(config: ValuePathConfig, p: ArrayLike, norm: ArrayLike, top: ArrayLike) -> Int:
    """Weights (…, T) of probabilities p (…, T) and norms (T,) on the grid of ``top`` (…).

    Raises ValueError where a vector with a p above 0 has a norm above its row's ``top``."""
    p = check("p", p, PROBABILITY_BITS, signed=False)
    top = as_int("top", top)
    if top.size and (top.min() < 1 or top.max() > 30):
        raise ValueError(f"top must lie in 1..30, not {top.min()}..{top.max()}")
    mantissa, biased = float16.parts(norm)
    finer = top[..., None] - biased
    if ((finer < 0) & (p > 0)).any():
        raise ValueError("top must be the largest exponent of a row's norms")
    w = round_shift(p * mantissa, config.drop + np.maximum(finer, 0))
    # Never rounded up to the next power of two: (2**16 - 1) * (2**11 - 1) lies further below it than half a unit.
    return check("w", w, config.weight_bits, signed=False)


def combine(config: ValuePathConfig, w: ArrayLike, index: ArrayLike, signs: ArrayLike, top: ArrayLike) -> Int:
    """y (…, size) of weights (…, T) and index (T, size)."""
    w, top = as_int("w", w), as_int("top", top)
    total = np.zeros((), np.int64)
    for code, member in zip(config.centroids, memberships(config.bits, index), strict=True):
        total = total + code * check("bin", matmul(w, member), config.bin_bits)
    check("moment", total, config.moment_bits)
    z = saturate(round_shift(total, config.z_drop), config.z_bits)
    y = saturate(round_shift(fwht(config.transform, z), config.out_drop - top[..., None]), config.out_bits)
    return flip(y, signs, config.out_bits)


def value_path(
    config: ValuePathConfig, index: ArrayLike, norm: ArrayLike, p: ArrayLike, top: ArrayLike, signs: ArrayLike
) -> Int:
    """y (…, size) of stored vectors (index (T, size), norm (T,)) with probabilities p (…, T), top (…)."""
    return combine(config, weights(config, p, norm, top), index, signs, top)
