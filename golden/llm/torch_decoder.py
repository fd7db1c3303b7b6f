"""The float32 decoder in PyTorch: a yardstick for the speed of :mod:`golden.llm.reference` and of the integer pipeline.

Only this module's class needs PyTorch (the extra ``train``), which is imported when a decoder is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.llm.checkpoint import Array, Checkpoint
from golden.llm.config import ModelConfig
from golden.llm.reference import rope_frequencies


class TorchCache:
    """Keys (rotated) and values of the positions seen so far: (kv_heads, capacity, head_dim) of each layer."""

    def __init__(self, torch: Any, config: ModelConfig, capacity: int):
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0


class TorchDecoder:
    """The same architectures as :class:`~golden.llm.reference.Decoder`, with PyTorch's own fused operations.

    Raises ModuleNotFoundError without PyTorch.
    """

    logit_scale = 1.0

    def __init__(self, checkpoint: Checkpoint):
        self._torch: Any = importlib.import_module("torch")
        self.config: ModelConfig = checkpoint.config
        weights = checkpoint.weights
        self._embedding = self._tensor(weights.embedding)
        self._head = self._embedding if checkpoint.config.tied else self._tensor(weights.head)
        self._final_norm = self._tensor(weights.final_norm)
        self._layers = [
            {name: self._tensor(array) for name, array in vars(layer).items() if array is not None}
            for layer in weights.layers
        ]
        angle = np.arange(self.config.max_positions)[:, None] * rope_frequencies(self.config)
        self._cosine, self._sine = self._tensor(np.cos(angle)), self._tensor(np.sin(angle))

    def _tensor(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.array(array, dtype=np.float32))

    def new_cache(self, capacity: int | None = None) -> TorchCache:
        """An empty cache for ``capacity`` positions, by default the model's longest sequence."""
        return TorchCache(self._torch, self.config, self.config.max_positions if capacity is None else capacity)

    def forward(self, tokens: Sequence[int] | NDArray[Any], cache: TorchCache | None = None) -> Array:
        """Logits (T, vocab) after each of the T tokens, which follow those in ``cache``."""
        cache = self.new_cache(len(tokens)) if cache is None else cache
        with self._torch.inference_mode():
            x = self._embedding[self._torch.as_tensor(np.asarray(tokens, np.int64))]
            first, last = cache.length, cache.length + len(tokens)
            for i, layer in enumerate(self._layers):
                x = self._layer(i, layer, x, first, last, cache)
            cache.length = last
            logits: Array = self._linear(self._norm(x, self._final_norm), self._head, None).numpy()
            return logits

    def _norm(self, x: Any, gamma: Any) -> Any:
        return self._torch.nn.functional.rms_norm(x, gamma.shape, gamma, self.config.norm_eps)

    def _linear(self, x: Any, matrix: Any, bias: Any) -> Any:
        return self._torch.nn.functional.linear(x, matrix, bias)

    def _heads(self, x: Any, gamma: Any, first: int, last: int) -> Any:
        """Projected queries or keys (T, heads * head_dim) to rotated heads (heads, T, head_dim)."""
        x = x.view(last - first, -1, self.config.head_dim)
        x = x if gamma is None else self._norm(x, gamma)
        cosine, sine = self._cosine[first:last, None], self._sine[first:last, None]
        low, high = x.chunk(2, dim=-1)
        return self._torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1).transpose(0, 1)

    def _layer(self, index: int, w: dict[str, Any], x: Any, first: int, last: int, cache: TorchCache) -> Any:
        c, functional = self.config, self._torch.nn.functional
        h = self._norm(x, w["attention_norm"])
        q, k, v = (self._linear(h, w[name], w.get(f"{name}_bias")) for name in ("query", "key", "value"))
        q = self._heads(q, w.get("query_norm"), first, last)
        cache.keys[index, :, first:last] = self._heads(k, w.get("key_norm"), first, last)
        cache.values[index, :, first:last] = v.view(last - first, c.kv_heads, c.head_dim).transpose(0, 1)
        keys = cache.keys[index, :, :last].repeat_interleave(c.group, dim=0)
        values = cache.values[index, :, :last].repeat_interleave(c.group, dim=0)
        distance = self._torch.arange(first, last)[:, None] - self._torch.arange(last)
        window = c.windows[index]
        keep = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        context = functional.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=keep)[0]
        context = context.transpose(0, 1).reshape(last - first, c.query_dim)
        x = x + self._linear(context, w["output"], w.get("output_bias"))
        h = self._norm(x, w["mlp_norm"])
        product = functional.silu(self._linear(h, w["gate"], None)) * self._linear(h, w["up"], None)
        return x + self._linear(product, w["down"], None)
