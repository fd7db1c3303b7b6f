"""The float language model: loaders, tokenizers, decoder, captures and the reference checkpoint."""

from __future__ import annotations

import json
import math
import struct
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import tokenizers
from click.testing import CliRunner

from golden.llm import capture as captures
from golden.llm import train
from golden.llm.checkpoint import INDEX, REFERENCE, SINGLE, from_bfloat16, load, to_bfloat16
from golden.llm.config import ModelConfig, RopeScaling
from golden.llm.formats import SCHEMES
from golden.llm.generate import generate_command
from golden.llm.integer import IntegerDecoder
from golden.llm.linear import LinearConfig, LinearWeights, linear
from golden.llm.prepare import quantize
from golden.llm.reference import Decoder, cross_entropy, generate, rope_frequencies, silu
from golden.llm.tokenizer import HuggingFaceTokenizer, find_tokenizer, load_tokenizer, stream_text
from golden.nonlinear.requantize import RequantizeConfig, requantize
from golden.nonlinear.residual import ResidualConfig, residual
from golden.nonlinear.rmsnorm import RmsNormConfig, rmsnorm
from golden.nonlinear.rope import RopeConfig, rotate
from golden.nonlinear.silu import SiluConfig, swiglu
from golden.nonlinear.softmax import SoftmaxConfig, softmax
from golden.rotated.fwht import FwhtConfig, fwht

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# One of each architecture, between them every feature; sizes are odd so that no two can be confused.
TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": 2,
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 1, "sliding_window": 5},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "num_key_value_heads": 2,
        "sliding_window": 3,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": 10,
        "rope_parameters": {**LLAMA3, "rope_theta": 900.0},
        "tie_word_embeddings": True,
    },
}
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 22,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def huggingface_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names, large enough that every path matters to the logits."""
    rng = np.random.default_rng(seed)
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab, c.dim),
        "model.norm.weight": (c.dim,),
    }
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab, c.dim)
    for i in range(c.layers):
        at = f"model.layers.{i}."
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (c.dim,)
        for name, rows in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows * c.head_dim, c.dim)
            if c.qkv_bias:
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * c.head_dim,)
            if c.qk_norm and name != "v":
                shapes[f"{at}self_attn.{name}_norm.weight"] = (c.head_dim,)
        shapes[f"{at}self_attn.o_proj.weight"] = (c.dim, c.heads * c.head_dim)
        if c.output_bias:
            shapes[f"{at}self_attn.o_proj.bias"] = (c.dim,)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (c.hidden, c.dim)
        shapes[f"{at}mlp.down_proj.weight"] = (c.dim, c.hidden)
    return {
        name: (rng.normal(1.0, 0.3, s) if "norm" in name else rng.normal(0.0, 0.4, s)).astype(np.float32)
        for name, s in shapes.items()
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str) -> None:
    """Write the format by hand, since its library takes no bfloat16 from NumPy; it reads the result back."""
    coded = {"F32": lambda x: x, "F16": lambda x: x.astype(np.float16), "BF16": to_bfloat16}[dtype]
    header, data = {}, b""
    for name, array in tensors.items():
        bits = coded(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(bits)],
        }
        data += bits
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with safetensors.safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(tensors)


def write_huggingface(
    folder: Path, family: str, dtype: str = "F32", shards: int = 1, change: Any = None
) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Write a tiny checkpoint; ``change`` may alter the tensors before they are written."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**SIZES, **TINY[family]}
    (folder / "config.json").write_text(json.dumps(settings))
    config = ModelConfig.from_huggingface(settings)
    tensors = huggingface_tensors(config)
    if change:
        change(tensors)
    if shards == 1:
        write_safetensors(folder / SINGLE, tensors, dtype)
    else:
        names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        places = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
        for name in names:
            write_safetensors(folder / name, {t: tensors[t] for t in tensors if places[t] == name}, dtype)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return config, tensors


# -- an independent decoder: plain loops, float64, Hugging Face's names ------------------------------


def oracle_norm(x: list[float], gamma: np.ndarray, eps: float) -> list[float]:
    scale = 1.0 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [v * scale * float(g) for v, g in zip(x, gamma, strict=True)]


def oracle_angles(settings: dict[str, Any], head_dim: int) -> list[float]:
    """Radians per position, after the formula of Llama 3.1's published `apply_scaling`."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    theta = rope.get("rope_theta", settings.get("rope_theta", 10000.0))
    angles = []
    for i in range(head_dim // 2):
        frequency = 1.0 / theta ** (2 * i / head_dim)
        if rope.get("rope_type") == "llama3":
            old, low, high = (
                rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
            )
            wavelength = 2 * math.pi / frequency
            if wavelength > old / low:
                frequency /= rope["factor"]
            elif wavelength >= old / high:
                smooth = (old / wavelength - low) / (high - low)
                frequency = (1 - smooth) * frequency / rope["factor"] + smooth * frequency
        angles.append(frequency)
    return angles


def oracle_turn(x: list[float], position: int, angles: list[float]) -> list[float]:
    half, y = len(x) // 2, list(x)
    for i, angle in enumerate(angles):
        cos, sin = math.cos(position * angle), math.sin(position * angle)
        y[i] = x[i] * cos - x[i + half] * sin
        y[i + half] = x[i + half] * cos + x[i] * sin
    return y


def oracle_logits(
    settings: dict[str, Any], tensors: dict[str, np.ndarray], tokens: list[int], windows: list[int | None]
) -> np.ndarray:
    heads, eps = settings["num_attention_heads"], settings["rms_norm_eps"]
    kv_heads = settings["num_key_value_heads"]
    d = settings.get("head_dim", settings["hidden_size"] // heads)
    angles = oracle_angles(settings, d)

    def linear(name: str, x: list[float]) -> list[float]:
        y = tensors[f"{name}.weight"].astype(np.float64) @ np.array(x)
        return list(y + tensors.get(f"{name}.bias", np.zeros(len(y))))

    stream = [[float(v) for v in tensors["model.embed_tokens.weight"][token]] for token in tokens]
    for layer in range(settings["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            h = oracle_norm(x, tensors[f"{at}input_layernorm.weight"], eps)
            q, k, v = (linear(f"{at}self_attn.{name}_proj", h) for name in "qkv")
            q_heads = [q[n * d : n * d + d] for n in range(heads)]
            k_heads = [k[n * d : n * d + d] for n in range(kv_heads)]
            if f"{at}self_attn.q_norm.weight" in tensors:
                q_heads = [oracle_norm(r, tensors[f"{at}self_attn.q_norm.weight"], eps) for r in q_heads]
                k_heads = [oracle_norm(r, tensors[f"{at}self_attn.k_norm.weight"], eps) for r in k_heads]
            queries.append([oracle_turn(r, position, angles) for r in q_heads])
            keys.append([oracle_turn(r, position, angles) for r in k_heads])
            values.append([v[n * d : n * d + d] for n in range(kv_heads)])
        for position, x in enumerate(stream):
            window = windows[layer]
            first = 0 if window is None else max(0, position - window + 1)
            context: list[float] = []
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = [
                    sum(a * b for a, b in zip(queries[position][head], keys[s][shared], strict=True)) / math.sqrt(d)
                    for s in range(first, position + 1)
                ]
                powers = [math.exp(score - max(scores)) for score in scores]
                for i in range(d):
                    mixed = sum(p * values[first + n][shared][i] for n, p in enumerate(powers))
                    context.append(mixed / sum(powers))
            x = [a + b for a, b in zip(x, linear(f"{at}self_attn.o_proj", context), strict=True)]
            h = oracle_norm(x, tensors[f"{at}post_attention_layernorm.weight"], eps)
            gate, up = linear(f"{at}mlp.gate_proj", h), linear(f"{at}mlp.up_proj", h)
            product = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            stream[position] = [a + b for a, b in zip(x, linear(f"{at}mlp.down_proj", product), strict=True)]
    matrix = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).astype(np.float64)
    return np.array([matrix @ np.array(oracle_norm(x, tensors["model.norm.weight"], eps)) for x in stream])


WINDOWS: dict[str, list[int | None]] = {
    "llama": [None, None],
    "mistral": [5, 5],
    "qwen2": [None, 3],
    "qwen3": [None, None],
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, SIZES["vocab_size"], 19)]


@pytest.mark.parametrize("family", TINY)
def test_decoder_against_plain_loops(tmp_path: Path, family: str) -> None:
    config, tensors = write_huggingface(tmp_path, family)
    assert list(config.windows) == WINDOWS[family]
    expected = oracle_logits({**SIZES, **TINY[family]}, tensors, TOKENS, WINDOWS[family])
    found = Decoder(load(tmp_path)).forward(TOKENS)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("pieces", [[1] * 19, [7, 1, 11], [18, 1]], ids=str)
def test_decoding_equals_prefill(tmp_path: Path, family: str, pieces: list[int]) -> None:
    write_huggingface(tmp_path, family)
    model = Decoder(load(tmp_path))
    cache, found, at = model.new_cache(19), [], 0
    for count in pieces:
        found.append(model.forward(TOKENS[at : at + count], cache))
        at += count
    assert cache.length == 19
    np.testing.assert_allclose(np.concatenate(found), model.forward(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("dtype", "shards"), [("F32", 3), ("F16", 1), ("BF16", 1), ("BF16", 2)])
@pytest.mark.parametrize("family", TINY)
def test_stored_forms(tmp_path: Path, family: str, dtype: str, shards: int) -> None:
    config, tensors = write_huggingface(tmp_path, family, dtype, shards)
    found = load(tmp_path)
    assert found.config == config
    error = {"F32": 0.0, "F16": 2.0**-11, "BF16": 2.0**-8}[dtype]
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_allclose(found.weights.layers[1].down, down, rtol=error, atol=1e-7)
    assert (found.weights.head is found.weights.embedding) == config.tied
    assert (found.weights.layers[0].query_bias is not None) == config.qkv_bias
    assert (found.weights.layers[0].key_norm is not None) == config.qk_norm
    assert len(found.files) == (2 if shards == 1 else 2 + shards)
    one_file = tmp_path / (SINGLE if shards == 1 else INDEX)
    assert load(one_file).sha256() == found.sha256()


def test_bfloat16_codes() -> None:
    """All 65,536 patterns decode to their definition, and finite ones encode back to themselves."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = from_bfloat16(bits)
    sign, exponent, fraction = bits >> 15, (bits >> 7) & 0xFF, (bits & 0x7F).astype(np.float64)
    normal = np.ldexp(1 + fraction / 128, exponent.astype(int) - 127)
    expected = np.where(exponent == 0, np.ldexp(fraction / 128, -126), normal) * np.where(sign, -1.0, 1.0)
    finite = exponent < 255
    np.testing.assert_array_equal(values[finite], expected[finite])
    np.testing.assert_array_equal(to_bfloat16(values[finite]), bits[finite])
    # Ties go to the even pattern: 1 + 2**-8 lies halfway between 1 and 1 + 2**-7.
    halfway = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], dtype=np.float32)
    np.testing.assert_array_equal(to_bfloat16(halfway), [0x3F80, 0x3F82, 0x3F81])


def test_llama3_frequencies() -> None:
    """Llama 3.1's own constants: the fast pairs are kept, the slow ones divided by 8, the rest between."""
    settings = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = ModelConfig(
        "llama",
        4096,
        1,
        32,
        8,
        128,
        14336,
        128256,
        rope_theta=500000.0,
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    )
    found = rope_frequencies(config)
    np.testing.assert_allclose(found, oracle_angles({"rope_parameters": settings}, 128), rtol=1e-12)
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    ratio = found / plain
    assert (ratio[:29] == 1).all()
    np.testing.assert_allclose(ratio[35:], 1 / 8, rtol=1e-12)
    assert ((ratio[29:35] < 1) & (ratio[29:35] > 1 / 8)).all()


def test_old_and_new_rope_settings_agree() -> None:
    base = {**SIZES, "architectures": ["LlamaForCausalLM"]}
    old = ModelConfig.from_huggingface({**base, "rope_theta": 500.0, "rope_scaling": LLAMA3})
    new = ModelConfig.from_huggingface({**base, "rope_parameters": {**LLAMA3, "rope_theta": 500.0}})
    assert old == new
    oldest = {**LLAMA3, "type": "llama3"}
    del oldest["rope_type"]
    assert old == ModelConfig.from_huggingface({**base, "rope_theta": 500.0, "rope_scaling": oldest})


def test_silu_at_extremes() -> None:
    x = np.array([-3e38, -100.0, -1.0, 0.0, 1.0, 100.0, 3e38], dtype=np.float32)
    with np.errstate(over="raise", invalid="raise"):
        y = silu(x)
    sigmoid_1 = 1 / (1 + math.exp(-1))
    np.testing.assert_allclose(y, [0, 0, sigmoid_1 - 1, 0, sigmoid_1, 100, 3e38], rtol=1e-6, atol=1e-30)


# -- bad requests: one line each ----------------------------------------------------------------------


def refusal(error: type[Exception], action: Any, *arguments: Any) -> str:
    with pytest.raises(error) as caught:
        action(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


ACCEPTED = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            f"architecture 'GPT2LMHeadModel' is not supported; accepted: {ACCEPTED}",
        ),
        (
            {"architectures": None},
            f"architecture None is not supported; accepted: {ACCEPTED}",
        ),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"vocab_size": "37"}, "config.json: vocab_size must be a positive integer, not '37'"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers must be a positive integer, not 0"),
        ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps must be a number, not 'small'"),
        ({"hidden_act": "gelu"}, "config.json: hidden_act must be silu, not 'gelu'"),
        ({"mlp_bias": True}, "config.json: mlp_bias true is not supported"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads, and 3 does not divide 4"),
        ({"head_dim": 5}, "head_dim must be even, not 5"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "config.json: rope scaling must be default or llama3, not 'yarn'",
        ),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1.5}},
            "config.json: original_max_position_embeddings must be a positive integer, not 1.5",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "config.json lacks factor"),
        ({"rope_scaling": {**LLAMA3, "factor": 0.5}}, "rope scaling: factor must be at least 1, not 0.5"),
        ({"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor must be 1, not 0.5"),
        (
            {"eos_token_id": ["</s>"]},
            "config.json: eos_token_id must be an integer or a list of them, not ['</s>']",
        ),
    ],
)
def test_bad_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "architectures": ["LlamaForCausalLM"], **change}))
    assert refusal(ValueError, ModelConfig.from_huggingface_file, path) == f"{path}: {message}"


def test_config_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe{}")
    assert refusal(ValueError, ModelConfig.from_huggingface_file, path).startswith(f"{path}: not a JSON file (")
    path.write_text("[]")
    found = refusal(ValueError, ModelConfig.from_huggingface_file, path)
    assert found == f"{path}: a JSON object was expected, not list"


def test_missing_files(tmp_path: Path) -> None:
    away = tmp_path / "away"
    assert refusal(FileNotFoundError, load, away) == f"{away}: no such checkpoint"
    assert refusal(ValueError, load, tmp_path) == f"{tmp_path}: no {SINGLE} or {INDEX} in this folder"
    (tmp_path / SINGLE).write_bytes(b"")
    found = refusal(FileNotFoundError, load, tmp_path)
    assert found == f"{tmp_path / 'config.json'}: no such file; it must lie beside the weights"
    write_huggingface(tmp_path / "shards", "qwen2", shards=2)
    shard = tmp_path / "shards" / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert refusal(FileNotFoundError, load, tmp_path / "shards") == f"{shard}: no such file; {INDEX} names it"
    (tmp_path / "shards" / INDEX).write_text("{}")
    found = refusal(ValueError, load, tmp_path / "shards")
    assert found == f"{tmp_path / 'shards' / INDEX}: not a safetensors index: no weight_map in it"


NAME = "model.layers.1.mlp.up_proj.weight"


def put(value: float) -> Any:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[NAME][3, 5] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), f"tensor {NAME} is missing; shape (22, 24) expected"),
        (
            lambda t: t.__setitem__(NAME, t[NAME].T.copy()),
            f"tensor {NAME} has shape (24, 22), (22, 24) expected",
        ),
        (put(math.nan), f"tensor {NAME} holds NaN or infinity"),
        (put(-math.inf), f"tensor {NAME} holds NaN or infinity"),
    ],
    ids=["missing", "transposed", "nan", "infinity"],
)
def test_bad_tensors(tmp_path: Path, change: Any, message: str) -> None:
    write_huggingface(tmp_path, "mistral", change=change)
    path = tmp_path / SINGLE
    assert refusal(ValueError, load, tmp_path) == f"{path}: {message}"


def test_untied_model_without_a_head(tmp_path: Path) -> None:
    write_huggingface(tmp_path, "llama", change=lambda t: t.pop("lm_head.weight"))
    found = refusal(ValueError, load, tmp_path)
    assert found == f"{tmp_path / SINGLE}: tensor lm_head.weight is missing; shape (37, 24) expected"


def test_damaged_safetensors(tmp_path: Path) -> None:
    write_huggingface(tmp_path, "qwen3")
    path = tmp_path / SINGLE
    whole = path.read_bytes()
    header = struct.unpack_from("<Q", whole)[0]

    path.write_bytes(whole[:-100])
    expected = f"{path}: truncated: {len(whole)} bytes expected, {len(whole) - 100} found"
    assert refusal(ValueError, load, path) == expected
    path.write_bytes(whole[:100])
    assert (
        refusal(ValueError, load, path) == f"{path}: truncated: the header takes {header} bytes, the file has 92 left"
    )
    foreign = f"{path}: not a safetensors file"
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000))
    assert refusal(ValueError, load, path) == f"{foreign}: no header length in its first 8 bytes"
    path.write_bytes(b"")
    assert refusal(ValueError, load, path) == f"{foreign}: no header length in its first 8 bytes"
    path.write_bytes(struct.pack("<Q", 40) + b"PK\x03\x04" + bytes(200))
    assert refusal(ValueError, load, path) == f"{foreign}: its header is no JSON object"
    path.write_bytes(struct.pack("<Q", 40) + b"{" + bytes(200))
    assert refusal(ValueError, load, path) == f"{foreign}: its header is no JSON object"

    def rewrite(**changes: Any) -> None:
        entries = json.loads(whole[8 : 8 + header])
        entries[NAME].update(changes)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + header :])

    rewrite(dtype="I8")
    assert refusal(ValueError, load, path) == f"{path}: tensor {NAME} is I8; accepted: F32, F16, BF16"
    rewrite(dtype="BF16")
    assert refusal(ValueError, load, path) == f"{path}: tensor {NAME} takes 2112 bytes, 1056 expected"
    rewrite(data_offsets=[10])
    assert refusal(ValueError, load, path) == f"{path}: tensor {NAME} has a malformed header entry"


def llama2c_bytes(untied: bool = False) -> bytes:
    """A random llama2.c file: dim 8, hidden 12, 1 layer, 2 heads, 1 kv head, vocab 300, 16 positions."""
    rng = np.random.default_rng(1)
    head = struct.pack("<7i", 8, 12, 1, 2, 1, -300 if untied else 300, 16)
    count = 300 * 8 + 8 + 64 + 32 + 32 + 64 + 8 + 3 * 96 + 8 + 2 * 16 * 2 + (300 * 8 if untied else 0)
    return head + rng.normal(0, 0.3, count).astype("<f4").tobytes()


def test_llama2c_files(tmp_path: Path) -> None:
    path = tmp_path / "tiny.bin"
    path.write_bytes(llama2c_bytes(untied=True))
    untied = load(path)
    assert untied.weights.head is not untied.weights.embedding
    np.testing.assert_array_equal(untied.weights.head.ravel(), np.frombuffer(path.read_bytes()[-9600:], "<f4"))
    path.write_bytes(llama2c_bytes())
    tied = load(path)
    assert tied.weights.head is tied.weights.embedding
    # Pair (2, 3) of the stored order is pair (1, 1 + 2) of ours.
    stored = np.frombuffer(path.read_bytes(), "<f4", offset=28)[300 * 8 + 8 :][:64].reshape(8, 8)
    np.testing.assert_array_equal(tied.weights.layers[0].query, stored[[0, 2, 1, 3, 4, 6, 5, 7]])

    whole = llama2c_bytes()
    path.write_bytes(whole[:-4])
    assert refusal(ValueError, load, path) == f"{path}: truncated: {len(whole)} bytes expected, {len(whole) - 4} found"
    path.write_bytes(whole + bytes(8))
    found = refusal(ValueError, load, path)
    assert found == f"{path}: not a llama2.c checkpoint: {len(whole)} bytes expected, {len(whole) + 8} found"
    path.write_bytes(whole[:10])
    assert refusal(ValueError, load, path) == f"{path}: a llama2.c header takes 28 bytes, not 10"
    path.write_bytes(b"PK\x03\x04" + whole)
    found = refusal(ValueError, load, path)
    assert found == f"{path}: not a llama2.c checkpoint: its first 28 bytes give no possible model"
    path.write_bytes(struct.pack("<I", 0x616B3432) + whole)
    found = refusal(ValueError, load, path)
    assert found == f"{path}: a llama2.c file of version 1 or later; version 0 was expected"
    path.write_bytes(whole[:60] + struct.pack("<f", math.nan) + whole[64:])
    assert refusal(ValueError, load, path) == f"{path}: tensor token_embedding_table holds NaN or infinity"


def test_bad_tokens(tmp_path: Path) -> None:
    write_huggingface(tmp_path, "mistral")
    model = Decoder(load(tmp_path))
    assert refusal(ValueError, model.forward, [0, 37]) == "token ids must lie in 0..36, not 0..37"
    assert refusal(ValueError, model.forward, []) == "tokens must be one row of ids, not float64 of shape (0,)"
    assert refusal(ValueError, model.forward, [1] * 49) == "49 positions are more than the 48 there is room for"
    found = refusal(ValueError, model.generate_greedy, [1, 2], 47)
    assert found == "2 tokens of prompt and 47 to generate exceed the model's 48 positions"
    found = refusal(ValueError, model.generate_greedy, [], 4)
    assert found == "the prompt is empty and the tokenizer knows no opening token"
    assert refusal(ValueError, generate, model, [1], 4, -1.0) == "temperature must be 0 or more, not -1.0"


# -- tokenizers -----------------------------------------------------------------------------------------

TEXTS = [
    "Once upon a time",
    "",
    " leading",
    "two  spaces\nand a line\n",
    "naïve café, 東京 🙂",
    "\ttab",
    "<s>",
]


def reference_tokenizer() -> Any:
    if not (REFERENCE / "tokenizer.json").is_file():
        pytest.skip("the reference checkpoint is not there")
    return load_tokenizer(REFERENCE)


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_reference_tokenizer_round_trip(text: str) -> None:
    words = reference_tokenizer()
    ids = words.encode(text)
    assert ids[0] == words.bos == 0
    assert words.encode(text, bos=False) == ids[1:]
    assert words.decode(ids) == text
    assert words.vocab == 1024


@pytest.mark.parametrize("text", TEXTS)
def test_llama2c_tokenizer_round_trip(shared: Path, text: str) -> None:
    words = load_tokenizer(shared / "data" / "tok512.bin")
    ids = words.encode(text)
    assert ids[0] == words.bos == 1
    assert words.encode(text, bos=False) == ids[1:]
    assert words.decode(ids) == text
    assert words.vocab == 512


def test_llama2c_tokenizer_against_its_definition(shared: Path) -> None:
    """The merge order of llama2.c, written as it stands there: scan all pairs, join the best, repeat."""
    words: Any = load_tokenizer(shared / "data" / "tok512.bin")
    text = (shared / "data" / "tinystories-a.txt").read_text(encoding="utf-8")[:1500] + "\x00é"
    ids = []
    for character in " " + text:
        spelt = character.encode()
        ids += [words._ids[spelt]] if spelt in words._ids else [3 + byte for byte in spelt]
    while True:
        spelt_pairs = [words._bytes[a] + words._bytes[b] for a, b in pairwise(ids)]
        pairs = [(words._ids.get(spelt), i) for i, spelt in enumerate(spelt_pairs)]
        best = max(((words._scores[m], -i, m) for m, i in pairs if m is not None), default=None)
        if best is None:
            break
        ids[-best[1] : -best[1] + 2] = [best[2]]
    assert words.encode(text, bos=False) == ids


def test_streamed_text_is_the_whole_text(shared: Path) -> None:
    text = "naïve 東京 🙂 " * 40
    for words in (load_tokenizer(shared / "data" / "tok512.bin"), reference_tokenizer()):
        ids = words.encode(text)
        pieces = list(stream_text(words, ids[:3], ids[3:]))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces[1:])


def test_opening_token_of_other_tokenizers(tmp_path: Path) -> None:
    model = tokenizers.models.WordLevel({"<unk>": 0, "<begin>": 1, "<s>": 2, "a": 3}, unk_token="<unk>")
    library = tokenizers.Tokenizer(model)
    library.add_special_tokens(["<begin>", "<s>"])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    assert HuggingFaceTokenizer(path).encode("a") == [2, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<begin>"}}')
    assert HuggingFaceTokenizer(path).encode("a") == [1, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert HuggingFaceTokenizer(path).encode("a") == [3]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    assert HuggingFaceTokenizer(path).encode("a") == [3]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 1)]
    )
    library.save(str(path))
    assert HuggingFaceTokenizer(path).encode("a") == [1, 3]


def test_bad_tokenizers(tmp_path: Path, shared: Path) -> None:
    away = tmp_path / "tok.bin"
    assert refusal(FileNotFoundError, load_tokenizer, away) == f"{away}: no such tokenizer"
    found = refusal(FileNotFoundError, find_tokenizer, away)
    assert found == f"{tmp_path}: no tokenizer beside the checkpoint; name one with --tokenizer"
    whole = (shared / "data" / "tok512.bin").read_bytes()
    away.write_bytes(whole[:-1])
    assert refusal(ValueError, load_tokenizer, away) == f"{away}: truncated in entry 511"
    away.write_bytes(whole[:4000])
    assert refusal(ValueError, load_tokenizer, away).startswith(f"{away}: truncated in entry 2")
    away.write_bytes(b"\x7fELF" * 100)
    found = refusal(ValueError, load_tokenizer, away)
    assert found == f"{away}: not a llama2.c tokenizer: entry 0 is malformed"
    away.write_bytes(whole[:4] + whole[13:])
    assert refusal(ValueError, load_tokenizer, away).startswith(f"{away}: not a llama2.c tokenizer: entr")
    foreign = tmp_path / "tokenizer.json"
    foreign.write_text("{}")
    assert refusal(ValueError, load_tokenizer, foreign).startswith(f"{foreign}: not a tokenizer.json (")


# -- stories260K ------------------------------------------------------------------------------------------


def test_stories_greedy_text(shared: Path) -> None:
    """llama2.c prints this text for `run stories260K.bin -t 0 -n 256 -i "Once upon a time"`."""
    words = find_tokenizer(shared / "data" / "stories260K.bin")
    model = Decoder(load(shared / "data" / "stories260K.bin"))
    prompt = words.encode("Once upon a time")
    ids = model.generate_greedy(prompt, 257 - len(prompt))
    text = words.decode([*prompt, *ids]) + "\n"
    assert text == (shared / "data" / "stories260K-greedy.txt").read_text(encoding="utf-8")


def test_generate_command(shared: Path) -> None:
    where = ["--checkpoint", str(shared / "data" / "stories260K.bin"), "--prompt", "Once upon a time"]
    result = CliRunner().invoke(generate_command, [*where, "--tokens", "40", "--greedy"])
    assert result.exit_code == 0
    expected = (shared / "data" / "stories260K-greedy.txt").read_text(encoding="utf-8")
    assert expected.startswith(result.stdout.removesuffix("\n"))
    assert result.stderr.startswith("40 tokens, ")
    drawn = [*where, "--tokens", "20", "--temperature", "0.9"]
    first, second, other = (
        CliRunner().invoke(generate_command, [*drawn, "--seed", seed]).stdout for seed in ("1", "1", "2")
    )
    assert first == second != other
    result = CliRunner().invoke(generate_command, [*drawn, "--greedy"])
    assert str(result.exception) == "--greedy and --temperature exclude each other"
    result = CliRunner().invoke(generate_command, [*where, "--tokenizer", str(REFERENCE)])
    assert str(result.exception) == (
        "the tokenizer has 1024 entries and the checkpoint only 512; they do not belong together"
    )


# -- captures ---------------------------------------------------------------------------------------------


def test_capture_recomputes_the_layer(tmp_path: Path, shared: Path) -> None:
    """From what a capture holds, float64 leads from each site to the next."""
    checkpoint = shared / "data" / "stories260K.bin"
    found = captures.capture(checkpoint, "Once upon a time, there was a", 12, name="story")
    loaded = load(checkpoint)
    c, layer = loaded.config, loaded.weights.layers[1]
    count = len(found["tokens"])
    assert captures.provenance(found)["tokens"] == count
    assert captures.provenance(found)["text"] == "story"
    assert captures.provenance(found)["checkpoint_sha256"] == loaded.sha256()
    floats = captures.floats(found)
    assert all(v.dtype == np.float32 for k, v in floats.items() if "/" in k and not k.endswith("/lengths"))
    assert found["1/scores"].shape == (c.heads * count, count)
    np.testing.assert_array_equal(found["1/lengths"], np.tile(np.arange(1, count + 1), c.heads))

    cos = np.cos(found["positions"][:, None] * rope_frequencies(c))[:, None]
    sin = np.sin(found["positions"][:, None] * rope_frequencies(c))[:, None]
    turned = []
    for site in ("1/query", "1/key"):
        low, high = np.split(found[site].astype(np.float64), 2, axis=-1)
        turned.append(np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1))
    keys = np.repeat(turned[1], c.group, axis=1)
    scores = np.einsum("thd,shd->hts", turned[0], keys) / math.sqrt(c.head_dim)
    scores = np.where(np.tri(count, dtype=bool), scores, 0).reshape(-1, count)
    np.testing.assert_allclose(found["1/scores"], scores, atol=2e-4)

    np.testing.assert_allclose(found["1/attention_out"], found["1/context"] @ layer.output.T, atol=1e-4)
    np.testing.assert_array_equal(found["1/mlp_norm"], found["1/attention_residual"] + found["1/attention_out"])
    np.testing.assert_array_equal(found["2/attention_norm"], found["1/mlp_residual"] + found["1/mlp_out"])
    product = silu(found["1/gate"]) * found["1/up"]
    np.testing.assert_array_equal(found["1/product"], product)
    np.testing.assert_array_equal(found[f"{c.layers}/final_norm_gamma"], loaded.weights.final_norm)

    path = tmp_path / "story.npz"
    captures.save(path, found)
    again = captures.load(path)
    assert again.keys() == found.keys()
    for key in found:
        np.testing.assert_array_equal(again[key], found[key])
    assert [p.name for p in tmp_path.iterdir()] == ["story.npz"]


# -- captures of the integer pipeline's units ---------------------------------------------------------------


class Ids:
    """A tokenizer for models that have none: a character is an id."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) - ord("a") for character in text]


def recompute(unit: captures.Recorded, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Outputs of a recorded unit by the golden function of its configuration."""
    c, t = unit.config, tensors
    if isinstance(c, RequantizeConfig):
        settings = {name: np.full(t["x"].shape[:-1], t[name]) for name in ("multiplier", "shift") if name in t}
        found = requantize(c, t["x"], **settings)
        return {name: value for name, value in zip("qec", found, strict=True) if value is not None}
    if isinstance(c, RmsNormConfig):
        out = rmsnorm(c, t["x"], t["gamma"], t["eps"], np.full(t["x"].shape[:-1], t["shift"]))
        return dict(zip("qec", out, strict=True)) if isinstance(out, tuple) else {"y": out}
    if isinstance(c, RopeConfig):
        return {"y": rotate(c, t["x"], t["position"], t["steps"])}
    if isinstance(c, SoftmaxConfig):
        return {"p": softmax(c, t["x"], t["keep"])[0]}
    if isinstance(c, SiluConfig):
        return {"y": swiglu(c, t["gate"], t["up"])}
    if isinstance(c, FwhtConfig):
        return {"y": fwht(c, t["x"])}
    if isinstance(c, ResidualConfig):
        return {"y": residual(c, t["a"], t["b"], np.full(t["a"].shape[:-1], t["shift"])).y}
    assert isinstance(c, LinearConfig)
    weights = LinearWeights(
        c, t["w"].astype(np.int8), t["m"].astype(np.uint16), int(t["down"]), t.get("bias", np.int32(0)).astype(np.int32)
    )
    return {"y": linear(weights, t["q"], t["e"], t["c"])}


def check_units(found: captures.Capture) -> list[captures.Recorded]:
    """Every unit gives what was recorded, and something else for another input."""
    units = captures.recorded(found)
    for unit in units:
        outputs = recompute(unit, unit.tensors)
        for name, value in outputs.items():
            np.testing.assert_array_equal(unit.tensors[name], value, err_msg=f"{unit} {name}")
        name = next(name for name in ("x", "a", "gate", "q") if name in unit.tensors)
        changed = recompute(unit, {**unit.tensors, name: unit.tensors[name][..., ::-1]})
        assert any(not np.array_equal(changed[name], value) for name, value in outputs.items()), str(unit)
    return units


def linked(found: captures.Capture, layer: int, *places: str) -> None:
    """What comes out of each place goes into the next: places as ``PLACE/NAME``, in pairs."""
    for out, into in zip(places[::2], places[1::2], strict=True):
        first, second = found[f"units/{layer}/{out}"], found[f"units/{layer}/{into}"]
        np.testing.assert_array_equal(first.ravel(), second.ravel(), err_msg=f"{out} {into}")


def test_captured_units_recompute_exactly(tmp_path: Path, shared: Path) -> None:
    checkpoint = shared / "data" / "stories260K.bin"
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    found = captures.capture(checkpoint, text, 22, every=4)
    count = len(found["tokens"])
    assert count == 22
    assert found["units/positions"].tolist() == [0, 1, 5, 9, 13, 17, 21]
    units = check_units(found)
    # 2 norms of 2 steps, 7 matrices, 2 heads of 4 steps, values, softmax, context, 5 of the product, 2 residuals.
    assert [unit.layer for unit in units] == [i for i in range(5) for _ in range(29)] + [5, 5, 5]
    assert units[-1].place == "head" and units[-1].tensors["y"].shape == (7, captures.OUTPUTS)
    for layer in range(5):
        linked(
            found, layer,
            "attention_norm_requantize/q", "attention_norm/x", "attention_norm/q", "query/q", "query/y",
            "query_requantize/x", "query_requantize/q", "query_rope/x", "query_rope/y", "query_fwht/x", "query_fwht/y",
            "query_codes/x", "key_rope/y", "key_fwht/x", "key_fwht/y", "key_codes/x", "value/y", "value_codes/x",
            "context_requantize/q", "output/q", "output/y", "attention_residual/b",
            "attention_residual/y", "mlp_norm_requantize/x", "gate/y", "gate_requantize/x", "gate_requantize/q",
            "silu/gate", "up_requantize/q", "silu/up", "silu/y", "product_fwht/x",
            "product_fwht/y", "product_requantize/x", "product_requantize/q", "down/q", "down/y", "mlp_residual/b",
        )  # fmt: skip

    loaded = load(checkpoint)
    model = quantize(loaded, SCHEMES["integer"])
    logits = IntegerDecoder(model).forward(found["tokens"])
    np.testing.assert_array_equal(found["units/5/head/y"], logits[found["units/positions"], : captures.OUTPUTS])
    keep = found["units/3/softmax/keep"]
    np.testing.assert_array_equal(keep, np.arange(count) <= found["units/positions"][:, None])
    assert found["units/3/softmax/p"].dtype == np.uint16 and found["units/3/attention_norm/q"].dtype == np.int8
    origin = captures.provenance(found)
    assert (origin["every"], origin["formats"]["group"], origin["formats"]["transform"]) == (4, 64, True)
    assert origin["quantized"]["source_sha256"] == loaded.sha256()

    path = tmp_path / "units.npz"
    captures.save(path, found)
    again = captures.load(path)
    assert [str(unit) for unit in captures.recorded(again)] == [str(unit) for unit in units]
    again["units/0/silu/config"] = np.array('{"unit": "os.system", "fields": {}}')
    refused = refusal(ValueError, captures.recorded, again)
    assert refused == "units/0/silu/config: no configuration of a unit known here ('os.system')"


@pytest.mark.parametrize("family", TINY)
def test_units_of_every_architecture_are_captured(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases, heads' own norms, windows; without the transform where a head is no power of two long."""
    monkeypatch.setitem(TINY[family], "head_dim", TINY[family].get("head_dim", 8))
    config, _ = write_huggingface(tmp_path, family)
    loaded = load(tmp_path)
    whole = captures._capture(loaded, Ids(), "hello" * 3, 15, "", every=1)  # type: ignore[arg-type]
    units = check_units(whole)
    places = {unit.place for unit in units}
    assert ("query_norm" in places) == config.qk_norm
    assert ("units/0/value/bias" in whole) == config.qkv_bias
    assert captures.provenance(whole)["formats"]["transform"] == ("key_fwht" in places) == (config.head_dim == 8)
    keep = whole["units/0/softmax/keep"]
    position, key = np.arange(15)[:, None], np.arange(15)
    window = config.windows[0] or 15
    np.testing.assert_array_equal(keep, (key <= position) & (key > position - window))
    # A prompt that attention reads in several blocks of queries.
    monkeypatch.setattr("golden.llm.kvcache.BLOCK_SCORES", 15 * 4 * 4)
    blocks = captures._capture(loaded, Ids(), "hello" * 3, 15, "", every=3)  # type: ignore[arg-type]
    chosen = blocks["units/positions"]
    for name in ("x", "p", "keep"):
        kept = blocks["units/1/softmax/keep"] if name == "x" else True
        wanted = whole[f"units/1/softmax/{name}"][..., chosen, :]
        np.testing.assert_array_equal(blocks[f"units/1/softmax/{name}"] * kept, wanted * kept)


def test_models_that_no_unit_can_run_give_float_tensors(tmp_path: Path) -> None:
    write_huggingface(tmp_path, "llama")  # heads of six elements
    found = captures._capture(load(tmp_path), Ids(), "hello", 5, "")  # type: ignore[arg-type]
    assert captures.recorded(found) == []
    assert found["1/query"].shape == (5, 4, 6)
    assert captures.provenance(found)["units_refused"] == "head_dim must lie in 8..256, not 6"


def test_captured_scores_in_a_window(tmp_path: Path) -> None:
    """With a sliding window a row starts at its first visible key."""
    scores = np.arange(2 * 4 * 4, dtype=np.float32).reshape(2, 4, 4)
    rows, lengths = captures._align(scores, 2)
    assert lengths.tolist() == [1, 2, 2, 2] * 2
    assert rows[:4].tolist() == [[0, 0, 0, 0], [4, 5, 0, 0], [9, 10, 0, 0], [14, 15, 0, 0]]


def test_bad_captures(tmp_path: Path, shared: Path) -> None:
    checkpoint = shared / "data" / "stories260K.bin"
    path = tmp_path / "x.npz"
    assert refusal(FileNotFoundError, captures.load, path) == f"{path}: no such capture"
    path.write_bytes(b"PK\x03\x04 damaged")
    assert refusal(ValueError, captures.load, path) == f"{path}: not a capture: an .npz archive was expected"
    np.savez(path, a=np.zeros(3))
    assert refusal(ValueError, captures.load, path) == f"{path}: not a capture: it has no provenance"
    assert refusal(ValueError, captures.capture, checkpoint, "a", 0) == "tokens must be positive, not 0"
    found = refusal(ValueError, captures.capture, checkpoint, "a", 1, None, "", 0)
    assert found == "every must be positive, not 0"
    away = tmp_path / "away"
    assert refusal(FileNotFoundError, captures.save, away / "x.npz", {}) == f"[Errno 2] no such folder: '{away}'"
    text = tmp_path / "x.txt"
    assert refusal(FileNotFoundError, captures.read_text, text) == f"{text}: no such text file"
    text.write_bytes(b"abc\xff")
    found = refusal(ValueError, captures.read_text, text)
    assert found == f"{text}: not UTF-8 text: byte 3 cannot be decoded"


def test_capture_command(tmp_path: Path, shared: Path) -> None:
    text, out = tmp_path / "x.txt", tmp_path / "x.npz"
    text.write_text("Once upon a time, there was a little girl", encoding="utf-8")
    where = ["--checkpoint", str(shared / "data" / "stories260K.bin"), "--text", str(text), "-o", str(out)]
    result = CliRunner().invoke(captures.capture_command, [*where, "--tokens", "9"])
    assert result.exit_code == 0, result.output
    assert captures.load(out)["0/gate"].shape == (9, 172)
    assert captures.load(out)["units/0/silu/gate"].shape == (3, 172)
    result = CliRunner().invoke(captures.capture_command, [*where, "--tokens", "9", "--every", "1"])
    assert result.exit_code == 0, result.output
    assert captures.load(out)["units/0/silu/gate"].shape == (9, 172)


# -- the reference checkpoint -------------------------------------------------------------------------------


def test_split_is_disjoint_and_stable() -> None:
    texts, held_out = train.split()
    assert not texts.keys() & held_out.keys()
    assert 0.02 < len(held_out) / (len(held_out) + len(texts)) < 0.12
    assert not any("/test" in name or name.startswith(("test/", "encodings/")) for name in [*texts, *held_out])
    # The rule sees only the path, so these stay where they are whatever the Python version.
    assert [name for name in ("functools.py", "traceback.py", "signal.py") if train.is_held_out(name)] == [
        "functools.py",
        "traceback.py",
        "signal.py",
    ]
    assert not any(train.is_held_out(name) for name in ("argparse.py", "ast.py", "json/decoder.py"))


def test_reference_checkpoint() -> None:
    """The committed weights predict unseen modules as well as their training recorded."""
    words = reference_tokenizer()
    record = json.loads((REFERENCE / "training.json").read_text())
    checkpoint = load(REFERENCE)
    config = checkpoint.config
    assert (config.dim, config.heads, config.kv_heads, config.head_dim) == (256, 2, 1, 128)
    assert (config.layers, config.hidden, config.vocab, config.tied) == (4, 768, 1024, True)
    assert (REFERENCE / SINGLE).stat().st_size < 10e6
    _, held_out = train.split()
    texts = {name: held_out[name] for name in ("functools.py", "traceback.py") if name in held_out}
    assert texts, "this Python has no source of its standard library"
    ids = np.concatenate([words.encode(text) for text in texts.values()])
    model = Decoder(checkpoint)
    losses = [
        cross_entropy(model.forward(ids[at : at + 512]), ids[at + 1 : at + 513]).mean()
        for at in range(0, len(ids) - 513, 512)
    ][:12]
    # Modules differ by about 0.3 nats, and so do Python versions' sources; a wrong rotation costs over 1.
    assert np.mean(losses) < record["held_out_loss"] + 0.4
    assert record["held_out_perplexity"] == pytest.approx(math.exp(record["held_out_loss"]), rel=1e-3)


def test_reference_capture_is_kept(tmp_path: Path) -> None:
    reference_tokenizer()
    first = captures.reference_capture(64, tmp_path)
    (path,) = tmp_path.iterdir()
    stamp = path.stat().st_mtime_ns
    second = captures.reference_capture(64, tmp_path)
    assert path.stat().st_mtime_ns == stamp
    assert first["0/query"].shape == (64, 2, 128)
    assert first["3/scores"].shape == (128, 64)
    assert first["units/3/up_requantize/x"].shape == (17, 768)
    np.testing.assert_array_equal(first["4/final_norm"], second["4/final_norm"])
    path.write_bytes(b"damaged")
    np.testing.assert_array_equal(captures.reference_capture(64, tmp_path)["3/up"], first["3/up"])
    assert captures.provenance(first)["text"] == "functools.py"
    # Another formula anywhere in the golden model may give other outputs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "_source_digest", lambda: "of other source")
        assert captures.reference_capture_file(64, tmp_path) != path


def test_training_a_little(tmp_path: Path) -> None:
    """What training leaves behind loads here, and its held-out loss is the one this decoder finds."""
    pytest.importorskip("torch", reason="training needs the extra 'train'")
    library = Path(sysconfig.get_paths()["stdlib"])
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    for name in ("argparse.py", "ast.py", "signal.py"):
        (sources / name).write_bytes((library / name).read_bytes())
    train.train(0.05, out, sources=sources)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", SINGLE, "tokenizer.json", "training.json"
    ]  # fmt: skip
    record = json.loads((out / "training.json").read_text())
    assert record["held_out_modules"] == ["signal.py"]
    ids = load_tokenizer(out).encode((sources / "signal.py").read_text(encoding="utf-8"))
    model = Decoder(load(out))
    losses = [
        cross_entropy(model.forward(ids[at : at + 512]), ids[at + 1 : at + 513]).mean()
        for at in range(0, len(ids) - 513, 512)
    ]
    assert np.mean(losses) == pytest.approx(record["held_out_loss"], abs=1e-3)


def test_bad_training(tmp_path: Path) -> None:
    assert refusal(ValueError, train.train, 0, tmp_path) == "minutes must be positive, not 0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        found = refusal(ValueError, train.train, 1, tmp_path)
    assert found == "training needs PyTorch: install the extra 'train'"
