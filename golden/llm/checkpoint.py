"""Load a decoder's weights as float32: Hugging Face safetensors (whole or sharded), GGUF and llama2.c files.

Files are memory-mapped. A model whose weights take at most :data:`KEEP_BYTES` as float32 is decoded once, when it is
loaded; a larger one keeps nothing in memory: each access to ``weights.layers[i]`` decodes that layer anew, and
``weights.embedding_table`` gives rows of the embedding without the rest.

Every fault of a file is a ValueError of one line that names the file, the tensor where there is one, and
what was expected. All but NaN and infinity are found when a file is loaded, from its header alone; those are found
when a tensor is decoded (:meth:`Checkpoint.validate` decodes all).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from golden.llm.config import LLAMA2C_HEADER, ModelConfig

Array = NDArray[np.float32]
Decode = Callable[[NDArray[np.uint8]], Array]
"""From rows of bytes (n, row_bytes) to their numbers (n, columns)."""

REFERENCE = Path(__file__).parent / "data" / "reference"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZED = ".nearmem.safetensors"
"""How the files end that ``calibrate`` writes (:mod:`golden.llm.quantized`); they hold no float weights."""
KEEP_BYTES = 2 << 30
"""Models whose weights take at most so many bytes as float32 are decoded once and kept."""
_BLOCK = 1 << 20  # numbers decoded at a time: small enough for a cache, large enough for NumPy


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


class MappedFile:
    """A file's bytes, read from disk when touched."""

    def __init__(self, path: Path):
        self.path = path
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def release(self, first: int, end: int) -> None:
        """Give up the memory that holds these bytes; they are read again when touched."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first -= first % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


@dataclass(frozen=True, eq=False)
class Stored:
    """One tensor of a mapped file, decoded to float32 when asked.

    Parameters
    ----------
    name : str
        As the file has it.
    shape : tuple of int
        A vector, or a matrix (rows, columns).
    file, offset : MappedFile, int
        Where its first byte lies; the rest follows.
    size : int
        Bytes taken. A row of a matrix takes the same number as every other.
    decode : Decode
    head_dim : int
        0, or the file holds the two elements of each rotated pair side by side within heads of this width, and they
        are to be moved half a head apart, as :class:`Layer` has them. Only :meth:`read` does so.
    """

    name: str
    shape: tuple[int, ...]
    file: MappedFile
    offset: int
    size: int
    decode: Decode
    head_dim: int = 0

    @property
    def where(self) -> str:
        return f"{self.file.path}: tensor {self.name}"

    def read(self) -> Array:
        """The whole tensor. ValueError if it holds NaN or infinity."""
        found = np.empty(self.shape, np.float32)
        rows = found if found.ndim > 1 else found[None]
        place = 0
        for block in self.blocks():
            rows[place : place + len(block)] = block
            place += len(block)
        if not self.head_dim:
            return found
        pairs = found.reshape(-1, self.head_dim // 2, 2, *self.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(self.shape)

    def rows(self, ids: NDArray[np.integer]) -> Array:
        """Rows (len(ids), columns) of a matrix."""
        found = self._decoded(self._raw[ids])
        self.file.release(self.offset, self.offset + self.size)
        return found

    def blocks(self) -> Iterator[Array]:
        """The rows in order, some at a time: (n, columns). A vector is one row."""
        raw = self._raw
        count, width = raw.shape
        step = max(1, _BLOCK * count // math.prod(self.shape))
        for first in range(0, count, step):
            last = min(first + step, count)
            yield self._decoded(raw[first:last])
            self.file.release(self.offset + first * width, self.offset + last * width)

    @property
    def _raw(self) -> NDArray[np.uint8]:
        count = self.shape[0] if len(self.shape) > 1 else 1
        return self.file.bytes[self.offset : self.offset + self.size].reshape(count, -1)

    def _decoded(self, raw: NDArray[np.uint8]) -> Array:
        with np.errstate(all="ignore"):
            found = self.decode(raw)
        if not np.isfinite(found).all():
            raise ValueError(f"{self.where} holds NaN or infinity")
        return found


class Table:
    """A matrix (rows, columns): in memory, or decoded from its file whenever asked."""

    def __init__(self, source: Array | Stored):
        self._source = source

    @property
    def shape(self) -> tuple[int, ...]:
        return self._source.shape

    @property
    def array(self) -> Array:
        """The whole matrix; the same array each time only where it is kept in memory."""
        return self._source.read() if isinstance(self._source, Stored) else self._source

    def rows(self, ids: Sequence[int] | NDArray[Any]) -> Array:
        """A new array with these rows (len(ids), columns); only they are decoded."""
        ids = np.asarray(ids)
        return self._source.rows(ids) if isinstance(self._source, Stored) else self._source[ids]

    def blocks(self) -> Iterator[Array]:
        """All rows in order, some (4 MB or less, but at least one row) at a time."""
        if isinstance(self._source, Stored):
            yield from self._source.blocks()
            return
        step = max(1, _BLOCK // self.shape[1])
        for first in range(0, len(self._source), step):
            yield self._source[first : first + step]


class StoredLayers(Sequence[Layer]):
    """The layers of a model that is not kept in memory: each access decodes one layer, new arrays every time."""

    def __init__(self, layers: Sequence[Mapping[str, Stored]]):
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | slice) -> Layer | tuple[Layer, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(len(self))[index])
        return Layer(**{field: stored.read() for field, stored in self._layers[index].items()})

    def __iter__(self) -> Iterator[Layer]:
        for i in range(len(self)):  # unlike the inherited one, this holds no layer while the next is decoded
            yield self[i]


@dataclass(frozen=True)
class Weights:
    """All weights. Where the model ties them, ``head_table`` is the very ``embedding_table``.

    ``embedding`` and ``head`` are the tables as whole arrays (vocab, dim): the same array each time if the model is
    kept in memory, decoded anew each time if not.
    """

    embedding_table: Table
    layers: Sequence[Layer]
    final_norm: Array
    head_table: Table

    @property
    def embedding(self) -> Array:
        return self.embedding_table.array

    @property
    def head(self) -> Array:
        return self.head_table.array


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

    def validate(self, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> None:
        """Decode everything once, layer by layer. ValueError if a tensor holds NaN or infinity.

        A model kept in memory has passed already, when it was loaded. ``progress`` may wrap the numbers of the layers.
        """
        weights = self.weights
        for table in dict.fromkeys((weights.embedding_table, weights.head_table)):
            for _ in table.blocks():
                pass
        for i in progress(range(self.config.layers)):
            _ = weights.layers[i]


def assemble(
    config: ModelConfig,
    files: tuple[Path, ...],
    layers: Sequence[Mapping[str, Stored]],
    embedding: Stored,
    final_norm: Stored,
    head: Stored | None,
    keep_bytes: int,
) -> Checkpoint:
    """A checkpoint of stored tensors, each layer's by field of :class:`Layer`; without a head it is tied."""
    stored = [
        embedding,
        final_norm,
        *([head] if head else []),
        *(tensor for layer in layers for tensor in layer.values()),
    ]
    keep = 4 * sum(math.prod(tensor.shape) for tensor in stored) <= keep_bytes
    table = Table(embedding.read() if keep else embedding)
    lazy = StoredLayers(layers)
    weights = Weights(
        embedding_table=table,
        layers=tuple(lazy) if keep else lazy,
        final_norm=final_norm.read(),
        head_table=table if head is None else Table(head.read() if keep else head),
    )
    return Checkpoint(config, weights, files)


def load(path: str | os.PathLike[str], keep_bytes: int = KEEP_BYTES) -> Checkpoint:
    """Load a checkpoint.

    ``path`` is a Hugging Face folder, one ``.safetensors`` file or ``.index.json`` with its ``config.json``
    beside it, a GGUF file, or a llama2.c file (version 0). Models of more than ``keep_bytes`` as float32 are decoded
    anew on every access instead of kept in memory.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if path.is_dir():
        for name in (SINGLE, INDEX):
            if (path / name).is_file():
                return _load_huggingface(path / name, keep_bytes)
        raise ValueError(f"{path}: no {SINGLE} or {INDEX} in this folder")
    if path.name.endswith(QUANTIZED):
        raise ValueError(f"{path}: a quantized checkpoint; a float one is needed here")
    if path.name.endswith((".safetensors", ".index.json")):
        return _load_huggingface(path, keep_bytes)
    with open(path, "rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == b"GGUF":
        from golden.llm.gguf_file import load_gguf

        return load_gguf(path, keep_bytes)
    return _load_llama2c(path, keep_bytes)


# -- Hugging Face ---------------------------------------------------------------------------------


def tensor_shapes(config: ModelConfig) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, tuple[int, ...]]]:
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
    """One safetensors file, memory-mapped."""

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
        self.file = MappedFile(path)

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

    def find(self, name: str, shape: tuple[int, ...]) -> Stored:
        where = f"{self.path}: tensor {name}"
        entry = self.entries[name]
        first, end = self._span(name)
        if tuple(entry["shape"]) != shape:
            raise ValueError(f"{where} has shape {tuple(entry['shape'])}, {shape} expected")
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{where} is {entry['dtype']}; accepted: {', '.join(_DTYPES)}")
        width, decode = _DTYPES[entry["dtype"]]
        if end - first != math.prod(shape) * width:
            raise ValueError(f"{where} takes {end - first} bytes, {math.prod(shape) * width} expected")
        return Stored(name, shape, self.file, self.start + first, end - first, decode)


def decode_float32(raw: NDArray[np.uint8]) -> Array:
    return raw.view("<f4").astype(np.float32, copy=False)


#: Bytes a number takes and how it is decoded, by safetensors' name of its type.
_DTYPES: dict[str, tuple[int, Decode]] = {
    "F32": (4, decode_float32),
    "F16": (2, lambda raw: raw.view("<f2").astype(np.float32)),
    "BF16": (2, lambda raw: from_bfloat16(raw.view("<u2"))),
}


def from_bfloat16(bits: NDArray[np.uint16]) -> Array:
    """bfloat16, as its 16-bit patterns, to float32: the same number with 16 more fraction bits, all zero."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(x: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Finite float32 to bfloat16 bit patterns, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _load_huggingface(path: Path, keep_bytes: int) -> Checkpoint:
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

    def find(name: str, shape: tuple[int, ...]) -> Stored:
        place = places.get(name)
        if place is None or name not in shards[place].entries:
            raise ValueError(f"{place or path}: tensor {name} is missing; shape {shape} expected")
        return shards[place].find(name, shape)

    layer_shapes, outside = tensor_shapes(config)
    top = {name: find(name, shape) for name, shape in outside.items()}
    layers = [
        {field: find(f"model.layers.{i}.{name}", shape) for field, (name, shape) in layer_shapes.items()}
        for i in range(config.layers)
    ]
    embedding, final_norm = top["model.embed_tokens.weight"], top["model.norm.weight"]
    return assemble(config, files, layers, embedding, final_norm, top.get("lm_head.weight"), keep_bytes)


# -- llama2.c -------------------------------------------------------------------------------------


def _load_llama2c(path: Path, keep_bytes: int) -> Checkpoint:
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
    mapped, places, place = MappedFile(path), {}, LLAMA2C_HEADER.size
    for name, shape in sections.items():
        places[name] = place
        place += 4 * math.prod(shape)

    def find(name: str, layer: int | None = None, head_dim: int = 0) -> Stored:
        shape, offset = sections[name], places[name]
        if layer is not None:
            shape = shape[1:]
            offset += 4 * math.prod(shape) * layer
            name = f"{name}[{layer}]"
        return Stored(name, shape, mapped, offset, 4 * math.prod(shape), decode_float32, head_dim)

    # llama2.c turns element 2i with 2i + 1; we turn i with i + head_dim / 2, as Hugging Face does.
    layers = [
        {
            "attention_norm": find("rms_att_weight", i),
            "query": find("wq", i, c.head_dim),
            "key": find("wk", i, c.head_dim),
            "value": find("wv", i),
            "output": find("wo", i),
            "mlp_norm": find("rms_ffn_weight", i),
            "gate": find("w1", i),
            "up": find("w3", i),
            "down": find("w2", i),
        }
        for i in range(n)
    ]
    head = None if c.tied else find("wcls")
    embedding, final_norm = find("token_embedding_table"), find("rms_final_weight")
    return assemble(config, (path,), layers, embedding, final_norm, head, keep_bytes)
