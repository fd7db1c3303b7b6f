"""hw.arithmetic and hw.pipeline against Python integers, in Amaranth's own simulator."""

import itertools
import random
import warnings
from math import isqrt

import numpy as np
import pytest
from amaranth.hdl import Module, Signal, Value, signed, unsigned
from amaranth.sim import Simulator

from golden import fixedpoint
from hw.arithmetic import (
    Divider,
    SquareRoot,
    adder_tree,
    bit_length,
    magnitude,
    max_tree,
    min_tree,
    or_tree,
    round_shift,
    round_shift_by,
    saturate,
    tree,
)
from hw.pipeline import SkidBuffer


def evaluate(shapes, functions, vectors):
    """Values of combinational functions of signals for each vector: a list of tuples."""
    m = Module()
    inputs = [Signal(shape, name=f"x{k}") for k, shape in enumerate(shapes)]
    outputs = []
    for k, function in enumerate(functions):
        value = Value.cast(function(*inputs))
        output = Signal(value.shape(), name=f"y{k}")
        m.d.comb += output.eq(value)
        outputs.append(output)
    found = []

    async def testbench(ctx):
        for vector in vectors:
            for signal, value in zip(inputs, vector, strict=True):
                ctx.set(signal, int(value))
            found.append(tuple(ctx.get(output) for output in outputs))

    simulator = Simulator(m)
    simulator.add_testbench(testbench)
    simulator.run()
    return found


def results(core, operands, seed=None):
    """(outputs, cycles from acceptance to validity) of a core with streams; random stalls with a seed."""
    generator = random.Random(seed)
    outputs, cycles = [], []

    async def testbench(ctx):
        cycle, accepted = 0, None
        todo = list(operands)
        held = None
        offering = False
        while len(outputs) < len(operands):
            offering = offering or (bool(todo) and (seed is None or generator.random() < 0.6))
            ready = seed is None or generator.random() < 0.4
            ctx.set(core.i.valid, offering)
            ctx.set(core.o.ready, ready)
            if offering:
                ctx.set(core.i.payload, todo[0])
            taken_in = offering and ctx.get(core.i.ready)
            if ctx.get(core.o.valid):
                value = ctx.get(core.o.payload)
                plain = {name: value[name] for name, _ in value.shape()} if hasattr(value, "shape") else value
                assert held in (None, plain), "payload changed while stalled"
                if held is None and accepted is not None:
                    cycles.append(cycle - accepted)
                held = None if ready else plain
                if ready:
                    outputs.append(plain)
            else:
                assert held is None, "valid dropped while stalled"
            await ctx.tick()
            if taken_in:
                todo.pop(0)
                accepted, offering = cycle, False
            cycle += 1
            assert cycle < 1_000_000

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulator = Simulator(core)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
    return outputs, cycles


# -- rounding and saturation -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [signed(7), unsigned(7)], ids=["signed", "unsigned"])
def test_round_shift_equals_golden_for_every_word_and_shift(shape):
    low, high = fixedpoint.bounds(7, shape.signed)
    every = np.arange(low, high + 1)
    shifts = range(9)
    found = evaluate([shape], [lambda x, s=s: round_shift(x, s) for s in shifts], every[:, None])
    for s in shifts:
        np.testing.assert_array_equal([row[s] for row in found], fixedpoint.round_shift(every, s))


@pytest.mark.parametrize("shape", [signed(6), unsigned(6)], ids=["signed", "unsigned"])
@pytest.mark.parametrize("limit", [0, 1, 6, 7, 9, 63])
def test_run_time_round_shift_equals_golden_for_every_word_and_shift(shape, limit):
    low, high = fixedpoint.bounds(6, shape.signed)
    pairs = list(itertools.product(range(low, high + 1), range(16)))
    found = evaluate([shape, unsigned(4)], [lambda x, s: round_shift_by(x, s, limit)], pairs)
    x, s = np.array(pairs).T
    np.testing.assert_array_equal([y for (y,) in found], fixedpoint.round_shift(x, np.minimum(s, limit)))


@pytest.mark.parametrize("shape", [signed(6), unsigned(6)], ids=["signed", "unsigned"])
@pytest.mark.parametrize(
    "bits, is_signed", [(3, True), (3, False), (5, True), (6, True), (6, False), (8, True), (8, False)]
)
def test_saturate_equals_golden_for_every_word(shape, bits, is_signed):
    low, high = fixedpoint.bounds(6, shape.signed)
    every = np.arange(low, high + 1)
    found = evaluate([shape], [lambda x: saturate(x, bits, is_signed)], every[:, None])
    np.testing.assert_array_equal([y for (y,) in found], fixedpoint.saturate(every, bits, is_signed))


def test_results_have_exactly_the_documented_shape():
    word = Signal(signed(9))
    assert saturate(word, 5).shape() == signed(5)
    assert saturate(word, 12).shape() == signed(12)
    assert saturate(word, 5, False).shape() == unsigned(5)
    assert round_shift_by(word, Signal(3), 7).shape() == signed(9)
    assert magnitude(word).shape() == unsigned(9)


# -- trees and counts --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [signed(5), unsigned(5)], ids=["signed", "unsigned"])
def test_trees_equal_sequential_reductions(lanes, shape):
    generator = np.random.default_rng(lanes)
    low, high = fixedpoint.bounds(5, shape.signed)
    vectors = generator.integers(low, high + 1, (300, lanes))
    vectors[:6] = [[low] * lanes, [high] * lanes, [0] * lanes, [low] + [high] * (lanes - 1),
                   [high] * (lanes - 1) + [low], [-1 if shape.signed else 1] * lanes]  # fmt: skip
    functions = [lambda *x, f=f: f(x) for f in (max_tree, min_tree, adder_tree, or_tree)]
    found = np.array(evaluate([shape] * lanes, functions, vectors))
    np.testing.assert_array_equal(found[:, 0], vectors.max(axis=1))
    np.testing.assert_array_equal(found[:, 1], vectors.min(axis=1))
    np.testing.assert_array_equal(found[:, 2], vectors.sum(axis=1))
    np.testing.assert_array_equal(found[:, 3], np.bitwise_or.reduce(vectors, axis=1))


@pytest.mark.parametrize("count", range(1, 18))
def test_tree_keeps_the_order_and_is_balanced(count):
    assert "".join(tree([chr(97 + k) for k in range(count)], lambda a, b: a + b)) == "abcdefghijklmnopq"[:count]
    depth = tree([0] * count, lambda a, b: max(a, b) + 1)
    assert depth == (count - 1).bit_length()


def test_tree_of_nothing_is_refused():
    with pytest.raises(ValueError, match="a tree needs at least one value"):
        tree([], max)


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 11])
def test_bit_length_of_every_word(bits):
    found = evaluate([unsigned(bits)], [bit_length], [[x] for x in range(1 << bits)])
    assert [y for (y,) in found] == [x.bit_length() for x in range(1 << bits)]


def test_bit_length_of_a_wide_word_at_every_edge():
    edges = sorted({max(0, min((1 << 61) - 1, (1 << k) + d)) for k in range(62) for d in (-1, 0, 1)})
    found = evaluate([unsigned(61)], [bit_length], [[x] for x in edges])
    assert [y for (y,) in found] == [x.bit_length() for x in edges]


def test_magnitude_of_every_word():
    found = evaluate([signed(6)], [magnitude], [[x] for x in range(-32, 32)])
    assert [y for (y,) in found] == [abs(x) for x in range(-32, 32)]


# -- serial cores ------------------------------------------------------------------------------------------------------
def divided(a, b, bits):
    return {"quotient": a // b, "remainder": a % b} if b else {"quotient": (1 << bits) - 1, "remainder": None}


def check_division(dividend_bits, divisor_bits, pairs, seed=None):
    core = Divider(dividend_bits, divisor_bits)
    found, cycles = results(core, [{"dividend": a, "divisor": b} for a, b in pairs], seed)
    for (a, b), got in zip(pairs, found, strict=True):
        wanted = divided(a, b, dividend_bits)
        assert got["quotient"] == wanted["quotient"], (a, b)
        assert b == 0 or got["remainder"] == wanted["remainder"], (a, b)
    assert set(cycles) == {core.latency} == {dividend_bits + 1}


def test_divider_for_every_pair_of_small_words():
    check_division(5, 4, list(itertools.product(range(32), range(16))))
    check_division(3, 5, list(itertools.product(range(8), range(32))))


def test_divider_of_a_single_bit():
    check_division(1, 1, list(itertools.product(range(2), range(2))))


def test_divider_at_edges_of_wide_words_and_with_stalls():
    edges = sorted({min((1 << 33) - 1, max(0, (1 << k) + d)) for k in (0, 1, 16, 17, 32, 33) for d in (-1, 0, 1)})
    pairs = list(itertools.product(edges, [1, 2, 3, 255, 256, (1 << 17) - 1, 0]))
    check_division(33, 17, pairs)
    check_division(33, 17, pairs[::5], seed=1)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 10])
def test_square_root_of_every_word(bits):
    core = SquareRoot(bits)
    found, cycles = results(core, range(1 << bits))
    assert found == [isqrt(x) for x in range(1 << bits)]
    assert set(cycles) == {core.latency} == {(bits + 1) // 2 + 1}


@pytest.mark.parametrize("bits", [31, 46])
def test_square_root_at_edges_of_wide_words_and_with_stalls(bits):
    top = (1 << bits) - 1
    squares = [r * r + d for r in (*(1 << k for k in range(bits // 2)), isqrt(top), 12345) for d in (-1, 0, 1)]
    x = sorted({min(top, max(0, v)) for v in [*squares, *((1 << k) + d for k in range(bits) for d in (-1, 0, 1)), top]})
    found, _ = results(SquareRoot(bits), x)
    assert found == [isqrt(v) for v in x]
    found, _ = results(SquareRoot(bits), x[::6], seed=2)
    assert found == [isqrt(v) for v in x[::6]]


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Divider(0, 4), "a divider needs at least one bit on each side, not 0 and 4"),
        (lambda: Divider(4, 0), "a divider needs at least one bit on each side, not 4 and 0"),
        (lambda: SquareRoot(0), "a square root needs a radicand of at least one bit, not 0"),
    ],
)
def test_cores_without_bits_are_refused(build, message):
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value) == message


# -- streams -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_skid_buffer_keeps_order_and_loses_nothing(seed):
    words = [random.Random(9).getrandbits(8) for _ in range(200)]
    found, cycles = results(SkidBuffer(8), words, seed)
    assert found == words
    if seed is None:
        assert set(cycles) == {1}  # latency 1, and one word per cycle


def test_skid_buffer_takes_two_words_while_stalled_and_gives_them_back_to_back():
    core = SkidBuffer(4)
    seen = []

    async def testbench(ctx):
        ctx.set(core.i.valid, 1)
        for k in range(4):
            ctx.set(core.i.payload, k + 1)
            seen.append(ctx.get(core.i.ready))
            await ctx.tick()
        assert seen == [1, 1, 0, 0]
        # Ready does not reach back to the other side within a cycle, nor does valid reach forward.
        ctx.set(core.o.ready, 1)
        assert ctx.get(core.i.ready) == 0
        ctx.set(core.i.valid, 0)
        assert ctx.get(core.o.valid) == 1
        for word in (1, 2):
            assert (ctx.get(core.o.valid), ctx.get(core.o.payload)) == (1, word)
            await ctx.tick()
        assert ctx.get(core.o.valid) == 0

    simulator = Simulator(core)
    simulator.add_clock(1e-6)
    simulator.add_testbench(testbench)
    simulator.run()
