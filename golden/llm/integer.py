"""The integer decoder: from token ids to logits without a floating-point number.

Every step is the golden function of a unit, called with the configuration that the unit is built from
(:mod:`golden.llm.formats` says which format lies between them); :class:`IntegerUnits` is the whole list. The pipeline
around them moves integers and exponents. A result never depends on the batch that it is computed in: prefill, chunked
prefill and decoding token by token give the same bits.

Source: *LLM Inference in a Flash* section 3.1; what differs from it, and what that is worth, is in ``docs/integer.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.fixedpoint import Int, round_shift, saturating_shift
from golden.llm.config import ModelConfig
from golden.llm.formats import Units
from golden.llm.kvcache import CacheFactory, DenseCache, Heads, KVCache, Logits, Tap, no_tap
from golden.llm.linear import RESIDENT_WEIGHTS, LinearWeights, align, join, project
from golden.llm.quantized import Gain, Quantized, score_constant
from golden.nonlinear.requantize import RequantizeConfig, Requantized, requantize
from golden.nonlinear.residual import residual
from golden.nonlinear.rmsnorm import rmsnorm
from golden.nonlinear.rope import rotate
from golden.nonlinear.silu import swiglu
from golden.nonlinear.softmax import softmax
from golden.rotated.fwht import fwht


class IntegerUnits:
    """The nonlinear units and requantizers as the pipeline strings them together.

    Subclasses replace some by something else (floating point, the paper's forms, naive ones) to say what each is worth.
    """

    #: Whether logits are in powers of two (or in nats).
    base2 = True

    def __init__(self, model: Quantized):
        self.units: Units = model.units
        self.model = model
        self.tap: Tap = no_tap
        self.layer = 0

    def _narrow(self, config: RequantizeConfig, x: Int) -> tuple[Int, Int]:
        """Wide rows to token-wise INT16: (q, e), e without the last axis."""
        q, e, _ = requantize(config, x)
        assert e is not None
        return q, e[..., 0]

    def _row(self, config: RequantizeConfig, place: str, x: Int) -> tuple[Int, Int]:
        q, e = self._narrow(config, x)
        self.tap(self.layer, place, config, {"x": x, "q": q, "e": e[..., None]})
        return q, e

    def norm(self, place: str, gain: Gain, x: Int) -> Requantized:
        """RMSNorm of wide rows (T, dim): requantized groups on the gain's scale."""
        u = self.units
        row, e = self._row(u.norm_row, f"{place}_requantize", x)
        eps = round_shift(np.full_like(e, self.model.eps), 2 * e)
        out = rmsnorm(u.norm, row, gain.table, eps, gain.shift)
        assert isinstance(out, Requantized)
        tensors = {"x": row, "gamma": gain.table, "eps": eps, "shift": gain.shift, "q": out.q, "e": out.e, "c": out.c}
        self.tap(self.layer, place, u.norm, tensors)
        return out

    def heads(
        self, gains: tuple[Gain | None, Gain | None], query: Int, key: Int, positions: Int
    ) -> tuple[Heads, Heads]:
        """Wide queries and keys (T, heads, head_dim): token-wise INT16, normalised where the model does, rotated. The
        exponent is on the wide scale, or on the gain's."""
        u, split = self.units, query.shape[1]
        x = np.concatenate((query, key), axis=1)  # both go through the same units
        row, e = self._narrow(u.head_row, x)
        parts = {"query": np.s_[:, :split], "key": np.s_[:, split:]}
        for place, part in parts.items():
            self.tap(
                self.layer, f"{place}_requantize", u.head_row, {"x": x[part], "q": row[part], "e": e[part][..., None]}
            )
        if gains[0] is not None and gains[1] is not None:
            normal = [
                self.head_norm(f"{place}_norm", gain, x[part], row[part], e[part])
                for gain, (place, part) in zip(gains, parts.items(), strict=True)
                if gain is not None
            ]
            row, e = np.concatenate(normal, axis=1), np.zeros_like(e)
        turned = self.rotate(row, positions[:, None])
        for place, part in parts.items():
            tensors = {
                "x": row[part],
                "position": positions[:, None],
                "steps": self.model.rope_steps,
                "y": turned[part],
            }
            self.tap(self.layer, f"{place}_rope", u.rope, tensors)
        return Heads(turned[:, :split], e[:, :split]), Heads(turned[:, split:], e[:, split:])

    def head_norm(self, place: str, gain: Gain, x: Int, row: Int, e: Int) -> Int:
        """RMSNorm of heads, wide (x) and as token-wise INT16 (row, e): INT16 on the gain's scale."""
        c = self.units.head_norm
        eps = round_shift(np.full_like(e, self.model.head_eps), 2 * e)
        y = rmsnorm(c, row, gain.table, eps, np.full_like(e, gain.shift))
        assert not isinstance(y, Requantized)
        self.tap(self.layer, place, c, {"x": row, "gamma": gain.table, "eps": eps, "shift": gain.shift, "y": y})
        return y

    def rotate(self, x: Int, positions: Int) -> Int:
        """Rotary embedding of token-wise INT16 heads."""
        return rotate(self.units.rope, x, positions, self.model.rope_steps)

    def probabilities(self, scores: Logits, keep: NDArray[np.bool_]) -> Int:
        """Softmax: unsigned 16-bit probabilities."""
        c = self.units.softmax
        x = scores.fixed(c.fraction_bits, c.score_bits)
        p, _ = softmax(c, x, keep)
        self.tap(self.layer, "softmax", c, {"x": x, "keep": keep, "p": p})
        return p

    def context(self, x: Int) -> Requantized:
        """Wide context (T, query_dim) as the output projection takes it."""
        out = requantize(self.units.context, x)
        self.tap(self.layer, "context_requantize", self.units.context, {"x": x, "q": out.q, "e": out.e, "c": out.c})
        return out

    def product(self, gate: Int, up: Int) -> Requantized:
        """SiLU(gate) * up of wide rows (T, hidden), as the down projection takes it; e includes up's own."""
        u, f = self.units, self.units.formats
        shift = np.full(len(gate), f.fraction_bits - f.gate_fraction_bits)
        narrow = requantize(u.gate, gate, multiplier=np.ones_like(shift), shift=shift).q
        self.tap(self.layer, "gate_requantize", u.gate, {"x": gate, "multiplier": 1, "shift": shift[0], "q": narrow})
        row, e = self._row(u.up, "up_requantize", up)
        y = swiglu(u.silu, narrow, row)
        self.tap(self.layer, "silu", u.silu, {"gate": narrow, "up": row, "y": y})
        if u.product_block > 1:
            blocks = y.reshape(len(y), -1, u.product_block)
            y = fwht(u.product_fwht, blocks).reshape(y.shape)
            self.tap(self.layer, "product_fwht", u.product_fwht, {"x": blocks, "y": y.reshape(blocks.shape)})
        out = requantize(u.product, y)
        self.tap(self.layer, "product_requantize", u.product, {"x": y, "q": out.q, "e": out.e, "c": out.c})
        assert out.e is not None
        return Requantized(out.q, out.e + e[:, None], out.c)

    def add(self, place: str, x: Int, branch: Int) -> Int:
        """Residual addition of wide rows."""
        y, _ = residual(self.units.residual, x, branch, np.zeros(len(x), np.int64))
        self.tap(self.layer, f"{place}_residual", self.units.residual, {"a": x, "b": branch, "shift": 0, "y": y})
        return y


class IntegerDecoder:
    """A decoder-only transformer in integers, from a :class:`~golden.llm.quantized.Quantized` model.

    ``forward`` gives logits as int64; a logit's real value is the integer times ``logit_scale``.
    """

    def __init__(
        self,
        model: Quantized,
        units: type[IntegerUnits] = IntegerUnits,
        cache: CacheFactory = DenseCache,
    ):
        self.config: ModelConfig = model.config
        self.model = model
        self.operators = units(model)
        self.logit_scale = model.units.wide_scale
        self._cache = cache
        # Matrices that read the same rows as one, and where each but the last ends; by the first of them.
        self._joined: dict[int, tuple[LinearWeights, list[int]]] = {}
        self._constants = [score_constant(model, i, self.operators.base2) for i in range(model.config.layers)]

    def with_cache(self, cache: CacheFactory) -> IntegerDecoder:
        """The same decoder with another kind of cache; the two share their weights, and are not to run at once."""
        other = copy(self)
        other._cache = cache
        return other

    def new_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for ``capacity`` positions, by default the model's longest sequence."""
        return self._cache(self.model.units, self.config.max_positions if capacity is None else capacity)

    def forward(self, tokens: Sequence[int] | NDArray[Any], cache: KVCache | None = None, tap: Tap = no_tap) -> Int:
        """Logits (T, vocab), signed 32 bits on the wide scale, after each of the T tokens, which follow those in
        ``cache``."""
        c, ops = self.config, self.operators
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one row of ids, not {ids.dtype} of shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= c.vocab:
            raise ValueError(f"token ids must lie in 0..{c.vocab - 1}, not {ids.min()}..{ids.max()}")
        cache = self.new_cache(len(ids)) if cache is None else cache
        past, count = cache.length, len(ids)
        limit = min(c.max_positions, cache.capacity)
        if past + count > limit:
            raise ValueError(f"{past + count} positions are more than the {limit} there is room for")
        ops.tap = cache.tap = tap
        positions = np.arange(past, past + count)
        down = self.model.embedding_fraction_bits - self.model.formats.fraction_bits
        x = saturating_shift(self.model.embedding[ids], down, 32)
        for i, layer in enumerate(self.model.layers):
            ops.layer = i
            h = ops.norm("attention_norm", layer.attention_norm, x)
            query, key, value = (
                y.reshape(count, -1, c.head_dim)
                for y in self._linear(h, query=layer.query, key=layer.key, value=layer.value)
            )
            queries, keys = ops.heads((layer.query_norm, layer.key_norm), query, key, positions)
            cache.append(i, keys, value)
            context = cache.attend(i, queries, self._constants[i], c.windows[i], ops.probabilities)
            (out,) = self._linear(ops.context(context.reshape(count, c.query_dim)), output=layer.output)
            x = ops.add("attention", x, out)
            h = ops.norm("mlp_norm", layer.mlp_norm, x)
            gate, up = self._linear(h, gate=layer.gate, up=layer.up)
            (out,) = self._linear(ops.product(gate, up), down=layer.down)
            x = ops.add("mlp", x, out)
        cache.advance(count)
        ops.layer = c.layers
        h = ops.norm("final_norm", self.model.final_norm, x)
        return self._linear(h, head=self.model.head)[0]

    def _linear(self, x: Requantized, **matrices: LinearWeights) -> list[Int]:
        """What each matrix makes of the same rows."""
        assert x.e is not None and x.c is not None
        parts = list(matrices.values())
        rows = align(parts[0].config, x.q, x.e, x.c)
        if sum(part.w.size for part in parts) > RESIDENT_WEIGHTS:
            found = [project(part, rows) for part in parts]
        elif len(parts) == 1:
            found = [project(parts[0], rows)]
        else:
            key = id(parts[0])
            if key not in self._joined:
                self._joined[key] = join(parts), [*accumulate(part.outputs for part in parts[:-1])]
            joined, ends = self._joined[key]
            found = np.split(project(joined, rows), ends, axis=1)
        for (place, weights), y in zip(matrices.items(), found, strict=True):
            tensors = {"q": x.q, "e": x.e, "c": x.c, "y": y}
            self.operators.tap(self.operators.layer, place, weights.config, tensors)
        return found
