"""Read path: scores of one query against many stored vectors, without turning any of them back.

``q . k`` is ``(H s q) . (H s k) / size``, and ``H s k`` is the norm times centroids C that only the indices choose.
Once per query the table ``P[i][j] = rs((H s q)[i] * C[j])`` is built, ``size * 2**(bits - 1)`` products (the negative
half of the codebook is the same with the other sign); then every key takes ``size`` lookups, ``size - 1`` additions and
one multiplication by its norm::

    sum   = sum over i of +-P[i][j(index[i])]      exact
    score = sat(rs(sum * m, shift + 30 - X))       norm = m * 2**(X - 25), the parts of its binary16

so that ``score = (q . k) * 2**-scale`` with ``scale = shift + table_drop + 5 - log2(size) - fraction bits of C``
plus the exponents of q. The centroids are the Lloyd-Max codebook's (``frozen``), or the model's own through the table
port (``programmable``): a constant that all scores of a layer are multiplied by is free there.

The ``binary16`` form does the same in IEEE binary16, as the paper states it, each operation rounded to nearest even:
``u[i] = (H s q)[i] * 2**-shift`` and C as binary16, ``P = u * C``, a tree of additions that takes neighbours first
(0 + 1, 2 + 3, …, then these in pairs), and the product with the norm.

Source: AXELRAM (read path, Fig. 3), symmetry and integers are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from golden import float16
from golden.config import UnitConfig, choice, integer, power_of_two
from golden.fixedpoint import Int, address_bits, as_int, check, matmul, round_shift, saturate
from golden.rotated.fwht import FwhtConfig, fwht
from golden.rotated.lloyd_max import CODE_BITS, FRACTION_BITS, MAX_BITS, check_dimension, codebook
from golden.rotated.signs import flip


@dataclass(frozen=True)
class ReadPathConfig(UnitConfig):
    """Configuration of the read path.

    Input: a query (signed ``in_bits``, with its shift, unsigned ``shift_bits``, and its sign pattern's number), then
    any number of stored vectors (index, unsigned ``bits``; norm, binary16). Output: a score for each of them, signed
    ``score_bits``, or binary16.
    Rounding: the table's entries and the score, half up; a sum of entries is exact. Saturation: the score.
    """

    size: int = power_of_two(128, 2, 256, "elements of a vector, a power of two")
    in_bits: int = integer(16, 2, 20, "width of the query")
    bits: int = integer(3, 1, MAX_BITS, "bits of an index")
    form: str = choice("integer", ("integer", "binary16"), "arithmetic")
    codebook: str = choice("frozen", ("frozen", "programmable"), "centroids: constants, or written through the table")
    centroid_bits: int = integer(CODE_BITS, 4, 18, "programmable: width of a centroid")
    table_bits: int = integer(24, 8, 40, "integer: most bits of a table entry")
    score_bits: int = integer(32, 8, 32, "integer: width of a score")
    build_lanes: int = power_of_two(8, 1, 256, "coordinates of the table that are built per cycle")
    patterns: int = integer(64, 1, 256, "sign patterns in the table")
    dimension: int = integer(0, 0, 256, "frozen: codebook of a sphere in so many dimensions, 0 of a normal one")

    def validate(self) -> None:
        if self.build_lanes > self.size:
            raise ValueError(f"build_lanes must be at most size = {self.size}, not {self.build_lanes}")
        check_dimension(self.dimension)
        if self.form == "integer" and self.table_bits <= self.code_bits:
            # So that rounding never reaches the next power of two, and an entry's negative has its width.
            raise ValueError(f"table_bits must be above the centroids' {self.code_bits}, not {self.table_bits}")
        if self.form == "binary16" and self.codebook != "frozen":
            raise ValueError("codebook must be frozen for the binary16 form, not programmable")

    @property
    def lanes(self) -> int:
        """Elements per beat: a query is one beat, a stored vector another."""
        return self.size

    @cached_property
    def transform(self) -> FwhtConfig:
        """Of the query: as many butterflies as a stage has."""
        return FwhtConfig(size=self.size, in_bits=self.in_bits, form="folded", butterflies=self.size // 2)

    @cached_property
    def half(self) -> int:
        """Positive centroids."""
        return 1 << (self.bits - 1)

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """The frozen codebook's positive centroids, ascending, with ``FRACTION_BITS`` fraction bits."""
        return codebook(self.bits, FRACTION_BITS, self.dimension).centroids

    @cached_property
    def code_bits(self) -> int:
        """Width of a centroid."""
        return CODE_BITS if self.codebook == "frozen" else self.centroid_bits

    @cached_property
    def product_bits(self) -> int:
        """Width of an exact table entry."""
        return self.transform.out_bits + self.code_bits

    @cached_property
    def table_drop(self) -> int:
        """Bits that a table entry is rounded by."""
        return max(0, self.product_bits - self.table_bits)

    @cached_property
    def entry_bits(self) -> int:
        """Width of a table entry: ``table_bits``, less where the exact one is narrower."""
        return 16 if self.form == "binary16" else self.product_bits - self.table_drop

    @cached_property
    def sum_bits(self) -> int:
        """Width of a vector's sum of entries."""
        return self.entry_bits + self.transform.stages

    @cached_property
    def scaled_bits(self) -> int:
        """Width of the sum times the norm's 11-bit mantissa."""
        return self.sum_bits + 11

    @property
    def shift_bits(self) -> int:
        """Width of a query's shift."""
        return 6

    @cached_property
    def pattern_bits(self) -> int:
        """Width of a pattern's number."""
        return address_bits(self.patterns)


def centroids_of(config: ReadPathConfig, centroids: ArrayLike | None) -> Int:
    """Positive centroids (``half``,) of a configuration: its frozen ones, or those that are given, checked."""
    if config.codebook == "frozen":
        return np.array(config.frozen, np.int64)
    found = check("centroids", () if centroids is None else centroids, config.centroid_bits, signed=False)
    if found.shape != (config.half,):
        raise ValueError(f"there must be {config.half} centroids, not an array of shape {found.shape}")
    return found


def build_table(
    config: ReadPathConfig, query: ArrayLike, signs: ArrayLike, centroids: ArrayLike | None = None, shift: ArrayLike = 0
) -> Int:
    """Table (…, size, half) of queries (…, size): products with the positive centroids; binary16 patterns in that form,
    where ``shift`` (…) applies already."""
    turned = fwht(config.transform, flip(query, signs, config.in_bits))
    codes = centroids_of(config, centroids)
    if config.form == "binary16":
        shift = check("shift", shift, config.shift_bits, signed=False)
        u = float16.from_integer(turned, -shift[..., None])
        return float16.multiply(u[..., None], float16.from_integer(codes, -FRACTION_BITS))
    exact = check("product", turned[..., None] * codes, config.product_bits)
    return check("entry", round_shift(exact, config.table_drop), config.entry_bits)


def cells(bits: int, index: ArrayLike) -> tuple[Int, Int]:
    """Which positive centroid an index stands for, and its sign (-1, +1)."""
    index = check("index", index, bits, signed=False)
    half = 1 << (bits - 1)
    above = index >= half
    return np.where(above, index - half, half - 1 - index), np.where(above, 1, -1)


def memberships(bits: int, index: ArrayLike) -> list[Int]:
    """For each positive centroid, index's shape in {-1, 0, +1}: where it is meant, and its sign."""
    cell, sign = cells(bits, index)
    return [np.where(cell == k, sign, 0) for k in range(1 << (bits - 1))]


def scores(config: ReadPathConfig, table: ArrayLike, index: ArrayLike, norm: ArrayLike, shift: ArrayLike = 0) -> Int:
    """Scores (…, T) of queries with tables (…, size, half) and shifts (…) against stored vectors: index (T, size),
    norm (T,). Binary16 patterns in that form."""
    table, index = as_int("table", table), as_int("index", index)
    shift = check("shift", shift, config.shift_bits, signed=False)[..., None]
    norm = check("norm", norm, 16, signed=False)
    if config.form == "binary16":
        cell, sign = cells(config.bits, index)
        entries = np.take_along_axis(table[..., None, :, :], cell[..., None], axis=-1)[..., 0]
        return float16.multiply(float16.tree_sum(entries ^ np.where(sign < 0, 1 << 15, 0)), norm)
    total = sum(matmul(table[..., k], member.T) for k, member in enumerate(memberships(config.bits, index)))
    mantissa, biased = float16.parts(norm)
    scaled = check("scaled", check("sum", total, config.sum_bits) * mantissa, config.scaled_bits)
    return saturate(round_shift(scaled, shift + 30 - biased), config.score_bits)


def read_path(
    config: ReadPathConfig,
    query: ArrayLike,
    signs: ArrayLike,
    index: ArrayLike,
    norm: ArrayLike,
    shift: ArrayLike = 0,
    centroids: ArrayLike | None = None,
) -> Int:
    """Scores (…, T) of queries (…, size) with their shifts (…) against T stored vectors, under one sign pattern."""
    return scores(config, build_table(config, query, signs, centroids, shift), index, norm, shift)
