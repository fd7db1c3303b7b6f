"""golden.float16 against NumPy, and hw.float16 against golden in Amaranth's simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from amaranth.hdl import Module, Signal, signed
from amaranth.sim import Simulator

from golden import float16 as golden
from hw import float16 as hw

SPECIAL = [0, 1, 2, 0x200, 0x3FF, 0x400, 0x401, 0x7FF, 0x3BFF, 0x3C00, 0x3C01, 0x4000, 0x7800, 0x7BFE, 0x7BFF]
SPECIAL += [0x7C00, 0x7C01, 0x7E00]
SPECIAL += [bits | 0x8000 for bits in SPECIAL]


def integers() -> tuple[np.ndarray, np.ndarray]:
    """Words of 24 bits and exponents: subnormal, half-way, saturating."""
    generator = np.random.default_rng(1)
    x = generator.integers(-(2**23), 2**23, 4000) >> generator.integers(0, 23, 4000)
    x = np.concatenate((x, [0, -1, 1, -(2**23), 2**23 - 1], np.arange(2048, 4096) + 2048))
    exponent = generator.integers(-45, 6, len(x))
    exponent[::3] = generator.integers(-128, 128, len(exponent[::3]))
    return x, exponent


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """All pairs of special patterns, near-cancelling ones, and others."""
    generator = np.random.default_rng(2)
    a, b = (grid.ravel() for grid in np.meshgrid(SPECIAL, SPECIAL))
    x, y = generator.integers(0, 1 << 16, (2, 4000))
    y[:2000] = x[:2000] ^ generator.integers(0, 64, 2000) ^ (generator.integers(0, 2, 2000) << 15)
    y[2000:3000] = np.clip((x[2000:3000] & 0x7FFF) + generator.integers(-4096, 4096, 1000), 0, 0x7BFF)
    return np.concatenate((a, x)), np.concatenate((b, y))


def test_from_integer_is_numpys_rounding() -> None:
    x, exponent = integers()
    real = np.clip(x * 2.0**exponent, -65504, 65504)
    wanted = real.astype(np.float16).view(np.uint16)
    assert np.array_equal(golden.from_integer(x, exponent), np.where(x == 0, 0, wanted))


def test_parts_of_every_pattern() -> None:
    bits = np.arange(0x7C00)
    mantissa, biased = golden.parts(bits)
    assert np.array_equal(mantissa * 2.0 ** (biased - 25), bits.astype(np.uint16).view(np.float16).astype(np.float64))
    with pytest.raises(ValueError, match="not 0x8001"):
        golden.parts([1, 0x8001])


def test_tree_sum_takes_neighbours_first() -> None:
    one, small = 0x3C00, 0x1000  # 1, and 2**-11: half a unit of 1
    assert golden.tree_sum([one, small, small, small]) == 0x3C01
    assert golden.tree_sum([one, small, small]) == one
    with pytest.raises(ValueError, match="at least one value"):
        golden.tree_sum(np.zeros(0, np.int64))


def test_components_equal_golden() -> None:
    m = Module()
    a, b, x, exponent = Signal(16), Signal(16), Signal(signed(24)), Signal(signed(8))
    outputs = [Signal(16, name=f"o{k}") for k in range(3)]
    m.d.comb += [
        outputs[0].eq(hw.add(m, a, b, "add")),
        outputs[1].eq(hw.multiply(m, a, b, "multiply")),
        outputs[2].eq(hw.from_integer(m, x, exponent, "integer")),
    ]
    first, second = pairs()
    words, powers = integers()
    wanted = (golden.add(first, second), golden.multiply(first, second), golden.from_integer(words, powers))

    async def testbench(ctx: Any) -> None:
        for k in range(max(len(first), len(words))):
            ctx.set(a, int(first[k % len(first)]))
            ctx.set(b, int(second[k % len(first)]))
            ctx.set(x, int(words[k % len(words)]))
            ctx.set(exponent, int(powers[k % len(words)]))
            got = [ctx.get(output) for output in outputs]
            assert got == [int(w[k % len(w)]) for w in wanted], k

    simulator = Simulator(m)
    simulator.add_testbench(testbench)
    simulator.run()
