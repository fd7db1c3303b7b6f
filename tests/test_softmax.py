"""Softmax: the golden function against exact rationals and floating point."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from golden.fixedpoint import bounds
from golden.nonlinear.softmax import (
    Mode,
    SoftmaxConfig,
    Statistics,
    exact,
    normalise,
    reciprocal,
    reduce,
    row_constants,
    softmax,
    split,
)
from hw.catalog import find
from hw.nonlinear.softmax import Softmax

BASE2 = SoftmaxConfig()
PEER = find("softmax").configurations["peer16"]
PAPER = find("softmax").configurations["paper"]


def bits(probability_bits, **changes):
    """A configuration whose reciprocal suits its output width."""
    return SoftmaxConfig(probability_bits=probability_bits, reciprocal_bits=probability_bits + 3, **changes)


def draw(config, rows, n, seed=0):
    """Rows of every kind: uniform, bell-shaped over a few octaves, nearly flat, and peaks on a floor."""
    generator = np.random.default_rng(seed)
    low, high = bounds(config.score_bits)
    octave = 1 << config.fraction_bits if config.form == "base2" else config.exp.frozen.ln2
    kinds = [
        generator.integers(low, high + 1, (rows, n)),
        np.rint(generator.normal(0, 3 * octave, (rows, n))),
        high - generator.integers(0, octave // 2 + 2, (rows, n)),
        np.where(generator.random((rows, n)) < 0.1, high - generator.integers(0, 2 * octave, (rows, n)), low),
    ]
    pick = (np.arange(rows) % 4)[:, None]
    return np.choose(pick, kinds).clip(low, high).astype(np.int64)


def worst_error(config, x, keep=None, constants=None):
    """Largest distance of a probability from the correctly rounded one, in LSB."""
    p, _ = softmax(config, x, keep, constants)
    m, z = split(config, x, keep, constants)
    return max(
        int(np.abs(p[k] - np.minimum(exact(m[k], z[k], config.probability_bits), config.one)).max())
        for k in range(len(p))
    )


# -- mass ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("probability_bits", [12, 16])
def test_flat_rows_of_every_length_to_4096_keep_their_mass(probability_bits):
    config = bits(probability_bits)
    least, error = 1.0, 0
    for first in range(1, 4097, 32):
        lengths = np.arange(first, min(first + 32, 4097))
        at = np.arange(lengths[-1])
        keep = at < lengths[:, None]
        p, empty = softmax(config, np.full(keep.shape, -137), keep)
        assert not empty.any()
        least = min(least, float(p.sum(axis=1).min()) / (1 << probability_bits))
        wanted = np.minimum(((2 << probability_bits) + lengths) // (2 * lengths), config.one)[:, None]
        error = max(error, int(np.abs(np.where(keep, p - wanted, 0)).max()))
    assert least >= 0.997
    assert error <= 1


def test_nearest_rounding_cannot_keep_the_mass_of_3000_equal_elements():
    x = np.zeros((1, 3000), dtype=np.int64)
    nearest = softmax(bits(12, rounding="nearest"), x)[0].sum() / 4096
    diffuse = softmax(bits(12), x)[0].sum() / 4096
    assert nearest < 0.74
    assert 0.99 <= diffuse <= 1.0


@pytest.mark.parametrize("n", [32_768, 200_000, 262_144])
def test_long_rows_keep_their_mass_and_stay_within_one_lsb(n):
    flat = normalise(BASE2, x := np.full((1, n), 99), reduce(BASE2, x))
    assert 0.99 <= flat.sum() / 65536 <= 1.001
    x = np.rint(np.random.default_rng(n).normal(0, 1500, (1, n))).astype(np.int64)
    statistics = reduce(BASE2, x)
    p = normalise(BASE2, x, statistics)
    assert 0.99 <= p.sum() / 65536 <= 1.001
    m, z = split(BASE2, x)
    assert np.abs(p[0] - exact(m[0], z[0], 16)).max() <= 1


def test_row_sums_of_short_rows_at_eight_bits():
    """The setting of the peers, whose flat rows of 64 at 8 bits sum to between .773 and .930."""
    sums = [softmax(PEER, np.full((1, n), 5))[0].sum() / 256 for n in range(1, 65)]
    assert min(sums) >= 0.98
    assert max(sums) <= 1.0


# -- error ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config",
    [
        *(bits(b) for b in range(8, 17)),
        bits(16, form="ibert"),
        bits(12, form="ibert", scale_log2=4),
        bits(12, form="ibert", scale_log2=12, mantissa_bits=12),
        bits(16, score_bits=8, fraction_bits=4),
        bits(16, interpolate=False, rom_bits=5, fraction_bits=6),
        bits(14, rounding="nearest"),
        bits(16, fraction_bits=14),
        bits(8, fraction_bits=0),
        PEER,
    ],
    ids=lambda config: config.describe(),
)
def test_every_probability_is_within_one_lsb_of_the_correctly_rounded_one(config):
    assert config.within_one_lsb
    for n in (1, 2, 5, 17, 64, 63):
        assert worst_error(config, draw(config, 40, n, n)) <= 1
    if config.max_row >= 1000:
        assert worst_error(config, draw(config, 8, 777)) <= 1


@pytest.mark.parametrize("probability_bits", [8, 12, 16])
def test_masses_of_tiny_elements_that_the_sum_floors_do_not_reach_one_lsb(probability_bits):
    """One large element beside 262,143 whose terms lie just below a step of the sum: the most that can be lost."""
    config = bits(probability_bits)
    for octaves in range(config.sum_guard_bits + 12, config.sum_guard_bits + 16):
        for fraction in (1, 1023):
            x = np.full((1, 262_144), bounds(16)[1] - 1024 * octaves - fraction)
            x[0, 0] = bounds(16)[1] - 1023
            m, z = split(config, x[:, :2])
            big, small = (Fraction(int(m[0, k]), 1 << int(z[0, k])) for k in (0, 1))
            wanted = big / (big + 262_143 * small) * (1 << probability_bits)
            statistics = reduce(config, x)
            p = int(normalise(config, x[:, :2], statistics)[0, 0])
            assert abs(p - min(wanted, config.one)) < 1.5


def test_a_maximum_that_rises_in_every_beat():
    config = bits(16, lanes=1)
    rising = (bounds(16)[0] + 700 * np.arange(90))[None]
    assert worst_error(config, rising) <= 1
    assert worst_error(config, rising[:, ::-1]) <= 1


@pytest.mark.parametrize("scale_bits", [(16, 3e-5), (12, 3e-4), (8, 5e-3)])
def test_against_floating_point_softmax(scale_bits):
    probability_bits, bound = scale_bits
    config = bits(probability_bits)
    x = draw(config, 64, 300)
    p, _ = softmax(config, x)
    e = np.exp2((x - x.max(axis=1, keepdims=True)) / 1024)
    wanted = e / e.sum(axis=1, keepdims=True)
    assert np.abs(p / (1 << probability_bits) - wanted).max() < bound + 2.0**-probability_bits


def test_arg_max_agrees_with_floating_point():
    """The largest score has the largest probability when its lead is worth more than an LSB."""
    config = bits(16)
    x = np.rint(np.random.default_rng(5).normal(0, 2000, (400, 50))).astype(np.int64)
    x[np.arange(400), np.arange(400) % 50] = x.max(axis=1) + 40
    p, _ = softmax(config, x)
    np.testing.assert_array_equal(p.argmax(axis=1), x.argmax(axis=1))


def test_outputs_never_exceed_one_at_any_width():
    for probability_bits in range(8, 17):
        config = bits(probability_bits)
        for n in (1, 2, 3):
            p, _ = softmax(config, draw(config, 60, n))
            assert p.min() >= 0
            assert p.max() <= (1 << probability_bits) - 1
        assert softmax(config, [[-32768]])[0].tolist() == [[(1 << probability_bits) - 1]]


# -- the paper's form ----------------------------------------------------------------------------------------
def test_token_wise_rows_with_their_own_scales_match_floating_point():
    generator = np.random.default_rng(3)
    logits = generator.normal(0, 4, (40, 200)) * generator.uniform(0.2, 3, (40, 1))
    scales = [Fraction(float(row)) / 32767 for row in np.abs(logits).max(axis=1)]
    x = np.rint(logits / np.array([float(s) for s in scales])[:, None]).astype(np.int64).clip(-32768, 32767)
    constants = row_constants(PAPER, scales)
    p, _ = softmax(PAPER, x, constants=constants)
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert np.abs(p / 65536 - e / e.sum(axis=1, keepdims=True)).max() < 2e-3
    assert worst_error(PAPER, x, constants=constants) <= 1


def test_scales_so_fine_that_the_polynomial_needs_the_overflow_guard():
    """Without the input shift the polynomial of such a row leaves 31 bits, and its softmax is noise."""
    scale = Fraction(1, 1 << 17)
    constants = PAPER.exp.constants(scale)
    assert constants.in_shift > 0
    x = np.linspace(-32768, 32767, 101).astype(np.int64)[None]
    p, _ = softmax(PAPER, x, constants=constants)
    e = np.exp(x[0] * float(scale))
    assert np.abs(p[0] / 65536 - e / e.sum()).max() < 1e-4
    assert abs(p.sum() / 65536 - 1) < 1e-3


def test_scales_so_coarse_that_the_polynomial_has_few_bits_stay_safe():
    for scale in (Fraction(2, 3), Fraction(1, 3), Fraction(1, 16)):
        constants = PAPER.exp.constants(scale)
        for x in ([[5]], [[5, 5, 5]], [[32767, -32768]], [list(range(-9, 9))]):
            p, _ = softmax(PAPER, x, constants=constants)
            assert p.max() <= 65535
            assert 0.95 <= p.sum() / 65536 <= 1.0001


# -- masks ---------------------------------------------------------------------------------------------------
def test_a_fully_masked_row_is_all_zeros_and_flagged():
    p, empty = softmax(BASE2, np.full((2, 9), 32767), [[False] * 9, [True] + [False] * 8])
    assert p[0].tolist() == [0] * 9
    assert empty.tolist() == [True, False]
    assert p[1].tolist() == [65535] + [0] * 8


def test_valid_scores_at_the_lowest_value_beat_masked_ones_at_the_highest():
    x = np.array([[32767, -32768, 32767, -32768, 32767]])
    p, empty = softmax(BASE2, x, [[False, True, False, True, False]])
    assert p.tolist() == [[0, 32768, 0, 32768, 0]]
    assert not empty[0]


@pytest.mark.parametrize("lanes", [1, 3, 8, 16])
def test_lengths_that_are_not_a_multiple_of_the_lanes(lanes):
    config = bits(14, lanes=lanes)
    for n in (1, lanes, lanes + 1, 2 * lanes + 1, 47):
        x = draw(config, 12, n, n)
        assert worst_error(config, x) <= 1
        # Masked elements behind the end change nothing: that is how the last beat is filled.
        longer = np.pad(x, ((0, 0), (0, 50)), constant_values=32767)
        p, _ = softmax(config, longer, np.arange(n + 50) < n)
        np.testing.assert_array_equal(p[:, :n], softmax(config, x)[0])
        assert not p[:, n:].any()


def test_rows_do_not_depend_on_their_batch():
    x = draw(BASE2, 24, 100)
    keep = np.random.default_rng(1).random((24, 100)) < 0.7
    p, _ = softmax(BASE2, x, keep)
    for k in range(24):
        np.testing.assert_array_equal(softmax(BASE2, x[k], keep[k])[0], p[k])
    np.testing.assert_array_equal(softmax(BASE2, x.reshape(4, 6, 100), keep.reshape(4, 6, 100))[0].reshape(24, 100), p)


# -- reduce, chain, normalise --------------------------------------------------------------------------------
def test_two_parts_share_one_normalisation():
    """Compressed context and local window: the same result as one row, cut at a whole beat."""
    x = draw(BASE2, 12, 200)
    context, window = x[:, :120], x[:, 120:]
    whole = reduce(BASE2, x)
    parts = reduce(BASE2, window, chained=reduce(BASE2, context))
    np.testing.assert_array_equal(parts.total, whole.total)
    np.testing.assert_array_equal(parts.exponent, whole.exponent)
    p = np.concatenate([normalise(BASE2, part, parts) for part in (context, window)], axis=1)
    assert np.abs(p - softmax(BASE2, x)[0]).max() <= 1
    assert p.sum(axis=1).min() > 0.999 * 65536


def test_parts_may_be_empty():
    x, none = draw(BASE2, 4, 30), np.zeros((4, 30), dtype=bool)
    nothing = reduce(BASE2, x, none)
    assert nothing.empty.all()
    assert not normalise(BASE2, x, nothing).any()
    for parts in (reduce(BASE2, x, chained=nothing), reduce(BASE2, x, none, chained=reduce(BASE2, x))):
        np.testing.assert_array_equal(parts.total, reduce(BASE2, x).total)


def test_scores_above_all_that_the_statistics_saw_stay_within_one():
    statistics = reduce(BASE2, [[-32768] * 5])
    p = normalise(BASE2, [[32767, 0, -32768]], statistics)
    assert (p[0, :2] > 32768).all()
    assert p.max() <= 65535
    assert abs(p[0, 2] - 13107) <= 1


# -- widths --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config", [BASE2, PAPER, bits(8, lanes=3, mantissa_bits=5), bits(16, form="ibert", scale_log2=3)]
)
def test_the_longest_row_of_the_largest_terms_just_fits_the_sum(config):
    constants = config.exp.constants(Fraction(1, 181)) if config.run_time_scale else None
    x = np.full((1, config.beats(config.max_row) * config.lanes), 32767)
    statistics = reduce(config, x, constants=constants)
    assert int(statistics.total[0]).bit_length() in (config.total_bits - 1, config.total_bits)
    r, excess = reciprocal(config, statistics)
    assert excess[0] <= config.excess_limit
    assert 1 << (config.reciprocal_bits - 1) <= r[0] < 1 << config.reciprocal_bits


def test_totals_of_every_size_have_a_normal_reciprocal():
    for config in (BASE2, PEER, PAPER, bits(8, mantissa_bits=4), bits(16, form="ibert", scale_log2=2)):
        low = 1 << (config.sum_guard_bits + config.mantissa_low_bits - 1)
        powers = [1 << k for k in range(low.bit_length() - 1, config.total_bits)]
        totals = np.array([t for power in powers for t in (power, power + 1, 2 * power - 1)])
        r, excess = reciprocal(config, Statistics(np.zeros_like(totals), totals))
        assert (r >= 1 << (config.reciprocal_bits - 1)).all()
        assert (r < 1 << config.reciprocal_bits).all()
        assert excess.max() == config.excess_limit


def test_a_row_longer_than_the_sum_was_made_for_is_refused():
    with pytest.raises(ValueError, match=r"^a row may have at most max_row = 64 elements, not 65$"):
        softmax(PEER, np.zeros((1, 65), dtype=np.int64))


def test_scores_are_integers_that_fit():
    with pytest.raises(TypeError, match=r"^x must hold integers, not float64$"):
        softmax(BASE2, [[0.5, 1.0]])
    with pytest.raises(OverflowError, match=r"^x holds 32768, which does not fit signed\(16\)$"):
        softmax(BASE2, [[32768]])
    with pytest.raises(ValueError, match=r"^a row needs at least one element$"):
        softmax(BASE2, np.zeros((1, 0), dtype=np.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"lanes": 65}, "lanes must lie in 1..64, not 65"),
        ({"score_bits": 7}, "score_bits must lie in 8..16, not 7"),
        ({"probability_bits": 17}, "probability_bits must lie in 8..16, not 17"),
        ({"score_bits": 8}, "fraction_bits must be at most score_bits = 8, not 10"),
        ({"run_time_scale": True}, "run_time_scale needs the ibert form, not base2"),
        ({"max_row": 4095}, "buffer must be at most max_row = 4095, not 4096"),
        ({"max_row": 262_145}, "max_row must lie in 1..262144, not 262145"),
        ({"form": "table"}, "form must be one of base2, ibert, not 'table'"),
        ({"rounding": "floor"}, "rounding must be one of diffuse, nearest, not 'floor'"),
        ({"guard_bits": 1}, "guard_bits must lie in 2..16, not 1"),
    ],
)
def test_illegal_configurations_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError) as refused:
        SoftmaxConfig(**changes)
    assert str(refused.value) == message


# -- component -----------------------------------------------------------------------------------------------
def test_documented_cycles_are_two_passes_and_a_constant():
    unit = Softmax(PAPER)
    unit._MustUse__silence = True
    assert [unit.row_cycles(n) - 2 * -(-n // 8) for n in (1, 8, 9, 4096)] == [43] * 4
    # Rows that the buffer does not hold take one pass and are flagged, or come in two by the streaming modes.
    assert unit.row_cycles(4097) == 513 + unit.reduce_latency
    assert unit.row_cycles(262_144, Mode.REDUCE) == 32_768 + 34
    assert unit.row_cycles(262_144, Mode.NORMALISE) == 32_768 + 11
