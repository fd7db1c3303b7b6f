"""What the integer pipeline's nonlinear units are worth: the same pipeline with others in their place.

* :class:`FloatUnits`: floating point between the same integer formats;
* :class:`PaperUnits`: the forms of *LLM Inference in a Flash* section 3.1.3 (second-order polynomials with constants of
  the token's own scale, token-wise INT16, the overflow guard, Newton-Raphson square root), with rounding shifts, and
  :class:`TruncatingUnits` with truncating ones in the requantizers;
* :class:`StaticUnits`: the paper's forms on static group scales from calibration;
* :class:`NaiveInt8Units` and :class:`NaiveInt32Units`: the same operators straight on the INT8 codes of the linear
  layers' scheme, or on INT32 with arithmetic that wraps at 32 bits. They diverge, as in the paper's Table 1. They are
  counter-examples, not hardware.
"""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from golden import fixedpoint
from golden.fixedpoint import Int, round_shift, saturate
from golden.llm import reference
from golden.llm.integer import IntegerUnits
from golden.llm.kvcache import Logits
from golden.llm.quantized import Gain
from golden.nonlinear.exp import LN2, POLY_A, POLY_B, POLY_C, IbertConstants
from golden.nonlinear.requantize import RequantizeConfig, Requantized, per_element, requantize, scale
from golden.nonlinear.rmsnorm import normalize, rmsnorm
from golden.nonlinear.silu import SiluConfig, SiluConstants, swiglu
from golden.nonlinear.softmax import SoftmaxConfig, softmax
from golden.rotated.fwht import fwht

Real = NDArray[np.float64]


class FloatUnits(IntegerUnits):
    """Norms, rotation, softmax and SiLU in float64; scales, codes and linear layers as in the integer pipeline."""

    def _normal(self, gain: Gain, x: Real) -> Real:
        """RMSNorm in units of the gain's scale."""
        gamma = np.ldexp(gain.table.astype(np.float64), -gain.shift) / np.sqrt(x.shape[-1])
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.model.config.norm_eps) * gamma

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        config = self.units.norm
        out = np.rint(self._normal(gain, np.asarray(x * self.units.wide_scale))).astype(np.int64)
        return requantize(config.requantizer, saturate(out, config.out_bits))

    def head_norm(self, place: str, gain: Gain, x: Int, row: Int, e: Int) -> Int:
        normal = np.rint(self._normal(gain, np.asarray(x * self.units.wide_scale))).astype(np.int64)
        return saturate(normal, self.units.head_norm.out_bits)

    def rotate(self, x: Int, positions: Int) -> Int:
        frequencies = reference.rope_frequencies(self.model.config)
        angle = positions[..., None] * frequencies
        low, high = np.split(x.astype(np.float64), 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        turned = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)
        return saturate(np.rint(turned).astype(np.int64), self.units.rope.out_bits)

    def probabilities(self, scores: Logits, keep: NDArray[np.bool_]) -> Int:
        x = np.where(keep, np.ldexp(scores.fixed(20, 48).astype(np.float64), -20), -np.inf)
        p = np.exp2(x - x.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return np.minimum(np.rint(p * 65536), 65535).astype(np.int64)

    def product(self, gate: Int, up: Int) -> Requantized:
        u = self.units
        row, e = self._row(u.up, "up_requantize", up)
        real = gate * u.wide_scale
        falling = np.exp(-np.abs(real))
        y = real * np.where(real >= 0, 1.0, falling) / (1 + falling) * np.ldexp(1.0, u.formats.gate_fraction_bits)
        return self._product(saturate(np.rint(y * row).astype(np.int64), u.silu.out_bits), e)

    def _product(self, y: Int, e: Int) -> Requantized:
        """What follows SiLU's product: transform and requantization."""
        u = self.units
        if u.product_block > 1:
            y = fwht(u.product_fwht, y.reshape(len(y), -1, u.product_block)).reshape(y.shape)
        out = self._groups(u.product, y)
        assert out.e is not None
        return Requantized(out.q, out.e + e[:, None], out.c)

    def _groups(self, config: RequantizeConfig, x: Int) -> Requantized:
        return requantize(config, x)


class PaperUnits(FloatUnits):
    """The paper's integer forms. Formats are expected with ``root = newton``."""

    base2 = False
    norm = IntegerUnits.norm
    head_norm = IntegerUnits.head_norm
    rotate = IntegerUnits.rotate

    def probabilities(self, scores: Logits, keep: NDArray[np.bool_]) -> Int:
        # 17 fraction bits: the coarsest scale, 2**-1, is still below ln 2.
        x = scores.fixed(17, 32)
        shape = x.shape
        kept = np.broadcast_to(keep, shape).reshape(-1, shape[-1])
        whole = -(-shape[-1] // 8) * 8
        config = RequantizeConfig(lanes=8, form="token", in_bits=32, out_bits=16, max_row=whole)
        q, e = self._token(config, x.reshape(kept.shape), kept)
        softmax_config = self.units.softmax.replace(form="ibert", run_time_scale=True)
        p, _ = softmax(softmax_config, q, kept, _polynomials(softmax_config, e))
        return p.reshape(shape)

    def product(self, gate: Int, up: Int) -> Requantized:
        u = self.units
        # Gates beyond 128 saturate: a coarser scale would leave the polynomial fewer bits than sigma has.
        narrow, gate_e = self._token(u.up, saturate(gate, 8 + u.formats.fraction_bits))
        row, e = self._token(u.up, up)
        config = SiluConfig(lanes=8, form="ibert", run_time_scale=True)
        y = swiglu(config, narrow, row, _silu_constants(config, gate_e))
        # The gate's own exponent and fraction bits: up to the static scale of the product.
        shift = self.units.formats.fraction_bits - self.units.formats.gate_fraction_bits - gate_e
        return self._product(saturate(round_shift(y, shift[:, None]), config.out_bits), e)

    def _token(self, config: RequantizeConfig, x: Int, keep: NDArray[np.bool_] | None = None) -> tuple[Int, Int]:
        q, e, _ = requantize(config, x, keep)
        assert e is not None
        return q, e[..., 0]


class TruncatingUnits(PaperUnits):
    """The paper's forms with requantizers that cut instead of rounding."""

    def _narrow(self, config: RequantizeConfig, x: Int) -> tuple[Int, Int]:
        return self._token(config, x)

    def _token(self, config: RequantizeConfig, x: Int, keep: NDArray[np.bool_] | None = None) -> tuple[Int, Int]:
        _, e = super()._token(config, x, keep)
        return x >> e[..., None] if keep is None else np.where(keep, x, 0) >> e[..., None], e

    def _groups(self, config: RequantizeConfig, x: Int) -> Requantized:
        return truncate(config, x)

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        u = self.units
        row, e = self._row(u.norm_row, place, x)
        eps = round_shift(np.full_like(e, self.model.eps), 2 * e)
        return truncate(u.norm.requantizer, normalize(u.norm, row, gain.table, eps, np.full_like(e, gain.shift)))

    def context(self, x: Int) -> Requantized:
        return truncate(self.units.context, x)


def truncate(config: RequantizeConfig, x: Int) -> Requantized:
    """The group form of the requantizer with a quotient that floors."""
    _, e, c = requantize(config, x)
    assert e is not None and c is not None
    n = x.shape[-1]
    q = (4 * x) // (per_element(config, c, n) << (per_element(config, e, n) + 2))
    return Requantized(np.maximum(q, -config.limit - 1), e, c)


class StaticUnits(PaperUnits):
    """The paper's forms on static scales per group of a linear layer's input, from the calibration text: what lies
    beyond them saturates."""

    def _static(self, site: str, config: RequantizeConfig, x: Int, unit: float) -> Requantized:
        largest = self.model.static[f"layers.{self.layer}.{site}"] / unit
        e, c = scale(config, np.minimum(np.ceil(largest), (1 << (config.in_bits - 1)) - 1).astype(np.int64))
        n = x.shape[-1]
        step = per_element(config, c, n) << (per_element(config, e, n) + 2)
        q = np.clip((4 * x + (step >> 1)) // step, -config.limit, config.limit)
        blocks = (*x.shape[:-1], e.shape[-1])
        return Requantized(q, np.broadcast_to(e, blocks), np.broadcast_to(c, blocks))

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        u = self.units
        row, e = self._row(u.norm_row, place, x)
        eps = round_shift(np.full_like(e, self.model.eps), 2 * e)
        y = normalize(u.norm, row, gain.table, eps, np.full_like(e, gain.shift))
        return self._static(place, u.norm.requantizer, y, gain.scale)

    def context(self, x: Int) -> Requantized:
        return self._static("context", self.units.context, x, self.units.wide_scale)

    def _product(self, y: Int, e: Int) -> Requantized:
        # A static scale needs a static unit: up's own exponent is undone.
        u = self.units
        y = saturate(y << e[:, None], u.product.in_bits)
        return self._static("product", u.product, y, u.product_scale)


def _polynomials(config: SoftmaxConfig, e: Int) -> IbertConstants:
    """The polynomial's constants of rows whose scale is 2**(e - 17), as columns."""
    table, inverse = np.unique(e, return_inverse=True)
    rows = [config.exp.constants(Fraction(2) ** (int(k) - 17)) for k in table]
    return IbertConstants(
        **{item.name: np.array([getattr(row, item.name) for row in rows])[inverse][:, None] for item in fields(rows[0])}  # type: ignore[arg-type]
    )


def _silu_constants(config: SiluConfig, e: Int) -> SiluConstants:
    """SiLU's constants of rows whose scale is 2**(e - 16), as columns."""
    table, inverse = np.unique(e, return_inverse=True)
    rows = [config.constants(Fraction(2) ** (int(k) - 16)) for k in table]
    columns = {
        item.name: np.array([getattr(row.exp, item.name) for row in rows])[inverse][:, None]
        for item in fields(IbertConstants)
    }
    normal = np.array([row.normalize for row in rows])[inverse][:, None]
    return SiluConstants(IbertConstants(**columns), normal)  # type: ignore[arg-type]


# -- naive forms -------------------------------------------------------------------------------------------------------


def wrap32(x: Int) -> Int:
    """What a 32-bit register keeps."""
    return ((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


def naive_exp(x: Int, unit: Fraction) -> tuple[Int, float]:
    """I-BERT's integer exponential of ``x * unit`` for x <= 0, in 32-bit arithmetic without any guard: (value, scale).

    A quotient by zero (a unit above ln 2) is 0, as software integer division in NumPy has it.
    """
    b, c, ln2 = floor(POLY_B / unit), floor(POLY_C / (POLY_A * unit * unit)), floor(LN2 / unit)
    t = np.maximum(x, -30 * max(ln2, 1))
    z = -t // ln2 if ln2 else np.zeros_like(t)
    rest = t + z * ln2
    square = wrap32(wrap32((rest + b) ** 2) + c % (1 << 32))
    return square >> np.minimum(z, 31), float(POLY_A * unit * unit)


class NaiveInt8Units(PaperUnits):
    """Every nonlinear operator takes INT8: norms the codes of the group-wise scheme as they are, though a sum over
    groups of different scales has no meaning (what section 3.1.3 of the paper warns of); softmax and SiLU tensors with
    one static scale from the calibration text."""

    def _int8(self, place: str, x: Int, unit: float) -> tuple[Int, float]:
        """(q, scale) of integers that stand for ``x * unit``."""
        step = max(self.model.ranges[f"layers.{self.layer}.{place}"], 2.0**-24) / 127  # a tensor may be all zeros
        return np.clip(np.rint(x * (unit / step)), -127, 127).astype(np.int64), step

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        config = self.units.norm.replace(in_bits=8)
        codes = self.units.norm.requantizer.replace(in_bits=32, out_bits=8)
        q = requantize(codes, x).q
        out = rmsnorm(config, q, gain.table, np.zeros(len(q), np.int64), np.full(len(q), gain.shift))
        assert isinstance(out, Requantized)
        return out

    def probabilities(self, scores: Logits, keep: NDArray[np.bool_]) -> Int:
        q, step = self._int8("all_scores", scores.fixed(16, 48), 2.0**-16)
        return _naive_softmax(q, Fraction(step), keep)

    def product(self, gate: Int, up: Int) -> Requantized:
        q, step = self._int8("gate", gate, self.units.wide_scale)
        return self._naive_silu(q, Fraction(step), up)

    def _naive_silu(self, gate: Int, unit: Fraction, up: Int) -> Requantized:
        """I-BERT's sigmoid of the gate, then its product with up on the product's scale."""
        value, one = naive_exp(-np.abs(gate), unit)
        total = wrap32(value + round(1 / one) % (1 << 32))
        low = np.where(total > 0, (value << 15) // np.maximum(total, 1), 0)
        sigma = np.where(gate >= 0, (1 << 15) - low, low)
        real = gate * sigma * (float(unit) / (1 << 15))
        row, e = self._token(self.units.up, up)
        y = np.rint(real * row * 2.0**self.units.formats.gate_fraction_bits)
        return self._product(np.clip(y, -(2.0**31), 2.0**31 - 1).astype(np.int64), e)


class NaiveInt32Units(NaiveInt8Units):
    """INT32 inputs straight into the polynomials, in arithmetic that wraps at 32 bits."""

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        total = wrap32(np.sum(wrap32(x * x), axis=-1))
        root = fixedpoint.isqrt(np.maximum(wrap32(total + self.model.eps), 1))
        factor = (1 << 31) // np.maximum(root, 1)
        down = 31 + gain.shift
        out = (wrap32(x * factor[:, None]) * gain.table) >> max(min(down, 62), 0)
        return requantize(self.units.norm.requantizer, saturate(out, self.units.norm.out_bits))

    def probabilities(self, scores: Logits, keep: NDArray[np.bool_]) -> Int:
        return _naive_softmax(scores.fixed(16, 32), Fraction(1, 1 << 16), keep)

    def product(self, gate: Int, up: Int) -> Requantized:
        return self._naive_silu(gate, Fraction(1, 1 << self.units.formats.fraction_bits), up)


def _naive_softmax(q: Int, unit: Fraction, keep: NDArray[np.bool_]) -> Int:
    """I-BERT's softmax in 32-bit arithmetic: 16-bit probabilities, whatever became of the sum."""
    x = np.where(keep, q, q.min())
    value, _ = naive_exp(np.where(keep, x - x.max(axis=-1, keepdims=True, where=keep, initial=x.min()), 0), unit)
    value = np.where(keep, value, 0)
    total = wrap32(value.sum(axis=-1, keepdims=True))
    return np.clip(np.where(total != 0, (value << 16) // np.where(total == 0, 1, total), 0), 0, 65535)
