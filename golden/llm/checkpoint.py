"""Load a decoder's weights: Hugging Face safetensors (whole or sharded) and llama2.c files, as float32.

Every fault of a file is a ValueError of one line that names the file, the tensor where there is one, and
what was expected.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.llm.config import LLAMA2C_HEADER, ModelConfig

Array = NDArray[np.float32]

REFERENCE = Path(__file__).parent / "data" / "reference"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Layer:
    """One decoder layer.  A matrix is (outputs, inputs); what a model lacks is None.

    Query and key rows are in the half-split order of the rotary embedding: element ``i`` of a head turns
    with element ``i + head_dim / 2``.
    """

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array
    query_bias: Array | None = None
    key_bias: Array | None = None
    value_bias: Array | None = None
    output_bias: Array | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None


@dataclass(frozen=True)
class Weights:
    """All weights; ``head`` is the very array ``embedding`` when the model ties them."""

    embedding: Array
    layers: tuple[Layer, ...]
    final_norm: Array
    head: Array


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and the files it came from."""

    config: ModelConfig
    weights: Weights
    files: tuple[Path, ...]

    def sha256(self) -> str:
        """One digest over the names and contents of all files."""
        total = hashlib.sha256()
        for path in self.files:
            with open(path, "rb") as file:
                total.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
        return total.hexdigest()


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Load a checkpoint.

    ``path`` is a Hugging Face folder, one ``.safetensors`` file or ``.index.json`` with its ``config.json``
    beside it, or a llama2.c file (version 0).
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if path.is_dir():
        for name in (SINGLE, INDEX):
            if (path / name).is_file():
                return _load_huggingface(path / name)
        raise ValueError(f"{path}: no {SINGLE} or {INDEX} in this folder")
    if path.name.endswith((".safetensors", ".index.json")):
        return _load_huggingface(path)
    return _load_llama2c(path)


# -- Hugging Face ---------------------------------------------------------------------------------


def _shapes(config: ModelConfig) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, tuple[int, ...]]]:
    """Hugging Face's name and shape of each field of :class:`Layer`, and the shapes outside the layers."""
    c = config
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attention_norm": ("input_layernorm.weight", (c.dim,)),
        "query": ("self_attn.q_proj.weight", (c.query_dim, c.dim)),
        "key": ("self_attn.k_proj.weight", (c.kv_dim, c.dim)),
        "value": ("self_attn.v_proj.weight", (c.kv_dim, c.dim)),
        "output": ("self_attn.o_proj.weight", (c.dim, c.query_dim)),
        "mlp_norm": ("post_attention_layernorm.weight", (c.dim,)),
        "gate": ("mlp.gate_proj.weight", (c.hidden, c.dim)),
        "up": ("mlp.up_proj.weight", (c.hidden, c.dim)),
        "down": ("mlp.down_proj.weight", (c.dim, c.hidden)),
    }
    if c.qkv_bias:
        layer["query_bias"] = ("self_attn.q_proj.bias", (c.query_dim,))
        layer["key_bias"] = ("self_attn.k_proj.bias", (c.kv_dim,))
        layer["value_bias"] = ("self_attn.v_proj.bias", (c.kv_dim,))
    if c.output_bias:
        layer["output_bias"] = ("self_attn.o_proj.bias", (c.dim,))
    if c.qk_norm:
        layer["query_norm"] = ("self_attn.q_norm.weight", (c.head_dim,))
        layer["key_norm"] = ("self_attn.k_norm.weight", (c.head_dim,))
    outside = {"model.embed_tokens.weight": (c.vocab, c.dim), "model.norm.weight": (c.dim,)}
    if not c.tied:
        outside["lm_head.weight"] = (c.vocab, c.dim)
    return layer, outside


class _SafeTensors:
    """One safetensors file, memory-mapped; tensors are decoded to float32 on demand."""

    def __init__(self, path: Path):
        self.path = path
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= 100_000_000:
                raise ValueError(f"{path}: not a safetensors file: no header length in its first 8 bytes")
            header = file.read(length)
        # A header begins with a brace; anything else is a foreign file, not a damaged one.
        if header[:1] != b"{":
            raise ValueError(f"{path}: not a safetensors file: its header is no JSON object")
        if len(header) < length:
            raise ValueError(f"{path}: truncated: the header takes {length} bytes, the file has {size - 8} left")
        try:
            self.entries: dict[str, Any] = json.loads(header)
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise ValueError(f"{path}: not a safetensors file: its header is no JSON object") from None
        self.entries.pop("__metadata__", None)
        self.start = 8 + length
        expected = self.start + max((self._span(name)[1] for name in self.entries), default=0)
        if size < expected:
            raise ValueError(f"{path}: truncated: {expected} bytes expected, {size} found")
        self.bytes = np.memmap(path, dtype=np.uint8, mode="r")

    def _span(self, name: str) -> tuple[int, int]:
        entry = self.entries[name]
        try:
            first, end = entry["data_offsets"]
            valid = 0 <= first <= end and isinstance(entry["dtype"], str) and isinstance(entry["shape"], list)
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"{self.path}: tensor {name} has a malformed header entry")
        return first, end

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        where = f"{self.path}: tensor {name}"
        entry = self.entries[name]
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"{where} has shape {tuple(entry['shape'])}, {shape} expected")
        first, end = self._span(name)
        widths = {"F32": 4, "F16": 2, "BF16": 2}
        if entry["dtype"] not in widths:
            raise ValueError(f"{where} is {entry['dtype']}; accepted: {', '.join(widths)}")
        if end - first != math.prod(shape) * widths[entry["dtype"]]:
            raise ValueError(f"{where} takes {end - first} bytes, {math.prod(shape) * widths[entry['dtype']]} expected")
        raw = self.bytes[self.start + first : self.start + end].tobytes()
        if entry["dtype"] == "BF16":
            array = from_bfloat16(np.frombuffer(raw, dtype="<u2"))
        else:
            array = np.frombuffer(raw, dtype="<f2" if entry["dtype"] == "F16" else "<f4").astype(np.float32)
        return _finite(array.reshape(shape), where)


def from_bfloat16(bits: NDArray[np.uint16]) -> Array:
    """bfloat16, as its 16-bit patterns, to float32: the same number with 16 more fraction bits, all zero."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Finite float32 to bfloat16 bit patterns, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _finite(array: Array, where: str) -> Array:
    if not np.isfinite(array).all():
        raise ValueError(f"{where} holds NaN or infinity")
    return array


def _load_huggingface(path: Path) -> Checkpoint:
    folder = path.parent
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise FileNotFoundError(f"{config_path}: no such file; it must lie beside the weights")
    config = ModelConfig.from_huggingface_file(config_path)
    if path.name.endswith(".index.json"):
        try:
            named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            places = {str(tensor): folder / str(name) for tensor, name in named.items()}
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{path}: not a safetensors index: no weight_map in it") from None
        for place in sorted(set(places.values())):
            if not place.is_file():
                raise FileNotFoundError(f"{place}: no such file; {path.name} names it")
        shards = {place: _SafeTensors(place) for place in sorted(set(places.values()))}
        files = (config_path, path, *shards)
    else:
        shards = {path: _SafeTensors(path)}
        places = dict.fromkeys(shards[path].entries, path)
        files = (config_path, path)

    def read(name: str, shape: tuple[int, ...]) -> Array:
        place = places.get(name)
        if place is None or name not in shards[place].entries:
            raise ValueError(f"{place or path}: tensor {name} is missing; shape {shape} expected")
        return shards[place].read(name, shape)

    layer_shapes, outside = _shapes(config)
    top = {name: read(name, shape) for name, shape in outside.items()}
    layers = tuple(
        Layer(**{field: read(f"model.layers.{i}.{name}", shape) for field, (name, shape) in layer_shapes.items()})
        for i in range(config.layers)
    )
    embedding = top["model.embed_tokens.weight"]
    weights = Weights(embedding, layers, top["model.norm.weight"], top.get("lm_head.weight", embedding))
    return Checkpoint(config, weights, files)


# -- llama2.c -------------------------------------------------------------------------------------


def _load_llama2c(path: Path) -> Checkpoint:
    size = path.stat().st_size
    with open(path, "rb") as file:
        try:
            config = ModelConfig.from_llama2c(file.read(LLAMA2C_HEADER.size))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    c, n = config, config.layers
    sections: dict[str, tuple[int, ...]] = {
        "token_embedding_table": (c.vocab, c.dim),
        "rms_att_weight": (n, c.dim),
        "wq": (n, c.query_dim, c.dim),
        "wk": (n, c.kv_dim, c.dim),
        "wv": (n, c.kv_dim, c.dim),
        "wo": (n, c.dim, c.query_dim),
        "rms_ffn_weight": (n, c.dim),
        "w1": (n, c.hidden, c.dim),
        "w2": (n, c.dim, c.hidden),
        "w3": (n, c.hidden, c.dim),
        "rms_final_weight": (c.dim,),
        "freq_cis_real": (c.max_positions, c.head_dim // 2),
        "freq_cis_imag": (c.max_positions, c.head_dim // 2),
    }
    if not c.tied:
        sections["wcls"] = (c.vocab, c.dim)
    expected = LLAMA2C_HEADER.size + 4 * sum(map(math.prod, sections.values()))
    if size < expected:
        raise ValueError(f"{path}: truncated: {expected} bytes expected, {size} found")
    if size > expected:
        raise ValueError(f"{path}: not a llama2.c checkpoint: {expected} bytes expected, {size} found")
    flat = np.fromfile(path, dtype="<f4", offset=LLAMA2C_HEADER.size).astype(np.float32, copy=False)

    def walk() -> Iterator[tuple[str, Array]]:
        place = 0
        for name, shape in sections.items():
            end = place + math.prod(shape)
            yield name, _finite(flat[place:end].reshape(shape), f"{path}: tensor {name}")
            place = end

    tensors = dict(walk())

    # llama2.c turns element 2i with 2i + 1; we turn i with i + head_dim / 2, as Hugging Face does.
    def split(rows: Array) -> Array:
        return np.ascontiguousarray(rows.reshape(-1, c.head_dim // 2, 2, c.dim).swapaxes(1, 2).reshape(-1, c.dim))

    layers = tuple(
        Layer(
            attention_norm=tensors["rms_att_weight"][i],
            query=split(tensors["wq"][i]),
            key=split(tensors["wk"][i]),
            value=tensors["wv"][i],
            output=tensors["wo"][i],
            mlp_norm=tensors["rms_ffn_weight"][i],
            gate=tensors["w1"][i],
            up=tensors["w3"][i],
            down=tensors["w2"][i],
        )
        for i in range(n)
    )
    embedding = tensors["token_embedding_table"]
    weights = Weights(embedding, layers, tensors["rms_final_weight"], tensors.get("wcls", embedding))
    return Checkpoint(config, weights, (path,))
