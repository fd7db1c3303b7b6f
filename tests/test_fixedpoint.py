"""golden.fixedpoint against exact integers and rationals."""

from fractions import Fraction
from math import floor, isqrt

import numpy as np
import pytest

from golden import fixedpoint as fp


def test_round_shift_rounds_half_up_at_every_half_way_point_of_both_signs():
    x = np.arange(-300, 301)
    for shift in range(0, 9):
        exact = [floor(Fraction(int(v), 1 << shift) + Fraction(1, 2)) if shift else int(v) for v in x]
        np.testing.assert_array_equal(fp.round_shift(x, shift), exact)


def test_round_shift_takes_a_shift_per_element_and_negative_ones_multiply():
    np.testing.assert_array_equal(fp.round_shift([-13, 13, 3, -3], [1, 1, -2, -2]), [-6, 7, 12, -12])


def test_round_shift_at_the_ends_of_int64_does_not_wrap():
    top = (1 << 62) - 1
    np.testing.assert_array_equal(fp.round_shift([top, -top], [1, 1]), [1 << 61, -(1 << 61) + 1])
    np.testing.assert_array_equal(fp.round_shift([5, -5], [62, 63]), [0, 0])


@pytest.mark.parametrize("bits, signed", [(8, True), (8, False), (1, False), (32, True)])
def test_saturate_clamps_to_the_word(bits, signed):
    low, high = fp.bounds(bits, signed)
    np.testing.assert_array_equal(fp.saturate([low - 1, low, high, high + 1], bits, signed), [low, low, high, high])


def test_check_names_the_value_and_the_width():
    assert fp.check("x", [-128, 127], 8).tolist() == [-128, 127]
    with pytest.raises(OverflowError, match=r"^sum holds 128, which does not fit signed\(8\)$"):
        fp.check("sum", [0, 128], 8)
    with pytest.raises(OverflowError, match=r"^x holds -1, which does not fit unsigned\(4\)$"):
        fp.check("x", [-1], 4, signed=False)


def test_floats_are_refused():
    with pytest.raises(TypeError, match="^x must hold integers, not float64$"):
        fp.check("x", [0.5], 8)
    with pytest.raises(TypeError, match="must hold integers"):
        fp.round_shift(np.array([1.0]), 1)


def test_bit_length_equals_python_at_every_edge():
    values = sorted({max(0, (1 << k) + d) for k in range(62) for d in (-1, 0, 1)})
    np.testing.assert_array_equal(fp.bit_length(values), [v.bit_length() for v in values])
    with pytest.raises(ValueError, match="non-negative"):
        fp.bit_length([-1])


def test_isqrt_is_the_floor_at_every_edge_and_at_random():
    roots = np.unique(np.concatenate([np.arange(2000), (1 << 31) - 1 - np.arange(2000), 1 << np.arange(31)]))
    values = np.unique(np.concatenate([roots**2 + d for d in (-1, 0, 1)]))
    values = values[(values >= 0) & (values < 1 << 62)]
    values = np.concatenate([values, np.random.default_rng(1).integers(0, 1 << 62, 20_000)])
    np.testing.assert_array_equal(fp.isqrt(values), [isqrt(int(v)) for v in values])


def test_matmul_is_exact_and_refuses_what_floats_cannot_hold():
    generator = np.random.default_rng(2)
    for high, terms in ((128, 1040), (1 << 20, 300)):
        a = generator.integers(-high, high, (5, terms))
        b = generator.integers(-high, high, (terms, 7))
        np.testing.assert_array_equal(fp.matmul(a, b), a @ b)
    worst = np.full((1, 1040), -127)
    assert fp.matmul(worst, worst.T).item() == 127 * 127 * 1040
    with pytest.raises(OverflowError, match="float64 does not hold exactly"):
        fp.matmul([[1 << 40]], [[1 << 20]])
    assert fp.matmul(np.zeros((0, 3), int), np.zeros((3, 2), int)).shape == (0, 2)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [2, 8, 33, 62])
def test_a_range_fits_exactly_where_its_ends_do(bits, signed):
    low, high = fp.bounds(bits, signed)
    fp.within("x", low, high, bits, signed)
    np.testing.assert_array_equal(fp.check("x", [low, high], bits, signed), [low, high])
    kind = "signed" if signed else "unsigned"
    for worst in (low - 1, high + 1):
        message = f"x holds {worst}, which does not fit {kind}\\({bits}\\)"
        with pytest.raises(OverflowError, match=message):
            fp.within("x", min(worst, 0), max(worst, 0), bits, signed)
        with pytest.raises(OverflowError, match=message):
            fp.check("x", [0, worst], bits, signed)


def test_matrices_of_any_integer_type_multiply_alike():
    generator = np.random.default_rng(3)
    a, b = generator.integers(-128, 128, (4, 50)), generator.integers(-128, 128, (50, 6))
    for kind in (np.int8, np.int16, np.int32, np.int64):
        np.testing.assert_array_equal(fp.matmul(a.astype(kind), b.astype(kind)), a @ b)
        np.testing.assert_array_equal(fp.Stationary(b.astype(kind)).product(a.astype(kind)), a @ b)
    assert fp.largest(np.array([-128], np.int8)) == 128


@pytest.mark.parametrize("shift", [0, 3, -2, np.array([0, 3, -2])])
def test_results_are_never_written_into_what_they_came_from(shift):
    x = np.array([5, -6, 7])
    kept = x.copy()
    fp.round_shift(x, shift)
    fp.saturate(x, 3)
    fp.saturate(x, 8)
    np.testing.assert_array_equal(x, kept)
