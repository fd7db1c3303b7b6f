"""The residual adder: golden function against exact rationals at every corner."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from golden.nonlinear.residual import ResidualConfig, residual
from hw.catalog import find
from tb.bench import bench_of
from tb.quick import session, simulate


def exact(a, b, shift, bits):
    """The true sum, rounded half up where b moves to the right, and saturated."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    return min(max(int(a) + floor(int(b) * Fraction(2) ** int(shift) + Fraction(1, 2)), low), high)


def test_every_pair_of_narrow_words_at_every_shift():
    config = ResidualConfig(a_bits=5, b_bits=5, max_left=4, max_right=6)
    a, b = (v.ravel() for v in np.meshgrid(np.arange(-16, 16), np.arange(-16, 16)))
    for shift in range(-6, 5):
        y, saturated = residual(config, a, b, shift)
        assert y.tolist() == [exact(p, q, shift, 5) for p, q in zip(a, b, strict=True)]
        wide = [exact(p, q, shift, 40) for p, q in zip(a, b, strict=True)]
        assert saturated.tolist() == (y != wide).tolist()


@pytest.mark.parametrize("shift", [-31, -16, -1, 0, 1, 16, 24])
def test_extremes_at_full_width_saturate_and_never_wrap(shift):
    config = ResidualConfig(a_bits=40, b_bits=32, max_left=24, max_right=31)
    a = np.array([-(1 << 39), -1, 0, 1, (1 << 39) - 1])
    b = np.array([-(1 << 31), -1, 0, 1, (1 << 31) - 1])
    a, b = (v.ravel() for v in np.meshgrid(a, b))
    assert residual(config, a, b, shift).y.tolist() == [exact(p, q, shift, 40) for p, q in zip(a, b, strict=True)]


def test_a_branch_that_overflows_meets_a_stream_of_the_other_sign():
    """The sum is exact before it saturates: an intermediate clamp of b would give -1 here."""
    config = ResidualConfig(a_bits=32, b_bits=32, max_left=16)
    y, saturated = residual(config, [-(1 << 31), (1 << 31) - 1], [1 << 20, -(1 << 20)], 12)
    assert y.tolist() == [(1 << 31) - 1, -(1 << 31)] and saturated.all()
    y, saturated = residual(config, [-(1 << 31)], [(1 << 20) - 1], 12)
    assert y.tolist() == [(1 << 31) - (1 << 12)] and not saturated.any()


def test_halfway_points_of_both_signs_round_up():
    config = ResidualConfig()
    k = np.arange(-50, 50)
    for right in range(1, 16):
        assert residual(config, k * 0, (2 * k + 1) << (right - 1), -right).y.tolist() == (k + 1).tolist()
    assert residual(config, [0, 0], [-13, 13], -1).y.tolist() == [-6, 7]


def test_rows_have_their_own_shift_and_do_not_see_each_other():
    config = ResidualConfig()
    generator = np.random.default_rng(2)
    a, b = generator.integers(-(1 << 28), 1 << 28, (2, 7, 30))
    shift = np.arange(-3, 4)
    whole = residual(config, a, b, shift)
    for k in range(7):
        assert residual(config, a[k], b[k], shift[k]).y.tolist() == whole.y[k].tolist()


def test_golden_takes_integers_in_range_only():
    config = ResidualConfig(max_left=5, max_right=4)
    with pytest.raises(TypeError, match="b must hold integers, not float64"):
        residual(config, [1], [1.0], 0)
    with pytest.raises(OverflowError, match=r"a holds 2147483648, which does not fit signed\(32\)"):
        residual(config, [1 << 31], [1], 0)
    for shift in (-5, 6):
        with pytest.raises(ValueError, match=rf"shift must lie in -4\.\.5, not {shift}"):
            residual(config, [1], [1], shift)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"b_bits": 33}, "b_bits must lie in 2..32, not 33"),
        ({"max_left": 25}, "max_left must lie in 0..24, not 25"),
        ({"flag_saturated": 1}, "flag_saturated must be true or false, not 1"),
    ],
)
def test_illegal_configurations(fields, message):
    with pytest.raises(ValueError) as raised:
        ResidualConfig(**fields)
    assert str(raised.value) == message


@pytest.mark.parametrize("max_left, max_right", [(0, 0), (0, 1), (1, 0), (0, 31), (24, 0), (3, 4), (4, 3)])
def test_shift_ranges_in_hardware(max_left, max_right):
    config = ResidualConfig(lanes=2, a_bits=10, b_bits=8, max_left=max_left, max_right=max_right)
    bench = bench_of("residual", config)
    rows = [row for case in bench.directed() for row in case.rows][:12]
    simulate(bench, [(session(bench, rows, "both random", 1), None)])


@pytest.mark.parametrize("lanes", [1, 3, 8, 16])
def test_one_beat_per_cycle_over_rows_of_any_length(lanes):
    config = ResidualConfig(lanes=lanes, a_bits=10, b_bits=8)
    bench = bench_of("residual", config)
    rows = [bench.row(np.arange(n) - 5, np.arange(n) - 9, n % 4) for n in (1, lanes + 1, 2 * lanes, 1, 3 * lanes - 1)]
    run = session(bench, rows)
    simulate(bench, [(run, None)])
    assert run.row_cycles == sum(-(-len(row) // lanes) for row in rows) + bench.unit.latency


def test_catalog_widths_follow_the_residual_stream():
    config = find("residual").configurations["paper"]
    assert (config.a_bits, config.b_bits, config.lanes) == (32, 32, 8)
