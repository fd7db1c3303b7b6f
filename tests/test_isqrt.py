"""golden.nonlinear.isqrt against Python's exact integers and float64, and its cores in Amaranth's simulator."""

from fractions import Fraction
from math import isqrt as exact

import numpy as np
import pytest

from golden import fixedpoint
from golden.nonlinear.isqrt import IsqrtConfig, isqrt, newton_root, normalise, reciprocal
from hw.catalog import Entry
from hw.nonlinear.isqrt import Isqrt
from tb.nonlinear.isqrt import IsqrtBench
from tb.quick import session, simulate


def edges(bits):
    """0, both ends, powers of two and perfect squares of every size, each with its neighbours."""
    powers = np.int64(1) << np.arange(bits)
    size = (bits + 1) // 2
    roots = np.unique(np.concatenate([(np.int64(1) << np.arange(size)) + d for d in (-1, 0, 1)]))
    roots = np.append(roots, [exact((1 << bits) - 1), *range(2, 40)])
    around = np.concatenate([[0, (1 << bits) - 1], powers, roots * roots])
    around = np.concatenate([around - 1, around, around + 1])
    return np.unique(around[(around >= 0) & (around < 1 << bits)])


def random(bits, count=1_000_000):
    """Uniform in value and uniform in length, half of each."""
    generator = np.random.default_rng(bits)
    x = generator.integers(0, 1 << bits, count)
    x[::2] >>= generator.integers(0, bits, count // 2 + count % 2)
    return x


@pytest.mark.parametrize("bits", [2, 3, 8, 16, 31, 32, 43, 61, 62])
def test_newton_reaches_the_floor_at_every_edge(bits):
    config = IsqrtConfig(form="newton", serial=True, in_bits=bits)
    x = edges(bits)
    np.testing.assert_array_equal(newton_root(config, x), [exact(int(v)) for v in x])


@pytest.mark.parametrize("bits", [32, 43, 62])
def test_newton_reaches_the_floor_at_a_million_random_inputs(bits):
    config = IsqrtConfig(form="newton", serial=True, in_bits=bits)
    x = random(bits)
    root = newton_root(config, x)
    assert (root * root <= x).all()
    assert (x - root * root <= 2 * root).all()  # (root + 1)**2 > x
    np.testing.assert_array_equal(root, fixedpoint.isqrt(x))


def test_newton_reaches_the_floor_of_every_input_of_twelve_bits():
    for bits in range(2, 13):
        config = IsqrtConfig(form="newton", serial=True, in_bits=bits)
        np.testing.assert_array_equal(newton_root(config, np.arange(1 << bits)), [exact(v) for v in range(1 << bits)])


def test_proven_number_of_iterations():
    """Five for 32 bits, as the paper's routine is usually run."""
    counts = {bits: IsqrtConfig(form="newton", serial=True, in_bits=bits).iterations for bits in (8, 16, 32, 48, 62)}
    assert counts == {8: 3, 16: 4, 32: 5, 48: 5, 62: 6}


@pytest.mark.parametrize(
    "fields, bound",
    [
        ({"form": "table"}, 3.7e-4),
        ({"form": "table", "address_bits": 4}, 5.1e-3),
        ({"form": "table", "address_bits": 8}, 5.4e-5),
        ({"form": "table", "steps": 2}, 5.4e-5),
        ({"form": "table", "steps": 0}, 1.6e-2),
        ({"form": "table", "root_bits": 20, "steps": 2}, 3.4e-6),
        ({"form": "table", "root_bits": 10}, 2.9e-3),
        ({"form": "newton", "serial": True}, 3.1e-5),
        ({"form": "newton", "serial": True, "root_bits": 20}, 2.0e-6),
    ],
)
def test_error_of_the_reciprocal_over_every_normalised_radicand(fields, bound):
    config = IsqrtConfig(output="reciprocal", in_bits=18, **fields)
    x = np.arange(1 << 16, 1 << 18)  # f in [1/4, 1): all others differ from these by an even shift
    mantissa, exponent = reciprocal(config, x)
    value = np.ldexp(mantissa.astype(np.float64), -(exponent + config.root_bits - 1))
    assert np.abs(value * np.sqrt(x) - 1).max() <= bound


@pytest.mark.parametrize("form", ["table", "newton"])
@pytest.mark.parametrize("bits", [16, 33, 43, 62])
def test_reciprocal_of_edges_and_a_million_random_inputs(form, bits):
    """The relative error does not depend on the size of x, down to 1; 0 gives 0."""
    config = IsqrtConfig(form=form, output="reciprocal", in_bits=bits, serial=True)
    x = np.concatenate([edges(bits), random(bits, 1_000_000 if bits == 43 else 100_000)])
    mantissa, exponent = reciprocal(config, x)
    some = x > 0
    value = np.ldexp(mantissa[some].astype(np.float64), -(exponent[some] + config.root_bits - 1))
    assert np.abs(value * np.sqrt(x[some].astype(np.float64)) - 1).max() <= (3.7e-4 if form == "table" else 3.1e-5)
    assert not mantissa[~some].any() and not exponent[~some].any()


@pytest.mark.parametrize("address_bits", range(3, 9))
@pytest.mark.parametrize("seed_bits", [4, 8])
def test_seeds_are_correctly_rounded_and_all_bits_are_used(address_bits, seed_bits):
    config = IsqrtConfig(form="table", output="reciprocal", address_bits=address_bits, seed_bits=seed_bits)
    steps = 1 << address_bits
    assert len(config.seeds) == 3 * steps // 4
    for k, seed in zip(range(steps // 4, steps), config.seeds, strict=True):
        square = Fraction(4**seed_bits * steps, 4 * k + 2)  # the exact seed, squared
        assert seed == (1 << seed_bits) - 1 or (seed - Fraction(1, 2)) ** 2 <= square <= (seed + Fraction(1, 2)) ** 2
    assert max(config.seeds).bit_length() == seed_bits


def test_the_spec_table_has_48_bytes():
    config = IsqrtConfig(form="table", output="reciprocal")
    assert config.seeds == tuple(round(256 / np.sqrt(4 * (k + 0.5) / 64)) for k in range(16, 64))


def test_every_width_holds_at_every_radicand():
    """check() inside raises if an intermediate leaves its word: 12-bit mantissas see every normalised radicand."""
    for root_bits in (8, 9, 10, 12):
        for address_bits in range(3, 9):
            for steps in (0, 1, 2):
                config = IsqrtConfig(
                    form="table", output="reciprocal", in_bits=root_bits + 2 + root_bits % 2,
                    root_bits=root_bits, address_bits=address_bits, steps=steps,
                )  # fmt: skip
                isqrt(config, np.arange(1 << config.in_bits))


def test_normalising_keeps_the_value():
    config = IsqrtConfig(form="newton", output="reciprocal", in_bits=31, serial=True)
    x = edges(31)[1:]
    normal, exponent = normalise(config, x)
    assert ((normal >= 1 << 30) & (normal < 1 << 32)).all()
    np.testing.assert_array_equal(normal >> (32 - 2 * exponent), x)


def test_floats_negatives_and_values_out_of_range_are_refused():
    with pytest.raises(TypeError, match="x must hold integers, not float64"):
        isqrt(IsqrtConfig(), [2.0])
    with pytest.raises(OverflowError, match=r"x holds -1, which does not fit unsigned\(32\)"):
        isqrt(IsqrtConfig(), [-1])
    with pytest.raises(OverflowError, match=r"x holds 4294967296, which does not fit unsigned\(32\)"):
        isqrt(IsqrtConfig(), [1 << 32])


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"in_bits": 63}, "in_bits must lie in 2..62, not 63"),
        ({"output": "reciprocal"}, "output must be root for the digit form, not reciprocal"),
        ({"form": "table"}, "output must be reciprocal for the table form, not root"),
        ({"form": "newton"}, "serial must be true for the newton form: its divisions run one bit a cycle"),
        ({"form": "cordic"}, "form must be one of digit, newton, table, not 'cordic'"),
        ({"root_bits": 7}, "root_bits must lie in 8..20, not 7"),
        ({"steps": 3}, "steps must lie in 0..2, not 3"),
    ],
)
def test_illegal_configurations(fields, message):
    with pytest.raises(ValueError) as caught:
        IsqrtConfig(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "config",
    [
        IsqrtConfig(in_bits=12, digits=4, lanes=4),
        IsqrtConfig(in_bits=9, serial=True, lanes=8),
        IsqrtConfig(form="newton", in_bits=10, serial=True, lanes=16),
        IsqrtConfig(form="newton", output="reciprocal", in_bits=9, root_bits=8, serial=True, lanes=16),
        IsqrtConfig(form="table", output="reciprocal", in_bits=11, root_bits=9, lanes=4),
        IsqrtConfig(form="table", output="reciprocal", in_bits=10, root_bits=12, serial=True, lanes=16),
    ],
    ids=lambda config: config.describe().replace(" ", ","),
)
def test_hardware_equals_golden_for_every_input(config):
    entry = Entry("isqrt", "nonlinear", Isqrt, isqrt, {"small": config})
    bench = IsqrtBench(entry, config)
    simulate(bench, [(session(bench, [bench.row(np.arange(1 << config.in_bits))]), None)])
