"""golden.nonlinear.rmsnorm against float64 and exact integers."""

from fractions import Fraction
from math import isqrt

import numpy as np
import pytest

from golden.fixedpoint import bounds
from golden.nonlinear.requantize import per_element
from golden.nonlinear.rmsnorm import RmsNormConfig, integer_eps, normalize, quantize_gamma, rmsnorm

PAPER = RmsNormConfig()
NEWTON = RmsNormConfig(form="newton")


def token_wise(x, bits=16):
    """(integers, scale): each row of floats with one power of two, so that its largest fills the word."""
    scale = np.ldexp(1.0, np.frexp(np.abs(x).max(axis=-1))[1] - bits + 1)
    low, high = bounds(bits)
    return np.clip(np.rint(x / scale[..., None]), low, high).astype(np.int64), scale


def rows(kind, n=4096, count=8):
    generator = np.random.default_rng(5)
    x = generator.standard_normal((count, n))
    if kind == "outlier":  # one channel a thousand times the rest
        x[:, n // 3] = 1000 * np.where(np.arange(count) % 2, 1, -1)
    if kind == "heavy":  # as residual streams are: tails, and a few large channels
        x = generator.standard_t(3, (count, n)) * np.exp(generator.standard_normal(n))
    return x


def relative_errors(config, x, gamma=None, epsilon=0.0, bits=16, out_scale=None):
    """(largest error relative to the row's largest output, root mean square error relative to the row's rms) against
    float64 RMSNorm of the unquantised rows."""
    n = x.shape[-1]
    gamma = np.ones(n) if gamma is None else gamma
    exact = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * gamma
    out_scale = out_scale or np.abs(exact).max() / ((1 << (config.out_bits - 1)) - 1)
    table, shift = quantize_gamma(config, gamma, n, out_scale)
    integers, scale = token_wise(x, bits)
    eps = [integer_eps(config, epsilon, n, s) for s in scale]
    y = normalize(config, integers, table, eps, np.full(len(x), shift)) * out_scale
    error = y - exact
    largest = np.abs(error).max(axis=-1) / np.abs(exact).max(axis=-1)
    return largest.max(), (np.sqrt((error**2).mean(axis=-1)) / np.sqrt((exact**2).mean(axis=-1))).max()


# -- accuracy ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config, kind, largest, mean",
    [
        (PAPER, "normal", 4.0e-4, 4.0e-4),
        (NEWTON, "normal", 7.0e-5, 1.2e-4),
        (PAPER, "heavy", 4.0e-4, 6.0e-4),
        (NEWTON, "heavy", 7.0e-5, 5.0e-4),
        (PAPER, "outlier", 4.0e-4, 1.0e-3),
        (NEWTON, "outlier", 7.0e-5, 9.0e-4),
        (PAPER.replace(address_bits=4), "normal", 5.2e-3, 5.2e-3),
        (PAPER.replace(steps=2), "normal", 9.0e-5, 1.3e-4),
    ],
)
def test_error_against_float64(config, kind, largest, mean):
    found = relative_errors(config, rows(kind))
    assert found[0] <= largest and found[1] <= mean, found


def test_wider_mantissas_keep_ordinary_channels_beside_an_outlier():
    """The ordinary channels of a row with one channel 3000 times the rest: 16 bits lose them, 20 bits do not."""
    x = np.random.default_rng(6).standard_normal((4, 4096))
    x[:, 77] = 3000
    n = x.shape[-1]
    exact = x / np.sqrt((x * x).mean(axis=-1, keepdims=True))
    errors = {}
    for bits in (16, 20):
        config = RmsNormConfig(in_bits=bits, form="newton", out_bits=24, gamma_bits=20, root_bits=20)
        out_scale = 64 / ((1 << 23) - 1)
        table, shift = quantize_gamma(config, np.ones(n), n, out_scale)
        y = normalize(config, token_wise(x, bits)[0], table, np.zeros(4, int), np.full(4, shift)) * out_scale
        ordinary = np.arange(n) != 77
        errors[bits] = np.sqrt(((y - exact)[:, ordinary] ** 2).mean() / (exact[:, ordinary] ** 2).mean())
    assert 1e-2 < errors[16] < 4e-2 and errors[20] < 2.5e-3, errors


def test_gamma_of_both_signs_and_epsilon():
    generator = np.random.default_rng(2)
    gamma = generator.standard_normal(512) * 0.5 + 1
    x = rows("heavy", 512) * 1e-3
    for epsilon in (1e-5, 1e-6, 1e-3):
        largest, _ = relative_errors(NEWTON.replace(hidden=512), x, gamma, epsilon)
        assert largest <= 1.5e-4


def test_epsilon_is_applied_in_the_integer_domain():
    """A row whose squares are as large as epsilon's term comes out at 1 / sqrt(2) of what it is without."""
    x = np.array([[3000, -4000, 0, 0]])
    config = NEWTON.replace(hidden=4, gamma_bits=16)
    gamma = np.full(4, 20000)
    with_eps = normalize(config, x, gamma, [25_000_000], [0])
    without = normalize(config, x, gamma, [0], [0])
    assert without.tolist() == [[12000, -16000, 0, 0]]
    assert with_eps.tolist() == [[8485, -11313, 0, 0]]  # 8485.3 and -11313.7
    assert integer_eps(config, 1e-5, 4, 2.0**-12) == round(4e-5 * 2**24)
    with pytest.raises(OverflowError, match=r"eps would be \d+, which does not fit unsigned\(33\): coarsen"):
        integer_eps(config, 1e-5, 4, 2.0**-40)


@pytest.mark.parametrize("config", [PAPER, NEWTON], ids=["table", "newton"])
def test_scale_of_the_input_does_not_matter(config):
    """A power of two on x leaves the output within a unit, as long as x keeps its bits."""
    x = np.random.default_rng(3).integers(-1000, 1001, (4, 256))
    gamma = np.full(256, 1 << 14)
    shift = np.full(4, -3)
    plain, scaled = (normalize(config, x * k, gamma, np.zeros(4, int), shift) for k in (1, 32))
    assert np.abs(plain - scaled).max() <= 1 and np.abs(plain).max() > 10_000


# -- rows that others get wrong ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["table", "newton"])
@pytest.mark.parametrize("n", [1, 7, 4096])
def test_zero_row_gives_zeros(form, n):
    config = PAPER.replace(form=form)
    for eps in (0, 1, (1 << config.eps_bits) - 1):
        assert not normalize(config, np.zeros((1, n), int), np.full(n, 32767), [eps], [-60]).any()


@pytest.mark.parametrize("in_bits", [4, 8, 16, 24])
@pytest.mark.parametrize("hidden", [1, 3, 4096, 16384])
@pytest.mark.parametrize("form", ["table", "newton"])
def test_widths_hold_at_full_scale(in_bits, hidden, form):
    """Every intermediate of rows of extremes is checked inside: the sum of squares cannot wrap, nor can eps make it."""
    for root_bits, guard_bits in ((8, 7), (20, 0), (20, 7)):
        config = RmsNormConfig(
            form=form, in_bits=in_bits, hidden=hidden, root_bits=root_bits, guard_bits=guard_bits,
            gamma_bits=24, out_bits=24,
        )  # fmt: skip
        low, high = bounds(in_bits)
        x = np.full((4, hidden), low)
        x[1], x[2] = high, np.where(np.arange(hidden) % 2, low, high)
        x[3, 1:] = 0
        gamma = np.resize(bounds(24), hidden)
        first, last = bounds(config.shift_bits)
        for eps in (0, (1 << config.eps_bits) - 1):
            for shift in (first, 0, last):
                normalize(config, x, gamma, np.full(4, eps), np.full(4, shift))
        assert (hidden << (2 * in_bits - 2)) + (1 << config.eps_bits) - 1 < 1 << config.total_bits <= 1 << 62


@pytest.mark.parametrize("config, bound", [(PAPER, 3.8e-4), (NEWTON, 6.3e-5)], ids=["table", "newton"])
def test_full_scale_and_constant_rows_have_norm_one(config, bound):
    for n in (1, 2, 100, 4096):
        for value in (-32768, 32767, 16384, 1, -1):
            out = normalize(config, np.full((1, n), value), np.full(n, 32767), [0], [0])
            exact = np.sign(value) * 32767 / np.sqrt(n)
            # u keeps two bits below x: an eighth of a unit of x comes on top.
            assert np.abs(out - exact).max() <= (bound + 0.125 / abs(value)) * abs(exact) + 0.6


@pytest.mark.parametrize("config, bound", [(PAPER, 3.8e-4), (NEWTON, 6.3e-5)], ids=["table", "newton"])
def test_one_hot_row_gives_gamma_at_any_size(config, bound):
    for value in (32767, -32768, 1000, 1, -1):
        x = np.zeros((1, 4096), int)
        x[0, 1234] = value
        out = normalize(config, x, np.full(4096, 32767), [0], [0])[0]
        assert abs(abs(out[1234]) / 32767 - 1) <= bound and np.sign(out[1234]) == np.sign(value)
        assert np.count_nonzero(out) == 1


def test_row_shorter_than_hidden_and_masked_elements():
    generator = np.random.default_rng(8)
    x, gamma = generator.integers(-3000, 3000, 50), generator.integers(-30000, 30000, 4096)
    short = normalize(PAPER, x, gamma, 7, -2)
    padded = normalize(PAPER, np.pad(x, (0, 4046)), gamma, 7, -2)
    masked = normalize(PAPER, np.pad(x, (0, 4046), constant_values=999), gamma, 7, -2, np.arange(4096) < 50)
    np.testing.assert_array_equal(short, padded[:50])
    np.testing.assert_array_equal(padded, masked)


def test_every_half_way_point_rounds_up_and_saturation_is_on_both_sides():
    """x = 64 alone: total = 2**12, h = 7, y = 255 (256, saturated), u = rs(64 * 255, 7) = 128."""
    config = RmsNormConfig(form="newton", in_bits=8, hidden=1, gamma_bits=8, out_bits=6, root_bits=8, guard_bits=0)
    seen = []
    for shift in (-20, *range(-8, 11)):
        down = min(config.scaled_bits, max(0, 7 + shift))
        for gamma in range(-128, 128):
            wanted = max(-32, min(31, (128 * gamma + (1 << down >> 1)) >> down))
            seen.append(int(normalize(config, [[64]], [gamma], [0], [shift])[0, 0]))
            assert seen[-1] == wanted, (shift, gamma)
    assert min(seen) == -32 and max(seen) == 31


def test_newton_form_is_the_papers_routine():
    """Integer square root and one division, in Python integers."""
    generator = np.random.default_rng(4)
    x = generator.integers(-32768, 32768, (20, 64))
    gamma = generator.integers(-32768, 32768, 64)
    out = normalize(NEWTON, x, gamma, np.zeros(20, int), np.full(20, -5))
    for row, got in zip(x.tolist(), out.tolist(), strict=True):
        total = sum(v * v for v in row)
        h = (total.bit_length() + 1) // 2
        std = isqrt((total << 32) >> (2 * h) if 2 * h > 32 else total << (32 - 2 * h))
        y = min((1 << 31) // std, 65535)
        down = 2 + h - 5
        for v, g, q in zip(row, gamma.tolist(), got, strict=True):
            u = (v * y + (1 << 12)) >> 13
            assert q == max(-32768, min(32767, (u * g + (1 << (down - 1))) >> down))


def test_group_output_is_the_requantised_normalised_row():
    config = PAPER.replace(out="group")
    x, _ = token_wise(rows("heavy", 1000, 3))
    table, shift = quantize_gamma(config, np.ones(1000), 1000, 2.0**-10)
    wide = normalize(config, x, table, np.zeros(3, int), np.full(3, shift))
    result = rmsnorm(config, x, table, np.zeros(3, int), np.full(3, shift))
    assert result.q.shape == x.shape and result.e.shape == (3, 8)
    step = per_element(config.requantizer, result.c * np.exp2(result.e), 1000)
    assert np.abs(result.q).max() <= 127
    assert (np.abs(result.q * step - wide) <= step / 2).all()
    np.testing.assert_array_equal(rmsnorm(PAPER, x, table, np.zeros(3, int), np.full(3, shift)), wide)


# -- what the controller prepares --------------------------------------------------------------------------------------
def test_quantised_gamma_uses_its_word():
    for gamma, out_scale in (([1.0, -0.5], 2.0**-9), ([3.0, 0.1], 7.3), ([-1.0], 1e-3), ([0.9, 1.1], 2.0**-12)):
        table, shift = quantize_gamma(PAPER, gamma, 4096, out_scale)
        assert 1 << 13 <= np.abs(table).max() < 1 << 15
        for g, entry in zip(gamma, table.tolist(), strict=True):
            exact = Fraction(g) * 64 / Fraction(out_scale) * Fraction(2) ** shift
            assert abs(entry - exact) <= Fraction(501, 1000)
    assert quantize_gamma(PAPER, [0.0], 4096, 1.0)[0].tolist() == [0]
    with pytest.raises(ValueError, match=r"gamma / out_scale reaches 1e\+40, too much for any shift"):
        quantize_gamma(PAPER, [1.0], 1, 1e-40)


# -- bad input ---------------------------------------------------------------------------------------------------------
def test_inputs_out_of_range_are_refused():
    gamma = np.ones(4096, int)
    with pytest.raises(TypeError, match="x must hold integers, not float64"):
        normalize(PAPER, [[0.5]], gamma)
    with pytest.raises(OverflowError, match=r"x holds 32768, which does not fit signed\(16\)"):
        normalize(PAPER, [[32768]], gamma)
    with pytest.raises(OverflowError, match=r"gamma holds 40000, which does not fit signed\(16\)"):
        normalize(PAPER, [[1]], [40000])
    with pytest.raises(OverflowError, match=r"eps holds -1, which does not fit unsigned\(43\)"):
        normalize(PAPER, [[1]], gamma, [-1])
    with pytest.raises(OverflowError, match=r"shift holds 64, which does not fit signed\(7\)"):
        normalize(PAPER, [[1]], gamma, [0], [64])
    with pytest.raises(ValueError, match=r"a row must have 1\.\.4096 elements, not 4097"):
        normalize(PAPER, np.ones((1, 4097), int), np.ones(5000, int))
    with pytest.raises(ValueError, match=r"a row must have 1\.\.4096 elements, not 0"):
        normalize(PAPER, np.ones((1, 0), int), gamma)
    with pytest.raises(ValueError, match="gamma must have at least 5 elements, not 3"):
        normalize(PAPER, np.ones((1, 5), int), np.ones(3, int))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"lanes": 65}, "lanes must lie in 1..64, not 65"),
        ({"in_bits": 25}, "in_bits must lie in 4..24, not 25"),
        ({"hidden": 0}, "hidden must lie in 1..16384, not 0"),
        ({"hidden": 16385}, "hidden must lie in 1..16384, not 16385"),
        ({"form": "cordic"}, "form must be one of table, newton, not 'cordic'"),
        ({"out": "int8"}, "out must be one of token, group, not 'int8'"),
        ({"overlap": 1}, "overlap must be true or false, not 1"),
        ({"out": "group", "group": 100}, "group must be a multiple of lanes = 8, not 100"),
        ({"out": "group", "out_bits": 8}, "out_bits must be below in_bits = 8, not 8"),
    ],
)
def test_illegal_configurations(fields, message):
    with pytest.raises(ValueError) as caught:
        RmsNormConfig(**fields)
    assert str(caught.value) == message
