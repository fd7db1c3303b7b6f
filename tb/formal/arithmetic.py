"""Combinational functions of :mod:`hw.arithmetic` against their definitions, for every input of a small width.

Each class takes the module whose functions it checks, so that a mutant of it can be checked as well.
"""

from __future__ import annotations

from typing import Any

from amaranth.hdl import Assert, C, Elaboratable, Module, Mux, Signal, Value, signed, unsigned

import hw.arithmetic
from golden.fixedpoint import bounds


class Trees(Elaboratable):
    """``max_tree``, ``min_tree`` or ``or_tree`` of 1 to ``lanes`` values equals the loop that takes one value after
    the other, on signed words of ``bits`` and on unsigned ones."""

    def __init__(self, kind: str, lanes: int = 9, bits: int = 4, functions: Any = hw.arithmetic) -> None:
        self.tree = getattr(functions, f"{kind}_tree")
        self.kind = kind
        self.groups = [
            [Signal(shape, name=f"{name}{k}") for k in range(lanes)]
            for name, shape in (("s", signed(bits)), ("u", unsigned(bits)))
        ]
        self.ports = [x for group in self.groups for x in group]

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        for group in self.groups:
            found: Any = group[0]
            for n, x in enumerate(group, 1):
                if n > 1:
                    step = Signal(x.shape(), name=f"{x.name}_step")
                    m.d.comb += step.eq(found)
                    if self.kind == "or":
                        m.d.comb += step.eq(found | x)
                    else:
                        with m.If(x > found if self.kind == "max" else x < found):
                            m.d.comb += step.eq(x)
                    found = step
                m.d.comb += Assert(self.tree(group[:n]) == found)
        return m


class RoundShift(Elaboratable):
    """``round_shift_by(x, shift, limit)`` is ``floor(x / 2**s + 1/2)`` with ``s = min(shift, limit)``, and
    ``round_shift(x, s)`` is the same for a constant: words of 1, 3 and ``bits``, signed and unsigned, limits on both
    sides of what ``shift`` can say."""

    def __init__(self, bits: int = 4, functions: Any = hw.arithmetic) -> None:
        self.functions = functions
        self.shift = Signal(3)
        self.words = [Signal(kind(n), name=f"{kind.__name__}{n}") for kind in (signed, unsigned) for n in (1, 3, bits)]
        self.ports = [self.shift, *self.words]

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        for x in self.words:
            for limit in (1, 4, 9):
                amount = Mux(self.shift > limit, limit, self.shift)
                got = self.functions.round_shift_by(x, self.shift, limit)
                self.claim(m, x, amount, got, name=f"{x.name}_{limit}")
                m.d.comb += Assert(C(got.shape() == x.shape()))
            for amount in range(len(x) + 3):
                self.claim(m, x, amount, self.functions.round_shift(x, amount), name=f"{x.name}_constant{amount}")
        return m

    def claim(self, m: Module, x: Any, amount: Any, got: Any, name: str) -> None:
        """``got`` is the integer with ``got * 2**s <= x + 2**s / 2 < (got + 1) * 2**s``, on doubled values.

        At shift 0 the doubled half is 1, which changes nothing: ``2 * got <= 2 * x + 1 < 2 * got + 2``.
        """
        wide = Signal(signed(len(x) + 10), name=f"{name}_low")
        half = Signal(signed(len(x) + 10), name=f"{name}_half")
        m.d.comb += [wide.eq((got << 1) << amount), half.eq((x << 1) + (1 << amount))]
        m.d.comb += Assert((wide <= half) & (half < wide + (2 << amount)))


class Saturate(Elaboratable):
    """``saturate(x, bits, signed)`` is the nearest value that the word holds, from and to every width of 1 to ``bits``
    and both signednesses."""

    def __init__(self, bits: int = 6, functions: Any = hw.arithmetic) -> None:
        self.functions, self.bits = functions, bits
        self.words = [
            Signal(kind(n), name=f"{kind.__name__}{n}") for kind in (signed, unsigned) for n in range(1, bits + 1)
        ]
        self.ports = list(self.words)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        for x in self.words:
            for bits in range(1, self.bits + 1):
                for is_signed in (True, False):
                    low, high = bounds(bits, is_signed)
                    y = self.functions.saturate(x, bits, is_signed)
                    shape = signed(bits) if is_signed else unsigned(bits)
                    m.d.comb += Assert(C(Value.cast(y).shape() == shape))
                    with m.If(x > high):
                        m.d.comb += Assert(y == high)
                    with m.Elif(x < low):
                        m.d.comb += Assert(y == low)
                    with m.Else():
                        m.d.comb += Assert(y == x)
        return m


class BitLength(Elaboratable):
    """``bit_length(x)`` is the n with ``2**(n-1) <= x < 2**n``, and 0 for 0: words of 1 to ``bits``."""

    def __init__(self, bits: int = 9, functions: Any = hw.arithmetic) -> None:
        self.functions = functions
        self.words = [Signal(n, name=f"x{n}") for n in range(1, bits + 1)]
        self.ports = list(self.words)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        for x in self.words:
            n = Signal(8, name=f"{x.name}_length")
            m.d.comb += n.eq(self.functions.bit_length(x))
            with m.If(x == 0):
                m.d.comb += Assert(n == 0)
            with m.Else():
                m.d.comb += Assert((n >= 1) & (n <= len(x)))
                m.d.comb += Assert((x >> n[:4] == 0) & (x >> (n - 1)[:4] == 1))
        return m


class Sums(Elaboratable):
    """``adder_tree`` of 1 to ``lanes`` values equals the running sum, and ``magnitude`` the absolute value."""

    def __init__(self, lanes: int = 9, bits: int = 3, functions: Any = hw.arithmetic) -> None:
        self.functions = functions
        self.words = [Signal(signed(bits), name=f"x{k}") for k in range(lanes)]
        self.ports = list(self.words)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        total: Any = 0
        for n, x in enumerate(self.words, 1):
            step = Signal(signed(16), name=f"sum{n}")
            m.d.comb += step.eq(total + x)
            total = step
            m.d.comb += Assert(self.functions.adder_tree(self.words[:n]) == total)
        x, y = self.words[0], self.functions.magnitude(self.words[0])
        with m.If(x < 0):
            m.d.comb += Assert(y == -x)
        with m.Else():
            m.d.comb += Assert(y == x)
        return m
