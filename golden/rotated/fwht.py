"""Walsh-Hadamard transform of a row of integers, unnormalised and exact.

``y = H x`` with ``H[i, j] = (-1)**popcount(i & j)``:

In hardware, ``log2(size)`` stages of butterflies ``(a + b, a - b)`` over elements that lie 1, 2, 4, … apart (natural
order). Nothing is rounded, so that any way gives the same y; here it is the exact product with H itself. y has
``log2(size)`` bits more than x. ``H H = size * I``, so that the transform is its own inverse up to the factor ``size``,
and ``(H q) . (H k) = size * (q . k)``.

Source: AXELRAM (the rotation of its write and read paths).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, integer
from golden.fixedpoint import Int, Stationary, check


@dataclass(frozen=True)
class FwhtConfig(UnitConfig):
    """Configuration of the transform.

    Input: x, signed ``in_bits``, rows of ``size``. Output: y, signed ``out_bits``.

    Raises
    ------
    ValueError
        Beside the range of each field: a ``size`` that is no power of two.
    """

    size: int = integer(128, 2, 256, "elements of a row, a power of two")
    in_bits: int = integer(16, 2, 32, "width of x")

    def validate(self) -> None:
        if self.size & (self.size - 1):
            raise ValueError(f"size must be a power of two, not {self.size}")

    @cached_property
    def stages(self) -> int:
        return self.size.bit_length() - 1

    @cached_property
    def out_bits(self) -> int:
        """Width of y: one bit more per stage."""
        return self.in_bits + self.stages


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
