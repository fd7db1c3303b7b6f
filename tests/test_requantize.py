"""The requantiser: golden function against exact rationals, and what only its hardware can get wrong."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from golden.fixedpoint import round_shift
from golden.nonlinear.requantize import RequantizeConfig, per_element, requantize, scale
from hw.catalog import find
from tb.bench import bench_of
from tb.quick import session, simulate

HALF = Fraction(1, 2)


def steps(config: RequantizeConfig, x: np.ndarray, result) -> np.ndarray:
    """x in steps of its scale, times 4 * 2**e_max: exact integers, and that factor."""
    c = 1 if result.c is None else per_element(config, result.c, x.shape[-1])
    e = per_element(config, result.e, x.shape[-1])
    return np.array(x, object) / np.array([Fraction(2) ** int(k) for k in e.ravel()], object).reshape(e.shape) / c


def test_halfway_points_of_both_signs_round_up_in_the_static_form():
    config = RequantizeConfig(form="static", in_bits=16, out_bits=12)
    for shift in range(1, 9):
        k = np.arange(-100, 100)
        x = (2 * k + 1) << (shift - 1)
        q = requantize(config, x, multiplier=1, shift=shift).q
        assert q.tolist() == (k + 1).tolist()
    assert requantize(config, [-13, 13], multiplier=1, shift=1).q.tolist() == [-6, 7]


def test_static_form_equals_rationals_over_every_input():
    config = RequantizeConfig(form="static", in_bits=10, out_bits=6, multiplier_bits=4, max_shift=15)
    x = np.arange(-512, 512)
    for multiplier in (0, 1, 3, 8, 15):
        for shift in (0, 1, 2, 5, 9, 14, 15):
            wanted = [floor(Fraction(int(v) * multiplier, 1 << shift) + HALF) for v in x]
            got = requantize(config, x, multiplier=multiplier, shift=shift).q
            assert got.tolist() == np.clip(wanted, -32, 31).tolist()


def test_static_form_at_full_width_saturates_and_never_wraps():
    config = RequantizeConfig(form="static", in_bits=40, out_bits=8, multiplier_bits=16, max_shift=62)
    ends = np.array([-(1 << 39), (1 << 39) - 1])
    assert requantize(config, ends, multiplier=65535, shift=0).q.tolist() == [-128, 127]
    assert requantize(config, ends, multiplier=65535, shift=48).q.tolist() == [-128, 127]
    assert requantize(config, ends, multiplier=65535, shift=55).q.tolist() == [-1, 1]
    assert requantize(config, ends, multiplier=65535, shift=62).q.tolist() == [0, 0]


def test_token_form_takes_the_smallest_word_that_holds_the_row():
    config = RequantizeConfig(form="token", in_bits=10, out_bits=5)
    x = np.arange(-512, 512)[:, None]
    q, e, _ = requantize(config, x)
    for value, exponent in zip(x.ravel().tolist(), e.ravel().tolist(), strict=True):
        fits = [k for k in range(10) if -16 <= Fraction(value, 1 << k) < 16]
        assert exponent == fits[0]
    exact = steps(config, x, requantize(config, x))
    top = q == 15
    # Half a step, but for what rounds past the top: less than a step.
    assert all(abs(a - b) <= HALF for a, b in zip(exact[~top], q[~top].tolist(), strict=True))
    assert all(-HALF <= a - b < 1 for a, b in zip(exact[top], q[top].tolist(), strict=True))


def test_token_form_keeps_the_lowest_value_and_rows_that_fit():
    config = RequantizeConfig(form="token", in_bits=32, out_bits=16)
    q, e, _ = requantize(config, [[-32768, 32767, 0], [-(1 << 31), (1 << 31) - 1, 1], [0, 0, 0], [32768, 0, -1]])
    assert e.ravel().tolist() == [0, 16, 0, 1]
    # 2**31 - 1 over 2**16 rounds to 32768: the one value that saturates. -1/2 rounds up.
    assert q.tolist() == [[-32768, 32767, 0], [-32768, 32767, 0], [0, 0, 0], [16384, 0, 0]]


@pytest.mark.parametrize("e", range(1, 17))
def test_token_form_halfway_points_of_both_signs(e):
    config = RequantizeConfig(form="token", in_bits=32, out_bits=16)
    k = np.arange(-300, 300)
    peak = ((1 << 15) - 1) << e
    q, found, _ = requantize(config, [*((2 * k + 1) << (e - 1)), peak])
    assert found.tolist() == [e] and q.tolist() == [*(k + 1), (1 << 15) - 1]


@pytest.mark.parametrize(("in_bits", "out_bits"), [(14, 8), (13, 4), (16, 10)])
def test_group_scale_is_the_finest_that_fits_for_every_largest_value(in_bits, out_bits):
    config = RequantizeConfig(in_bits=in_bits, out_bits=out_bits)
    largest = np.arange((1 << (in_bits - 1)) + 1)
    e, c = scale(config, largest)
    assert e.min() == -2 and c.min() == 4 and c.max() == 7
    quarter_steps = c << (e + 2)
    assert (4 * largest <= config.limit * quarter_steps).all()
    # One scale finer does not fit, or would be below 1.
    finer = np.where(c > 4, (c - 1) << (e + 3), 7 << (e + 2))  # in eighths
    assert ((8 * largest > config.limit * finer) | (quarter_steps == 4)).all()


def test_group_form_equals_rationals_over_every_input_of_a_group():
    config = RequantizeConfig(in_bits=12, out_bits=8, group=8)
    for largest in (
        0,
        1,
        126,
        127,
        128,
        129,
        500,
        635,
        636,
        762,
        763,
        889,
        890,
        1016,
        1017,
        1270,
        2047,
        2048,
    ):
        x = np.arange(-min(largest, 2048), min(largest, 2047) + 1)
        x = np.concatenate([x, np.zeros(-len(x) % 7, np.int64)]).reshape(-1, 7)
        x = np.concatenate([x, np.full((len(x), 1), -largest)], axis=1)
        result = requantize(config, x)
        wanted = [floor(v + HALF) for v in steps(config, x, result).ravel()]
        assert result.q.ravel().tolist() == wanted
        assert np.abs(result.q).max() <= 127


def test_group_form_halfway_points_of_both_signs():
    config = RequantizeConfig(in_bits=32, out_bits=8, group=256, lanes=8)
    for e in range(-1, 22):
        for c in (4, 5, 6, 7):
            if e == -1 and c % 2:
                continue  # a half step is no integer
            k = np.arange(-126, 126)
            half_step = c << (e + 1)  # in quarters
            if half_step % 4:
                continue
            x = [*((2 * k + 1) * (half_step // 4)), 127 * (half_step // 2)]
            q, found_e, found_c = requantize(config, x)
            assert (int(found_e[0]), int(found_c[0])) == (e, c)
            assert q.tolist() == [*(k + 1), 127]


@pytest.mark.parametrize("out_bits", [4, 5, 8, 9, 10, 16])
@pytest.mark.parametrize("in_bits", [17, 26, 32, 40])
def test_group_form_error_is_at_most_half_a_step(in_bits, out_bits):
    config = RequantizeConfig(in_bits=in_bits, out_bits=out_bits, group=8)
    generator = np.random.default_rng(in_bits * out_bits)
    width = generator.integers(1, in_bits, 80)[:, None]
    x = generator.integers(-(1 << width), 1 << width, (80, 20))
    ends = np.array([-(1 << (in_bits - 1)), (1 << (in_bits - 1)) - 1])
    x = np.concatenate([x, np.tile(ends, (1, 10)), np.full((1, 20), ends[0]), np.zeros((1, 20), np.int64)])
    result = requantize(config, x)
    error = steps(config, x, result) - result.q
    assert abs(error).max() <= HALF
    assert np.abs(result.q).max() <= config.limit
    assert (result.q[-1] == 0).all() and (result.e[-1] == -2).all() and (result.c[-1] == 4).all()


def test_group_quotient_agrees_with_a_reciprocal_multiplier_away_from_ties():
    config = RequantizeConfig(in_bits=32, out_bits=8, group=128)
    generator = np.random.default_rng(5)
    x = np.round(generator.normal(0, 1, (200, 512)) * (1 << generator.integers(16, 27, (200, 1)))).astype(np.int64)
    result = requantize(config, x)
    c, e = (per_element(config, v, 512) for v in (result.c, result.e))
    reciprocal = np.array([round((1 << 18) / k) for k in (4, 5, 6, 7)])[c - 4]
    other = round_shift(x * reciprocal, 18 + e)
    differ = other != result.q
    assert differ.mean() < 2e-3 and np.abs(other - result.q).max() <= 1
    fraction = np.abs(x / (c * 2.0**e) % 1 - 0.5)
    assert fraction[differ].max(initial=0) < 2e-3


def test_signal_to_noise_of_normal_values():
    """Decibels on normal values: what eight bits per group and sixteen per token keep."""
    x = np.round(np.random.default_rng(1).normal(0, 1, (64, 4096)) * (1 << 20)).astype(np.int64)

    def decibels(config):
        q, e, c = requantize(config, x)
        scaled = q * 2.0 ** per_element(config, e, 4096) * (1 if c is None else per_element(config, c, 4096))
        return 10 * np.log10((x.astype(float) ** 2).sum() / ((x - scaled) ** 2).sum())

    assert decibels(RequantizeConfig()) > 42.5
    assert decibels(RequantizeConfig(form="token", out_bits=16)) > 85.0
    assert decibels(RequantizeConfig(out_bits=10)) > decibels(RequantizeConfig()) + 11.5


@pytest.mark.parametrize("form", ["token", "group"])
def test_rows_and_blocks_do_not_see_each_other(form):
    config = RequantizeConfig(form=form, in_bits=24, group=16, max_row=16, lanes=8)
    generator = np.random.default_rng(3)
    x = generator.integers(-(1 << 23), 1 << 23, (9, 45)) >> generator.integers(0, 20, (9, 1))
    whole = requantize(config, x)
    for k, row in enumerate(x):
        alone = requantize(config, row)
        assert (alone.q == whole.q[k]).all() and (alone.e == whole.e[k]).all()
        pieces = [requantize(config, row[at : at + 16]) for at in (0, 16, 32)]
        assert np.concatenate([p.q for p in pieces]).tolist() == alone.q.tolist()
        assert np.concatenate([p.e for p in pieces]).tolist() == alone.e.tolist()


def test_the_last_element_of_a_block_sets_the_scale_and_the_next_one_does_not():
    config = RequantizeConfig(in_bits=32, out_bits=8, group=32)
    x = np.ones(64, np.int64)
    x[31] = -(1 << 31)
    q, e, c = requantize(config, x)
    assert e.tolist() == [22, -2] and c.tolist() == [5, 4]
    assert q.tolist() == [0] * 31 + [-102] + [1] * 32


def test_masked_elements_do_not_count():
    for form in ("token", "group"):
        config = RequantizeConfig(form=form, in_bits=32, out_bits=8)
        x, keep = np.array([5, -(1 << 31), -7]), np.array([True, False, True])
        q, e, _ = requantize(config, x, keep)
        assert q.tolist() == [5, 0, -7] and e.tolist() == [0 if form == "token" else -2]


def test_golden_takes_integers_in_range_only():
    config = RequantizeConfig(in_bits=16)
    with pytest.raises(TypeError, match="x must hold integers, not float64"):
        requantize(config, [1.0])
    with pytest.raises(OverflowError, match=r"x holds 32768, which does not fit signed\(16\)"):
        requantize(config, [32768])
    static = config.replace(form="static", max_shift=20)
    with pytest.raises(ValueError, match=r"shift must lie in 0\.\.20, not 21"):
        requantize(static, [1], multiplier=1, shift=21)
    with pytest.raises(OverflowError, match=r"multiplier holds 256, which does not fit unsigned\(8\)"):
        requantize(static, [1], multiplier=256, shift=0)
    for arguments in ({}, {"multiplier": 1}):
        with pytest.raises(ValueError, match="multiplier and shift are needed in the static form, and only there"):
            requantize(static, [1], **arguments)
    with pytest.raises(ValueError, match="only there"):
        requantize(config, [1], multiplier=1, shift=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"lanes": 2.5}, "lanes must be an integer, not 2.5"),
        ({"form": "row"}, "form must be one of token, group, static, not 'row'"),
        ({"group": 100}, "group must be a multiple of lanes = 8, not 100"),
        ({"form": "token", "max_row": 100}, "max_row must be a multiple of lanes = 8, not 100"),
        ({"in_bits": 8}, "out_bits must be below in_bits = 8, not 8"),
        ({"out_bits": 3}, "out_bits must lie in 4..32, not 3"),
        ({"max_shift": 63}, "max_shift must lie in 0..62, not 63"),
    ],
)
def test_illegal_configurations(fields, message):
    with pytest.raises(ValueError) as raised:
        RequantizeConfig(**fields)
    assert str(raised.value) == message


def test_unused_fields_do_not_restrict_the_other_forms():
    assert RequantizeConfig(form="token", group=100).block == 4096
    assert RequantizeConfig(form="static", in_bits=8, out_bits=8, group=100).product_bits == 16


# -- hardware ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["token", "group", "static"])
@pytest.mark.parametrize("lanes", [1, 3, 8, 16])
def test_every_lane_count_with_rows_that_do_not_divide(form, lanes):
    config = RequantizeConfig(form=form, lanes=lanes, in_bits=14, out_bits=6, group=3 * lanes, max_row=5 * lanes)
    bench = bench_of("requantize", config)
    generator = np.random.default_rng(lanes)
    rows = [bench.row(generator.integers(-8192, 8192, n)) for n in range(1, 3 * lanes + 3, 1 + lanes // 4)]
    simulate(bench, [(session(bench, rows, "both random", lanes), None)])


@pytest.mark.parametrize("lengths", [[1] * 40, [24, 2, 2, 24, 1, 1, 1, 49], [7, 100, 3, 50] * 3, [200]])
def test_group_form_takes_and_gives_one_beat_per_cycle_over_rows_of_any_length(lengths):
    config = RequantizeConfig(lanes=2, in_bits=14, out_bits=6, group=12)
    bench = bench_of("requantize", config)
    rows = [bench.row(np.arange(n) * 37 % 1000 - 500) for n in lengths]
    run = session(bench, rows)
    simulate(bench, [(run, None)])
    beats = [-(-n // 2) for n in lengths]
    # What follows the last accepted beat is at most one whole group and the latency.
    assert run.row_cycles <= sum(beats) + config.block_beats + bench.unit.latency


def test_token_form_overlaps_a_row_with_the_one_before():
    config = RequantizeConfig(form="token", lanes=2, in_bits=14, out_bits=6, max_row=40)
    bench = bench_of("requantize", config)
    rows = [bench.row(np.arange(40) - 20 * k) for k in range(6)]
    run = session(bench, rows)
    simulate(bench, [(run, None)])
    # Six rows of 20 beats, the last one given out after it ends; 4 cycles of waiting after each full row.
    assert run.row_cycles == 6 * (20 + 4) - 4 + 20 + bench.unit.latency


def test_catalog_has_the_peer_configuration_at_equal_parameters():
    entry = find("requantize")
    peer = entry.configurations["peer16"]
    assert (peer.lanes, peer.in_bits, peer.multiplier_bits, peer.out_bits) == (16, 26, 8, 8)
    assert entry.peers["peer16"][1] == 37038
