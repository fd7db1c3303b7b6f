"""Float decoders with INT8 linear layers: the first rows of the paper's ablation. A study, not hardware.

Weights and activations are rounded to INT8 and multiplied in float32; norms, attention and SiLU are floating point.

* per tensor: one scale a matrix, one static scale for each layer's input;
* by groups of the input: one scale per row and group of a matrix, and static or dynamic scales of the input's groups.

Source: *LLM Inference in a Flash* sections 3.1.2 and 5.2, Table 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.llm.calibrate import Observed, Observer, migration, smoothing
from golden.llm.checkpoint import Array, Checkpoint, Layer, Table
from golden.llm.formats import Formats
from golden.llm.prepare import SITES, smooth_layer
from golden.llm.reference import Decoder, rms_norm

LIMIT = 127


def fake(x: Array, step: Any) -> Array:
    """Round to INT8 at a step (0 counts as 1) and back."""
    step = np.where(np.asarray(step) == 0, 1, step)
    found: Array = (np.clip(np.rint(x / step), -LIMIT, LIMIT) * step).astype(np.float32)
    return found


def group_steps(x: Array, group: int) -> Array:
    """Step of each element of the last axis: the largest magnitude of its group over 127."""
    n = x.shape[-1]
    absmax = np.maximum.reduceat(np.abs(x), np.arange(0, n, group), axis=-1)
    steps = np.repeat(absmax / np.float32(LIMIT), group, axis=-1)[..., :n]
    return steps.astype(np.float32, copy=False)


class W8A8Decoder(Decoder):
    """Decoder whose linear layers take INT8.

    Parameters
    ----------
    checkpoint : Checkpoint
    channels : largest magnitude of each channel of each linear layer's input, by (layer, site), for static scales;
        None for dynamic ones (one per token and group)
    group : elements that share a scale, or None for one scale a tensor
    """

    def __init__(
        self, checkpoint: Checkpoint, channels: Mapping[tuple[int, str], Array] | None, group: int | None = None
    ):
        super().__init__(checkpoint)
        self._channels, self._group = channels, group
        self._matrices: dict[tuple[int, str], Array] = {}

    def linear(self, index: int, name: str, matrix: Array, x: Array) -> Array:
        key = index, name
        if key not in self._matrices:
            step = np.abs(matrix).max() / LIMIT if self._group is None else group_steps(matrix, self._group)
            self._matrices[key] = fake(matrix, step)
        site = index, SITES[name]
        if self._channels is None:
            step = group_steps(x, self._group or x.shape[-1])
        elif self._group is None:
            step = self._channels[site].max() / LIMIT
        else:
            step = group_steps(self._channels[site], self._group)
        return fake(x, step) @ self._matrices[key].T


def observe(
    checkpoint: Checkpoint, rows: Sequence[Sequence[int] | NDArray[Any]], smooth: bool
) -> tuple[Checkpoint, dict[tuple[int, str], Array]]:
    """The checkpoint, smoothed (SmoothQuant, strength 0.5) if wanted, and what its linear layers' inputs reach on a
    calibration text: the largest magnitude of each channel by (layer, site)."""
    c, w = checkpoint.config, checkpoint.weights
    units = Formats(transform=False, transform_product=False).units(c)
    watcher, layers = Observer(checkpoint), []
    watcher.moments = False
    states = [w.embedding_table.rows(row) for row in rows]
    channels: dict[tuple[int, str], Array] = {}
    for i in range(c.layers):
        layer: Layer = w.layers[i]
        watcher.observed = seen = Observed()
        states = [watcher.layer(i, layer, x) for x in states]
        scales = smoothing(units, layer, seen, "half")[0] if smooth else {}
        layers.append(smooth_layer(c, layer, scales))
        for site, reach in seen.channels.items():
            channels[i, site] = reach / scales[site] if site in scales else reach
    normal = [np.abs(rms_norm(x, w.final_norm, c.norm_eps)).max(axis=0) for x in states]
    reach = np.max(normal, axis=0)
    if smooth:
        scale = migration(reach, [w.head], 0.5)
        reach = reach / scale
        w = replace(w, final_norm=w.final_norm / scale, head_table=Table(w.head * scale))
    channels[c.layers, "final_norm"] = reach
    return replace(checkpoint, weights=replace(w, layers=tuple(layers))), channels
