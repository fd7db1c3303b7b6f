"""golden.nonlinear.silu against float64, over every gate."""

from fractions import Fraction

import numpy as np
import pytest

from golden.fixedpoint import round_shift
from golden.nonlinear.silu import SiluConfig, _falling_sigmoid, sigmoid, silu, swiglu
from hw.nonlinear.silu import LOG2E, _times_log2e

#: Run-time scales: coarse, usual, not a power of two, and one at which the overflow guard shifts the gate.
SCALES = (Fraction(1, 128), Fraction(1, 1000), Fraction(3, 20000), Fraction(1, 1 << 17))
FORMS = ("base2", "ibert", "piecewise")
SHIPPED = [
    *(SiluConfig(form=form, gate_fraction_bits=f) for form in FORMS for f in (8, 10, 11, 12, 15)),
    SiluConfig(exp_fraction_bits=10, reciprocal_bits=5),
    SiluConfig(rom_bits=2, reciprocal_bits=3, sigma_bits=12),
    SiluConfig(form="piecewise", segment_bits=6),
    SiluConfig(form="ibert", gate_bits=8, gate_fraction_bits=4, sigma_bits=9),
]
CASES = [(config, None) for config in SHIPPED] + [(SiluConfig(form="ibert", run_time_scale=True), s) for s in SCALES]
TABLES = [SiluConfig(form="table", gate_bits=b, gate_fraction_bits=f) for b, f in ((8, 4), (10, 6), (12, 8), (4, 9))]


def name(case):
    config, scale = case
    return f"{config.describe()} scale={scale}" if scale else config.describe() or "defaults"


def every(config):
    return np.arange(-(1 << (config.gate_bits - 1)), 1 << (config.gate_bits - 1))


def constants(config, scale):
    return None if scale is None else config.constants(scale)


def real(config, scale):
    """Every gate as a real number."""
    return every(config) * float(scale or Fraction(1, 1 << config.gate_fraction_bits))


def exact(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_sigma_is_within_zero_and_one_and_never_falls_over_every_gate(case):
    config, scale = case
    sigma = sigmoid(config, every(config), constants(config, scale))
    assert sigma.min() >= 0 and sigma.max() <= config.one
    assert (np.diff(sigma) >= 0).all()
    assert sigma[every(config) == 0] == config.one // 2
    np.testing.assert_array_equal(sigma[1:] + sigma[:0:-1], config.one)  # sigma(x) + sigma(-x) = 1


@pytest.mark.parametrize("case", CASES, ids=name)
def test_silu_is_the_rounded_product_with_sigma_over_every_gate(case):
    config, scale = case
    k = constants(config, scale)
    product = every(config) * sigmoid(config, every(config), k)
    np.testing.assert_array_equal(silu(config, every(config), k), round_shift(product, config.sigma_bits))


@pytest.mark.parametrize(
    "config, scale, sigma_bound, silu_bound",
    [
        (SiluConfig(), None, 1.1e-4, 1.25),
        (SiluConfig(gate_fraction_bits=12), None, 1.1e-4, 2.0),
        (SiluConfig(gate_fraction_bits=15), None, 1.2e-4, 3.5),
        (SiluConfig(rom_bits=5, reciprocal_bits=7), None, 6.5e-5, 1.0),
        (SiluConfig(form="ibert"), None, 8.3e-4, 2.3),
        (SiluConfig(form="ibert", gate_fraction_bits=8), None, 9.3e-4, 0.9),
        (SiluConfig(form="ibert", gate_bits=8, gate_fraction_bits=4, sigma_bits=9), None, 2.6e-3, 0.56),
        (SiluConfig(form="ibert", run_time_scale=True), Fraction(1, 1000), 8.2e-4, 1.3),
        (SiluConfig(form="ibert", run_time_scale=True), Fraction(3, 20000), 8.2e-4, 6.0),
        (SiluConfig(form="piecewise"), None, 4.0e-4, 5.7),
    ],
)
def test_error_over_every_gate(config, scale, sigma_bound, silu_bound):
    """sigma as a fraction of one, silu in steps of the gate."""
    x, k = real(config, scale), constants(config, scale)
    step = x[-1] - x[-2]
    assert np.abs(sigmoid(config, every(config), k) / config.one - exact(x)).max() <= sigma_bound
    assert np.abs(silu(config, every(config), k) - x * exact(x) / step).max() <= silu_bound


@pytest.mark.parametrize("case", [*CASES, *((c, None) for c in TABLES)], ids=name)
def test_tails_saturate(case):
    config, scale = case
    gate, x = every(config), real(config, scale)
    y = silu(config, gate, constants(config, scale))
    # From a real 12 on, whatever is left of sigma is less than half a step of its own.
    if config.form != "table":
        assert (y[x <= -12] == 0).all()
        np.testing.assert_array_equal(y[x >= 12], gate[x >= 12])
    # Never above the gate, and never below the minimum of the function by more than the error bound.
    assert (y <= np.maximum(gate, 0)).all()
    step = float(scale or Fraction(1, 1 << config.gate_fraction_bits))
    assert y.min() >= -0.2785 / step - 13


@pytest.mark.parametrize("case", [*CASES, *((c, None) for c in TABLES)], ids=name)
def test_the_negative_tail_never_grows_by_more_than_a_step(case):
    config, scale = case
    x = real(config, scale)
    y = silu(config, every(config), constants(config, scale))
    tail = np.abs(y[x <= -1.3])  # from far away towards the minimum: may only grow
    if len(tail):
        assert (np.maximum.accumulate(tail) - tail).max() <= 1
    assert (np.diff(y[x >= 0]) >= 0).all()


@pytest.mark.parametrize("config", TABLES, ids=lambda c: c.describe())
def test_table_is_correctly_rounded(config):
    for gate, y in zip(every(config)[::3], silu(config, every(config)[::3]), strict=True):
        wanted = int(gate) * (1 - _falling_sigmoid(Fraction(int(gate), 1 << config.gate_fraction_bits)))
        assert abs(wanted - int(y)) <= Fraction(1, 2)


def test_log2e_by_additions_is_the_constant():
    assert LOG2E == round(np.log2(np.e) * (1 << 14))
    from amaranth.hdl import Module, Signal
    from amaranth.sim import Simulator

    x, y, m = Signal(16), Signal(31), Module()
    m.d.comb += y.eq(_times_log2e(x))

    async def bench(ctx):
        for value in (0, 1, 2, 3, 0x5555, 0x7FFF, 0x8000, 0xFFFF):
            ctx.set(x, value)
            assert ctx.get(y) == value * LOG2E

    simulator = Simulator(m)
    simulator.add_testbench(bench)
    simulator.run()


def test_product_with_up_at_the_extremes_is_exact_or_saturates():
    config = SiluConfig()
    gate = np.array([32767, 32767, -32768, -2600, -2600, 0])
    up = np.array([32767, -32768, -32768, 32767, -32768, -32768])
    y = swiglu(config, gate, up)
    np.testing.assert_array_equal(y, silu(config, gate) * up)
    narrow = config.replace(out_bits=16, out_shift=11)
    np.testing.assert_array_equal(swiglu(narrow, gate[:2], up[:2]), [32767, -32768])
    # Half-way points of both signs round towards plus infinity.
    plain = SiluConfig(multiply=False, out_bits=15, out_shift=1)
    np.testing.assert_array_equal(swiglu(plain, [32001, 32003]), [16001, 16002])
    half = SiluConfig(out_shift=1, out_bits=32)
    np.testing.assert_array_equal(swiglu(half, [30001, 30001], [1, -1]), [15001, -15000])


def test_run_time_constants_of_a_frozen_scale_give_the_frozen_result():
    frozen, free = SiluConfig(form="ibert"), SiluConfig(form="ibert", run_time_scale=True)
    k = free.constants(Fraction(1, 2048))
    np.testing.assert_array_equal(silu(frozen, every(frozen)), silu(free, every(free), k))
    widths = free.exp.constant_bits
    for scale in (*SCALES, Fraction(1, 1 << 19)):
        k = free.constants(scale)
        assert k.normalize < 1 << free.normalize_bits
        assert all(getattr(k.exp, field) < 1 << bits for field, bits in widths.items())


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"lanes": 0}, "lanes must lie in 1..64, not 0"),
        ({"form": "quadratic"}, "form must be one of base2, ibert, piecewise, table, not 'quadratic'"),
        ({"form": "table"}, "gate_bits must lie in 4..12 for the table form, not 16"),
        ({"run_time_scale": True}, "run_time_scale needs the ibert form, not base2"),
        ({"out_shift": 31}, "out_shift must lie in 0..30, not 31"),
        ({"form": "ibert", "gate_fraction_bits": 0}, "gate_fraction_bits must lie in 1..20 for the ibert form, not 0"),
        (
            {"form": "ibert", "gate_fraction_bits": 4},
            "sigma_bits must be at most 9 for the ibert form at scale 0.0625, not 15",
        ),
        ({"gate_bits": 16.0}, "gate_bits must be an integer, not 16.0"),
    ],
)
def test_illegal_configurations_say_what_is_accepted(fields, message):
    with pytest.raises(ValueError) as caught:
        SiluConfig(**fields)
    assert str(caught.value) == message


def test_wrong_arguments_are_refused():
    config = SiluConfig()
    with pytest.raises(TypeError, match="gate must hold integers, not float64"):
        swiglu(config, [0.5], [1])
    with pytest.raises(OverflowError, match=r"gate holds 32768, which does not fit signed\(16\)"):
        swiglu(config, [32768], [1])
    with pytest.raises(OverflowError, match=r"up holds -32769, which does not fit signed\(16\)"):
        swiglu(config, [0], [-32769])
    with pytest.raises(ValueError, match="up is needed with multiply, and only then"):
        swiglu(config, [0])
    with pytest.raises(ValueError, match="constants are needed with run_time_scale, and only then"):
        silu(SiluConfig(form="ibert", run_time_scale=True), [0])
    with pytest.raises(ValueError, match="the table form has no sigma"):
        sigmoid(TABLES[0], [0])
