"""Loading checkpoints: lazily from memory-mapped files, GGUF files with their tokenizers, and an 8B model's shapes."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Kind
from test_llm import (
    LLAMA3,
    NAME,
    SIZES,
    TEXTS,
    TINY,
    TOKENS,
    huggingface_tensors,
    put,
    reference_tokenizer,
    refusal,
    write_huggingface,
    write_safetensors,
)

from golden.llm.checkpoint import REFERENCE, SINGLE, load, tensor_shapes, to_bfloat16
from golden.llm.config import ModelConfig, RopeScaling
from golden.llm.generate import generate_command
from golden.llm.reference import Decoder, rope_frequencies
from golden.llm.tokenizer import find_tokenizer, load_tokenizer

# -- layer by layer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "shards"), [("F32", 1), ("F16", 2), ("BF16", 1)])
@pytest.mark.parametrize("family", TINY)
def test_layer_by_layer_equals_whole(tmp_path: Path, family: str, dtype: str, shards: int) -> None:
    config, _ = write_huggingface(tmp_path, family, dtype, shards)
    kept, lazy = load(tmp_path), load(tmp_path, keep_bytes=0)
    np.testing.assert_array_equal(Decoder(lazy).forward(TOKENS), Decoder(kept).forward(TOKENS))
    assert kept.weights.layers[0] is kept.weights.layers[0]
    assert kept.weights.embedding is kept.weights.embedding
    assert lazy.weights.layers[0].query is not lazy.weights.layers[0].query
    assert (lazy.weights.head_table is lazy.weights.embedding_table) == config.tied
    assert lazy.sha256() == kept.sha256()
    lazy.validate()


def test_the_budget_decides_what_is_kept(tmp_path: Path) -> None:
    _, tensors = write_huggingface(tmp_path, "mistral", "BF16")
    size = 4 * sum(array.size for array in tensors.values())
    assert isinstance(load(tmp_path, keep_bytes=size).weights.layers, tuple)
    assert not isinstance(load(tmp_path, keep_bytes=size - 1).weights.layers, tuple)


def test_lazy_layers_are_a_sequence(tmp_path: Path) -> None:
    _, tensors = write_huggingface(tmp_path, "qwen3")
    layers = load(tmp_path, keep_bytes=0).weights.layers
    gates = [tensors[f"model.layers.{i}.mlp.gate_proj.weight"] for i in range(2)]
    assert len(layers) == 2
    for found in (list(layers), layers[:], layers[-2:], [layers[0], layers[-1]], list(reversed(layers))[::-1]):
        np.testing.assert_array_equal([layer.gate for layer in found], gates)
    for index in (2, -3):
        with pytest.raises(IndexError):
            layers[index]


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_rows_and_blocks_of_a_table(tmp_path: Path, keep_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, tensors = write_huggingface(tmp_path, "llama", "F32")
    weights = load(tmp_path, keep_bytes).weights
    for table, name in (
        (weights.embedding_table, "model.embed_tokens.weight"),
        (weights.head_table, "lm_head.weight"),
    ):
        assert table.shape == (37, 24)
        np.testing.assert_array_equal(table.array, tensors[name])
        np.testing.assert_array_equal(table.rows([36, 0, 7, 7]), tensors[name][[36, 0, 7, 7]])
        monkeypatch.setattr("golden.llm.checkpoint._BLOCK", 10 * 24 + 5)
        blocks = list(table.blocks())
        assert [len(block) for block in blocks] == [10, 10, 10, 7]
        np.testing.assert_array_equal(np.concatenate(blocks), tensors[name])
        # A block never is less than a row.
        monkeypatch.setattr("golden.llm.checkpoint._BLOCK", 1)
        assert len(list(table.blocks())) == 37


def test_rows_of_a_table_need_no_other_row(tmp_path: Path) -> None:
    """What else the table holds is not even decoded: NaN in row 5 shows only where row 5 is asked for."""

    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"][5, 3] = math.nan

    _, tensors = write_huggingface(tmp_path, "qwen2", change=spoil)
    message = f"{tmp_path / SINGLE}: tensor model.embed_tokens.weight holds NaN or infinity"
    checkpoint = load(tmp_path, keep_bytes=0)
    table = checkpoint.weights.embedding_table
    np.testing.assert_array_equal(table.rows([4, 6]), tensors["model.embed_tokens.weight"][[4, 6]])
    assert refusal(ValueError, table.rows, [4, 5]) == message
    assert refusal(ValueError, checkpoint.validate) == message
    assert refusal(ValueError, Decoder(checkpoint).forward, [1]) == message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_bad_numbers_are_found_when_decoded(tmp_path: Path, dtype: str, value: float) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[NAME] = tensors[NAME].copy()
        tensors[NAME][3, 5] = value

    write_huggingface(tmp_path, "mistral", dtype, change=change)
    message = f"{tmp_path / SINGLE}: tensor {NAME} holds NaN or infinity"
    assert refusal(ValueError, load, tmp_path) == message
    lazy = load(tmp_path, keep_bytes=0)
    assert lazy.weights.layers[0].up.shape == (22, 24)
    assert refusal(ValueError, lambda: lazy.weights.layers[1]) == message
    assert refusal(ValueError, lazy.validate) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing; shape (22, 24) expected"),
        (lambda t: t.__setitem__(NAME, t[NAME].T.copy()), f"tensor {NAME} has shape (24, 22), (22, 24) expected"),
    ],
    ids=["missing", "transposed"],
)
def test_headers_alone_show_what_is_missing(tmp_path: Path, change: Any, message: str) -> None:
    write_huggingface(tmp_path, "mistral", change=change)
    assert refusal(ValueError, load, tmp_path, 0) == f"{tmp_path / SINGLE}: {message}"


def test_truncation_is_found_at_load(tmp_path: Path) -> None:
    write_huggingface(tmp_path, "mistral")
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    found = refusal(ValueError, load, tmp_path, 0)
    assert found == f"{path}: truncated: {len(whole)} bytes expected, {len(whole) - 1} found"


def test_llama2c_layer_by_layer(shared: Path) -> None:
    path = shared / "data" / "stories260K.bin"
    kept, lazy = load(path), load(path, keep_bytes=0)
    np.testing.assert_array_equal(Decoder(lazy).forward(range(1, 30)), Decoder(kept).forward(range(1, 30)))


# -- GGUF ---------------------------------------------------------------------------------------------------

ARCHITECTURE = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Rows of quantized tensors are blocks of 32 numbers.
WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 96}


def gguf_settings(family: str, sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    # GGUF knows no windows that differ from layer to layer.
    return {**sizes, **TINY[family], "use_sliding_window": False}


def interleaved(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head as llama.cpp stores them: 0, half, 1, half + 1, …"""
    order = [(i % 2) * head_dim // 2 + i // 2 for i in range(head_dim)]
    return np.concatenate([head[order] for head in np.split(array, len(array) // head_dim)])


def rope_factors(settings: dict[str, Any], head_dim: int) -> np.ndarray | None:
    """Divisors of the frequencies, from Llama 3's published definition in wavelengths."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if rope.get("rope_type") != "llama3":
        return None
    theta = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    old, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        smooth = min(max((old / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def write_gguf(
    path: Path,
    family: str,
    settings: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: Kind = Kind.F32,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    arch: str | None = None,
    omit: tuple[str, ...] = (),
) -> None:
    """Write a model as llama.cpp's converter does; matrices as ``kind``, vectors as F32."""
    config = ModelConfig.from_huggingface(settings)
    name = ARCHITECTURE[family]
    rope = settings.get("rope_parameters", {})
    writer = gguf.GGUFWriter(path, arch or name)
    fields = {
        "block_count": lambda: writer.add_block_count(config.layers),
        "context_length": lambda: writer.add_context_length(config.max_positions),
        "embedding_length": lambda: writer.add_embedding_length(config.dim),
        "feed_forward_length": lambda: writer.add_feed_forward_length(config.hidden),
        "head_count": lambda: writer.add_head_count(config.heads),
        "head_count_kv": lambda: writer.add_head_count_kv(config.kv_heads),
        "epsilon": lambda: writer.add_layer_norm_rms_eps(config.norm_eps),
        "freq_base": lambda: writer.add_rope_freq_base(rope.get("rope_theta", settings.get("rope_theta", 10000.0))),
        "dimension_count": lambda: writer.add_rope_dimension_count(config.head_dim),
    }
    for field, add in fields.items():
        if field not in omit:
            add()
    if "head_dim" in settings:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.windows[0]:
        writer.add_sliding_window(config.windows[0])
    metadata(writer)
    if (factors := rope_factors(settings, config.head_dim)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config.layers)
    for tensor, array in tensors.items():
        if name == "llama" and ("q_proj" in tensor or "k_proj" in tensor):
            array = interleaved(array, config.head_dim)
        known = names.get_name(tensor, try_suffixes=(".weight", ".bias")) or tensor
        if array.ndim == 1 or kind == Kind.F32 or array.dtype != np.float32:
            writer.add_tensor(known, array)
        else:
            writer.add_tensor(known, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def both(
    folder: Path, family: str, sizes: dict[str, Any] = SIZES, kind: Kind = Kind.F32, **changes: Any
) -> tuple[Path, Path]:
    """The same model as a Hugging Face folder (float32 of what ``kind`` keeps) and as a GGUF file."""
    settings = {**gguf_settings(family, sizes), **changes}
    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))
    write_gguf(folder / "model.gguf", family, settings, tensors, kind)
    (folder / "config.json").write_text(json.dumps(settings))
    kept = {
        name: array if array.ndim == 1 else gguf.dequantize(gguf.quantize(array, kind), kind)
        for name, array in tensors.items()
    }
    write_safetensors(folder / SINGLE, kept, "F32")
    return folder, folder / "model.gguf"


@pytest.mark.parametrize("family", TINY)
def test_gguf_equals_safetensors(tmp_path: Path, family: str) -> None:
    plain, path = (load(place) for place in both(tmp_path, family))
    np.testing.assert_array_equal(Decoder(path).forward(TOKENS), Decoder(plain).forward(TOKENS))
    assert path.files == (tmp_path / "model.gguf",)
    # Short decimal numbers come back as they were, though GGUF stores float32.
    same = {"architecture": plain.config.architecture, "rope_scaling": plain.config.rope_scaling}
    assert replace(path.config, **same) == plain.config
    lazy = load(tmp_path / "model.gguf", keep_bytes=0)
    np.testing.assert_array_equal(Decoder(lazy).forward(TOKENS), Decoder(plain).forward(TOKENS))


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gguf_tensor_types(tmp_path: Path, family: str, kind: Kind) -> None:
    """Whatever the type, the numbers are those the gguf package reads, in rows as in whole tensors."""
    changes = {"head_dim": 32} if family == "qwen3" else {}  # the output projection has heads * head_dim columns
    plain, path = (load(place) for place in both(tmp_path, family, WIDE, kind, **changes))
    np.testing.assert_array_equal(Decoder(path).forward(TOKENS), Decoder(plain).forward(TOKENS))
    table = load(tmp_path / "model.gguf", keep_bytes=0).weights.embedding_table
    np.testing.assert_array_equal(table.rows([30, 2]), plain.weights.embedding[[30, 2]])


@pytest.mark.parametrize(
    ("theta", "head_dim", "scaling"),
    [
        (500000.0, 128, RopeScaling(8.0, 1.0, 4.0, 8192)),
        (500000.0, 64, RopeScaling(32.0, 1.0, 4.0, 8192)),
        (10000.0, 80, RopeScaling(16.0, 1.0, 8.0, 4096)),
        (10000.0, 80, RopeScaling(16.0, 2.0, 8.0, 4096)),
        (500.0, 6, RopeScaling(8.0, 1.0, 4.0, 16)),
        (500.0, 6, RopeScaling(8.0, 1.0, 4.0, 40)),
        (500.0, 2, RopeScaling(8.0, 1.0, 4.0, 5)),
        (500.0, 2, RopeScaling(8.0, 1.0, 4.0, 6)),
        (500.0, 2, RopeScaling(8.0, 1.0, 4.0, 5000)),
    ],
    ids=str,
)
def test_llama3_scaling_from_its_factors(tmp_path: Path, theta: float, head_dim: int, scaling: RopeScaling) -> None:
    """Low 1 and high, original stand for all (k, k * high, k * original), which give the same factors."""
    settings = {
        **gguf_settings("qwen3"),
        "head_dim": head_dim,
        "rope_parameters": {
            **LLAMA3,
            "rope_theta": theta,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        },
    }
    config = ModelConfig.from_huggingface(settings)
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", settings, huggingface_tensors(config))
    found = load(path).config
    np.testing.assert_allclose(rope_frequencies(found), rope_frequencies(config), rtol=2e-6)
    if head_dim >= 64:
        low = scaling.low_frequency_factor
        expected = (scaling.factor, 1.0, scaling.high_frequency_factor / low, scaling.original_positions / low)
        s = found.rope_scaling
        assert s is not None
        assert (s.factor, s.low_frequency_factor, s.high_frequency_factor, s.original_positions) == expected


def test_gguf_without_metadata_that_has_defaults(tmp_path: Path) -> None:
    settings = {**gguf_settings("mistral"), "num_key_value_heads": 4, "sliding_window": None, "eos_token_id": [2, 5]}
    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))
    path = tmp_path / "model.gguf"

    def stops(writer: gguf.GGUFWriter) -> None:
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(5)

    omit = ("context_length", "head_count_kv", "freq_base", "dimension_count")
    write_gguf(path, "mistral", settings, tensors, metadata=stops, omit=omit)
    found = load(path).config
    assert (found.kv_heads, found.max_positions, found.rope_theta, found.stops) == (4, 2048, 10000.0, (2, 5))
    assert found.windows == (None, None)


BLOCK = "blk.1.ffn_up.weight"


def transpose(tensors: dict[str, np.ndarray]) -> None:
    tensors[NAME] = tensors[NAME].T.copy()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t.pop(NAME), {}, f"tensor {BLOCK} is missing; shape (22, 24) expected"),
        (transpose, {}, f"tensor {BLOCK} has shape (24, 22), (22, 24) expected"),
        (put(math.nan), {}, f"tensor {BLOCK} holds NaN or infinity"),
        (put(-math.inf), {}, f"tensor {BLOCK} holds NaN or infinity"),
        (
            lambda t: t.__setitem__(NAME, np.ones((22, 24), np.int8)),
            {},
            f"tensor {BLOCK} is I8, which the gguf package cannot dequantize",
        ),
        (
            lambda t: t.pop("model.embed_tokens.weight"),
            {},
            "tensor token_embd.weight is missing or not a matrix",
        ),
        (
            lambda t: t.__setitem__("blk.0.ffn_up.bias", np.ones(22, np.float32)),
            {},
            "tensor blk.0.ffn_up.bias is not part of a supported llama model",
        ),
        (
            lambda t: t.__setitem__("rope_freqs.weight", np.array([1.0, 2.0, 3.0, 4.0], np.float32)),
            {},
            "tensor rope_freqs.weight has shape (4,) of F32, (3,) of F32 expected",
        ),
        (
            lambda t: t.__setitem__("rope_freqs.weight", np.array([2.0, 1.0, 4.0], np.float32)),
            {},
            "tensor rope_freqs.weight is not Llama 3's scaling, the only one supported",
        ),
        (
            lambda t: t.__setitem__("rope_freqs.weight", np.array([1.0, 0.0, 4.0], np.float32)),
            {},
            "tensor rope_freqs.weight holds a number that is not finite or below 1",
        ),
        (None, {"arch": "gemma2"}, "architecture 'gemma2' is not supported; accepted: llama, qwen2, qwen3"),
        (None, {"omit": ("feed_forward_length",)}, "metadata lacks llama.feed_forward_length"),
        (None, {"omit": ("epsilon",)}, "metadata lacks llama.attention.layer_norm_rms_epsilon"),
        (
            None,
            {"metadata": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "llama.rope.scaling.type must be none, not 'yarn'",
        ),
        (None, {"metadata": lambda w: w.add_expert_count(8)}, "8 experts are not supported"),
        (
            None,
            {"metadata": lambda w: w.add_rope_dimension_count(4), "omit": ("dimension_count",)},
            "llama.rope.dimension_count must be the width of a head, 6, not 4",
        ),
        (
            None,
            {"metadata": lambda w: w.add_head_count_kv([1, 1]), "omit": ("head_count_kv",)},
            "llama.attention.head_count_kv must be a positive integer, not an array",
        ),
        (
            None,
            {"metadata": lambda w: w.add_head_count_kv(3), "omit": ("head_count_kv",)},
            "kv_heads must divide heads, and 3 does not divide 4",
        ),
        (
            None,
            {"metadata": lambda w: w.add_uint16("split.count", 3)},
            "one of 3 parts of a split GGUF file; merge them with llama-gguf-split --merge",
        ),
    ],
)
def test_bad_gguf(tmp_path: Path, change: Any, options: dict[str, Any], message: str) -> None:
    settings = gguf_settings("mistral")
    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))
    if change:
        change(tensors)
    path = tmp_path / "model.gguf"
    write_gguf(path, "mistral", settings, tensors, **options)
    assert refusal(ValueError, load, path) == f"{path}: {message}"
    if "NaN" not in message:
        assert refusal(ValueError, load, path, 0) == f"{path}: {message}"


def test_gguf_qwen2_needs_its_biases(tmp_path: Path) -> None:
    settings = gguf_settings("qwen2")
    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", settings, {name: a for name, a in tensors.items() if not name.endswith(".bias")})
    assert refusal(ValueError, load, path) == f"{path}: tensor blk.0.attn_q.bias is missing; shape (24,) expected"


def test_nan_scale_of_a_quantized_tensor(tmp_path: Path) -> None:
    _, path = both(tmp_path, "qwen3", WIDE, Kind.Q8_0, head_dim=32)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == BLOCK)
    content = bytearray(path.read_bytes())
    content[tensor.data_offset : tensor.data_offset + 2] = np.float16(math.nan).tobytes()
    path.write_bytes(content)
    assert refusal(ValueError, load, path) == f"{path}: tensor {BLOCK} holds NaN or infinity"


def test_damaged_gguf(tmp_path: Path) -> None:
    _, path = both(tmp_path, "qwen2")
    whole = path.read_bytes()
    for end in (len(whole) - 400, 3000, 100, 20, 5):
        path.write_bytes(whole[:end])
        found = refusal(ValueError, load, path)
        assert found.startswith(f"{path}: truncated or damaged GGUF file (")
        assert found.endswith(f" bytes expected, {end} found)")
    # A count that no file could hold ends the reading at once.
    at = whole.index(b"general.architecture") + 20 + 4
    path.write_bytes(whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :])
    assert refusal(ValueError, load, path).startswith(f"{path}: truncated or damaged GGUF file (1152921504606")
    for content in (b"", b"PK\x03\x04" + whole):
        path.write_bytes(content)
        assert refusal(ValueError, load, path) == f"{path}: not a GGUF file: it does not begin with GGUF"
    path.write_bytes(whole[:4] + struct.pack("<I", 99) + whole[8:])
    assert refusal(ValueError, load, path).startswith(f"{path}: truncated or damaged GGUF file (")
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = refusal(ValueError, load, path)
    assert found == f"{path}: a GGUF file of a big-endian machine; a little-endian one was expected"
    other = tmp_path / "model.bin"  # known by its first bytes
    other.write_bytes(whole)
    assert load(other).config.architecture == "qwen2"


# -- tokenizers of GGUF files -------------------------------------------------------------------------------


def write_tokenizer(path: Path, kind: str, tokens: list[Any], write: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_parts() -> tuple[list[str], list[str]]:
    reference_tokenizer()
    model = json.loads((REFERENCE / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]


def test_byte_level_tokenizer(tmp_path: Path) -> None:
    tokens, merges = reference_parts()
    expected = reference_tokenizer()

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(merges)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    found = find_tokenizer(write_tokenizer(tmp_path / "a.gguf", "gpt2", tokens, write))
    assert (found.bos, found.vocab) == (0, 1024)
    for text in [*TEXTS, "def f(x):\n    return 12345 + x  # doesn't\n"]:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


@pytest.mark.parametrize(
    ("pre", "bos", "digits"), [("llama-bpe", 0, ["123", "45"]), ("qwen2", None, ["1", "2", "3", "4", "5"])]
)
def test_words_are_cut_before_merging(tmp_path: Path, pre: str, bos: int | None, digits: list[str]) -> None:
    """Digits are cut by threes for Llama 3, which opens its texts, and one by one for Qwen, which does not."""
    tokens, _ = reference_parts()

    def write(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(["a b"])
        writer.add_token_types([3] + [1] * 256 + [4, 1, 1])
        writer.add_bos_token_id(0)

    tokens = ["<s>", *(token for token in tokens if len(token) == 1), "<tool>", "ab", "cd"]
    words: Any = load_tokenizer(write_tokenizer(tmp_path / "a.gguf", "gpt2", tokens, write))
    text = "it's 12345 ab\n\n !?"
    pieces = words._library.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in pieces] == ["it", "'s", " ", *digits, " ab", "\n\n", " !?"]
    assert words.bos == bos
    assert words.decode(words.encode(text)) == text
    assert words.encode("<tool>ab<s>", bos=False) == [257, 258, 0]
    assert words.decode([0, 257, 258]) == "<tool>ab"
    # Llama 3 takes a whole word that is a token even where no merges lead to it.
    assert (words.encode("cd", bos=False) == [259]) == (pre == "llama-bpe")


def test_sentencepiece_tokenizer(tmp_path: Path, shared: Path) -> None:
    expected: Any = load_tokenizer(shared / "data" / "tok512.bin")
    tokens = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256)), *expected._bytes[259:]]
    tokens = [*(token.replace(b" ", "\u2581".encode()) for token in tokens), b"on"]  # the last is a control token

    def write(writer: gguf.GGUFWriter, prefix: bool = True) -> None:
        writer.add_token_scores([*expected._scores, 1e9])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 253, 3])
        writer.add_bos_token_id(1)
        writer.add_add_space_prefix(prefix)

    path = tmp_path / "a.gguf"
    found = find_tokenizer(write_tokenizer(path, "llama", tokens, write))
    assert found.vocab == 513
    assert found.decode([512]) == ""
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text
    bare = find_tokenizer(write_tokenizer(path, "llama", tokens, lambda writer: write(writer, False)))
    assert bare.encode(" Once upon") == expected.encode("Once upon")
    assert bare.decode(bare.encode(" Once upon")) == " Once upon"


def test_bad_gguf_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    hint = "name another with --tokenizer"

    def found(kind: str, tokens: list[str], write: Callable[[gguf.GGUFWriter], None]) -> str:
        return refusal(ValueError, find_tokenizer, write_tokenizer(path, kind, tokens, write))

    def merges(pre: str, merge: str) -> Callable[[gguf.GGUFWriter], None]:
        def write(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_pre(pre)
            writer.add_token_merges([merge])

        return write

    assert found("bert", ["a"], lambda w: None) == f"{path}: its tokenizer is 'bert', not gpt2 or llama; {hint}"
    assert found("gpt2", ["a"], merges("tekken", "a b")) == (
        f"{path}: its tokenizer cuts words like 'tekken', not gpt-2, llama-bpe, qwen2; {hint}"
    )
    assert found("gpt2", ["a"], merges("qwen2", "a b")).startswith(f"{path}: its tokenizer is damaged (")
    assert found("llama", ["a"], lambda w: None) == f"{path}: its tokenizer is not that of a Llama; {hint}"
    scores = found("llama", ["a"], lambda w: w.add_token_scores([0.0]))
    assert scores == f"{path}: its tokenizer's entries 3 to 258 are not the 256 bytes; {hint}"


def test_generating_from_gguf(tmp_path: Path) -> None:
    """One file holds all that generation needs, and gives the text that the same model gives from safetensors."""
    tokens, merges = reference_parts()
    settings = {**gguf_settings("qwen3"), "vocab_size": 1024}

    def tokenizer(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_merges(merges)
        writer.add_token_types([3] + [1] * (len(tokens) - 1))
        writer.add_bos_token_id(0)
        writer.add_add_bos_token(True)

    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))
    write_gguf(tmp_path / "model.gguf", "qwen3", settings, tensors, metadata=tokenizer)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    write_safetensors(tmp_path / SINGLE, tensors, "F32")
    texts = []
    for checkpoint, extra in ((tmp_path / "model.gguf", []), (tmp_path, ["--tokenizer", str(REFERENCE)])):
        arguments = ["--checkpoint", str(checkpoint), "--prompt", "def", "--tokens", "20", *extra]
        result = CliRunner().invoke(generate_command, arguments)
        assert result.exit_code == 0, result.output
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 20


# -- 8B -----------------------------------------------------------------------------------------------------

LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192},
    "hidden_act": "silu",
}


def write_large(folder: Path, layers: int) -> None:
    """A bfloat16 checkpoint of Llama-3.1-8B's shapes with few layers; 16 MB of random numbers serve all matrices."""
    settings = {**LLAMA31_8B, "num_hidden_layers": layers}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    shapes, outside = tensor_shapes(ModelConfig.from_huggingface(settings))
    names = dict(outside)
    for i in range(layers):
        names.update({f"model.layers.{i}.{name}": shape for name, shape in shapes.values()})
    entries, place = {}, 0
    for name, shape in names.items():
        end = place + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, end]}
        place = end
    tile = to_bfloat16(np.random.default_rng(0).normal(0.0, 0.02, 8_388_593)).tobytes()  # a prime: no rows are alike
    header = json.dumps(entries).encode()
    with open(folder / SINGLE, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for shape in names.values():
            left = 2 * math.prod(shape)
            if len(shape) == 1:
                file.write(to_bfloat16(np.ones(shape)).tobytes())
                continue
            while left:
                left -= file.write(tile[:left])


RUN_LARGE = """
import json, resource, sys, time
from golden.llm.checkpoint import load
from golden.llm.reference import Decoder
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
peaks = {"base": peak()}
checkpoint = load(sys.argv[1])
weights, decoder = checkpoint.weights, Decoder(checkpoint)
peaks["load"] = peak()
stream = weights.embedding_table.rows(range(8))
for i in range(checkpoint.config.layers):
    stream = decoder.layer(i, weights.layers[i], stream)
peaks["layers"] = peak()
start = time.monotonic()
assert decoder.forward(range(8)).shape == (8, 128256)
print(json.dumps({**peaks, "forward": peak(), "seconds": time.monotonic() - start}))
"""


@pytest.mark.skipif(not os.environ.get("NEARMEM_EXHAUSTIVE"), reason="NEARMEM_EXHAUSTIVE=1 runs it: writes 4 GB")
def test_memory_of_8b_shapes(tmp_path: Path) -> None:
    """What 8 tokens of a Llama-3.1-8B need does not grow with its layers (docs/checkpoints.md has the figures)."""
    peaks = []
    for layers in (2, 4):
        folder = tmp_path / "large"
        try:
            write_large(folder, layers)
            done = subprocess.run(
                [sys.executable, "-c", RUN_LARGE, str(folder)],
                check=True,
                capture_output=True,
                text=True,
                cwd=Path(__file__).parents[1],
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        found = json.loads(done.stdout)
        print(layers, {key: value if key == "seconds" else round(value / 1e9, 2) for key, value in found.items()})
        assert found["load"] - found["base"] < 50e6
        assert found["layers"] < 1.2e9
        peaks.append(found["forward"])
    assert peaks[1] - peaks[0] < 100e6
    assert peaks[1] < 4e9
