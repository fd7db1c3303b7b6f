"""A model in integers: what the machine holds before the first token, and the file that keeps it.

Preparing it is floating-point work done once, layer by layer (:mod:`golden.llm.prepare`); running it
(:mod:`golden.llm.integer`) is not. The file is a safetensors file whose metadata is a JSON object: formats, model
configuration, scales, and where it came from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.commandline import atomic_write
from golden.fixedpoint import Int
from golden.llm.checkpoint import QUANTIZED
from golden.llm.config import ModelConfig, RopeScaling
from golden.llm.formats import Formats, Units
from golden.llm.linear import LinearWeights

FORMAT = "nearmem-integer-1"
SUFFIX = QUANTIZED
_KINDS = {
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "int64": "I64",
    "float32": "F32",
    "float64": "F64",
}
#: Linear layers of a decoder layer, by the name of their field.
LINEARS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True)
class Gain:
    """Table of an RMSNorm: G int32 (n,), the row's ``shift``, and the real value of 1 in its output."""

    table: NDArray[np.int32]
    shift: int
    scale: float


@dataclass(frozen=True)
class QuantizedLayer:
    """One decoder layer. What a model lacks is None."""

    attention_norm: Gain
    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    output: LinearWeights
    mlp_norm: Gain
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    query_norm: Gain | None = None
    key_norm: Gain | None = None


@dataclass(frozen=True)
class Quantized:
    """All that the integer pipeline needs.

    ``embedding`` is INT16 (vocab, dim) with ``embedding_fraction_bits``; ``rope_steps`` are phases per position;
    ``eps`` (for an exponent of 0) that of the model's norms and of the heads' own. What was measured on a calibration
    text serves studies only: ``ranges``, the largest magnitudes of the nonlinear operators' inputs
    (``layers.I.PLACE``), and ``static``, those of each group of a linear layer's input (``layers.I.SITE``).
    ``tokenizer`` is the text that :func:`golden.llm.tokenizer.unpack` takes.
    """

    config: ModelConfig
    formats: Formats
    embedding: NDArray[np.int16]
    embedding_fraction_bits: int
    layers: Sequence[QuantizedLayer]
    final_norm: Gain
    head: LinearWeights
    rope_steps: Int
    eps: int
    head_eps: int
    ranges: dict[str, float] = field(default_factory=dict)
    static: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    tokenizer: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def units(self) -> Units:
        """Every unit's configuration."""
        return self.formats.units(self.config)

    @property
    def weight_bits(self) -> int:
        """Size in bits of all weights, multipliers, gains and the embedding."""
        total = 16 * self.embedding.size + self.head.bits + 32 * self.final_norm.table.size
        for layer in self.layers:
            total += sum(getattr(layer, name).bits for name in LINEARS)
            total += 32 * (layer.attention_norm.table.size + layer.mlp_norm.table.size)
        return total


def score_constant(model: Quantized, layer: int, base2: bool = True) -> tuple[int, int]:
    """(multiplier, fraction) with which a layer's ``q . k`` becomes a logit ``q . k * multiplier * 2**-fraction``, in
    powers of two or in nats. The multiplier has 16 bits."""
    wide, found = model.units.wide_scale, model.layers[layer]
    scale = math.log2(math.e) if base2 else 1.0
    for gain in (found.query_norm, found.key_norm):
        scale *= wide if gain is None else gain.scale
    head_dim = model.config.head_dim
    scale /= math.sqrt(head_dim) * (head_dim if model.formats.transform else 1)
    fraction = 16 - math.frexp(scale)[1]
    multiplier = round(math.ldexp(scale, fraction))
    return (multiplier, fraction) if multiplier < 1 << 16 else (multiplier >> 1, fraction - 1)


# -- the file --------------------------------------------------------------------------------------------------------


def _tensors(model: Quantized) -> Iterator[tuple[str, NDArray[Any]]]:
    yield "embedding", model.embedding
    yield "rope_steps", model.rope_steps
    yield from _part("final_norm", model.final_norm)
    yield from _part("head", model.head)
    for name, array in model.static.items():
        yield f"static.{name}", array
    for i, layer in enumerate(model.layers):
        yield from layer_tensors(i, layer)


def layer_tensors(index: int, layer: QuantizedLayer) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and array of each tensor of a layer, as the file has them."""
    for item in fields(QuantizedLayer):
        part = getattr(layer, item.name)
        if part is not None:
            yield from _part(f"layers.{index}.{item.name}", part)


def _part(name: str, part: Gain | LinearWeights) -> Iterator[tuple[str, NDArray[Any]]]:
    if isinstance(part, Gain):
        yield f"{name}.table", part.table
        yield f"{name}.shift", np.array(part.shift, np.int32)
        yield f"{name}.scale", np.array(part.scale, np.float64)
        return
    yield f"{name}.weight", part.w
    yield f"{name}.multiplier", part.m
    yield f"{name}.down", np.array(part.down, np.int32)
    if part.bias is not None:
        yield f"{name}.bias", part.bias


def header(model: Quantized) -> dict[str, Any]:
    """The JSON object in the file's metadata."""
    return {
        "format": FORMAT,
        "formats": asdict(model.formats),
        "config": asdict(model.config),
        "embedding_fraction_bits": model.embedding_fraction_bits,
        "eps": model.eps,
        "head_eps": model.head_eps,
        "ranges": model.ranges,
        "tokenizer": model.tokenizer,
        "provenance": model.provenance,
    }


def save(path: str | os.PathLike[str], model: Quantized) -> None:
    """Write the model as one safetensors file, which appears whole or not at all."""
    write(path, dict(_tensors(model)), header(model))


def write(path: str | os.PathLike[str], tensors: Mapping[str, NDArray[Any]], head: Mapping[str, Any]) -> None:
    """Write tensors one after the other, so that memory-mapped ones need not be in memory together."""
    entries: dict[str, Any] = {"__metadata__": {"nearmem": json.dumps(dict(head), sort_keys=True)}}
    place = 0
    # Widest elements first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in order:
        array = tensors[name]
        entries[name] = {
            "dtype": _KINDS[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [place, place + array.nbytes],
        }
        place += array.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_write(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).tobytes())


def load(path: str | os.PathLike[str]) -> Quantized:
    """Open a file that :func:`save` wrote; its tensors stay on disk until they are used.

    Raises FileNotFoundError, or ValueError with one line for a file that is no such checkpoint.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    tensors, head = _map(path)
    kind = head.get("format")
    if kind != FORMAT:
        raise ValueError(f"{path}: format {kind!r} is not known; accepted: {FORMAT}")
    try:
        config, formats = _configuration(head["config"]), Formats(**head["formats"])
        units = formats.units(config)
        fraction = int(head["embedding_fraction_bits"])
        if not -16 <= fraction <= 64 or (head["eps"], head["head_eps"]) != (units.eps, units.head_eps):
            raise ValueError(f"{path}: damaged header: eps or embedding_fraction_bits do not belong to this model")
        parts = _Parts(path, units, tensors)
        return Quantized(
            config=config,
            formats=formats,
            embedding=parts.tensor("embedding", (config.vocab, config.dim), "int16"),
            embedding_fraction_bits=fraction,
            layers=tuple(parts.layer(i) for i in range(config.layers)),
            final_norm=parts.gain("final_norm", config.dim),
            head=parts.linear("head", config.vocab, config.dim),
            rope_steps=parts.tensor("rope_steps", (config.head_dim // 2,), "int64"),
            eps=int(head["eps"]),
            head_eps=int(head["head_eps"]),
            ranges=dict(head["ranges"]),
            static={n.removeprefix("static."): array for n, array in tensors.items() if n.startswith("static.")},
            tokenizer=head["tokenizer"],
            provenance=dict(head["provenance"]),
        )
    except (KeyError, TypeError) as problem:
        raise ValueError(f"{path}: damaged header: {type(problem).__name__} {problem}") from None


def _configuration(found: Mapping[str, Any]) -> ModelConfig:
    scaling = found["rope_scaling"]
    return ModelConfig(
        **{
            **found,
            "rope_scaling": None if scaling is None else RopeScaling(**scaling),
            "windows": tuple(found["windows"]),
            "stops": tuple(found["stops"]),
        }
    )


def _map(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Every tensor of the file as a view of its memory map, and the JSON object in its metadata."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:  # checks the header and the file's length
            metadata = file.metadata() or {}
    except SafetensorError as problem:
        raise ValueError(f"{path}: not a quantized checkpoint ({str(problem).splitlines()[0]})") from None
    try:
        head = json.loads(metadata["nearmem"])
    except (KeyError, ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise ValueError(f"{path}: not a quantized checkpoint: its metadata holds no description of it")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    entries = json.loads(data[8 : 8 + length].tobytes())
    entries.pop("__metadata__")
    kinds = {short: kind for kind, short in _KINDS.items()}
    found = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        if entry["dtype"] not in kinds:
            raise ValueError(f"{path}: tensor {name} is {entry['dtype']}; accepted: {', '.join(kinds)}")
        raw = data[8 + length + first : 8 + length + last]
        found[name] = raw.view(np.dtype(kinds[entry["dtype"]]).newbyteorder("<")).reshape(entry["shape"])
    return found, head


def read_layer(
    path: Path, units: Units, index: int
) -> tuple[QuantizedLayer, dict[str, Any], dict[str, NDArray[np.float32]]]:
    """A layer that :func:`write` put into a file of its own: the layer, the file's JSON object, its static scales."""
    tensors, head = _map(path)
    static = {name.removeprefix("static."): array for name, array in tensors.items() if name.startswith("static.")}
    return _Parts(path, units, tensors).layer(index), head, static


@dataclass(frozen=True)
class _Parts:
    """Gains and matrices put together from the tensors of a file, whose names and shapes are checked."""

    path: Path
    units: Units
    tensors: Mapping[str, NDArray[Any]]

    def tensor(self, name: str, shape: tuple[int, ...], kind: str) -> NDArray[Any]:
        found = self.tensors.get(name)
        if found is None:
            raise ValueError(f"{self.path}: tensor {name} is missing; shape {shape} expected")
        if found.shape != shape:
            raise ValueError(f"{self.path}: tensor {name} has shape {found.shape}, {shape} expected")
        if found.dtype.name != kind:
            raise ValueError(f"{self.path}: tensor {name} is {found.dtype.name}, {kind} expected")
        return found

    def gain(self, name: str, n: int) -> Gain:
        scale = float(self.tensor(f"{name}.scale", (), "float64"))
        if not 0 < scale < math.inf:
            raise ValueError(f"{self.path}: tensor {name}.scale holds {scale}; a positive number was expected")
        shift = self.number(f"{name}.shift", -64, 64)
        return Gain(self.tensor(f"{name}.table", (n,), "int32"), shift, scale)

    def number(self, name: str, low: int, high: int) -> int:
        found = int(self.tensor(name, (), "int32"))
        if not low <= found <= high:
            raise ValueError(f"{self.path}: tensor {name} holds {found}; {low} to {high} expected")
        return found

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = False) -> LinearWeights:
        config = self.units.linear(inputs)
        return LinearWeights(
            config,
            self.tensor(f"{name}.weight", (outputs, inputs), "int8"),
            self.tensor(f"{name}.multiplier", (outputs, config.groups), "uint16"),
            self.number(f"{name}.down", -64, 64),
            self.tensor(f"{name}.bias", (outputs,), "int32") if bias else None,
        )

    def layer(self, index: int) -> QuantizedLayer:
        m, at = self.units.model, f"layers.{index}."
        return QuantizedLayer(
            attention_norm=self.gain(at + "attention_norm", m.dim),
            query=self.linear(at + "query", m.query_dim, m.dim, m.qkv_bias),
            key=self.linear(at + "key", m.kv_dim, m.dim, m.qkv_bias),
            value=self.linear(at + "value", m.kv_dim, m.dim, m.qkv_bias),
            output=self.linear(at + "output", m.dim, m.query_dim, m.output_bias),
            mlp_norm=self.gain(at + "mlp_norm", m.dim),
            gate=self.linear(at + "gate", m.hidden, m.dim),
            up=self.linear(at + "up", m.hidden, m.dim),
            down=self.linear(at + "down", m.dim, m.hidden),
            query_norm=self.gain(at + "query_norm", m.head_dim) if m.qk_norm else None,
            key_norm=self.gain(at + "key_norm", m.head_dim) if m.qk_norm else None,
        )
