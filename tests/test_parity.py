"""The same checkpoints in this package's decoder and in the ``transformers`` library, in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint import gguf_settings, write_gguf
from test_llm import TOKENS as SHORT
from test_llm import huggingface_tensors

from golden.llm.checkpoint import INDEX, SINGLE, load
from golden.llm.config import ModelConfig
from golden.llm.reference import Decoder

torch: Any = pytest.importorskip("torch", reason="parity needs the extra 'train'")
transformers: Any = pytest.importorskip("transformers", reason="parity needs the extra 'train'")

# The libraries' own warnings (deprecations, a missing GPU) are not ours to fix.
pytestmark = pytest.mark.filterwarnings("default")

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-windows-in-later-layers": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied-theta-bias": (
        "Qwen3",
        {
            "head_dim": 12,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-short-window": ("Mistral", {"sliding_window": 7, "head_dim": 10, "num_key_value_heads": 1}),
    "llama-3-scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-3-scaling-tied": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 20, "tie_word_embeddings": True}),
    "llama-2-bias-one-key-head-each": ("Llama", {"attention_bias": True, "num_key_value_heads": 6}),
}
TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, SIZES["vocab_size"], 40)]


def random_model(name: str) -> Any:
    """A model whose every parameter, biases and gains included, is random."""
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            centre, spread = (1.0, 0.2) if "norm" in parameter else (0.0, 0.2)
            values.normal_(centre, spread)
    return model


def expected_logits(model: Any, tokens: list[int] = TOKENS) -> np.ndarray:
    torch.set_num_threads(1)
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(logits).max() > 1  # else a fixed difference would mean nothing
    return logits


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    assert checkpoint.config.architecture == MODELS[name][0].lower()
    assert checkpoint.config.tied == MODELS[name][1].get("tie_word_embeddings", False)
    found = Decoder(checkpoint).forward(TOKENS)
    np.testing.assert_allclose(found, expected_logits(model), rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_stored_forms_of_transformers(tmp_path: Path, dtype: str, keep_bytes: int) -> None:
    """Saved in shards and in 16 bits; the numbers stored are what both compute with, in float32."""
    model = random_model("qwen3").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / INDEX).is_file() and not (tmp_path / SINGLE).exists()
    checkpoint = load(tmp_path, keep_bytes)
    assert len(checkpoint.files) > 4
    # Loaded anew: `to` has rounded the rotary frequencies too, which no checkpoint holds.
    read = type(model).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    np.testing.assert_allclose(Decoder(checkpoint).forward(TOKENS), expected_logits(read), rtol=0, atol=1e-4)


def test_a_window_is_what_makes_the_difference(tmp_path: Path) -> None:
    """The windowed models above would fail without their windows: the text is longer than they are."""
    model = random_model("mistral-short-window")
    model.save_pretrained(tmp_path)
    checkpoint = load(tmp_path)
    assert checkpoint.config.windows == (7, 7, 7)
    windowed = Decoder(checkpoint).forward(TOKENS)
    whole = Decoder(checkpoint).forward(TOKENS[:7])
    np.testing.assert_allclose(windowed[:7], whole, rtol=0, atol=1e-5)
    model.config.sliding_window = None
    assert np.abs(expected_logits(model)[7:] - windowed[7:]).max() > 0.1


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_a_config_leaves_out(tmp_path: Path, family: str) -> None:
    """The defaults of a ``config.json`` are those of its architecture."""
    settings = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 101,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = ModelConfig.from_huggingface_file(tmp_path / "config.json")
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    window = theirs.sliding_window if family == "Mistral" else None
    assert ours.windows == (window,) * 2
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (ours.norm_eps, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gguf_files_equal_those_read_by_transformers(tmp_path: Path, family: str) -> None:
    """The library's own GGUF reader, which knows neither windows nor Llama 3's scaling in such files, agrees."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    settings = {**gguf_settings(family), "rope_scaling": None, "attention_bias": False, "sliding_window": None}
    if family == "qwen3":
        settings |= {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}
    path = tmp_path / "model.gguf"
    tensors = huggingface_tensors(ModelConfig.from_huggingface(settings))

    def tokens(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a"] * settings["vocab_size"])
        writer.add_vocab_size(settings["vocab_size"])

    write_gguf(path, family, settings, tensors, metadata=tokens)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = expected_logits(theirs, SHORT)
    np.testing.assert_allclose(Decoder(load(path)).forward(SHORT), expected, rtol=0, atol=1e-4)
