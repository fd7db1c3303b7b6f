"""The shape of a Llama-family decoder, from a Hugging Face ``config.json`` or a llama2.c header."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
LLAMA2C_HEADER = struct.Struct("<7i")
_LLAMA2C_MAGIC = 0x616B3432  # "ak42", the first word of llama2.c's later formats


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the rotary frequencies.

    A frequency whose wavelength is below ``original_positions / high_frequency_factor`` is kept, one above
    ``original_positions / low_frequency_factor`` is divided by ``factor``, and those between are blended.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise ValueError(f"rope scaling: factor must be at least 1, not {self.factor}")
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                "rope scaling: low_freq_factor must lie above 0 and below high_freq_factor, "
                f"not {self.low_frequency_factor} and {self.high_frequency_factor}"
            )
        if self.original_positions < 1:
            raise ValueError(
                f"rope scaling: original_max_position_embeddings must be positive, not {self.original_positions}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a decoder except its weights.

    Parameters
    ----------
    architecture : str
        ``llama``, ``mistral``, ``qwen2`` or ``qwen3``; llama2.c files are ``llama``.
    dim, layers, heads, kv_heads, head_dim, hidden, vocab : int
        Width of the residual stream, number of layers, of query heads and of key/value heads, width of a
        head, width of the gated MLP, number of token ids.
    norm_eps, rope_theta : float
        RMSNorm's epsilon, and the base of the rotary frequencies.
    rope_scaling : RopeScaling or None
    qkv_bias, output_bias, qk_norm : bool
        Whether the query, key and value projections and the output projection add a bias, and whether each
        head's query and key pass through an RMSNorm of their own before the rotation.
    tied : bool
        Whether the output matrix is the embedding table.
    max_positions : int
        Longest sequence.
    windows : tuple
        For each layer the number of most recent positions it attends to, itself included, or None for all.
        Empty means None for every layer.
    stops : tuple of int
        Ids that end a text.
    """

    architecture: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_positions: int = 2048
    windows: tuple[int | None, ...] = ()
    stops: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if self.architecture not in ARCHITECTURES.values():
            raise ValueError(_unknown_architecture(self.architecture, ARCHITECTURES.values()))
        for name in ("dim", "layers", "heads", "kv_heads", "head_dim", "hidden", "vocab", "max_positions"):
            value = getattr(self, name)
            _require(_positive(value), f"{name} must be a positive integer, not {value!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide heads, and {self.kv_heads} does not divide {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be positive, not {self.norm_eps}")
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta must be positive, not {self.rope_theta}")
        if len(self.windows) != self.layers:
            raise ValueError(f"windows must name {self.layers} layers, not {len(self.windows)}")
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"windows must be positive or None, not {self.windows}")

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a ``config.json``.

        The rotary base and scaling are taken from ``rope_parameters`` (newer files) or from ``rope_theta``
        and ``rope_scaling`` (older ones).  Whatever would change the arithmetic and is not implemented is
        refused, not ignored.
        """
        names = config.get("architectures") or [config.get("model_type")]
        if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
            given = names[0] if isinstance(names, list) and len(names) == 1 else names
            raise ValueError(_unknown_architecture(given, ARCHITECTURES))
        architecture = ARCHITECTURES[names[0]]

        def integer(name: str, default: Any = None) -> int:
            value = config.get(name)
            value = default if value is None else value
            if value is None:
                raise ValueError(f"config.json lacks {name}")
            _require(_positive(value), f"config.json: {name} must be a positive integer, not {value!r}")
            return int(value)

        def real(source: Mapping[str, Any], name: str, default: float | None = None) -> float:
            value = source.get(name)
            value = default if value is None else value
            if value is None:
                raise ValueError(f"config.json lacks {name}")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            _require(number, f"config.json: {name} must be a number, not {value!r}")
            return float(value)

        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"config.json: hidden_act must be silu, not {activation!r}")
        if config.get("mlp_bias"):
            raise ValueError("config.json: mlp_bias true is not supported")

        rope = config.get("rope_parameters") or {}
        scaling = rope or config.get("rope_scaling") or {}
        objects = isinstance(rope, dict) and isinstance(scaling, dict)
        _require(objects, "config.json: rope_parameters and rope_scaling must be objects")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in ("default", "llama3"):
            raise ValueError(f"config.json: rope scaling must be default or llama3, not {kind!r}")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor must be 1, not {partial!r}")
        rope_scaling = None
        if kind == "llama3":
            original: Any = scaling.get("original_max_position_embeddings")
            _require(
                _positive(original),
                f"config.json: original_max_position_embeddings must be a positive integer, not {original!r}",
            )
            rope_scaling = RopeScaling(
                factor=real(scaling, "factor"),
                low_frequency_factor=real(scaling, "low_freq_factor"),
                high_frequency_factor=real(scaling, "high_freq_factor"),
                original_positions=int(original),
            )

        heads, layers = integer("num_attention_heads"), integer("num_hidden_layers")
        dim = integer("hidden_size")
        bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=integer("num_key_value_heads", heads),
            head_dim=integer("head_dim", 128 if architecture == "qwen3" else dim // heads),
            hidden=integer("intermediate_size"),
            vocab=integer("vocab_size"),
            norm_eps=real(config, "rms_norm_eps", 1e-6),
            rope_theta=real(rope, "rope_theta", real(config, "rope_theta", 10000.0)),
            rope_scaling=rope_scaling,
            qkv_bias=architecture == "qwen2" or (bias and architecture != "mistral"),
            output_bias=bias and architecture in ("llama", "qwen3"),
            qk_norm=architecture == "qwen3",
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=integer("max_position_embeddings", 2048),
            windows=_windows(architecture, layers, config),
            stops=_stops(config),
        )

    @classmethod
    def from_huggingface_file(cls, path: Path) -> ModelConfig:
        """Read a ``config.json``."""
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a JSON file ({str(error).splitlines()[0]})") from None
        _require(isinstance(config, dict), f"{path}: a JSON object was expected, not {type(config).__name__}")
        try:
            return cls.from_huggingface(config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_llama2c(cls, header: bytes) -> ModelConfig:
        """From the seven 32-bit words that open a llama2.c file; a negative vocabulary means untied."""
        if len(header) < LLAMA2C_HEADER.size:
            raise ValueError(f"a llama2.c header takes {LLAMA2C_HEADER.size} bytes, not {len(header)}")
        dim, hidden, layers, heads, kv_heads, vocab, positions = LLAMA2C_HEADER.unpack_from(header)
        if dim == _LLAMA2C_MAGIC:
            raise ValueError("a llama2.c file of version 1 or later; version 0 was expected")
        fields = (dim, hidden, layers, heads, kv_heads, abs(vocab), positions)
        plausible = all(0 < value <= 1 << 24 for value in fields) and layers <= 1 << 12
        if not plausible or dim % heads or heads % kv_heads or dim // heads % 2:
            raise ValueError("not a llama2.c checkpoint: its first 28 bytes give no possible model")
        return cls(
            architecture="llama",
            dim=dim,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim // heads,
            hidden=hidden,
            vocab=abs(vocab),
            tied=vocab > 0,
            max_positions=positions,
            stops=(1, 2),  # begin of the next text, end of this one
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _unknown_architecture(given: Any, accepted: Any) -> str:
    return f"architecture {given!r} is not supported; accepted: {', '.join(accepted)}"


def _stops(config: Mapping[str, Any]) -> tuple[int, ...]:
    stops = config.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    integers = all(isinstance(stop, int) for stop in stops)
    _require(integers, f"config.json: eos_token_id must be an integer or a list of them, not {stops!r}")
    return tuple(stops)


def _windows(architecture: str, layers: int, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096)  # a file may say null: none
    enabled = architecture == "mistral" or bool(config.get("use_sliding_window", False))
    if architecture == "llama" or not enabled or window is None:
        return (None,) * layers
    _require(_positive(window), f"config.json: sliding_window must be a positive integer, not {window!r}")
    if architecture == "mistral":
        return (window,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ValueError(
            f"config.json: layer_types must be {layers} of sliding_attention and full_attention, not {kinds}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
