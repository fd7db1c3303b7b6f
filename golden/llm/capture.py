"""Record what flows through a decoder on a real text, as stimulus for units and testbenches.

A capture is a dictionary of arrays, in two parts: what the float model computes, and what goes into and comes out of
every unit of the integer pipeline while it reads the same text.

**Float tensors.** Keys are ``LAYER/SITE``:

=========================================  =============================  ====================================
site                                       shape                          what
=========================================  =============================  ====================================
``scores``                                 (heads * tokens, tokens)       logits q·k / sqrt(head_dim); row
                                                                          ``head * tokens + position``, from
                                                                          its first visible key on, then zeros
``lengths``                                (heads * tokens,)              how many of a row's scores count
``query``, ``key``, ``value``              (tokens, heads, head_dim)      before the rotary embedding
``attention_norm``, ``mlp_norm``           (tokens, dim)                  inputs of the norms
``attention_norm_gamma``, ``mlp_norm_…``   (dim,)                         their gains
``gate``, ``up``, ``product``              (tokens, hidden)               inputs and output of SwiGLU
``context``                                (tokens, heads * head_dim)     attention's output, not projected
``attention_out``, ``mlp_out``             (tokens, dim)                  what the residual adds
``attention_residual``, ``mlp_residual``   (tokens, dim)                  the stream it is added to
=========================================  =============================  ====================================

The last norm stands under the layer after the last: ``final_norm`` and ``final_norm_gamma``.  Everything measured is
float32.

**Units.** Keys are ``units/LAYER/PLACE/NAME``: integers, each array in the narrowest type that holds it, of the tokens
whose positions ``units/positions`` (P,) lists: each ``every``-th back from the last one, and the first.
``units/LAYER/PLACE/config`` is a JSON text, ``{"unit": the configuration's class, "fields": its fields}``.

=============================================  ======================================================================
place                                          names
=============================================  ======================================================================
``attention_norm_requantize``, ``mlp_norm_…``  x (P, dim) -> q (P, dim), e (P, 1); also ``final_norm_…``, under the
                                               layer after the last, like ``final_norm`` and ``head``
``attention_norm``, ``mlp_norm``, …            x, eps (P,), gamma (dim,), shift () -> q, e and c (P, groups)
``query``, ``key``, … ``down``, ``head``       q, e, c -> y (P, outputs), of the first :data:`OUTPUTS` rows of a matrix,
                                               whose w, m, bias (where there is one) and down () are there too
``query_requantize``, ``key_…``                x (P, heads, head_dim) -> q, e (P, heads, 1)
``query_norm``, ``key_norm``                   where the model has them: x, eps (P, heads), gamma, shift -> y
``query_rope``, ``key_rope``                   x (P, heads, head_dim), position (P, 1), steps (head_dim/2,) -> y
``query_fwht``, ``key_fwht``                   with the format's ``transform``: x -> y (P, heads, head_dim)
``query_codes``, ``key_…``, ``value_…``        x (P, heads, head_dim) -> q, e and c (P, heads, 1)
``softmax``                                    x (heads, P, tokens), keep (P, tokens) -> p (heads, P, tokens)
``context_requantize``                         x (P, heads * head_dim) -> q, e and c (P, groups)
``gate_requantize``, ``up_requantize``         x (P, hidden), gate: multiplier (), shift () -> q, up: e (P, 1)
``silu``                                       gate, up -> y (P, hidden)
``product_fwht``                               with ``transform_product``: x -> y (P, blocks, size)
``product_requantize``                         x (P, hidden) -> q, e and c (P, groups)
``attention_residual``, ``mlp_residual``       a, b (P, dim), shift () -> y
=============================================  ======================================================================

Of a softmax's row only kept elements count; its length is that of its last one.  The model is quantized without a
calibration text, in the project's formats (``golden.llm.formats.SCHEMES["integer"]``), or without the transform of
queries and keys where the model's shape refuses it.  A model that the units cannot run at all (heads of fewer than
eight elements) has no units in its capture; ``units_refused`` in the provenance says why.

Beside them stand ``positions``, ``tokens`` and ``provenance``, a JSON text that names the checkpoint's digest, its
files and configuration, the text, and the quantized model's formats and origin.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zipfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from golden.commandline import atomic_write, check_output
from golden.llm.checkpoint import REFERENCE, Array, Checkpoint
from golden.llm.checkpoint import load as load_checkpoint
from golden.llm.formats import SCHEMES
from golden.llm.integer import IntegerDecoder
from golden.llm.linear import LinearConfig
from golden.llm.options import checkpoint_options, text_option
from golden.llm.prepare import quantize
from golden.llm.quantized import LINEARS, Quantized
from golden.llm.reference import Decoder
from golden.llm.text import read_text
from golden.llm.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from golden.llm.train import split
from golden.nonlinear.requantize import RequantizeConfig
from golden.nonlinear.residual import ResidualConfig
from golden.nonlinear.rmsnorm import RmsNormConfig
from golden.nonlinear.rope import RopeConfig
from golden.nonlinear.silu import SiluConfig
from golden.nonlinear.softmax import SoftmaxConfig
from golden.rotated.fwht import FwhtConfig

Capture = dict[str, NDArray[Any]]

#: Outputs of a matrix that are recorded: what they need of it grows a file little, whatever the model.
OUTPUTS = 256
#: Units are recorded at one token of so many.
EVERY = 4
UNITS = "units/"
_CONFIGURATIONS: dict[str, type[Any]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        FwhtConfig,
        LinearConfig,
        RequantizeConfig,
        ResidualConfig,
        RmsNormConfig,
        RopeConfig,
        SiluConfig,
        SoftmaxConfig,
    )
}
# What belongs to the model or the unit, not to a token.
_STATE = ("gamma", "steps", "multiplier", "shift")
# Raised whenever the layout of a capture changes, so that no stale file is read.
_VERSION = 2
# Held out from training by the rule of `train.split`, and part of every Python version.
_REFERENCE_MODULE = "functools.py"


def capture(
    checkpoint: str | os.PathLike[str],
    text: str,
    tokens: int = 256,
    tokenizer: str | os.PathLike[str] | None = None,
    name: str = "",
    every: int = EVERY,
) -> Capture:
    """Run the first ``tokens`` tokens of ``text`` through a checkpoint, in floating point and in integers, and return
    all sites and units, the latter at one token of ``every``.

    ``name`` is what the provenance calls the text.  A shorter text gives fewer positions.
    """
    words = find_tokenizer(checkpoint) if tokenizer is None else load_tokenizer(tokenizer)
    return _capture(load_checkpoint(checkpoint), words, text, tokens, name, every)


def _capture(
    checkpoint: Checkpoint, words: Tokenizer, text: str, tokens: int, name: str, every: int = EVERY
) -> Capture:
    for option, value in (("tokens", tokens), ("every", every)):
        if value < 1:
            raise ValueError(f"{option} must be positive, not {value}")
    if not text:
        raise ValueError("the text is empty")
    # Twelve characters a token is more than any text needs; the whole of a long one need not be encoded.
    ids = words.encode(text[: 12 * tokens])
    if len(ids) < tokens:
        ids = words.encode(text)
    ids = ids[:tokens]
    config, weights = checkpoint.config, checkpoint.weights
    found: Capture = {}

    def tap(layer: int, site: str, array: Array) -> None:
        if site == "scores":
            array, found[f"{layer}/lengths"] = _align(array, config.windows[layer])
        found[f"{layer}/{site}"] = np.ascontiguousarray(array)

    Decoder(checkpoint).forward(ids, tap=tap)
    for i, layer in enumerate(weights.layers):
        found[f"{i}/attention_norm_gamma"] = layer.attention_norm
        found[f"{i}/mlp_norm_gamma"] = layer.mlp_norm
    found[f"{config.layers}/final_norm_gamma"] = weights.final_norm
    found["positions"] = np.arange(len(ids))
    found["tokens"] = np.array(ids)
    provenance: dict[str, Any] = {
        "checkpoint_sha256": checkpoint.sha256(),
        "files": [path.name for path in checkpoint.files],
        "config": asdict(config),
        "text": name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(ids),
    }
    try:
        model = _quantized(checkpoint)
    except ValueError as refusal:
        provenance["units_refused"] = str(refusal)
    else:
        _record(found, model, ids, every)
        provenance |= {"every": every, "formats": asdict(model.formats), "quantized": model.provenance}
    found["provenance"] = np.array(json.dumps(provenance))
    return found


def _align(scores: Array, window: int | None) -> tuple[Array, NDArray[np.int64]]:
    """Rows of (heads, T, T) scores moved left to their first visible key, and their lengths."""
    heads, count, _ = scores.shape
    position = np.arange(count)
    lengths = position + 1 if window is None else np.minimum(position + 1, window)
    source = (position + 1 - lengths)[:, None] + np.arange(count)
    visible = np.arange(count) < lengths[:, None]
    rows = np.take_along_axis(scores, np.minimum(source, count - 1)[None], axis=2)
    rows = np.where(visible, rows, np.float32(0.0))
    return rows.reshape(heads * count, count), np.tile(lengths, heads)


# -- units ------------------------------------------------------------------------------------------------------------


def _quantized(checkpoint: Checkpoint) -> Quantized:
    progress = partial(tqdm, desc="quantizing", unit="layer", disable=None, leave=False)
    formats = SCHEMES["integer"]
    try:
        return quantize(checkpoint, formats, progress=progress)
    except ValueError:
        return quantize(checkpoint, formats.replace(transform=False), progress=progress)


def _record(found: Capture, model: Quantized, ids: list[int], every: int) -> None:
    """Run the integer pipeline and add what its units take and give."""
    count = len(ids)
    positions = np.union1d(0, np.arange(count - 1, -1, -every))
    blocks: dict[str, list[NDArray[Any]]] = defaultdict(list)
    rows: dict[int, int] = defaultdict(int)

    def tap(layer: int, place: str, config: Any, tensors: Mapping[str, Any]) -> None:
        at = f"{UNITS}{layer}/{place}"
        unit = f"{type(config).__module__}.{type(config).__qualname__}"
        found[f"{at}/config"] = np.array(json.dumps({"unit": unit, "fields": asdict(config)}))
        if isinstance(config, SoftmaxConfig):  # comes in blocks of queries, with the keys that those see
            first = rows[layer]
            rows[layer] += tensors["x"].shape[-2]
            chosen = positions[(positions >= first) & (positions < rows[layer])] - first
            for name, value in tensors.items():
                part = value[..., chosen, :]
                room = [(0, 0)] * (part.ndim - 1) + [(0, count - part.shape[-1])]
                blocks[f"{at}/{name}"].append(np.pad(part, room))
            return
        for name, value in tensors.items():
            array = np.asarray(value)
            array = array if name in _STATE else array[positions]
            if name == "y" and isinstance(config, LinearConfig):
                array = array[:, :OUTPUTS]
            found[f"{at}/{name}"] = _narrow(array)

    IntegerDecoder(model).forward(ids, tap=tap)
    for key, parts in blocks.items():
        found[key] = _narrow(np.concatenate(parts, axis=-2))
    matrices = {f"{i}/{name}": getattr(layer, name) for i, layer in enumerate(model.layers) for name in LINEARS}
    for place, weights in {**matrices, f"{model.config.layers}/head": model.head}.items():
        for name in ("w", "m", "down", "bias"):
            value = getattr(weights, name)
            if value is not None:
                found[f"{UNITS}{place}/{name}"] = _narrow(value if name == "down" else value[:OUTPUTS])
    found[f"{UNITS}positions"] = positions


def _narrow(values: ArrayLike) -> NDArray[Any]:
    """Integers in the narrowest type that holds them all; masks as they are."""
    array = np.asarray(values)
    if array.dtype == np.bool_ or array.size == 0:
        return array
    low, high = int(array.min()), int(array.max())
    for kind in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return array.astype(kind)
    return array.astype(np.int64)


@dataclass(frozen=True)
class Recorded:
    """What one unit took and gave at its place in a layer: arrays by name, as the module's table lists them."""

    layer: int
    place: str
    config: Any
    tensors: dict[str, NDArray[Any]]

    def __str__(self) -> str:
        return f"layer {self.layer}, {self.place}"


def recorded(arrays: Mapping[str, NDArray[Any]]) -> list[Recorded]:
    """The units of a capture, in the order in which the pipeline calls them; arrays as int64 (masks as bool).

    Raises ValueError, one line, for a configuration that is not known here.
    """
    found: dict[str, dict[str, NDArray[Any]]] = {}
    configs: dict[str, Any] = {}
    for key, array in arrays.items():
        at, _, name = key.removeprefix(UNITS).rpartition("/")
        if not key.startswith(UNITS) or not at:
            continue
        if name != "config":
            found.setdefault(at, {})[name] = array if array.dtype == np.bool_ else array.astype(np.int64)
            continue
        try:
            text = json.loads(str(array))
            configs[at] = _CONFIGURATIONS[text["unit"]](**text["fields"])
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{key}: no configuration of a unit known here ({problem})") from None
    return [
        Recorded(int(at.partition("/")[0]), at.partition("/")[2], config, found.get(at, {}))
        for at, config in configs.items()
    ]


def floats(arrays: Mapping[str, NDArray[Any]]) -> Capture:
    """A capture without its units: the float tensors and what stands beside them."""
    return {key: array for key, array in arrays.items() if not key.startswith(UNITS)}


# -- files ------------------------------------------------------------------------------------------------------------


def save(path: str | os.PathLike[str], arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write a capture as ``.npz``; the file appears whole or not at all."""
    with atomic_write(path, "wb") as file:
        # `savez` takes the keys as argument names, where "file" alone would clash; no site is called so.
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load(path: str | os.PathLike[str]) -> Capture:
    """Read a capture that :func:`save` wrote."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such capture")
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, zipfile.BadZipFile, EOFError, KeyError, AttributeError):
        raise ValueError(f"{path}: not a capture: an .npz archive was expected") from None
    if "provenance" not in arrays:
        raise ValueError(f"{path}: not a capture: it has no provenance")
    return arrays


def provenance(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """What a capture was made from, as :func:`capture` recorded it."""
    found: dict[str, Any] = json.loads(str(arrays["provenance"]))
    return found


def reference_text() -> tuple[str, str]:
    """Name and source of a standard-library module that the reference checkpoint has never seen."""
    path = Path(sysconfig.get_paths()["stdlib"]) / _REFERENCE_MODULE
    if path.is_file():
        return _REFERENCE_MODULE, path.read_text(encoding="utf-8")
    train, held_out = split()
    for name, text in {**train, **held_out}.items() if not held_out else held_out.items():
        if len(text) >= 4096:
            return name, text
    raise ValueError("this Python installation holds no standard library source")


def _source_digest() -> str:
    """Of all of the golden model: another formula may give other outputs."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def reference_capture_file(tokens: int = 256, folder: str | os.PathLike[str] | None = None) -> Path:
    """File with the capture of the repository's own checkpoint on :func:`reference_text`.

    It is kept in ``folder`` (by default ``build/captures`` where the command runs) under a name that changes with the
    checkpoint, the text, the number of tokens and the golden model's source, and is made again only when that name is
    new or the file is broken.
    """
    name, text = reference_text()
    checkpoint = load_checkpoint(REFERENCE)
    content = [_VERSION, _source_digest(), checkpoint.sha256(), hashlib.sha256(text.encode()).hexdigest(), tokens]
    tokenizer_digest = hashlib.sha256((REFERENCE / "tokenizer.json").read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([*content, tokenizer_digest]).encode()).hexdigest()[:16]
    place = Path(folder) if folder is not None else Path("build") / "captures"
    path = place / f"reference-{key}.npz"
    if path.is_file():
        try:
            load(path)
            return path
        except ValueError:
            pass  # left by something else under our name: make it again
    place.mkdir(parents=True, exist_ok=True)
    save(path, _capture(checkpoint, find_tokenizer(REFERENCE), text, tokens, name))
    return path


def reference_capture(tokens: int = 256, folder: str | os.PathLike[str] | None = None) -> Capture:
    """What :func:`reference_capture_file` holds."""
    return load(reference_capture_file(tokens, folder))


@click.command("capture")
@checkpoint_options()
@text_option("to read")
@click.option("--tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens to run.")
@click.option(
    "--every",
    type=click.IntRange(1),
    default=EVERY,
    show_default=True,
    help="Record the integer pipeline's units at one token of so many.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The .npz file to write.")
def capture_command(
    checkpoint: Path, tokenizer: Path | None, text: Path, tokens: int, every: int, output: Path
) -> None:
    """Record every unit's inputs and outputs while a checkpoint reads a text."""
    check_output(output, checkpoint, text, tokenizer)
    arrays = capture(checkpoint, read_text(text), tokens, tokenizer, text.name, every)
    save(output, arrays)
    size = output.stat().st_size / 1e6
    click.echo(f"{output}: {len(arrays)} arrays of {len(arrays['tokens'])} tokens, {size:.1f} MB", err=True)
    if refused := provenance(arrays).get("units_refused"):
        click.echo(f"{output}: float tensors only, the units cannot run this model: {refused}", err=True)
