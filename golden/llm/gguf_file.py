"""Load GGUF files, the single-file checkpoints of llama.cpp, through the ``gguf`` package.

Architectures ``llama`` (which Mistral's files also bear), ``qwen2`` and ``qwen3``; any tensor type that the package
can dequantize: F32, F16, BF16, Q8_0, and the smaller ones.

Sources: the GGUF specification and llama.cpp's tensor names and metadata keys, as its ``gguf`` package lists them.
Files of architecture ``llama`` hold the query and key rows in interleaved pairs, which is undone here; those of Qwen
do not. Llama 3's rotary scaling is stored as one factor per frequency (``rope_freqs.weight``); its parameters are
derived from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from golden.llm.checkpoint import Array, Checkpoint, Decode, MappedFile, Stored, assemble, tensor_shapes
from golden.llm.config import ModelConfig, RopeScaling
from golden.llm.tokenizer import LibraryTokenizer, Llama2cTokenizer, Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: GGUF's name for each field of a layer, without ``.weight`` or ``.bias``.
_NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}
_EMBEDDING, _FINAL_NORM, _HEAD, _ROPE = "token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"


class _Metadata:
    """The key/value pairs of a file, with one-line errors."""

    def __init__(self, path: Path, reader: gguf.GGUFReader):
        self.path, self._reader = path, reader

    def get(self, key: str) -> Any:
        field = self._reader.get_field(key)
        try:
            return None if field is None else field.contents()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {key} is not UTF-8 text") from None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.path}: metadata lacks {key}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            given = "an array" if isinstance(value, list) else repr(value)
            raise ValueError(f"{self.path}: {key} must be a positive integer, not {given}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            raise ValueError(f"{self.path}: metadata lacks {key}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} must be a number, not {value!r}")
        # Written as float32 from a short decimal number, which is what the model's authors meant.
        return float(str(np.float32(value)))


class _Reader(gguf.GGUFReader):
    """The package's reader, which does not notice a file's end: it finds empty arrays there, as many as are announced.

    It also cuts a million pieces out of its memory map where the vocabulary is large; a plain array of the same bytes
    is quicker to cut.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, *arguments: Any, **options: Any) -> NDArray[Any]:
        if isinstance(self.data, np.memmap):
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"{end} bytes expected, {len(self.data)} found")
        return super()._get(offset, dtype, count, *arguments, **options)


def _open(path: Path) -> _Reader:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it does not begin with GGUF")
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: truncated or damaged GGUF file ({str(error).splitlines()[0]})") from None
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError(f"{path}: a GGUF file of a big-endian machine; a little-endian one was expected")
    return reader


def load_gguf(path: Path, keep_bytes: int) -> Checkpoint:
    """Load a GGUF file; see :func:`golden.llm.checkpoint.load`."""
    reader = _open(path)
    meta, file = _Metadata(path, reader), MappedFile(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if (parts := meta.get("split.count")) not in (None, 0, 1):
        raise ValueError(f"{path}: one of {parts} parts of a split GGUF file; merge them with llama-gguf-split --merge")
    config = _config(meta, tensors)

    def find(name: str, shape: tuple[int, ...], head_dim: int = 0) -> Stored:
        used.add(name)
        tensor, where = tensors.get(name), f"{path}: tensor {name}"
        if tensor is None:
            raise ValueError(f"{where} is missing; shape {shape} expected")
        if (found := _shape(tensor)) != shape:
            raise ValueError(f"{where} has shape {found}, {shape} expected")
        size, decode = int(tensor.n_bytes), _decoder(where, tensor.tensor_type)
        return Stored(name, shape, file, int(tensor.data_offset), size, decode, head_dim)

    used = {_ROPE}
    layers = []
    for i in range(config.layers):
        layer = {}
        for field, (_, shape) in tensor_shapes(config)[0].items():
            base, kind = (field[:-5], "bias") if field.endswith("_bias") else (field, "weight")
            split = config.head_dim if config.architecture == "llama" and base in ("query", "key") else 0
            layer[field] = find(f"blk.{i}.{_NAMES[base]}.{kind}", shape, split)
        layers.append(layer)
    embedding, final_norm = find(_EMBEDDING, (config.vocab, config.dim)), find(_FINAL_NORM, (config.dim,))
    head = None if config.tied else find(_HEAD, (config.vocab, config.dim))
    # What is stored and not used would change the arithmetic: further biases, experts.
    if unknown := sorted(tensors.keys() - used):
        raise ValueError(f"{path}: tensor {unknown[0]} is not part of a supported {config.architecture} model")
    return assemble(config, (path,), layers, embedding, final_norm, head, keep_bytes)


def _shape(tensor: gguf.gguf_reader.ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _decoder(where: str, kind: gguf.GGMLQuantizationType) -> Decode:
    """The package's dequantization of rows of bytes. ValueError if it has none for this type."""

    def decode(raw: NDArray[np.uint8]) -> Array:
        return gguf.dequantize(raw, kind).astype(np.float32, copy=False)

    try:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        decode(np.zeros((1, block_bytes), np.uint8))
    except (NotImplementedError, KeyError):
        raise ValueError(f"{where} is {kind.name}, which the gguf package cannot dequantize") from None
    return decode


def _config(meta: _Metadata, tensors: Mapping[str, gguf.gguf_reader.ReaderTensor]) -> ModelConfig:
    path, name = meta.path, meta.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(f"{path}: architecture {name!r} is not supported; accepted: {', '.join(ARCHITECTURES)}")
    scaling = meta.get(f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ValueError(f"{path}: {name}.rope.scaling.type must be none, not {scaling!r}")
    if experts := meta.get(f"{name}.expert_count"):
        raise ValueError(f"{path}: {experts} experts are not supported")
    if (embedding := tensors.get(_EMBEDDING)) is None or len(_shape(embedding)) != 2:
        raise ValueError(f"{path}: tensor {_EMBEDDING} is missing or not a matrix")

    dim, layers = meta.integer(f"{name}.embedding_length"), meta.integer(f"{name}.block_count")
    heads = meta.integer(f"{name}.attention.head_count")
    head_dim = meta.integer(f"{name}.attention.key_length", dim // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := meta.integer(f"{name}.{key}", head_dim)) != head_dim:
            raise ValueError(f"{path}: {name}.{key} must be the width of a head, {head_dim}, not {found}")
    window_key = f"{name}.attention.sliding_window"
    window = meta.integer(window_key) if meta.get(window_key) else None
    stops = {meta.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    theta = meta.real(f"{name}.rope.freq_base", 10000.0)
    try:
        return ModelConfig(
            architecture=name,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=meta.integer(f"{name}.attention.head_count_kv", heads),
            head_dim=head_dim,
            hidden=meta.integer(f"{name}.feed_forward_length"),
            vocab=_shape(embedding)[0],
            norm_eps=meta.real(f"{name}.attention.layer_norm_rms_epsilon"),
            rope_theta=theta,
            rope_scaling=_rope_scaling(path, tensors.get(_ROPE), theta, head_dim),
            qkv_bias=name == "qwen2" or "blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm=name == "qwen3",
            tied=_HEAD not in tensors,
            max_positions=meta.integer(f"{name}.context_length", 2048),
            windows=(window,) * layers,
            stops=tuple(sorted(stops)),
        )
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(str(path)) else f"{path}: {error}") from None


def _rope_scaling(
    path: Path, tensor: gguf.gguf_reader.ReaderTensor | None, theta: float, head_dim: int
) -> RopeScaling | None:
    """Llama 3's parameters from the numbers that divide the rotary frequencies, (head_dim / 2,).

    With t turns over the context trained first, the divisor is 1 for t >= high, ``factor`` for t <= low, and between
    them ``1 / (keep + (1 - keep) / factor)`` with ``keep = (t - low) / (high - low)``: only the ratios of context, low
    and high are determined. Low is taken as 1, which every published Llama 3 has, and where fewer than two frequencies
    lie between, high as 4. ValueError if the result does not give the stored numbers to 1e-5.
    """
    if tensor is None:
        return None
    where = f"{path}: tensor {_ROPE}"
    if _shape(tensor) != (head_dim // 2,) or tensor.tensor_type != gguf.GGMLQuantizationType.F32:
        raise ValueError(
            f"{where} has shape {_shape(tensor)} of {tensor.tensor_type.name}, {(head_dim // 2,)} of F32 expected"
        )
    divisors = np.asarray(tensor.data, np.float64)
    if not (np.isfinite(divisors).all() and (divisors >= 1).all()):
        raise ValueError(f"{where} holds a number that is not finite or below 1")
    factor = float(divisors.max())
    if factor == 1:
        return None
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    keep = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (keep > 1e-6) & (keep < 1 - 1e-6)
    low, high = 1.0, 4.0
    if between.sum() >= 2:
        slope, offset = np.polyfit(frequency[between], keep[between], 1)
        high = float(round(1 - 1 / offset, 4))
        original = 2 * math.pi * slope * (high - low)
    elif between.any():
        original = 2 * math.pi * float(((keep * (high - low) + low) / frequency)[between][0])
    else:
        kept = frequency[keep >= 0.5]
        original = 2 * math.pi * (high / kept.min() if len(kept) else low / frequency.max())
        original = math.ceil(original) if len(kept) else math.floor(original)
    scaling = RopeScaling(factor, low, high, max(1, round(original)))
    turns = scaling.original_positions * frequency / (2 * math.pi)
    found = np.clip((turns - low) / (high - low), 0, 1)
    if not np.allclose(1 / (found + (1 - found) / factor), divisors, rtol=1e-5, atol=0):
        raise ValueError(f"{where} is not Llama 3's scaling, the only one supported")
    return scaling


# -- tokenizer -------------------------------------------------------------------------------------------------------

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: How a text is cut before the merges, by ``tokenizer.ggml.pre``; None is GPT-2's own expression.
_CUTS = {
    "gpt-2": None,
    "llama-bpe": rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}",
    "qwen2": rf"{_LETTERS}|\p{{N}}|{_OTHERS}",
}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF file: byte-level BPE (Llama 3, Qwen) or SentencePiece BPE (Llama 2, Mistral)."""
    meta = _Metadata(path, _open(path))
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if kind not in ("gpt2", "llama") or not isinstance(tokens, list):
        raise ValueError(f"{path}: its tokenizer is {kind!r}, not gpt2 or llama; name another with --tokenizer")
    bos, add_bos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.add_bos_token")
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if kind == "llama":
        scores = meta.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or len(scores) != len(tokens) or bos not in (None, 1) or add_bos is False:
            raise ValueError(f"{path}: its tokenizer is not that of a Llama; name another with --tokenizer")
        prefix = "" if meta.get("tokenizer.ggml.add_space_prefix") is False else " "
        # A control token has no spelling: no text becomes it, and it becomes no text.
        pieces = ["" if of == _CONTROL else token.replace("\u2581", " ") for token, of in zip(tokens, types)]
        try:
            return Llama2cTokenizer([piece.encode() for piece in pieces], scores, prefix)
        except ValueError as error:
            raise ValueError(f"{path}: its tokenizer's {error}; name another with --tokenizer") from None

    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    merges, cut = meta.get("tokenizer.ggml.merges"), meta.get("tokenizer.ggml.pre")
    if cut not in _CUTS or not isinstance(merges, list):
        known = ", ".join(_CUTS)
        raise ValueError(f"{path}: its tokenizer cuts words like {cut!r}, not {known}; name another with --tokenizer")
    try:
        pairs = [tuple(merge.split(" ")) for merge in merges]
        model = models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=cut == "llama-bpe")
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{path}: its tokenizer is damaged ({str(error).splitlines()[0]})") from None
    library = Library(model)
    expression = _CUTS[cut]
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
    library.pre_tokenizer = (
        bytes_of
        if expression is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), bytes_of])
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([token for token, of in zip(tokens, types) if of == _CONTROL])
    library.add_tokens([AddedToken(t, normalized=False) for t, of in zip(tokens, types) if of == _USER_DEFINED])
    opens = cut == "llama-bpe" if add_bos is None else add_bos
    return LibraryTokenizer(library, bos if opens else None)
