"""Fixed-point arithmetic that golden functions and hardware agree on (int64 carriers, declared widths).

Narrowing right shifts round half up, then saturate; a value that leaves its declared width is an error, never a wrap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int64]
INT64 = np.dtype(np.int64)

#: Largest magnitude up to which float32 represents every integer, so that BLAS adds them exactly.
EXACT_FLOAT32 = 1 << 24
EXACT_FLOAT64 = 1 << 53


def as_int(name: str, x: ArrayLike) -> Int:
    """``x`` as int64, the same array where it is one already. TypeError if its values are not integers: golden
    functions never take floats, and never write into what they are given."""
    if type(x) is np.ndarray and x.dtype is INT64:
        return x
    array = np.asarray(x)
    if array.dtype == np.int64:
        return array
    if array.size == 0 and array.dtype.kind == "f":
        return array.astype(np.int64)
    if array.dtype.kind not in "iub":
        raise TypeError(f"{name} must hold integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >> 63:
        raise OverflowError(f"{name} holds {int(array.max())}, which does not fit signed(64)")
    return array.astype(np.int64)


def bounds(bits: int, signed: bool = True) -> tuple[int, int]:
    """Smallest and largest value of a two's complement (or unsigned) word of ``bits``."""
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)


def address_bits(depth: int) -> int:
    """Width of an address of ``depth`` words: at least 1."""
    return max(1, (depth - 1).bit_length())


def extremes(x: NDArray[Any]) -> tuple[int, int]:
    """Smallest and largest value of an integer array that is not empty. (NumPy finds the place of an extreme of a short
    array in a fifth of the time that it takes to reduce the array to it.)"""
    return x.item(x.argmin()), x.item(x.argmax())


def unsigned_top(x: Int) -> int:
    """Largest value of an array that is not empty, read as unsigned 64 bits: 2**63 or more if any is negative."""
    bits = x.view(np.uint64)
    top: int = bits.item(bits.argmax())
    return top


def check(name: str, x: ArrayLike, bits: int, signed: bool = True) -> Int:
    """Return ``x`` as int64 after proving that every value fits ``bits``.

    Raises OverflowError (one line: name, value, width) otherwise, so that each golden run is also a proof on that
    data that the hardware's widths suffice.
    """
    array = as_int(name, x)
    if not array.size:
        return array
    if signed:
        half = 1 << (bits - 1)
        if array.item(array.argmin()) < -half or array.item(array.argmax()) >= half:
            within(name, *extremes(array), bits)
    elif unsigned_top(array) >> bits:
        within(name, *extremes(array), bits, signed=False)
    return array


def within(name: str, smallest: int, largest: int, bits: int, signed: bool = True) -> None:
    """Prove that what lies in smallest..largest fits ``bits``, or raise :func:`check`'s OverflowError.

    The proof of an intermediate whose range follows from the ranges of its operands: it holds for all data at once,
    and costs no pass over them.
    """
    low, high = bounds(bits, signed)
    if smallest < low or largest > high:
        worst = smallest if smallest < low else largest
        raise OverflowError(f"{name} holds {worst}, which does not fit {'' if signed else 'un'}signed({bits})")


def saturate(x: ArrayLike, bits: int, signed: bool = True) -> Int:
    """Clamp to the range of a word of ``bits``; the same array where nothing is out of range."""
    value = as_int("saturate", x)
    low, high = bounds(bits, signed)
    if value.size and value.item(value.argmin()) >= low and value.item(value.argmax()) <= high:
        return value
    return np.minimum(np.maximum(value, low), high)


def round_shift(x: ArrayLike, shift: ArrayLike) -> Int:
    """``(x + 2**(shift-1)) >> shift``: round half up (towards plus infinity), for ``|x| < 2**61``. ``shift`` 0 leaves
    x as it is, a negative shift multiplies by a power of two (the caller knows that the product fits int64), and 62
    or more gives what an endless shift gives (0)."""
    value, amount = as_int("round_shift", x), as_int("shift", shift)
    if amount.size == 1 and amount.ndim <= value.ndim:
        right = min(amount.item(), 62)
        if right <= 0:
            return value << min(-right, 62) if right else value
        rounded: Int = value + (1 << (right - 1))
        rounded >>= right
        return rounded
    low, high = extremes(amount) if amount.size else (0, 0)
    down = amount if low >= 0 and high <= 62 else np.clip(amount, 0, 62)
    rounded = value + ((np.int64(1) << down) >> 1)
    rounded >>= down
    return rounded << np.clip(-amount, 0, 62) if low < 0 else rounded


def saturating_shift(x: ArrayLike, shift: ArrayLike, bits: int) -> Int:
    """``sat(rs(x, shift))`` to a word of ``bits``, for any shift: what moves out of int64 to the left saturates too."""
    value, amount = as_int("saturating_shift", x), as_int("shift", shift)
    if not amount.size or amount.item(amount.argmin()) >= 0:
        return saturate(round_shift(value, amount), bits)
    low, high = bounds(bits)
    left = np.clip(-amount, 0, 62)
    moved = round_shift(value, np.maximum(amount, 0))
    fits = (moved >= -(-low >> left)) & (moved <= high >> left)
    return saturate(np.where(fits, moved << left, np.where(moved < 0, low, high)), bits)


def bit_length(x: ArrayLike) -> Int:
    """Number of bits of each non-negative integer below 2**62 (0 for 0): what a leading-zero counter finds."""
    value = as_int("bit_length", x)
    top = unsigned_top(value) if value.size else 0
    if top >> 63:
        raise ValueError("bit_length takes non-negative integers")
    # frexp is exact on integers below 2**53; its exponent is the bit length.
    if top < EXACT_FLOAT64:
        return np.frexp(value.astype(np.float64))[1].astype(np.int64)
    high, low = value >> 31, value & 0x7FFFFFFF
    length = np.where(high > 0, np.frexp(high.astype(np.float64))[1] + 31, np.frexp(low.astype(np.float64))[1])
    return length.astype(np.int64)


def isqrt(x: ArrayLike) -> Int:
    """Floor of the square root of each non-negative integer below 2**62, exact."""
    value = as_int("isqrt", x)
    if value.size and int(value.min()) < 0:
        raise ValueError("isqrt takes non-negative integers")
    root = np.sqrt(value.astype(np.float64)).astype(np.int64)
    root -= root * root > value
    root += (root + 1) * (root + 1) <= value
    return root


def _exact(bound: int) -> Any:
    """The narrowest floating dtype in which BLAS adds integers exactly while no partial sum exceeds ``bound``."""
    if bound < EXACT_FLOAT32:
        return np.float32
    if bound < EXACT_FLOAT64:
        return np.float64
    raise OverflowError(f"matmul sums may reach {bound}, which float64 does not hold exactly")


def largest(x: ArrayLike) -> int:
    """Largest magnitude in an integer array, 0 of an empty one."""
    array = np.asarray(x)
    if not array.size:
        return 0
    low, high = extremes(array)
    return max(high, -low)


def matmul(a: ArrayLike, b: ArrayLike) -> Int:
    """Exact integer ``a @ b`` through BLAS. A bound of every partial sum is proven for this call first:
    ``terms * max|a| * max|b|`` or, where that is too coarse, the largest ``sum|a|`` of a row times ``max|b|``. Below
    2**24 the products run in float32, below 2**53 in float64; above, OverflowError."""
    left, right = np.asarray(a), np.asarray(b)
    if left.dtype.kind not in "iub" or right.dtype.kind not in "iub" or left.size == 0 or right.size == 0:
        return as_int("matmul", a) @ as_int("matmul", b)
    bound = left.shape[-1] * largest(left) * largest(right)
    if bound >= EXACT_FLOAT64:
        bound = largest(np.abs(as_int("matmul", left)).sum(axis=-1)) * largest(right)
    kind = _exact(bound)
    # Strides that BLAS cannot take would send the product through a loop many times slower.
    return (left.astype(kind, order="C") @ right.astype(kind)).astype(np.int64)


class Stationary:
    """An integer matrix (n, outputs) that many vectors are multiplied with, kept in the dtype that BLAS needs.

    ``reach`` is the largest sum of magnitudes of a column: ``max|x| * reach`` bounds every partial sum of ``x @ b``,
    and is proven below 2**53 at each call (OverflowError otherwise), below 2**24 for float32.
    """

    def __init__(self, b: ArrayLike):
        matrix = as_int("matrix", b)
        self.shape: tuple[int, ...] = matrix.shape
        self.reach = int(np.abs(matrix).sum(axis=0).max()) if matrix.size else 0
        self._matrix = matrix.astype(np.float64)
        # Of use to words of 12 bits and more; other matrices would only take more memory.
        self._narrow = matrix.astype(np.float32) if self.reach < EXACT_FLOAT32 >> 12 else None

    def product(self, x: ArrayLike) -> Int:
        """``x @ b`` for x (…, n), exact."""
        left = as_int("x", x)
        kind = _exact(largest(left) * self.reach)
        if kind is np.float32 and self._narrow is not None:
            return (left.astype(kind) @ self._narrow).astype(np.int64)
        return (left.astype(np.float64) @ self._matrix).astype(np.int64)
