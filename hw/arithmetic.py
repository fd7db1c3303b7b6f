"""Combinational arithmetic that mirrors ``golden.fixedpoint``, trees over lanes, and serial dividers and roots.

Functions take and return Amaranth values; none of them creates state unless its name says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import stream
from amaranth.lib.data import StructLayout
from amaranth.lib.wiring import Component, In, Out

from golden.fixedpoint import bounds


def round_shift(x: Value, shift: int) -> Value:
    """``(x + 2**(shift-1)) >> shift`` for a constant shift: round half up."""
    x = Value.cast(x)
    if shift <= 0:
        return x << -shift
    return (x + (1 << (shift - 1))) >> shift


def round_shift_by(x: Value, shift: Value, limit: int) -> Value:
    """``round_shift`` for a run-time unsigned shift of at most ``limit`` (larger amounts count as ``limit``).

    The result has the shape of ``x``: rounding up may carry into a new bit only when shift is 0, where nothing is
    added. The carry is the bit just below the cut, found by shifting once with one guard bit.
    """
    x, shift = Value.cast(x), Value.cast(shift)
    bits = limit.bit_length()
    if len(shift) > bits or (1 << len(shift)) - 1 > limit:
        shift = Mux(shift > limit, limit, shift)[:bits]
    guarded = Cat(C(0, 1), x)
    if x.shape().signed:
        guarded = guarded.as_signed()
    moved = guarded >> shift
    rounded = moved[1:] if not x.shape().signed else moved[1:].as_signed()
    total = rounded + moved[0]
    return total[: len(x)].as_signed() if x.shape().signed else total[: len(x)]


def saturate(x: Value, bits: int, is_signed: bool = True) -> Value:
    """Clamp to the range of a word of ``bits``; the result has exactly that shape."""
    x = Value.cast(x)
    low, high = bounds(bits, is_signed)
    shape = signed(bits) if is_signed else unsigned(bits)
    if x.shape().signed:
        if is_signed and len(x) <= bits:
            return _as(x, shape)
        clamped = Mux(x > high, C(high, shape), Mux(x < low, C(low, shape), _as(x, shape)))
    else:
        if len(x) < bits or (len(x) == bits and not is_signed):
            return _as(x, shape)
        clamped = Mux(x > high, C(high, shape), _as(x, shape))
    return _as(clamped, shape)


def _as(x: Value, shape: Any) -> Value:
    """``x`` cut or extended to ``shape``."""
    x = Value.cast(x)
    if len(x) < shape.width:
        # An arithmetic no-op extends by the sign of x itself.
        x = (x | C(0, signed(shape.width))) if x.shape().signed else Cat(x, C(0, shape.width - len(x)))
    x = x[: shape.width]
    return x.as_signed() if shape.signed else x.as_unsigned()


def tree(values: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Balanced reduction: depth ``ceil(log2(len(values)))``, neighbours first, so that order is kept."""
    level = list(values)
    if not level:
        raise ValueError("a tree needs at least one value")
    while len(level) > 1:
        pairs = [combine(a, b) for a, b in zip(level[::2], level[1::2])]
        level = pairs + level[len(level) - len(level) % 2 :]
    return level[0]


def max_tree(values: Sequence[Any]) -> Value:
    """Largest value of the lanes, combinational."""
    return tree(values, lambda a, b: Mux(b > a, b, a))


def min_tree(values: Sequence[Any]) -> Value:
    """Smallest value of the lanes, combinational."""
    return tree(values, lambda a, b: Mux(b < a, b, a))


def or_tree(values: Sequence[Any]) -> Value:
    """Bitwise or of the lanes. A leading-zero count of it equals that of the largest unsigned lane."""
    return tree(values, lambda a, b: a | b)


def adder_tree(values: Sequence[Any]) -> Value:
    """Exact sum of the lanes: one bit more per level."""
    return tree(values, lambda a, b: a + b)


def add_or_subtract(a: Value, b: Value, subtract: Value) -> Value:
    """``a + b``, or ``a - b``, of two signed words with one adder: signed, one bit more than a, which has to hold the
    result. The carry into the sum completes the negation."""
    flipped = Cat(b) ^ subtract.replicate(len(b))
    total = Cat(C(1, 1), a).as_signed() + Cat(subtract, flipped).as_signed()
    return total[1 : len(a) + 2].as_signed()


def equals(x: Value, number: int) -> Value:
    """``x == number``, without the comparison with 0 that Verilog linters object to on words."""
    return x == number if number else ~x.any()


def magnitude(x: Value) -> Value:
    """Absolute value of a signed word, unsigned and of the same width (the smallest value becomes 2**(n-1))."""
    x = Value.cast(x)
    return Mux(x < 0, -x, x)[: len(x)].as_unsigned()


def square(x: Value) -> Value:
    """``x * x`` of an unsigned word from half the partial products: ``x_i * x_j`` and ``x_j * x_i`` are one term."""
    x = Value.cast(x).as_unsigned()
    rows = []
    for k in range(len(x)):
        above = x[k + 1 :] & x[k].replicate(len(x) - k - 1) if k + 1 < len(x) else C(0, 0)
        rows.append(Cat(C(0, 2 * k), x[k], C(0, 1), above))
    return adder_tree(rows)[: 2 * len(x)]


def bit_length(x: Value) -> Value:
    """Number of bits of an unsigned word: index of its highest one plus 1, and 0 for 0."""
    x = Value.cast(x).as_unsigned()
    width = 1 << max(0, (len(x) - 1).bit_length())
    padded = Cat(x, C(0, width - len(x))) if width > len(x) else x

    def count(word: Value) -> tuple[Value, Value]:
        """(any bit set, index of the highest one) of a word whose width is a power of two."""
        if len(word) == 1:
            return word, C(0, 0)
        half = len(word) // 2
        some_low, low = count(word[:half])
        some_high, high = count(word[half:])
        return some_low | some_high, Cat(Mux(some_high, high, low), some_high)

    some, index = count(padded)
    return Mux(some, index + 1, 0)


class Divider(Component):
    """Serial restoring divider: ``quotient = floor(dividend / divisor)``, ``remainder`` beside it.

    One quotient bit per cycle: a result is valid ``dividend_bits + 1`` cycles after its operands were accepted, and
    one division is under way at a time. A divisor of 0 gives the quotient of all ones.

    With ``head`` the dividend has ``divisor_bits`` more on top, given as ``head``, which may not exceed the divisor;
    the quotient has ``dividend_bits`` all the same (all ones where head equals the divisor) and takes no longer.

    Ports: stream ``i`` of {dividend, divisor}, with ``head`` {dividend, divisor, head}; stream ``o`` of {quotient,
    remainder}.
    """

    def __init__(self, dividend_bits: int, divisor_bits: int, head: bool = False) -> None:
        if dividend_bits < 1 or divisor_bits < 1:
            raise ValueError(f"a divider needs at least one bit on each side, not {dividend_bits} and {divisor_bits}")
        self.dividend_bits, self.divisor_bits = dividend_bits, divisor_bits
        self.latency = dividend_bits + 1
        self.head = head
        operands = {"dividend": dividend_bits, "divisor": divisor_bits} | ({"head": divisor_bits} if head else {})
        super().__init__(
            {
                "i": In(stream.Signature(StructLayout(operands))),
                "o": Out(stream.Signature(StructLayout({"quotient": dividend_bits, "remainder": divisor_bits}))),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        # The quotient's bits enter where the dividend's leave: one shift register holds both.
        quotient = Signal(self.dividend_bits, reset_less=True)
        remainder = Signal(self.divisor_bits, reset_less=True)
        divisor = Signal(self.divisor_bits, reset_less=True)
        left = Signal(range(self.dividend_bits + 1))
        busy = Signal()
        m.d.comb += [
            self.i.ready.eq(~busy),
            self.o.valid.eq(busy & ~left.any()),
            self.o.payload.quotient.eq(quotient),
            self.o.payload.remainder.eq(remainder),
        ]
        partial = Cat(quotient[-1], remainder)
        difference = partial - divisor
        fits = ~difference[-1]
        with m.If(~busy):
            m.d.sync += [
                quotient.eq(self.i.payload.dividend),
                divisor.eq(self.i.payload.divisor),
                remainder.eq(self.i.payload.head if self.head else 0),
                left.eq(self.dividend_bits),
                busy.eq(self.i.valid),
            ]
        with m.Elif(left.any()):
            m.d.sync += [
                quotient.eq(Cat(fits, quotient[:-1])),
                remainder.eq(Mux(fits, difference, partial)),
                left.eq(left - 1),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += busy.eq(0)
        return m


class SquareRoot(Component):
    """Serial floor square root by the digit recurrence: ``root = floor(sqrt(radicand))``.

    One root bit per cycle: valid ``ceil(bits / 2) + 1`` cycles after the radicand was accepted, one at a time.
    """

    def __init__(self, bits: int) -> None:
        if bits < 1:
            raise ValueError(f"a square root needs a radicand of at least one bit, not {bits}")
        self.bits, self.root_bits = bits, (bits + 1) // 2
        self.latency = self.root_bits + 1
        super().__init__({"i": In(stream.Signature(bits)), "o": Out(stream.Signature(self.root_bits))})

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        n = self.root_bits
        radicand = Signal(2 * n, reset_less=True)
        root = Signal(n, reset_less=True)
        remainder = Signal(n + 1, reset_less=True)
        left = Signal(range(n + 1))
        busy = Signal()
        m.d.comb += [self.i.ready.eq(~busy), self.o.valid.eq(busy & ~left.any()), self.o.payload.eq(root)]
        partial = Cat(radicand[-2:], remainder)
        difference = partial - Cat(C(1, 2), root)
        fits = ~difference[-1]
        with m.If(~busy):
            m.d.sync += [radicand.eq(self.i.payload), root.eq(0), remainder.eq(0), left.eq(n), busy.eq(self.i.valid)]
        with m.Elif(left.any()):
            m.d.sync += [
                radicand.eq(radicand << 2),
                root.eq(Cat(fits, root[:-1])),
                remainder.eq(Mux(fits, difference, partial)),
                left.eq(left - 1),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += busy.eq(0)
        return m
