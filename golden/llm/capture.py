"""Record what flows through a decoder on a real text, as stimulus for units and testbenches.

A capture is a dictionary of arrays.  Keys are ``LAYER/SITE``:

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

The last norm stands under the layer after the last: ``final_norm`` and ``final_norm_gamma``.  Beside the
layers stand ``positions``, ``tokens`` and ``provenance``, a JSON text that names the checkpoint's digest,
its files and configuration, and the text.  Everything measured is float32.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from golden.commandline import atomic_write
from golden.llm.checkpoint import REFERENCE, Array, Checkpoint
from golden.llm.checkpoint import load as load_checkpoint
from golden.llm.reference import Decoder
from golden.llm.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from golden.llm.train import split

Capture = dict[str, NDArray[Any]]

# Raised whenever the same checkpoint and text would give other arrays, so that no stale file is read.
_VERSION = 1
# Held out from training by the rule of `train.split`, and part of every Python version.
_REFERENCE_MODULE = "functools.py"


def capture(
    checkpoint: str | os.PathLike[str],
    text: str,
    tokens: int = 256,
    tokenizer: str | os.PathLike[str] | None = None,
    name: str = "",
) -> Capture:
    """Run the first ``tokens`` tokens of ``text`` through a checkpoint and return all sites.

    ``name`` is what the provenance calls the text.  A shorter text gives fewer positions.
    """
    words = find_tokenizer(checkpoint) if tokenizer is None else load_tokenizer(tokenizer)
    return _capture(load_checkpoint(checkpoint), words, text, tokens, name)


def _capture(checkpoint: Checkpoint, words: Tokenizer, text: str, tokens: int, name: str) -> Capture:
    if tokens < 1:
        raise ValueError(f"tokens must be positive, not {tokens}")
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
    provenance = {
        "checkpoint_sha256": checkpoint.sha256(),
        "files": [path.name for path in checkpoint.files],
        "config": asdict(config),
        "text": name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": len(ids),
    }
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


def reference_capture_file(tokens: int = 256, folder: str | os.PathLike[str] | None = None) -> Path:
    """File with the capture of the repository's own checkpoint on :func:`reference_text`.

    It is kept in ``folder`` (by default ``build/captures`` where the command runs) under a name that changes with the
    checkpoint, the text and the number of tokens, and is made again only when that name is new or the file is broken.
    """
    name, text = reference_text()
    checkpoint = load_checkpoint(REFERENCE)
    content = [_VERSION, checkpoint.sha256(), hashlib.sha256(text.encode()).hexdigest(), tokens]
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
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="Hugging Face folder or llama2.c file.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="By default the one beside the checkpoint.")
@click.option("--text", type=click.Path(path_type=Path), required=True, help="UTF-8 text file.")
@click.option("--tokens", type=click.IntRange(1), default=256, show_default=True, help="Tokens to run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The .npz file to write.")
def capture_command(checkpoint: Path, tokenizer: Path | None, text: Path, tokens: int, output: Path) -> None:
    """Record every unit's input while a checkpoint reads a text."""
    arrays = capture(checkpoint, read_text(text), tokens, tokenizer, name=text.name)
    save(output, arrays)
    size = output.stat().st_size / 1e6
    click.echo(f"{output}: {len(arrays)} arrays of {len(arrays['tokens'])} tokens, {size:.1f} MB", err=True)


def read_text(path: str | os.PathLike[str]) -> str:
    """A UTF-8 text file, with one-line errors."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such text file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: byte {error.start} cannot be decoded") from None
