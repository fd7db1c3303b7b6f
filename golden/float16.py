"""IEEE binary16 as bit patterns: unsigned 16-bit integers in int64 arrays.

Every operation rounds to nearest even and keeps subnormals. Conversion from integers is integer arithmetic, and
saturates: what exceeds 65504 becomes 65504, so that no infinity is ever made from a finite number. :func:`add` and
:func:`multiply` are IEEE's, with infinities; a NaN is always ``0x7E00``. They call NumPy's element-wise float16
operations, which are correctly rounded (its sums and dot products are not: :func:`tree_sum` says in which order).

Source: AXELRAM (binary16 norms; binary16 table and tree of its read path).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from golden.fixedpoint import Int, as_int, bit_length, check

LARGEST = 0x7BFF
INFINITY = 0x7C00
NAN = 0x7E00
#: A pattern's value is ``mantissa * 2**(X - OFFSET)``, X from 1 to 30.
OFFSET = 25


def from_integer(x: ArrayLike, exponent: ArrayLike = 0) -> Int:
    """``x * 2**exponent`` for ``|x| < 2**61``; the arguments broadcast. Beyond 65504 it saturates, with its sign."""
    value, exponent = np.broadcast_arrays(as_int("x", x), as_int("exponent", exponent))
    size = np.abs(value)
    # The biased exponent at which the highest bit of x is the hidden one; subnormals have that of the smallest normals.
    biased = np.maximum(bit_length(size) + exponent + 14, 1)
    down = biased - OFFSET - exponent
    right = np.clip(down, 0, 62)
    mantissa = np.where(down > 0, size >> right, size << np.clip(-down, 0, 10))
    rest = size - (mantissa << right)
    half = (np.int64(1) << right) >> 1
    up = (down > 0) & ((rest > half) | ((rest == half) & (mantissa & 1 == 1)))
    # A carry out of the mantissa goes on into the exponent.
    pattern = ((biased - 1) << 10) + mantissa + up
    pattern = np.where(size == 0, 0, np.where(biased > 30, LARGEST, np.minimum(pattern, LARGEST)))
    return check("pattern", pattern | np.where(value < 0, 1 << 15, 0), 16, signed=False)


def parts(bits: ArrayLike) -> tuple[Int, Int]:
    """(mantissa, X) of finite patterns that are not negative: ``mantissa * 2**(X - 25)``, mantissa unsigned 11 bits,
    X from 1 to 30. ValueError for any other."""
    pattern = check("bits", bits, 16, signed=False)
    if pattern.size and int(pattern.max()) > LARGEST:
        raise ValueError(f"a finite binary16 that is not negative is needed, not 0x{int(pattern.max()):04X}")
    exponent = pattern >> 10
    return np.where(exponent > 0, 1 << 10, 0) + (pattern & 0x3FF), np.maximum(exponent, 1)


def _elementwise(operation: Callable[..., Any], a: ArrayLike, b: ArrayLike) -> Int:
    operands = (check(name, x, 16, signed=False).astype(np.uint16).view(np.float16) for name, x in (("a", a), ("b", b)))
    with np.errstate(all="ignore"):
        result = np.asarray(operation(*operands))
    return np.where(np.isnan(result), NAN, result.view(np.uint16)).astype(np.int64)


def add(a: ArrayLike, b: ArrayLike) -> Int:
    """``a + b``, element by element."""
    return _elementwise(np.add, a, b)


def multiply(a: ArrayLike, b: ArrayLike) -> Int:
    """``a * b``, element by element."""
    return _elementwise(np.multiply, a, b)


def tree_sum(values: ArrayLike) -> Int:
    """Sum over the last axis: neighbours (0 + 1, 2 + 3, …) first, then these in pairs; an odd one out moves up as it
    is. The order of ``hw.arithmetic.tree``. ValueError if there is nothing to add."""
    level = as_int("values", values)
    if level.ndim == 0 or level.shape[-1] == 0:
        raise ValueError("a tree needs at least one value")
    while level.shape[-1] > 1:
        even = level.shape[-1] & ~1
        pairs = add(level[..., 0:even:2], level[..., 1:even:2])
        level = np.concatenate((pairs, level[..., even:]), axis=-1)
    return level[..., 0]
