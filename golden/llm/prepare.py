"""From a float checkpoint to a :class:`~golden.llm.quantized.Quantized` model, layer by layer.

Three things may be done to the float model first, none of which costs the machine anything:

* **rotation** of the residual stream by a Walsh-Hadamard matrix Q (as in *QuaRot*, Ashkboos et al., 2024): RMSNorm does
  not notice an orthogonal change of basis once its gains are folded into the matrices behind it. Channels become
  alike, so that the groups of a norm's output fill their INT8 scale;
* **smoothing** (*SmoothQuant*, Xiao et al., 2023): channel j of a linear layer's input is divided by s_j and the
  weights multiplied by it; 1/s folds into a gain or into the rows of the matrix before;
* **compensation** while the weights are rounded (:func:`golden.llm.linear.quantize_weights`).

Rotation needs no data; smoothing and compensation come from :mod:`golden.llm.calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.llm.checkpoint import Array, Checkpoint, Layer
from golden.llm.config import ModelConfig
from golden.llm.formats import Formats, Units
from golden.llm.linear import LinearWeights, quantize_weights, spread_of
from golden.llm.quantized import Gain, Quantized, QuantizedLayer
from golden.nonlinear.rmsnorm import RmsNormConfig, quantize_gamma

Moments = Mapping[str, NDArray[np.floating]]
"""Second moments of the inputs of linear layers, (parts, n, n) of consecutive parts, by *site*: attention_norm (input
of query, key, value), context (of output), mlp_norm (of gate and up), product (of down), final_norm (of the head)."""

SITES = {
    "query": "attention_norm",
    "key": "attention_norm",
    "value": "attention_norm",
    "output": "context",
    "gate": "mlp_norm",
    "up": "mlp_norm",
    "down": "product",
    "head": "final_norm",
}
"""Where each linear layer's input comes from."""


#: Rows of the head that are rounded together: few are slow, all of a large vocabulary would be gigabytes.
HEAD_ROWS = 8192


# -- rotation --------------------------------------------------------------------------------------------------------


def _walsh(size: int) -> Array:
    """Walsh-Hadamard matrix in natural order, divided by the root of its size."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(math.sqrt(size))


def hadamard(x: NDArray[Any], block: int, axis: int = -1) -> NDArray[Any]:
    """Orthonormal Walsh-Hadamard transform of blocks of ``block`` (a power of two) elements along an axis."""
    if block == 1:
        return x
    moved = np.moveaxis(x, axis, -1)
    # The matrix of a * b elements is the Kronecker product of those of a and of b.
    inner = min(block, 64)
    y = moved.reshape(-1, inner) @ _walsh(inner).astype(x.dtype)
    if block > inner:
        y = _walsh(block // inner).astype(x.dtype) @ y.reshape(-1, block // inner, inner)
    return np.ascontiguousarray(np.moveaxis(y.reshape(moved.shape), -1, axis))


def rotation_block(config: ModelConfig) -> int:
    """Largest power of two that divides the residual stream's width: rotations act on blocks of it."""
    return config.dim & -config.dim


def rotate_layer(config: ModelConfig, layer: Layer) -> Layer:
    """The layer with its gains folded into its matrices and the residual stream in the rotated basis."""
    block = rotation_block(config)

    def reads(matrix: Array, gain: Array) -> Array:
        return hadamard(matrix * gain, block)

    def writes(matrix: Array) -> Array:
        return hadamard(matrix, block, axis=0)

    attention, mlp = layer.attention_norm, layer.mlp_norm
    return replace(
        layer,
        attention_norm=np.ones_like(attention),
        query=reads(layer.query, attention),
        key=reads(layer.key, attention),
        value=reads(layer.value, attention),
        output=writes(layer.output),
        output_bias=None if layer.output_bias is None else hadamard(layer.output_bias, block),
        mlp_norm=np.ones_like(mlp),
        gate=reads(layer.gate, mlp),
        up=reads(layer.up, mlp),
        down=writes(layer.down),
    )


# -- smoothing -------------------------------------------------------------------------------------------------------


def smooth_layer(config: ModelConfig, layer: Layer, scales: Mapping[str, Array]) -> Layer:
    """The layer with the channels of each named site divided by its scales, (inputs,), and the weights multiplied.

    The context's scales must be the same for all query heads that share a value head.
    """
    changes: dict[str, Array] = {}
    for site, scale in scales.items():
        for name in (name for name, place in SITES.items() if place == site):
            changes[name] = getattr(layer, name) * scale
    for site in ("attention_norm", "mlp_norm"):
        if site in scales:
            changes[site] = getattr(layer, site) / scales[site]
    if "product" in scales:
        changes["up"] = changes.get("up", layer.up) / scales["product"][:, None]
    if "context" in scales:
        shared = scales["context"].reshape(config.kv_heads, config.group, config.head_dim)[:, 0].reshape(-1)
        changes["value"] = changes.get("value", layer.value) / shared[:, None]
        if layer.value_bias is not None:
            changes["value_bias"] = layer.value_bias / shared
    return replace(layer, **changes)


# -- integers --------------------------------------------------------------------------------------------------------


def quantize_gain(config: RmsNormConfig, gamma: NDArray[np.floating]) -> Gain:
    """Gain of a norm. The output's scale is the smallest at which no row whatever saturates: ``|x_j| <= ||x||``, so
    that ``|out_j| <= sqrt(n) * |gamma_j|``."""
    n = len(gamma)
    top = (1 << (config.out_bits - 1)) - 1
    # The reciprocal root is off by up to 4e-4 (its docstring), and G by half a unit.
    scale = float(np.abs(gamma).max()) * math.sqrt(n) * (1 + 2**-10) / top or 1.0
    table, shift = quantize_gamma(config, gamma, n, scale)
    return Gain(table.astype(np.int32), shift, scale)


def quantize_layer(units: Units, layer: Layer, moments: Moments | None = None) -> QuantizedLayer:
    """Quantize one float layer (rotated and smoothed already, as are the moments). Of a transformed product, weights
    and moments are transformed here."""
    wide, block = units.wide_scale, units.product_block
    attention, mlp = quantize_gain(units.norm, layer.attention_norm), quantize_gain(units.norm, layer.mlp_norm)

    spreads: dict[str, list[Array]] = {}

    def linear(name: str, matrix: Array, scale: float, bias: Array | None = None) -> LinearWeights:
        site = SITES[name]
        if moments is not None and site not in spreads:
            spreads[site] = spread_of(moments[site])
        return quantize_weights(units.linear(matrix.shape[1]), matrix, scale, wide, bias, spreads.get(site))

    def head_gain(gamma: Array | None) -> Gain | None:
        return None if gamma is None else quantize_gain(units.head_norm, gamma)

    # The machine's transform is not normalised: product and weights are both transformed, 1/block is in the scale.
    down = hadamard(layer.down, block)
    if moments is not None and block > 1:
        product = moments["product"]
        moments = {**moments, "product": hadamard(hadamard(product, block), block, axis=1)}
    return QuantizedLayer(
        attention_norm=attention,
        query=linear("query", layer.query, attention.scale, layer.query_bias),
        key=linear("key", layer.key, attention.scale, layer.key_bias),
        value=linear("value", layer.value, attention.scale, layer.value_bias),
        output=linear("output", layer.output, wide, layer.output_bias),
        mlp_norm=mlp,
        gate=linear("gate", layer.gate, mlp.scale),
        up=linear("up", layer.up, mlp.scale),
        down=linear("down", down, units.product_scale / math.sqrt(block)),
        query_norm=head_gain(layer.query_norm),
        key_norm=head_gain(layer.key_norm),
    )


def _joined(blocks: Iterable[Array], rows: int) -> Iterator[Array]:
    """The same rows in blocks of at least ``rows`` (the last may have fewer)."""
    kept: list[Array] = []
    for block in blocks:
        kept.append(block)
        if sum(map(len, kept)) >= rows:
            yield np.concatenate(kept)
            kept = []
    if kept:
        yield np.concatenate(kept)


def assemble(
    checkpoint: Checkpoint,
    formats: Formats,
    layers: Iterable[QuantizedLayer],
    rotate: bool = True,
    moments: NDArray[np.floating] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Quantized:
    """The model around its quantized layers: embedding, last norm, head (with the moments of its input), tables."""
    c, w = checkpoint.config, checkpoint.weights
    units, block = formats.units(c), rotation_block(c) if rotate else 1
    gain = quantize_gain(units.norm, np.ones_like(w.final_norm) if rotate else w.final_norm)

    spread = None if moments is None else spread_of(moments)

    def embedding() -> Iterable[Array]:
        return (hadamard(rows, block) for rows in w.embedding_table.blocks())

    def head() -> Iterable[Array]:
        for rows in _joined(w.head_table.blocks(), HEAD_ROWS):
            yield hadamard(rows * w.final_norm if rotate else rows, block)

    reach = max(float(np.abs(rows).max()) for rows in embedding())
    if reach >= (room := 2.0 ** (31 - formats.fraction_bits)):
        raise ValueError(f"the embedding reaches {reach:g}; it must stay below {room:g} (fewer fraction_bits)")
    fraction = 15 - math.frexp(reach)[1] if reach else formats.fraction_bits
    table = [np.clip(np.rint(np.ldexp(rows, fraction)), -32768, 32767).astype(np.int16) for rows in embedding()]
    scaling = c.rope_scaling
    llama3 = (
        ()
        if scaling is None
        else (scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.original_positions)
    )
    return Quantized(
        config=c,
        formats=formats,
        embedding=np.concatenate(table),
        embedding_fraction_bits=fraction,
        layers=tuple(layers),
        final_norm=gain,
        head=quantize_weights(units.linear(c.dim), head, gain.scale, units.wide_scale, None, spread),
        rope_steps=np.array(units.rope.step_table(c.rope_theta, *llama3), np.int64),
        eps=units.eps,
        head_eps=units.head_eps,
        provenance={
            "source": [path.name for path in checkpoint.files],
            "source_sha256": checkpoint.sha256(),
            **(provenance or {}),
        },
    )


def quantize(
    checkpoint: Checkpoint,
    formats: Formats,
    rotate: bool = True,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Quantized:
    """Quantize without data: no smoothing, weights rounded to nearest, the formats' fraction bits as they are."""
    c, units = checkpoint.config, formats.units(checkpoint.config)

    def layers() -> Iterable[QuantizedLayer]:
        for i in progress(range(c.layers)):
            layer = checkpoint.weights.layers[i]
            yield quantize_layer(units, rotate_layer(c, layer) if rotate else layer)

    return assemble(checkpoint, formats, layers(), rotate)
