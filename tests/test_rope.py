"""golden.nonlinear.rope against float64: every phase, every position and frequency, and what a rotation must keep."""

import os

import numpy as np
import pytest

from golden.llm.config import ModelConfig, RopeScaling
from golden.llm.reference import rope_frequencies
from golden.nonlinear.rope import RopeConfig, cosine_sine, frequencies, phase, rope, rotate

PAPER = RopeConfig()
ONE = 1 << PAPER.fraction_bits
MODELS = {"theta 10000": (10_000, None), "theta 500000": (500_000, None), "llama3": (500_000, 8)}
LAST = (1 << 18) - 1


def worst(config, theta, factor, positions):
    """Largest error of cosine and sine, in their steps."""
    steps = np.array(config.step_table(theta, factor))
    turns = np.array([float(f) for f in frequencies(config.head_dim, theta, factor)])
    found = 0.0
    for start in range(0, len(positions), 1 << 16):
        p = positions[start : start + (1 << 16), None]
        for j in range(0, config.pairs, 16):
            cosine, sine = cosine_sine(config, phase(config, p, steps[j : j + 16]))
            angle = 2 * np.pi * ((p * turns[j : j + 16]) % 1.0)
            one = 1 << config.fraction_bits
            found = max(found, np.abs(cosine - one * np.cos(angle)).max(), np.abs(sine - one * np.sin(angle)).max())
    return found


@pytest.mark.parametrize("model", MODELS)
def test_cosine_and_sine_are_within_a_step_of_q1_14_at_all_positions(model):
    """NEARMEM_EXHAUSTIVE=1 takes all 262,144 positions; otherwise the first, the last, and every 31st."""
    positions = np.arange(LAST + 1)
    if not os.environ.get("NEARMEM_EXHAUSTIVE"):
        positions = np.unique(np.concatenate([positions[:2048], positions[::31], positions[-2048:]]))
    assert worst(PAPER, *MODELS[model], positions) < 1.0


def test_cosine_and_sine_over_every_angle():
    angle = np.arange(1 << PAPER.angle_bits)
    cosine, sine = cosine_sine(PAPER, angle << (PAPER.phase_bits - PAPER.angle_bits))
    exact = 2 * np.pi * (angle + 0.5) / len(angle)
    assert np.abs(cosine - ONE * np.cos(exact)).max() < 0.87
    assert np.abs(sine - ONE * np.sin(exact)).max() < 0.87
    assert np.abs(np.hypot(cosine, sine) - ONE).max() < 1.0
    assert cosine.max() == sine.max() == ONE and cosine.min() == sine.min() == -ONE
    # Mirror symmetry is exact: about the half turn, and a quarter turn from one function to the other.
    np.testing.assert_array_equal(cosine, cosine[::-1])
    np.testing.assert_array_equal(sine, -sine[::-1])
    np.testing.assert_array_equal(np.roll(cosine, len(angle) // 4), sine)


@pytest.mark.parametrize("model", MODELS)
def test_step_error_stays_below_the_resolution_at_the_last_position(model):
    theta, factor = MODELS[model]
    exact = frequencies(128, theta, factor)
    steps = PAPER.step_table(theta, factor)
    turns = max(abs(s - f * (1 << PAPER.phase_bits)) for s, f in zip(steps, exact, strict=True))
    assert turns <= 0.5
    assert 2 * np.pi * float(turns) * LAST / (1 << PAPER.phase_bits) < 0.25 / ONE


@pytest.mark.parametrize("head_dim", [8, 10, 80, 128, 256])
@pytest.mark.parametrize("model", MODELS)
def test_frequencies_equal_those_of_the_float_decoder(model, head_dim):
    theta, factor = MODELS[model]
    scaling = None if factor is None else RopeScaling(float(factor), 1.0, 4.0, 8192)
    config = ModelConfig(
        vocab=32,
        architecture="llama",
        dim=head_dim,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=head_dim,
        hidden=8,
        rope_theta=float(theta),
        rope_scaling=scaling,
    )
    ours = 2 * np.pi * np.array([float(f) for f in frequencies(head_dim, theta, factor)])
    np.testing.assert_allclose(ours, rope_frequencies(config), rtol=1e-13)


def test_tables_are_two_hundred_thousand_times_smaller_than_one_of_all_positions_per_model():
    sizes = PAPER.table_bits
    assert sizes["steps"] == 64 * 36 and sizes["chords"] == 64 * 53
    assert sizes["naive"] == 262_144 * 64 * 2 * 16
    assert sizes["naive"] > 200_000 * sizes["steps"]
    assert sizes["naive"] > 90_000 * (sizes["steps"] + sizes["chords"])


@pytest.fixture(scope="module")
def steps():
    return PAPER.step_table(500_000, 8)


@pytest.mark.parametrize("head_dim", [8, 10, 80, 128, 254, 256])
def test_position_zero_is_the_identity(head_dim):
    config = PAPER.replace(head_dim=head_dim)
    x = np.random.default_rng(head_dim).integers(-(1 << 15), 1 << 15, (5, head_dim))
    x[0], x[1] = 32767, -32768
    np.testing.assert_array_equal(rotate(config, x, np.zeros(5, int), config.step_table(10_000)), x)


@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
def test_equals_the_float_rotation_and_keeps_norms(head_dim):
    config = PAPER.replace(head_dim=head_dim)
    generator = np.random.default_rng(7)
    x = generator.integers(-20_000, 20_001, (400, head_dim))
    position = generator.integers(0, LAST + 1, 400)
    y = rotate(config, x, position, config.step_table(500_000))
    angle = 2 * np.pi * (position[:, None] * np.array([float(f) for f in frequencies(head_dim, 500_000)]) % 1.0)
    lo, hi = x[:, : config.pairs], x[:, config.pairs :]
    exact = np.concatenate([lo * np.cos(angle) - hi * np.sin(angle), hi * np.cos(angle) + lo * np.sin(angle)], axis=1)
    # Two elements of 20,000 times an error below one step each, and half a unit of rounding.
    assert np.abs(y - exact).max() < 2 * 20_000 / ONE + 0.5
    assert np.abs(np.linalg.norm(y, axis=1) / np.linalg.norm(x, axis=1) - 1).max() < 1.2e-4


def test_dot_products_depend_on_the_distance_only(steps):
    generator = np.random.default_rng(3)
    q, k = generator.integers(-20_000, 20_001, (2, 128))
    for distance in (0, 1, 100, 5000):
        first = np.array([0, 1, 77, 4096, 100_000, LAST - distance])
        a = rotate(PAPER, np.tile(q, (6, 1)), first, steps)
        b = rotate(PAPER, np.tile(k, (6, 1)), first + distance, steps)
        dots = (a * b).sum(axis=1) / (np.linalg.norm(q) * np.linalg.norm(k))
        assert np.ptp(dots) < 1e-4


def test_extreme_elements_saturate_at_both_ends(steps):
    """At half a right angle the sum of two full-scale elements is 1.41 times full scale."""
    config = RopeConfig(head_dim=8, frozen=True)
    quarter = (1 << config.phase_bits) // 8  # one eighth of a turn per position
    free = RopeConfig(head_dim=8)
    low, high = rope(free, [[-32768] * 4, [32767] * 4], [[32767] * 4, [32767] * 4], [1, 1], [quarter] * 4)
    np.testing.assert_array_equal(low[0], -32768)
    np.testing.assert_array_equal(high[1], 32767)
    assert np.abs(low[1]).max() <= 4 and np.abs(high[0]).max() <= 4
    wide = free.replace(out_bits=17)
    low, _ = rope(wide, [[-32768] * 4], [[32767] * 4], [1], [quarter] * 4)
    assert np.abs(low + 46340).max() <= 3
    # Every corner at many positions stays inside the proven widths (check raises otherwise).
    corner = np.array([-32768, 32767])
    for a in corner:
        for b in corner:
            rope(PAPER, np.full((2048, 64), a), np.full((2048, 64), b), np.arange(0, LAST + 1, 128), steps)
    assert len(config.frozen_steps) == 4


def test_a_shorter_row_holds_the_first_pairs(steps):
    x = np.random.default_rng(5).integers(-(1 << 15), 1 << 15, (2, 3, 64))
    whole, part = rope(PAPER, *x, [9, 99, 999], steps), rope(PAPER, *x[..., :5], [9, 99, 999], steps)
    for full, cut in zip(whole, part, strict=True):
        np.testing.assert_array_equal(full[:, :5], cut)


def test_frozen_steps_equal_loaded_ones():
    frozen = PAPER.replace(frozen=True, theta=500_000, scaling="llama3")
    x = np.random.default_rng(6).integers(-(1 << 15), 1 << 15, (20, 128))
    position = np.arange(20) * 13_000
    np.testing.assert_array_equal(rotate(frozen, x, position), rotate(PAPER, x, position, PAPER.step_table(500_000, 8)))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"head_dim": 7}, "head_dim must lie in 8..256, not 7"),
        ({"head_dim": 81}, "head_dim must be even, not 81"),
        ({"head_dim": 258}, "head_dim must lie in 8..256, not 258"),
        ({"phase_bits": 18}, "angle_bits must be at most phase_bits = 18, not 19"),
        ({"angle_bits": 8, "segment_bits": 5}, "segment_bits must lie in 1..4, not 5"),
        ({"scaling": "yarn"}, "scaling must be one of none, llama3, not 'yarn'"),
    ],
)
def test_illegal_configurations_say_what_is_accepted(fields, message):
    with pytest.raises(ValueError) as caught:
        RopeConfig(**fields)
    assert str(caught.value) == message


def test_wrong_arguments_are_refused(steps):
    with pytest.raises(TypeError, match="lo must hold integers, not float64"):
        rope(PAPER, [0.5], [1], 0, steps)
    with pytest.raises(OverflowError, match=r"position holds 262144, which does not fit unsigned\(18\)"):
        rope(PAPER, [0], [1], 262_144, steps)
    with pytest.raises(OverflowError, match=r"hi holds 32768, which does not fit signed\(16\)"):
        rope(PAPER, [0], [32768], 0, steps)
    with pytest.raises(ValueError, match="steps are needed without frozen, and only then"):
        rope(PAPER, [0], [1], 0)
    with pytest.raises(ValueError, match=r"steps must hold 64 values, not \(5,\)"):
        rope(PAPER, [0], [1], 0, steps[:5])
    with pytest.raises(ValueError, match=r"lo and hi must both hold 1 to 64 pairs, not \(65,\) and \(65,\)"):
        rope(PAPER, [0] * 65, [1] * 65, 0, steps)
    with pytest.raises(ValueError, match="x must hold heads of 128 elements, not an array of shape \\(.*80,?\\)"):
        rotate(PAPER, [0] * 80, 0, steps)
