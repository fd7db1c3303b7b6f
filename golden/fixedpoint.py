"""Fixed-point arithmetic that golden functions and hardware agree on (int64 carriers, declared widths).

Narrowing right shifts round half up, then saturate; a value that leaves its declared width is an error, never a wrap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int = NDArray[np.int64]

#: Largest magnitude up to which float32 represents every integer, so that BLAS adds them exactly.
EXACT_FLOAT32 = 1 << 24
EXACT_FLOAT64 = 1 << 53


def as_int(name: str, x: ArrayLike) -> Int:
    """``x`` as int64. TypeError if its values are not integers: golden functions never take floats."""
    array = np.asarray(x)
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


def check(name: str, x: ArrayLike, bits: int, signed: bool = True) -> Int:
    """Return ``x`` as int64 after proving that every value fits ``bits``.

    Raises OverflowError (one line: name, value, width) otherwise, so that each golden run is also a proof on that
    data that the hardware's widths suffice.
    """
    array = as_int(name, x)
    low, high = bounds(bits, signed)
    if array.size:
        smallest, largest = int(array.min()), int(array.max())
        if smallest < low or largest > high:
            worst = smallest if smallest < low else largest
            raise OverflowError(f"{name} holds {worst}, which does not fit {'' if signed else 'un'}signed({bits})")
    return array


def saturate(x: ArrayLike, bits: int, signed: bool = True) -> Int:
    """Clamp to the range of a word of ``bits``."""
    return np.clip(as_int("saturate", x), *bounds(bits, signed))


def round_shift(x: ArrayLike, shift: ArrayLike) -> Int:
    """``(x + 2**(shift-1)) >> shift``: round half up (towards plus infinity), for ``|x| < 2**61``. ``shift`` 0 leaves
    x as it is, a negative shift multiplies by a power of two (the caller knows that the product fits int64), and 62
    or more gives what an endless shift gives (0)."""
    value, amount = as_int("round_shift", x), as_int("shift", shift)
    right = np.clip(amount, 0, 62)
    half = np.where(right > 0, np.int64(1) << np.maximum(right - 1, 0), 0)
    # Split so that value + half cannot leave int64: x >> s plus the bit just below the cut.
    rounded = np.where(right > 0, (value >> right) + ((value & half) != 0), value)
    return np.where(amount < 0, rounded << np.clip(-amount, 0, 62), rounded)


def bit_length(x: ArrayLike) -> Int:
    """Number of bits of each non-negative integer below 2**62 (0 for 0): what a leading-zero counter finds."""
    value = as_int("bit_length", x)
    if value.size and int(value.min()) < 0:
        raise ValueError("bit_length takes non-negative integers")
    high, low = value >> 31, value & 0x7FFFFFFF
    # frexp is exact on integers below 2**53; its exponent is the bit length.
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


def matmul(a: ArrayLike, b: ArrayLike) -> Int:
    """Exact integer ``a @ b`` through BLAS. The bound ``terms * max|a| * max|b|`` is proven for this call first:
    below 2**24 the products run in float32, below 2**53 in float64; above, OverflowError."""
    left, right = as_int("matmul", a), as_int("matmul", b)
    if left.size == 0 or right.size == 0:
        return left @ right
    bound = left.shape[-1] * int(np.abs(left).max()) * int(np.abs(right).max())
    if bound < EXACT_FLOAT32:
        kind: Any = np.float32
    elif bound < EXACT_FLOAT64:
        kind = np.float64
    else:
        raise OverflowError(f"matmul sums may reach {bound}, which float64 does not hold exactly")
    return (left.astype(kind) @ right.astype(kind)).astype(np.int64)
