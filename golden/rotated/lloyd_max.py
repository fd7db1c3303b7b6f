"""Lloyd-Max quantizer of normally distributed coordinates: a fixed codebook, symmetric about zero.

A rotated vector's coordinates are close to normal with the variance ``norm**2 / size``, whatever the vector. After an
unnormalised transform, ``y / norm`` has variance 1: thresholds and centroids depend on the bits alone, not on data or
size. ``index = #{thresholds < y}``: thresholds ``-norm * t``, 0 and ``norm * t`` of which the positive half is stored,
so that a lane takes one comparator per positive threshold and no multiplier. A y that equals a threshold goes to the
lower index with ``ties = lower`` (the paper's code), to the upper one with ``ties = upper``. Index 0 is the most
negative cell. A row of norm 0 gives ``2**(bits - 1) - 1`` (lower), ``2**(bits - 1)`` (upper).

======================  ===============================================================================================
form                    positive thresholds
======================  ===============================================================================================
``scaled``              ``t * norm``: t with ``fraction_bits``, norm (integer, of the same unit as y) with each row.
                        One multiplication a row and threshold; the product is compared exactly
``frozen``              ``t * 2**fraction_bits``: constants, for a y whose deviation is ``2**fraction_bits``
``programmable``        integers in ascending order, written through the table port
======================  ===============================================================================================

:func:`solve` finds the codebook: each centroid is the mean of its cell, each threshold lies half-way between centroids.

Source: AXELRAM (fixed Lloyd-Max codebook; its 3-bit comparator bank).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import ArrayLike, NDArray

from golden.config import UnitConfig, choice, integer
from golden.fixedpoint import Int, check, within

MAX_BITS = 6
#: Fraction bits of a codebook's integers; 14 bits hold every centroid below 4.
FRACTION_BITS = 12
CODE_BITS = 14

Real = NDArray[np.float64]
Words = TypeVar("Words")


class Codebook(NamedTuple, Generic[Words]):
    """Positive half of a symmetric codebook: 2**(bits - 1) - 1 thresholds and 2**(bits - 1) centroids, ascending."""

    thresholds: Words
    centroids: Words


def check_dimension(dimension: int) -> None:
    """What a configuration's field of that name accepts, beside its range: 0, or at least 4. ValueError otherwise."""
    if 0 < dimension < 4:
        raise ValueError(f"dimension must be 0 or lie in 4..256, not {dimension}")


def _density(x: Real, dimension: int) -> Real:
    """Density of one coordinate, of variance 1: normal, or of a point that is uniform on a sphere."""
    if not dimension:
        return np.exp(-0.5 * x * x)
    return np.maximum(1 - x * x / dimension, 0.0) ** (0.5 * (dimension - 3))


@lru_cache
def solve(bits: int, dimension: int = 0) -> Codebook[Real]:
    """Codebook of a coordinate of variance 1, in float64.

    ``dimension`` 0 is the normal distribution, the limit that the paper uses; from 4 on, a coordinate of a uniformly
    random direction in so many dimensions, which is what a random rotation of any vector gives.

    Lloyd's iteration until no threshold moves by 1e-13. Raises ValueError for bits outside 1..6, dimensions below 4.
    """
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits must lie in 1..{MAX_BITS}, not {bits}")
    if dimension and dimension < 4:
        raise ValueError(f"dimension must be 0 (normal) or at least 4, not {dimension}")
    cells = 1 << (bits - 1)
    # Beyond 8 deviations, the paper's cut, there is nothing at all.
    end = min(8.0, float(np.sqrt(dimension))) if dimension else 8.0
    nodes, weights = leggauss(48)

    def means(edges: Real) -> Real:
        """Mean of each cell, the last one in four parts: it is the widest."""
        inner, tail = edges[:-1], np.linspace(edges[-2], end, 5)
        low, high = np.append(inner[:-1], tail[:-1]), np.append(inner[1:], tail[1:])
        half = (high - low) / 2
        x = (low + high)[:, None] / 2 + half[:, None] * nodes
        mass = _density(x, dimension) * weights * half[:, None]
        total, moment = mass.sum(axis=1), (mass * x).sum(axis=1)
        last = cells - 1
        return np.append(moment[:last] / total[:last], moment[last:].sum() / total[last:].sum())

    thresholds = np.linspace(0, 0.6 * min(4.0, end), cells + 1)[1:-1]
    while True:
        centroids = means(np.concatenate(([0.0], thresholds, [end])))
        moved = (centroids[1:] + centroids[:-1]) / 2
        done = cells == 1 or float(np.abs(moved - thresholds).max()) < 1e-13
        thresholds = moved
        if done:
            return Codebook(thresholds, centroids)


@lru_cache
def codebook(bits: int, fraction_bits: int = FRACTION_BITS, dimension: int = 0) -> Codebook[tuple[int, ...]]:
    """The same in integers with ``fraction_bits``: tuples, rounded to nearest."""
    real = solve(bits, dimension)
    return Codebook(*(tuple(int(v) for v in np.rint(part * (1 << fraction_bits))) for part in real))


@dataclass(frozen=True)
class LloydMaxConfig(UnitConfig):
    """Configuration of the comparator bank.

    Input: y, signed ``in_bits``; scaled: norm, unsigned ``norm_bits``, one a row. Output: index, unsigned ``bits``.
    """

    lanes: int = integer(8, 1, 256, "elements per beat")
    bits: int = integer(3, 1, MAX_BITS, "bits of an index")
    in_bits: int = integer(23, 4, 40, "width of y")
    form: str = choice("scaled", ("scaled", "frozen", "programmable"), "where the thresholds come from")
    ties: str = choice("lower", ("lower", "upper"), "index of a y that equals a threshold")
    fraction_bits: int = integer(FRACTION_BITS, 4, 14, "scaled, frozen: fraction bits of a threshold")
    norm_bits: int = integer(19, 2, 24, "scaled: width of a row's norm")
    dimension: int = integer(0, 0, 256, "scaled, frozen: codebook of a sphere in so many dimensions, 0 of a normal one")

    def validate(self) -> None:
        check_dimension(self.dimension)
        if self.form == "frozen":
            top = max(self.positive, default=0)
            if top >> (self.in_bits - 1):
                raise ValueError(f"in_bits must hold the largest threshold {top}, not {self.in_bits} bits")
        if self.form == "scaled":
            within(
                "threshold", 0, max(self.positive, default=0) * ((1 << self.norm_bits) - 1), self.product_bits, False
            )

    @cached_property
    def count(self) -> int:
        """Positive thresholds."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def positive(self) -> tuple[int, ...]:
        """Scaled, frozen: the positive thresholds with ``fraction_bits``."""
        return codebook(self.bits, self.fraction_bits, self.dimension).thresholds

    @cached_property
    def factor_bits(self) -> int:
        """Scaled: width of a threshold before it is multiplied with the norm; all are below 4."""
        return self.fraction_bits + 2

    @cached_property
    def product_bits(self) -> int:
        """Scaled: width of threshold times norm."""
        return self.factor_bits + self.norm_bits


def quantize(config: LloydMaxConfig, y: ArrayLike, norm: ArrayLike = 0, thresholds: ArrayLike = ()) -> Int:
    """Indices of rows y (…, n): unsigned ``bits``.

    ``norm`` (…) counts in form scaled only, ``thresholds`` (``count``,) in form programmable only, where ValueError is
    raised unless they are that many and in ascending order.
    """
    y = check("y", y, config.in_bits)
    drop = 0
    if config.form == "programmable":
        positive = check("thresholds", thresholds, config.in_bits - 1, signed=False)
        if positive.shape != (config.count,) or (np.diff(positive) < 0).any():
            raise ValueError(f"there must be {config.count} thresholds in ascending order, not {positive.tolist()}")
        each = list(positive)
        empty: Any = False
    elif config.form == "frozen":
        each = [np.int64(t) for t in config.positive]
        empty = False
    else:
        norm = check("norm", norm, config.norm_bits, signed=False)[..., None]
        each = [t * norm for t in config.positive]
        empty = norm == 0
        drop = config.fraction_bits
    # In units of 2**-fraction_bits: y stays below 2**54.
    fine = y << drop
    lower = config.ties == "lower"
    above = y > 0 if lower else y >= 0
    size = np.abs(fine)
    count = np.zeros(y.shape, np.int64)
    for t in each:
        # Towards the index on the far side of the threshold, or only beyond it.
        count += np.where(above == lower, size > t, size >= t)
    count = np.where(empty, 0, count)
    middle = 1 << (config.bits - 1)
    return check("index", np.where(above, middle + count, middle - 1 - count), config.bits, signed=False)
