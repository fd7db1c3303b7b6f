"""``python -m golden accuracy``: how far the integer units are from real arithmetic, over whole input ranges."""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np
from numpy.typing import NDArray

from golden.commandline import show
from golden.nonlinear.exp import ExpConfig, exp
from golden.nonlinear.isqrt import IsqrtConfig
from golden.nonlinear.isqrt import isqrt as integer_root
from golden.nonlinear.rope import RopeConfig, cosine_sine, frequencies, phase
from golden.nonlinear.silu import SiluConfig, sigmoid
from golden.nonlinear.softmax import SoftmaxConfig, softmax

Measure = tuple[str, str, str, float]


def exponentials() -> Iterator[Measure]:
    """Largest error of e over every input, in units of 1.0."""
    for name, config in {
        "polynomial, scale 2^-8": ExpConfig(form="ibert", scale_log2=8),
        "polynomial, scale 2^-12": ExpConfig(form="ibert", scale_log2=12),
        "base 2, 16-entry ROM, interpolated": ExpConfig(),
        "base 2, 32-entry ROM": ExpConfig(rom_bits=5, interpolate=False),
    }.items():
        t = np.arange(1 << config.in_bits)
        base = np.e if config.form == "ibert" else 2.0
        error = np.abs(exp(config, t) / config.one - base ** (-t * float(config.scale))).max()
        yield "exp", name, "largest error, every input", float(error)


def rows() -> Iterator[Measure]:
    """Sums of flat rows of every length up to 4,096."""
    for bits in (8, 12, 16):
        for rounding in ("diffuse", "nearest"):
            config = SoftmaxConfig(probability_bits=bits, rounding=rounding)
            sums = [softmax(config, np.zeros((1, n), dtype=np.int64))[0].sum() / 2**bits for n in range(1, 4097)]
            yield "softmax", f"{bits} bit, {rounding}", "least row sum, flat rows of 1 to 4,096", float(min(sums))


def sigmoids() -> Iterator[Measure]:
    """Largest error of sigma over every INT16 gate."""
    x = np.arange(-(1 << 15), 1 << 15)
    for form in ("ibert", "base2", "piecewise"):
        config = SiluConfig(form=form)
        real = 1 / (1 + np.exp(-x / 2.0**config.gate_fraction_bits))
        error = np.abs(sigmoid(config, x) / 2.0**config.sigma_bits - real).max()
        yield "silu", form, "largest error of sigma, every INT16 gate", float(error)


def rotations() -> Iterator[Measure]:
    """Largest error of cosine and sine at 4,096 positions up to 262,143, all frequencies, in steps of Q1.14."""
    positions = np.unique(np.linspace(0, (1 << 18) - 1, 4096).astype(np.int64))
    for name, fields in {
        "theta 10,000": {"theta": 10_000},
        "theta 500,000": {"theta": 500_000},
        "theta 500,000, Llama-3": {"theta": 500_000, "scaling": "llama3"},
    }.items():
        config = RopeConfig(frozen=True, **fields)  # type: ignore[arg-type]
        yield "rope", name, "largest error of cos and sin, Q1.14 steps", rotation_error(config, positions)
        bits = config.table_bits
        yield "rope", name, f"table bits (a full table: {bits['naive']:,})", float(bits["steps"] + bits["chords"])


def rotation_error(config: RopeConfig, positions: NDArray[np.int64]) -> float:
    """Against the exact frequencies, not against the steps that stand for them."""
    factor = 8 if config.scaling == "llama3" else None
    turns = np.array([float(f) for f in frequencies(config.head_dim, config.theta, factor)])
    real = 2 * np.pi * np.mod(positions[:, None] * turns, 1.0)
    steps = np.array(config.frozen_steps, dtype=np.int64)
    cosine, sine = cosine_sine(config, phase(config, positions[:, None], steps[None, :]))
    one = 1 << (config.trig_bits - 2)
    return float(max(np.abs(cosine - one * np.cos(real)).max(), np.abs(sine - one * np.sin(real)).max()))


def roots() -> Iterator[Measure]:
    x = np.arange(1, 1 << 16)
    for form in ("newton", "table"):
        config = IsqrtConfig(form=form, output="reciprocal", in_bits=16, serial=form == "newton")
        mantissa, exponent = integer_root(config, x)
        value = mantissa / 2.0 ** (exponent + config.root_bits - 1)
        yield "isqrt", form, "largest relative error of 1/sqrt, 16 bit", float(np.abs(value * np.sqrt(x) - 1).max())


@click.command("accuracy")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def accuracy_command(as_json: bool) -> None:
    """How far the integer units are from real arithmetic (about a minute)."""
    found = [
        {"unit": unit, "form": form, "measure": measure, "value": value if as_json else f"{value:.4g}"}
        for part in (exponentials, rows, sigmoids, rotations, roots)
        for unit, form, measure, value in part()
    ]
    show(found, as_json, "Integer units against real arithmetic")
