"""The whole macro: a memory of quantized vectors with a write path in front and a read path behind.

Vectors are written one at a time to an address (:mod:`golden.rotated.write_path`); a query is scored against the
addresses from 0 to a last one (:mod:`golden.rotated.read_path`). What is stored is never turned back. Commands take
effect in order: a query sees every vector that was written before it.

Source: AXELRAM (smart SRAM macro, Fig. 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, integer, power_of_two
from golden.fixedpoint import Int, address_bits
from golden.rotated.lloyd_max import MAX_BITS
from golden.rotated.read_path import ReadPathConfig, read_path
from golden.rotated.write_path import WritePathConfig, write_path


@dataclass(frozen=True)
class AxelramConfig(UnitConfig):
    """Configuration of the macro; the fields are those of its two paths.

    Input: x, signed ``in_bits``, a vector to be written or a query. Output: scores, signed ``score_bits`` or binary16.
    """

    size: int = power_of_two(128, 2, 256, "elements of a vector, a power of two")
    in_bits: int = integer(16, 2, 20, "width of an element")
    bits: int = integer(3, 1, MAX_BITS, "bits of an index")
    capacity: int = integer(4096, 1, 1 << 18, "vectors that it holds")
    form: str = choice("integer", ("integer", "binary16"), "arithmetic of the read path")
    table_bits: int = integer(24, 8, 40, "integer: most bits of a table entry")
    score_bits: int = integer(32, 8, 32, "integer: width of a score")
    build_lanes: int = power_of_two(8, 1, 256, "coordinates of the table that are built per cycle")
    patterns: int = integer(64, 1, 256, "sign patterns in the table")
    dimension: int = integer(0, 0, 256, "codebook of a sphere in so many dimensions, 0 of a normal distribution")

    def validate(self) -> None:
        _ = self.write, self.read

    @property
    def lanes(self) -> int:
        """Elements per beat: a vector is one beat."""
        return self.size

    @cached_property
    def write(self) -> WritePathConfig:
        return WritePathConfig(
            lanes=self.size,
            size=self.size,
            in_bits=self.in_bits,
            bits=self.bits,
            patterns=self.patterns,
            dimension=self.dimension,
        )

    @cached_property
    def read(self) -> ReadPathConfig:
        return ReadPathConfig(
            size=self.size,
            in_bits=self.in_bits,
            bits=self.bits,
            form=self.form,
            table_bits=self.table_bits,
            score_bits=self.score_bits,
            build_lanes=self.build_lanes,
            patterns=self.patterns,
            dimension=self.dimension,
        )

    @cached_property
    def address_bits(self) -> int:
        """Width of an address."""
        return address_bits(self.capacity)


class Axelram:
    """The macro's memory: index (capacity, size), norm (capacity,), and which addresses were written."""

    def __init__(self, config: AxelramConfig):
        self.config = config
        self.index = np.zeros((config.capacity, config.size), np.int64)
        self.norm = np.zeros(config.capacity, np.int64)
        self.written = np.zeros(config.capacity, bool)

    def write(self, address: ArrayLike, x: ArrayLike, signs: ArrayLike, exponent: ArrayLike = 0) -> None:
        """Write rows x (…, size) with one sign pattern (size,), or one a row, to the addresses (…), in order: of
        several writes to one address the last one stays."""
        place = self._checked(address)
        self.index[place], self.norm[place] = write_path(self.config.write, x, signs, exponent)
        self.written[place] = True

    def read(self, query: ArrayLike, last: int, signs: ArrayLike, shift: ArrayLike = 0) -> Int:
        """Scores (…, last + 1) of queries (…, size) with shifts (…) against the addresses 0 to ``last``.

        Raises ValueError if one of them was never written."""
        seen = np.s_[: int(self._checked(last)) + 1]
        if not self.written[seen].all():
            raise ValueError(f"address {int(np.argmin(self.written[seen]))} was never written")
        return read_path(self.config.read, query, signs, self.index[seen], self.norm[seen], shift)

    def _checked(self, address: ArrayLike) -> Int:
        found = np.asarray(address, np.int64)
        if found.size and (found.min() < 0 or found.max() >= self.config.capacity):
            raise ValueError(f"addresses must lie in 0..{self.config.capacity - 1}, not {found.min()}..{found.max()}")
        return found


def axelram(config: AxelramConfig) -> Axelram:
    """An empty macro."""
    return Axelram(config)
