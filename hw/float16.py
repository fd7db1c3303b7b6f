"""IEEE binary16, combinational, bit for bit as :mod:`golden.float16`.

One aligner, one leading-zero count and one rounding each; subnormals are the smallest exponent without the hidden one,
not a path of their own. Functions take a module for their named intermediates and return 16 bits.
"""

from __future__ import annotations

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value

from golden.float16 import INFINITY, LARGEST, NAN
from hw.arithmetic import bit_length, magnitude

#: Bits of a mantissa, the hidden one included.
MANTISSA = 11


def parts(bits: Value) -> tuple[Value, Value]:
    """(mantissa, X), 11 and 5 bits, of a finite pattern; its sign is not looked at."""
    exponent = bits[10:15]
    normal = exponent.any()
    return Cat(bits[:10], normal), Cat(exponent[0] | ~normal, exponent[1:])


def _named(m: Module, value: Any, name: str) -> Signal:
    signal = Signal(Value.cast(value).shape(), name=name)
    m.d.comb += signal.eq(value)
    return signal


def _left(m: Module, word: Value, length: Value, name: str) -> Signal:
    """``word``, whose highest one is bit ``length - 1``, moved to the left end."""
    away = (len(word) - length)[: len(word).bit_length()]
    return _named(m, (word << away)[: len(word)], name)


def _rounded(m: Module, word: Value, exponent: Value, largest: int, name: str) -> Value:
    """15 bits of a word with its highest one at the left end (or 0), at least 13 bits, and that one's biased exponent,
    signed, which may be too small or too large: ``largest`` stands for what is too large."""
    short = Mux(exponent < 1, 1 - exponent, 0)
    # Beyond 13 nothing is left but whether there was anything.
    far = _named(m, Mux(short > MANTISSA + 2, MANTISSA + 2, short)[:4], f"{name}_far")
    moved = _named(m, Cat(C(0, MANTISSA + 2), word) >> far, f"{name}_moved")
    mantissa, guard, sticky = moved[-MANTISSA:], moved[-MANTISSA - 1], moved[: -MANTISSA - 1].any()
    field = _named(m, Mux(exponent < 1, 0, exponent - 1), f"{name}_field")
    # A carry out of the mantissa goes on into the exponent.
    pattern = _named(m, (field << 10) + mantissa + (guard & (sticky | mantissa[0])), f"{name}_pattern")
    return Mux(pattern > largest, largest, pattern)[:15]


def from_integer(m: Module, x: Value, exponent: Value, name: str) -> Value:
    """``x * 2**exponent`` of a signed or unsigned word and a signed exponent."""
    x = Value.cast(x)
    negative = x[-1] if x.shape().signed else C(0, 1)
    size = magnitude(x) if x.shape().signed else x
    if len(size) < MANTISSA + 2:
        size = Cat(size, C(0, MANTISSA + 2 - len(size)))
    length = _named(m, bit_length(size), f"{name}_length")
    biased = Mux(size.any(), length + exponent + 14, 0)
    pattern = _rounded(m, _left(m, size, length, f"{name}_size"), biased, LARGEST, name)
    return Cat(pattern, negative & size.any())


def multiply(m: Module, a: Value, b: Value, name: str) -> Value:
    """``a * b``."""
    (mantissa_a, x_a), (mantissa_b, x_b) = parts(a), parts(b)
    product = _named(m, mantissa_a * mantissa_b, f"{name}_product")
    length = _named(m, bit_length(product), f"{name}_length")
    biased = length + x_a + x_b - 36
    pattern = _rounded(m, _left(m, product, length, f"{name}_word"), biased, INFINITY, name)
    special = a[10:15].all() | b[10:15].all()
    # A NaN, or infinity times zero.
    invalid = _is_nan(a) | _is_nan(b) | ~a[:15].any() | ~b[:15].any()
    pattern = Mux(special, INFINITY, pattern)[:15]
    return Mux(special & invalid, C(NAN, 16), Cat(pattern, a[15] ^ b[15]))


def add(m: Module, a: Value, b: Value, name: str) -> Value:
    """``a + b``."""
    swap = _named(m, b[:15] > a[:15], f"{name}_swap")
    large, small = (_named(m, v, f"{name}_{n}") for v, n in ((Mux(swap, b, a), "large"), (Mux(swap, a, b), "small")))
    (mantissa, x), (other, other_x) = parts(large), parts(small)
    # Three bits below the mantissa: guard, round, and whether anything lay below these.
    away = _named(m, (x - other_x)[:5], f"{name}_away")
    wide = _named(m, Cat(C(0, MANTISSA + 3), other) >> Mux(away > MANTISSA + 3, MANTISSA + 3, away)[:4], f"{name}_wide")
    aligned = Cat(wide[: MANTISSA + 1].any(), wide[MANTISSA + 1 :])
    differ = large[15] ^ small[15]
    base = Cat(C(0, 3), mantissa)
    total = _named(m, Mux(differ, base - aligned, base + aligned)[: MANTISSA + 4], f"{name}_total")
    length = _named(m, bit_length(total), f"{name}_length")
    biased = Mux(total.any(), x + length - (MANTISSA + 3), 0)
    pattern = _rounded(m, _left(m, total, length, f"{name}_word"), biased, INFINITY, name)
    sign = Mux(total.any(), large[15], a[15] & b[15])
    infinite = large[10:15].all()
    invalid = _is_nan(a) | _is_nan(b) | (infinite & small[10:15].all() & differ)
    return Mux(invalid, C(NAN, 16), Mux(infinite, large, Cat(pattern, sign)))


def _is_nan(bits: Value) -> Value:
    return bits[10:15].all() & bits[:10].any()
