"""Walsh-Hadamard transform of a row of integers, unnormalised and exact.

``y = H x`` with ``H[i, j] = (-1)**popcount(i & j)``: natural (Hadamard) order. Nothing is rounded, so that any way of
computing it gives the same y; here it is the exact product with H itself. y has ``log2(size)`` bits more than x.
``H H = size * I``, so that the transform is its own inverse up to the factor ``size``, and
``(H q) . (H k) = size * (q . k)``.

In hardware, ``log2(size)`` stages of butterflies ``(a + b, a - b)``. The parallel form has them all, over elements
that lie 1, 2, 4, … apart, one row per cycle. The folded form has ``butterflies`` of them and goes round: each stage
pairs the neighbours 2i and 2i + 1 and puts their sum at i, their difference at i + size / 2, which is the same wiring
in every stage, and natural order again after the last.

Source: AXELRAM (the rotation of its write and read paths). A row of 128 takes 448 butterflies: 896 adders and
subtractors, where the paper counts 448.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, integer, power_of_two
from golden.fixedpoint import Int, Stationary, check


@dataclass(frozen=True)
class FwhtConfig(UnitConfig):
    """Configuration of the transform.

    Input: x, signed ``in_bits``, rows of ``size``. Output: y, signed ``out_bits``.

    Raises
    ------
    ValueError
        Beside the range of each field: more ``butterflies`` than a stage of the folded form has.
    """

    size: int = power_of_two(128, 2, 256, "elements of a row, a power of two")
    in_bits: int = integer(16, 2, 32, "width of x")
    form: str = choice("parallel", ("parallel", "folded"), "all stages at once, or one after the other")
    butterflies: int = power_of_two(1, 1, 128, "folded: butterflies per cycle, a power of two")
    stages_per_cycle: int = integer(1, 1, 8, "parallel: stages between registers")

    def validate(self) -> None:
        if self.butterflies > self.size // 2:
            raise ValueError(f"butterflies must be at most size / 2 = {self.size // 2}, not {self.butterflies}")

    @property
    def lanes(self) -> int:
        """Elements per beat: a row is one beat."""
        return self.size

    @cached_property
    def stages(self) -> int:
        return self.size.bit_length() - 1

    @cached_property
    def out_bits(self) -> int:
        """Width of y: one bit more per stage."""
        return self.in_bits + self.stages

    @cached_property
    def cycles(self) -> int:
        """Folded: cycles of a row."""
        return self.stages * self.size // (2 * self.butterflies)


@lru_cache
def hadamard(size: int) -> Stationary:
    """H, ready to be multiplied with: ``H[2i + a, 2j + b] = H[i, j] * (-1)**(a & b)``."""
    matrix = np.ones((1, 1), np.int64)
    while len(matrix) < size:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]))
    return Stationary(matrix)


def fwht(config: FwhtConfig, x: ArrayLike) -> Int:
    """Transform rows (…, size). Raises OverflowError for values outside their width, ValueError for another length."""
    x = check("x", x, config.in_bits)
    if x.ndim == 0 or x.shape[-1] != config.size:
        raise ValueError(f"a row must have {config.size} elements, not an array of shape {x.shape}")
    rows = hadamard(config.size).product(x.reshape(-1, config.size))  # H is symmetric
    return check("y", rows.reshape(x.shape), config.out_bits)
