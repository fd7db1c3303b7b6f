"""golden.nonlinear.exp against float64 and exact integers, over every input."""

from fractions import Fraction

import numpy as np
import pytest

from golden.fixedpoint import round_shift
from golden.nonlinear.exp import LN2, POLY_BITS, ExpConfig, exp, power_of_half, split

EVERY = np.arange(1 << 16)


def error(config, constants=None, scale=None):
    """Largest absolute error over every input, relative to 1.0."""
    t = np.arange(1 << config.in_bits)
    base = np.e if config.form == "ibert" else 2.0
    e = exp(config, t, constants)
    one = config.one if constants is None else int(e[0])
    return np.abs(e / one - base ** (-t * float(scale or config.scale))).max()


@pytest.mark.parametrize(
    "config, bound",
    [
        (ExpConfig(), 2.5e-4),
        (ExpConfig(interpolate=False, rom_bits=5), 1.1e-2),
        (ExpConfig(interpolate=False), 2.2e-2),
        (ExpConfig(form="ibert", scale_log2=12), 1.97e-3),
        (ExpConfig(form="ibert", scale_log2=8), 1.99e-3),  # the published bound of the polynomial is .0019 at 2**-8
        (ExpConfig(form="ibert", scale_log2=6), 5.5e-3),
        (ExpConfig(form="ibert", scale_log2=4), 2.8e-2),
        (ExpConfig(form="table", in_bits=8, fraction_bits=5, out_bits=8), 0.5 / 128 + 1e-9),
        (ExpConfig(form="table", in_bits=12, fraction_bits=8), 0.5 / 32768 + 1e-9),
    ],
)
def test_error_over_every_input(config, bound):
    assert error(config) <= bound


@pytest.mark.parametrize("scale", [Fraction(1, 256), Fraction(3, 20000), Fraction(1, 1 << 15), Fraction(1, 1 << 19)])
def test_run_time_scale_is_as_accurate_as_a_frozen_one_even_where_the_input_is_shifted(scale):
    config = ExpConfig(form="ibert", run_time_scale=True)
    k = config.constants(scale)
    assert (k.in_shift > 0) == (scale < Fraction(1, 1 << 14))
    assert error(config, k, scale) < 2.1e-3


@pytest.mark.parametrize("form", ["base2", "ibert", "table"])
def test_never_rises_and_reaches_zero(form):
    config = ExpConfig(form=form, in_bits=12 if form == "table" else 16, fraction_bits=6)
    e = exp(config, np.arange(1 << config.in_bits))
    assert (np.diff(e) <= 0).all()
    assert e[0] == config.one and e[-1] == 0


def test_rom_without_interpolation_never_exceeds_one():
    e = exp(ExpConfig(interpolate=False, rom_bits=5), EVERY)
    assert e.max() <= 1 << 15 and (np.diff(e) <= 0).all()


def test_polynomial_stays_within_int32_for_every_scale_and_input():
    """The accumulator's widest value, for scales from ln 2 down to far below what INT16 tokens need."""
    config = ExpConfig(form="ibert", run_time_scale=True)
    for exponent in range(1, 24):
        for numerator in (1, 3, 5, 7):
            scale = Fraction(numerator, 7 << exponent)
            k = config.constants(scale)
            assert k.b * k.b + k.c < 1 << POLY_BITS
            assert all(getattr(k, name) < 1 << bits for name, bits in config.constant_bits.items())
            exp(config, EVERY[::97], k)  # every intermediate is checked inside


def test_division_by_ln2_is_one_exact_multiplication():
    config = ExpConfig(form="ibert", run_time_scale=True)
    for scale in (Fraction(1, 3), Fraction(1, 200), Fraction(1, 1 << 14), Fraction(1, 1 << 16)):
        k = config.constants(scale)
        t = round_shift(EVERY, k.in_shift)
        np.testing.assert_array_equal((t * k.reciprocal) >> (16 + k.ln2_bits), t // k.ln2)


def test_scale_that_leaves_no_range_reduction_is_refused():
    config = ExpConfig(form="ibert", run_time_scale=True)
    for scale in (Fraction(2), Fraction(0), Fraction(-1), LN2 + Fraction(1, 1000)):
        with pytest.raises(ValueError, match=r"^the scale of the ibert form must lie in \(0, ln 2\], not"):
            config.constants(scale)


def test_input_width_below_the_table_address_width():
    """A ROM with more address bits than there are fraction bits uses only those that exist."""
    for fraction in range(0, 5):
        config = ExpConfig(in_bits=5, fraction_bits=fraction, rom_bits=8, out_bits=10)
        assert config.rom_address_bits == fraction and len(config.rom) == 1 << fraction
        assert error(config) <= 0.51 / 512 + 2**-10


def test_split_and_shift_give_exp():
    for config in (ExpConfig(), ExpConfig(form="ibert")):
        mantissa, exponent = split(config, EVERY)
        np.testing.assert_array_equal(round_shift(mantissa, exponent), exp(config, EVERY))
        assert mantissa.min() >= config.one // 2 - config.one // 100


def test_every_table_bit_is_used():
    """No half of the table lies idle behind a sign bit: every entry is another input's value."""
    config = ExpConfig(form="table", in_bits=8, fraction_bits=5, out_bits=12)
    assert len(config.table) == 256 and config.table[0] == 2048 and config.table[255] < 16


def test_floats_and_values_out_of_range_are_refused():
    with pytest.raises(TypeError, match="^t must hold integers, not float64$"):
        exp(ExpConfig(), np.array([0.5]))
    with pytest.raises(OverflowError, match=r"^t holds -1, which does not fit unsigned\(16\)$"):
        exp(ExpConfig(), [-1])
    with pytest.raises(ValueError, match="^constants are needed with run_time_scale, and only then$"):
        exp(ExpConfig(form="ibert", run_time_scale=True), [1])


def test_powers_of_half_are_correctly_rounded():
    for k in range(65):
        value = power_of_half(Fraction(k, 64), 15)
        # value = round(x) with x = 2**(15 - k/64): compare 64th powers exactly.
        exact = 1 << (15 * 64 - k)
        assert (2 * value - 1) ** 64 <= exact << 64 <= (2 * value + 1) ** 64
    assert [power_of_half(Fraction(k), 3) for k in range(6)] == [8, 4, 2, 1, 1, 0]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lanes": 0}, "lanes must lie in 1..128, not 0"),
        ({"lanes": 2.5}, "lanes must be an integer, not 2.5"),
        ({"form": "cubic"}, "form must be one of base2, ibert, table, not 'cubic'"),
        ({"in_bits": 25}, "in_bits must lie in 2..24, not 25"),
        ({"in_bits": 8, "fraction_bits": 9}, "fraction_bits must be at most in_bits = 8, not 9"),
        ({"form": "table"}, "in_bits must lie in 2..12 for the table form, not 16"),
        ({"run_time_scale": True}, "run_time_scale needs the ibert form, not base2"),
        ({"interpolate": 1}, "interpolate must be true or false, not 1"),
    ],
)
def test_illegal_configurations(fields, message):
    with pytest.raises(ValueError) as told:
        ExpConfig(**fields)
    assert str(told.value) == message


@pytest.mark.parametrize(
    "setting, message",
    [
        ("lanes", "a setting must have the form field=value, not 'lanes'"),
        ("lines=4", "ExpConfig has no field 'lines'; it has lanes, form"),
        ("lanes=four", "lanes must be an integer, not 'four'"),
        ("interpolate=maybe", "interpolate must be true or false, not 'maybe'"),
    ],
)
def test_illegal_settings(setting, message):
    with pytest.raises(ValueError) as told:
        ExpConfig().with_settings([setting])
    assert str(told.value).startswith(message)
