"""Prepare a quantized model on a calibration text: smoothing, compensated rounding, fraction bits, static scales.

The text runs through the float model one layer at a time, so that only one float layer is in memory. For each layer:

1. rotate it (:mod:`golden.llm.prepare`), run all sequences through it, and keep the second moments of its linear
   layers' inputs, the largest magnitude of each channel, and some rows;
2. choose, for each input, the SmoothQuant migration strength (or none) that gives the least error of the layer's
   outputs on those rows;
3. quantize, rounding with compensation by the moments, and write the layer to a folder beside the output file.

A run that was stopped goes on from the last finished layer. The file appears whole, at the end.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from golden.commandline import atomic_write, check_output
from golden.config import UnitConfig, choice, flag
from golden.llm import quantized
from golden.llm.checkpoint import Array, Checkpoint, Layer, Table, load
from golden.llm.formats import SCHEMES, Formats, Units
from golden.llm.options import checkpoint_options, text_option
from golden.llm.prepare import (
    SITES,
    assemble,
    hadamard,
    quantize_layer,
    rotate_layer,
    rotation_block,
    smooth_layer,
)
from golden.llm.quantized import SUFFIX, Quantized, QuantizedLayer
from golden.llm.reference import Decoder, rms_norm
from golden.llm.text import check_vocabulary, read_text, sequences
from golden.llm.tokenizer import find_tokenizer, load_tokenizer, pack

#: Migration strengths that the search tries.
STRENGTHS = (0.25, 0.5, 0.75)
#: Rows on which it compares them.
SAMPLE_ROWS = 256
#: Second moments are kept of parts of at most this many inputs: a product's 14,336 would take 1.6 GB and hours.
LARGEST_PART = 4096
#: Octaves of headroom above the largest gate and score of the calibration text.
HEADROOM = 1


@dataclass(frozen=True)
class Preparation(UnitConfig):
    """What is done to the float model on its way to integers."""

    rotate: bool = flag(True, "rotate the residual stream")
    smooth: str = choice("search", ("none", "half", "search"), "SmoothQuant: none, strength 0.5, or the best per layer")
    compensate: bool = flag(True, "make up for each column's rounding in the columns after it")


PREPARATIONS: dict[str, Preparation] = {
    "integer": Preparation(),
    "r1": Preparation(),
    "r2": Preparation(),
    "paper": Preparation(rotate=False, smooth="half", compensate=False),
}
"""How each named scheme of :data:`golden.llm.formats.SCHEMES` is prepared."""


def part_of(inputs: int) -> int:
    """Inputs whose rounding errors make up for each other: all, or the largest equal parts of at most
    ``LARGEST_PART`` that are whole numbers of 64 (of 1 where there are none)."""
    if inputs <= LARGEST_PART:
        return inputs
    fitting = [n for n in range(1, LARGEST_PART + 1) if inputs % n == 0]
    return max((n for n in fitting if n % 64 == 0), default=fitting[-1])


@dataclass
class Observed:
    """What the inputs of one layer's linear layers were, by site (:data:`golden.llm.prepare.SITES`)."""

    moments: dict[str, NDArray[np.floating]] = field(default_factory=dict)
    channels: dict[str, Array] = field(default_factory=dict)
    rows: dict[str, Array] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)

    def add(self, site: str, x: Array, moments: bool) -> None:
        """Rows (T, inputs) of one sequence."""
        reach = np.abs(x).max(axis=0)
        self.channels[site] = np.maximum(self.channels[site], reach) if site in self.channels else reach
        kept = self.rows.get(site, x[:0])
        if len(kept) < SAMPLE_ROWS:
            self.rows[site] = np.concatenate((kept, x[:: max(1, len(x) // 32)]))[:SAMPLE_ROWS]
        if moments:
            parts = x.reshape(len(x), -1, part_of(x.shape[1])).swapaxes(0, 1)
            product = parts.swapaxes(1, 2) @ parts
            self.moments[site] = self.moments[site] + product if site in self.moments else product.astype(np.float64)

    def widen(self, place: str, x: NDArray[Any]) -> None:
        self.ranges[place] = max(self.ranges.get(place, 0.0), float(np.abs(x).max()))


class Observer(Decoder):
    """The float decoder, noting what flows into its linear layers."""

    observed: Observed
    moments = True

    def linear(self, index: int, name: str, matrix: Array, x: Array) -> Array:
        if name in ("query", "output", "gate", "down"):
            self.observed.add(SITES[name], x, self.moments)
        return super().linear(index, name, matrix, x)

    def note(self, layer: int, site: str, array: Array) -> None:
        """A tap: ranges of the nonlinear operators' inputs."""
        if site in ("attention_norm", "mlp_norm"):
            self.observed.widen(f"{site}_input", array)
        elif site == "scores":
            # Of each row, its largest score counts: what lies far below it may saturate, as its probability is 0.
            queries, keys = array.shape[1:]
            seen = np.tri(queries, keys, keys - queries, dtype=bool)
            self.observed.widen("scores", array.max(axis=-1, where=seen, initial=-np.inf))
            self.observed.widen("all_scores", np.where(seen, array, 0))
        elif site == "gate":
            self.observed.widen(site, array)


# -- smoothing ---------------------------------------------------------------------------------------------------------


def migration(channels: Array, matrices: Sequence[Array], strength: float) -> Array:
    """SmoothQuant's scales: ``max|x_j|**strength / max|w_j|**(1 - strength)``, with a geometric mean of 1."""
    weights = np.max([np.abs(matrix).max(axis=0) for matrix in matrices], axis=0)
    scale = np.maximum(channels, 1e-5) ** strength / np.maximum(weights, 1e-5) ** (1 - strength)
    return (scale / np.exp(np.mean(np.log(scale)))).astype(np.float32)


def _fake(x: Array, group: int, bits: int) -> Array:
    """Quantized and back, groups of the last axis, scale absmax / limit."""
    limit, n = (1 << (bits - 1)) - 1, x.shape[-1]
    step = np.maximum.reduceat(np.abs(x), np.arange(0, n, group), axis=-1) / limit
    step = np.repeat(np.where(step == 0, 1, step), group, axis=-1)[..., :n]
    return (np.rint(x / step) * step).astype(np.float32)


def smoothing(units: Units, layer: Layer, observed: Observed, mode: str) -> tuple[dict[str, Array], dict[str, float]]:
    """Scales by site, and the strength chosen for each (0: none)."""
    formats, scales, strengths = units.formats, {}, {}
    for site in ("attention_norm", "context", "mlp_norm", "product"):
        matrices = [getattr(layer, name) for name, place in SITES.items() if place == site]
        channels = observed.channels[site]
        if site == "context":  # query heads of a group share their value head
            shared = channels.reshape(units.model.kv_heads, units.model.group, units.model.head_dim).max(axis=1)
            channels = np.repeat(shared, units.model.group, axis=0).reshape(-1)
        best, least = 0.0, np.inf
        rows, block = observed.rows[site], units.product_block if site == "product" else 1
        group = min(formats.group, rows.shape[1])
        wanted = [rows @ matrix.T for matrix in matrices]
        for strength in (0.0, *STRENGTHS) if mode == "search" else (0.5,):
            scale = migration(channels, matrices, strength) if strength else np.ones_like(channels)
            if site == "context" and strength:
                mean = np.log(scale).reshape(units.model.kv_heads, units.model.group, -1).mean(axis=1, keepdims=True)
                scale = np.exp(np.broadcast_to(mean, (units.model.kv_heads, units.model.group, units.model.head_dim)))
                scale = scale.reshape(-1).astype(np.float32)
            x = _fake(hadamard(rows / scale, block), group, formats.activation_bits)
            error = sum(
                float(np.square(x @ _fake(hadamard(m * scale, block), group, formats.weight_bits).T - y).sum())
                for m, y in zip(matrices, wanted, strict=True)
            )
            if error < least:
                best, least, scales[site] = strength, error, scale
        strengths[site] = best
        if not best:
            scales.pop(site, None)
    return scales, strengths


def _scaled(moments: NDArray[np.floating], scale: Array | None) -> NDArray[np.floating]:
    """Moments (parts, n, n) of inputs that are divided by ``scale``."""
    if scale is None:
        return moments
    parts = scale.reshape(len(moments), -1)
    return moments / (parts[:, :, None] * parts[:, None, :])


# -- one layer after the other -----------------------------------------------------------------------------------------


class _Work:
    """The folder of a run that may be resumed: one file per finished layer, and the residual stream behind it."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]):
        self.folder, self.plan = folder, json.dumps(plan, sort_keys=True)
        path = folder / "plan.json"
        self.created = not folder.exists()
        if not self.created and any(folder.iterdir()):
            if not path.is_file() or path.read_bytes() != self.plan.encode():
                raise ValueError(f"{folder}: left by a run with other settings; remove it, or repeat those settings")
            return
        folder.mkdir(exist_ok=True)
        with atomic_write(path) as file:
            file.write(self.plan)

    def layer(self, index: int) -> Path:
        return self.folder / f"layer-{index}.safetensors"

    def state(self, index: int) -> Path:
        return self.folder / f"state-{index}.npy"

    def finished(self) -> int:
        """How many layers are done."""
        count = 0
        while self.layer(count).is_file():
            count += 1
        # The stream behind the last layer is written before the layer itself.
        return count

    def save(
        self, index: int, layer: QuantizedLayer, states: Sequence[Array], notes: Mapping[str, Any], static: Any
    ) -> None:
        with atomic_write(self.state(index), "wb") as file:
            np.save(file, np.concatenate(states))
        tensors = dict(quantized.layer_tensors(index, layer)) | {
            f"static.{name}": array for name, array in static.items()
        }
        quantized.write(self.layer(index), tensors, notes)
        if index:
            self.state(index - 1).unlink(missing_ok=True)

    def load_state(self, index: int, shape: tuple[int, int]) -> Array:
        """The residual stream behind a layer."""
        path = self.state(index)
        try:
            found = np.load(path, allow_pickle=False)
        except (ValueError, EOFError, OSError):
            found = None
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != np.float32:
            raise ValueError(f"{path}: damaged; remove the folder and begin again")
        return found

    def load_layer(self, units: Units, index: int) -> tuple[QuantizedLayer, dict[str, Any], dict[str, Array]]:
        """A finished layer, its notes and static scales."""
        layer, notes, static = quantized.read_layer(self.layer(index), units, index)
        if not isinstance(notes.get("ranges"), dict) or not isinstance(notes.get("strengths"), dict):
            raise ValueError(f"{self.layer(index)}: damaged; remove the folder and begin again")
        return layer, notes, static


def calibrate(
    checkpoint: Checkpoint,
    sequences: Sequence[Sequence[int] | NDArray[Any]],
    formats: Formats,
    preparation: Preparation | None = None,
    work: Path | None = None,
    progress: bool = False,
) -> Quantized:
    """A quantized model.

    Parameters
    ----------
    sequences : rows of token ids, each a text of its own
    work : folder that keeps finished layers, so that a stopped run goes on; the caller removes it. None: memory only.
    progress : show a bar on standard error

    Raises ValueError for a folder that other settings left, and what loading a layer raises.
    """
    how = preparation or Preparation()
    c, weights, units = checkpoint.config, checkpoint.weights, formats.units(checkpoint.config)
    if not sequences or not all(len(row) for row in sequences):
        raise ValueError("calibration needs at least one sequence of tokens, and none that is empty")
    if (longest := max(map(len, sequences))) > c.max_positions:
        raise ValueError(f"a calibration sequence of {longest} tokens exceeds the model's {c.max_positions} positions")
    lengths = [len(row) for row in sequences]
    ids = np.concatenate([np.asarray(row) for row in sequences])
    if ids.min() < 0 or ids.max() >= c.vocab:
        raise ValueError(f"token ids must lie in 0..{c.vocab - 1}, not {ids.min()}..{ids.max()}")
    plan = {
        "source_sha256": checkpoint.sha256(),
        "formats": asdict(formats),
        "preparation": asdict(how),
        "tokens": len(ids),
        "tokens_sha256": hashlib.sha256(ids.astype(np.int64).tobytes() + str(lengths).encode()).hexdigest(),
    }
    kept = None if work is None else _Work(work, plan)
    start = 0 if kept is None else kept.finished()
    ends = np.cumsum(lengths)[:-1]
    block = rotation_block(c)
    if kept is not None and start:
        states = np.split(kept.load_state(start - 1, (len(ids), c.dim)), ends)
    else:
        rows = weights.embedding_table.rows(ids)
        states = np.split(hadamard(rows, block) if how.rotate else rows, ends)
    decoder = Observer(checkpoint)
    decoder.moments = how.compensate
    layers: list[QuantizedLayer] = []
    ranges: dict[str, float] = {}
    static: dict[str, Array] = {}
    strengths: list[dict[str, float]] = []

    def record(index: int, observed: Observed, scales: Mapping[str, Array], chosen: dict[str, float]) -> None:
        strengths.append(chosen)
        for place, reach in observed.ranges.items():
            ranges[f"layers.{index}.{place}"] = reach
        for site, found in observed.channels.items():
            channels = found / scales[site] if site in scales else found
            starts = np.arange(0, len(channels), min(formats.group, len(channels)))
            static[f"layers.{index}.{site}"] = np.maximum.reduceat(channels, starts).astype(np.float32)

    for i in tqdm(range(c.layers), "layers", unit="layer", disable=not progress, initial=0):
        if i < start:
            assert kept is not None
            layer, notes, found = kept.load_layer(units, i)
            layers.append(layer)
            ranges |= notes["ranges"]
            static |= found
            strengths.append(notes["strengths"])
            continue
        decoder.observed = observed = Observed()
        whole = weights.layers[i]
        whole = rotate_layer(c, whole) if how.rotate else whole
        with np.errstate(over="ignore", invalid="ignore"):
            states = [decoder.layer(i, whole, x, tap=decoder.note) for x in states]
        if not all(np.isfinite(x).all() for x in states):
            raise ValueError(f"layer {i} of the float model overflows on the calibration text")
        scales, chosen = ({}, {}) if how.smooth == "none" else smoothing(units, whole, observed, how.smooth)
        moments = None
        if how.compensate:
            moments = {site: _scaled(found, scales.get(site)) for site, found in observed.moments.items()}
        layer = quantize_layer(units, smooth_layer(c, whole, scales), moments)
        record(i, observed, scales, chosen)
        if kept is not None:
            mine = f"layers.{i}."
            notes = {
                "ranges": {name: reach for name, reach in ranges.items() if name.startswith(mine)},
                "strengths": chosen,
            }
            kept.save(i, layer, states, notes, {n: a for n, a in static.items() if n.startswith(mine)})
            layer, _, _ = quantized.read_layer(kept.layer(i), units, i)  # from now on on disk
        layers.append(layer)

    # The last norm feeds the head.
    decoder.observed = last = Observed()
    gain = np.ones_like(weights.final_norm) if how.rotate else weights.final_norm
    for x in states:
        last.widen("final_norm_input", x)
        last.add("final_norm", rms_norm(x, gain, c.norm_eps), how.compensate)
    scales = {}
    if how.smooth == "half" and not how.rotate:
        scales["final_norm"] = scale = migration(last.channels["final_norm"], [weights.head], 0.5)
        smooth = replace(weights, final_norm=weights.final_norm / scale, head_table=Table(weights.head * scale))
        checkpoint = replace(checkpoint, weights=smooth)
    record(c.layers, last, scales, {})
    fitted = fit(formats, ranges)
    shift = fitted.gate_fraction_bits - formats.gate_fraction_bits
    layers = [replace(layer, down=replace(layer.down, down=layer.down.down + shift)) for layer in layers]
    model = assemble(
        checkpoint, fitted, layers, how.rotate, last.moments.get("final_norm"), plan | {"strengths": strengths}
    )
    return replace(model, ranges=ranges, static=static)


def fit(formats: Formats, ranges: Mapping[str, float]) -> Formats:
    """The formats with as many fraction bits of gate and score as the ranges leave, with one octave of headroom; at
    most 11 and 10, from where on nothing is gained."""

    def bits(place: str, unit: float, most: int) -> int:
        reach = max(value for name, value in ranges.items() if name.endswith(f".{place}")) * unit
        return max(0, min(most, 15 - HEADROOM - ceil(log2(max(reach, 2.0**-8)))))

    return formats.replace(
        gate_fraction_bits=bits("gate", 1.0, min(11, formats.fraction_bits)),
        score_fraction_bits=bits("scores", log2(np.e), 10),
    )


# -- command line ------------------------------------------------------------------------------------------------------


@click.command("calibrate")
@checkpoint_options()
@text_option("to calibrate on")
@click.option("--tokens", type=click.IntRange(2), default=8192, show_default=True, help="Tokens of it to use.")
@click.option("--skip", type=click.IntRange(0), default=0, show_default=True, help="Tokens of the text to pass over.")
@click.option("--length", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a sequence.")
@click.option(
    "--scheme", type=click.Choice(list(SCHEMES)), default="integer", show_default=True, help="Formats to start from."
)
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Change a format, for example group=32.")
@click.option(
    "--prepare", multiple=True, metavar="FIELD=VALUE", help="Change the preparation: rotate, smooth, compensate."
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help=f"File to write (NAME{SUFFIX}).")
def calibrate_command(
    checkpoint: Path,
    tokenizer: Path | None,
    text: Path,
    tokens: int,
    skip: int,
    length: int,
    scheme: str,
    settings: tuple[str, ...],
    prepare: tuple[str, ...],
    output: Path,
) -> None:
    """Quantize a checkpoint on a calibration text into one file that needs the float weights no more.

    A run that was stopped goes on where it was when the same command is given again.
    """
    check_output(output, checkpoint, text, tokenizer)
    if not output.name.endswith(SUFFIX):
        raise ValueError(f"{output}: the name must end in {SUFFIX}")
    for setting in settings:
        if setting.partition("=")[0] in ("gate_fraction_bits", "score_fraction_bits"):
            raise ValueError(f"{setting.partition('=')[0]} follows from the calibration text; it cannot be set")
    formats = SCHEMES[scheme].with_settings(settings)
    preparation = PREPARATIONS[scheme].with_settings(prepare)
    loaded = load(checkpoint)
    formats.units(loaded.config)  # refuses what does not fit the model before any work is done
    words = find_tokenizer(checkpoint) if tokenizer is None else load_tokenizer(tokenizer)
    check_vocabulary(words, loaded.config)
    rows = sequences(words, read_text(text), min(length, loaded.config.max_positions), tokens, skip)
    work = output.with_name(f".{output.name}.partial")
    fresh = not work.exists()
    try:
        model = calibrate(loaded, rows, formats, preparation, work, progress=True)
    except (ValueError, OverflowError):
        if fresh:  # a request that cannot be met leaves nothing; a stopped run does
            shutil.rmtree(work, ignore_errors=True)
        raise
    named = model.provenance | {"text": text.name}
    quantized.save(output, replace(model, tokenizer=pack(words), provenance=named))
    shutil.rmtree(work)
    size, source = output.stat().st_size, sum(path.stat().st_size for path in loaded.files)
    click.echo(f"{output}: {size / 1e6:.1f} MB from {source / 1e6:.1f} MB; {model.formats.describe()}", err=True)
