"""The float32 decoder that every integer pipeline is measured against, in NumPy alone.

One function computes both prefill and decoding: :meth:`Decoder.forward` takes any number of tokens and
appends them to a key/value cache when it is given one.  Nothing loops over heads, positions or elements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from golden.llm.checkpoint import Array, Checkpoint, Layer, Weights
from golden.llm.config import ModelConfig


class Tap(Protocol):
    """Called at each site of each layer with the array there; it must not change the array.

    ====================  ===========================  ====================================================
    site                  shape                        what
    ====================  ===========================  ====================================================
    attention_norm        (T, dim)                     input of the norm before attention
    query_norm, key_norm  (T, heads, head_dim)         input of the heads' own norms, where a model has them
    query, key            (T, heads, head_dim)         before the rotary embedding
    value                 (T, kv_heads, head_dim)
    scores                (heads, T, S)                q·k / sqrt(head_dim), not yet masked
    context               (T, heads * head_dim)        input of the output projection
    attention_residual    (T, dim)                     residual stream before attention is added to it
    attention_out         (T, dim)                     what is added
    mlp_norm              (T, dim)                     input of the norm before the MLP
    gate, up              (T, hidden)                  inputs of SiLU and of the product
    product               (T, hidden)                  silu(gate) * up, input of the down projection
    mlp_residual          (T, dim)                     residual stream before the MLP is added to it
    mlp_out               (T, dim)                     what is added
    final_norm            (T, dim)                     input of the last norm; its layer is ``config.layers``
    ====================  ===========================  ====================================================
    """

    def __call__(self, layer: int, site: str, array: Array, /) -> None: ...


def _no_tap(layer: int, site: str, array: Array, /) -> None:
    pass


class Cache:
    """Keys (rotated) and values of the positions seen so far, for all layers."""

    def __init__(self, config: ModelConfig, capacity: int):
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.keys: Array = np.zeros(shape, dtype=np.float32)
        self.values: Array = np.zeros(shape, dtype=np.float32)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


def rope_frequencies(config: ModelConfig) -> NDArray[np.float64]:
    """Radians per position for each of the ``head_dim / 2`` pairs, with Llama 3's scaling if configured."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64)
    frequency = config.rope_theta ** (-pairs / config.head_dim)
    if (scaling := config.rope_scaling) is None:
        return frequency
    turns = scaling.original_positions * frequency / (2 * np.pi)  # over the context trained first
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequency * (keep + (1.0 - keep) / scaling.factor)


def rms_norm(x: Array, gamma: Array, eps: float) -> Array:
    """``gamma * x / sqrt(mean(x**2) + eps)`` over the last axis."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    scale = np.reciprocal(np.sqrt(mean + np.float32(eps)), dtype=np.float32)
    return x * scale * gamma


def silu(x: Array) -> Array:
    """``x / (1 + exp(-x))``, without overflow for any float32."""
    e = np.exp(-np.abs(x))
    y = x * np.where(x >= 0, np.float32(1.0), e) / (np.float32(1.0) + e)
    return y.astype(np.float32, copy=False)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Turn element ``i`` with element ``i + d/2``; ``x`` is (T, heads, d), the others (T, 1, d/2)."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


class Decoder:
    """A decoder-only transformer: grouped-query attention, rotary embedding, RMSNorm, SwiGLU.

    ``forward`` of T tokens equals T calls with one token each, up to float32 rounding.
    """

    logit_scale = 1.0

    def __init__(self, checkpoint: Checkpoint):
        self.config: ModelConfig = checkpoint.config
        self.weights: Weights = checkpoint.weights
        self._frequencies = rope_frequencies(self.config)

    def new_cache(self, capacity: int | None = None) -> Cache:
        """An empty cache for ``capacity`` positions, by default the model's longest sequence."""
        return Cache(self.config, self.config.max_positions if capacity is None else capacity)

    def forward(self, tokens: Sequence[int] | NDArray[Any], cache: Cache | None = None, tap: Tap = _no_tap) -> Array:
        """Logits (T, vocab) after each of the T tokens, which follow those in ``cache``."""
        c, w = self.config, self.weights
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one row of ids, not {ids.dtype} of shape {ids.shape}")
        if ids.min() < 0 or ids.max() >= c.vocab:
            raise ValueError(f"token ids must lie in 0..{c.vocab - 1}, not {ids.min()}..{ids.max()}")
        past, count = (cache.length if cache is not None else 0), len(ids)
        limit = min(c.max_positions, cache.capacity) if cache is not None else c.max_positions
        if past + count > limit:
            raise ValueError(f"{past + count} positions are more than the {limit} there is room for")

        x = w.embedding_table.rows(ids)
        for i, layer in enumerate(w.layers):
            x = self.layer(i, layer, x, past, cache, tap)
        if cache is not None:
            cache.length = past + count
        tap(c.layers, "final_norm", x)
        return self.linear(c.layers, "head", w.head, rms_norm(x, w.final_norm, c.norm_eps))

    def linear(self, index: int, name: str, matrix: Array, x: Array) -> Array:
        """``x @ matrix.T``; ``name`` is the matrix's field in :class:`~golden.llm.checkpoint.Layer`, or ``head`` with
        the index after the last layer.  Studies of quantized layers override it."""
        return x @ matrix.T

    def layer(
        self, index: int, layer: Layer, x: Array, past: int = 0, cache: Cache | None = None, tap: Tap = _no_tap
    ) -> Array:
        """One layer: the residual stream (T, dim) after it, for T tokens that follow ``past`` others."""
        c, i, count = self.config, index, len(x)
        positions = np.arange(past, past + count)
        angle = (positions[:, None] * self._frequencies)[:, None, :]
        cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        distance = positions[:, None] - np.arange(past + count)  # of key from query; negative is the future
        scale = np.float32(1.0 / np.sqrt(c.head_dim))

        tap(i, "attention_norm", x)
        h = rms_norm(x, layer.attention_norm, c.norm_eps)
        q, k, v = (
            self.linear(i, name, matrix, h)
            for name, matrix in (("query", layer.query), ("key", layer.key), ("value", layer.value))
        )
        if layer.query_bias is not None and layer.key_bias is not None and layer.value_bias is not None:
            q, k, v = q + layer.query_bias, k + layer.key_bias, v + layer.value_bias
        q = q.reshape(count, c.heads, c.head_dim)
        k, v = k.reshape(count, c.kv_heads, c.head_dim), v.reshape(count, c.kv_heads, c.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            tap(i, "query_norm", q)
            tap(i, "key_norm", k)
            q, k = rms_norm(q, layer.query_norm, c.norm_eps), rms_norm(k, layer.key_norm, c.norm_eps)
        tap(i, "query", q)
        tap(i, "key", k)
        tap(i, "value", v)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = k.swapaxes(0, 1), v.swapaxes(0, 1)  # (kv_heads, positions, head_dim)
        if cache is not None:
            cache.keys[i, :, past : past + count] = keys
            cache.values[i, :, past : past + count] = values
            keys, values = cache.keys[i, :, : past + count], cache.values[i, :, : past + count]
        # The queries of one group share their keys: (kv_heads, group * T, head_dim).
        q = q.reshape(count, c.kv_heads, c.group, c.head_dim).transpose(1, 2, 0, 3)
        scores = q.reshape(c.kv_heads, -1, c.head_dim) @ keys.swapaxes(1, 2) * scale
        scores = scores.reshape(c.heads, count, past + count)
        tap(i, "scores", scores)
        window = c.windows[i]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = np.where(hidden, np.float32(-np.inf), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        context = weights.reshape(c.kv_heads, -1, past + count) @ values
        context = context.reshape(c.heads, count, c.head_dim).swapaxes(0, 1).reshape(count, c.query_dim)
        tap(i, "context", context)
        out = self.linear(i, "output", layer.output, context)
        if layer.output_bias is not None:
            out = out + layer.output_bias
        tap(i, "attention_residual", x)
        tap(i, "attention_out", out)
        x = x + out

        tap(i, "mlp_norm", x)
        h = rms_norm(x, layer.mlp_norm, c.norm_eps)
        gate, up = self.linear(i, "gate", layer.gate, h), self.linear(i, "up", layer.up, h)
        tap(i, "gate", gate)
        tap(i, "up", up)
        product = silu(gate) * up
        tap(i, "product", product)
        out = self.linear(i, "down", layer.down, product)
        tap(i, "mlp_residual", x)
        tap(i, "mlp_out", out)
        return x + out

    def generate_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The ``count`` most likely ids after ``prompt``, each appended before the next is chosen."""
        return list(generate(self, prompt, count))


class LanguageModel(Protocol):
    """What generation and scoring need of a pipeline, whatever its arithmetic.

    A logit's real value is what ``forward`` gives times ``logit_scale``."""

    config: ModelConfig
    logit_scale: float

    def new_cache(self, capacity: int | None = None) -> Any: ...

    def forward(self, tokens: Sequence[int] | NDArray[Any], cache: Any = None) -> NDArray[Any]: ...


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Natural logarithms of the probabilities, over the last axis, in float64."""
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def cross_entropy(logits: NDArray[Any], targets: Sequence[int] | NDArray[Any]) -> NDArray[np.float64]:
    """Loss in nats of each target under the row of logits that predicts it."""
    targets = np.asarray(targets)
    return -log_softmax(logits)[np.arange(len(targets)), targets]


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    temperature: float = 0.0,
    seed: int = 0,
    stops: Collection[int] = (),
) -> Iterator[int]:
    """Yield up to ``count`` ids that follow ``prompt``; end early at any of ``stops``, which is not yielded.

    Temperature 0 is greedy: the largest logit, the lowest id of equal ones.  Any other draws from
    softmax(logits / temperature) with a generator seeded by ``seed``.
    """
    if not prompt:
        raise ValueError("the prompt is empty and the tokenizer knows no opening token")
    if count < 0:
        raise ValueError(f"the number of tokens must not be negative, not {count}")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 or more, not {temperature}")
    limit = model.config.max_positions
    if len(prompt) + count > limit:
        raise ValueError(f"{len(prompt)} tokens of prompt and {count} to generate exceed the model's {limit} positions")
    return _generate(model, prompt, count, temperature, seed, stops)


def _generate(
    model: LanguageModel,
    prompt: Sequence[int],
    count: int,
    temperature: float,
    seed: int,
    stops: Collection[int],
) -> Iterator[int]:
    rng = np.random.default_rng(seed)
    cache = model.new_cache(len(prompt) + count)
    fed: Sequence[int] = prompt
    for _ in range(count):
        logits = model.forward(fed, cache)[-1]
        if temperature == 0:
            token = int(np.argmax(logits))
        else:
            # From the largest down: a tiny temperature then gives the arg-max, and nothing overflows upwards.
            with np.errstate(over="ignore"):
                scaled = (logits - logits.max()).astype(np.float64) * (model.logit_scale / temperature)
            token = int(rng.choice(len(logits), p=np.exp(log_softmax(scaled))))
        if token in stops:
            return
        yield token
        fed = [token]
