"""The pipelines that can score and generate, by name: the float model, the rows of the paper's ablation, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from golden.llm import quantized
from golden.llm.calibrate import PREPARATIONS, calibrate
from golden.llm.checkpoint import Checkpoint
from golden.llm.formats import SCHEMES, Formats
from golden.llm.integer import IntegerDecoder, IntegerUnits
from golden.llm.kvcache import CacheFactory
from golden.llm.quantized import Quantized
from golden.llm.reference import Decoder, LanguageModel
from golden.llm.tokenizer import Tokenizer, find_tokenizer, load_tokenizer, unpack
from golden.llm.variants import (
    FloatUnits,
    NaiveInt8Units,
    NaiveInt32Units,
    PaperUnits,
    StaticUnits,
    TruncatingUnits,
)
from golden.llm.w8a8 import W8A8Decoder, observe

#: The paper's perplexity without quantization (Table 1: Llama-3.1-8B on WikiText-2).
PAPER_FLOAT = 7.5454


@dataclass
class Workshop:
    """What pipelines are built from: a float checkpoint and rows of calibration tokens. What several pipelines share is
    made once."""

    checkpoint: Checkpoint
    rows: Sequence[Sequence[int]]
    group: int | None = None
    progress: bool = False
    _models: dict[str, Quantized] = field(default_factory=dict)

    def formats(self, scheme: str) -> Formats:
        """A scheme's formats, as far as the model allows: without transforms where heads are no power of two."""
        found = SCHEMES[scheme]
        if self.group is not None:
            found = found.replace(group=self.group)
        head_dim = self.checkpoint.config.head_dim
        return found.replace(transform=False) if head_dim & (head_dim - 1) else found

    def quantized(self, scheme: str) -> Quantized:
        """The checkpoint in a scheme's formats."""
        if scheme not in self._models:
            formats, how = self.formats(scheme), PREPARATIONS[scheme]
            self._models[scheme] = calibrate(self.checkpoint, self.rows, formats, how, progress=self.progress)
        return self._models[scheme]

    @cached_property
    def plain(self) -> Any:
        """The checkpoint, and what its linear layers' inputs reach."""
        return observe(self.checkpoint, self.rows, smooth=False)

    @cached_property
    def smoothed(self) -> Any:
        """The same after SmoothQuant."""
        return observe(self.checkpoint, self.rows, smooth=True)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline: how to build it, whether it takes a key/value scheme, and the paper's perplexity of such a row."""

    description: str
    build: Callable[[Workshop, CacheFactory], LanguageModel]
    paper: float | None = None
    kv: bool = False


def _float(shop: Workshop, kv: CacheFactory) -> LanguageModel:
    return Decoder(shop.checkpoint)


def _w8a8(smooth: bool, group: bool, static: bool) -> Callable[[Workshop, CacheFactory], LanguageModel]:
    def build(shop: Workshop, kv: CacheFactory) -> LanguageModel:
        checkpoint, channels = shop.smoothed if smooth else shop.plain
        size = shop.formats("paper").group if group else None
        return W8A8Decoder(checkpoint, channels if static else None, size)

    return build


def _integer(
    scheme: str, units: type[IntegerUnits] = IntegerUnits
) -> Callable[[Workshop, CacheFactory], LanguageModel]:
    def build(shop: Workshop, kv: CacheFactory) -> LanguageModel:
        return IntegerDecoder(shop.quantized(scheme), units, kv)

    return build


PIPELINES: dict[str, Pipeline] = {
    "float": Pipeline("float32 throughout", _float, PAPER_FLOAT),
    "w8a8": Pipeline("INT8 linear layers, one static scale a tensor", _w8a8(False, False, True), 7.6525),
    "smoothquant": Pipeline("the same after SmoothQuant", _w8a8(True, False, True)),
    "smoothquant-group-static": Pipeline("SmoothQuant, groups of static scales", _w8a8(True, True, True)),
    "smoothquant-group": Pipeline("SmoothQuant, groups of dynamic scales", _w8a8(True, True, False), 7.5511),
    "naive-int8": Pipeline("integer nonlinears on INT8 tensors", _integer("paper", NaiveInt8Units), float("nan")),
    "naive-int32": Pipeline("integer nonlinears on INT32, wrapping", _integer("paper", NaiveInt32Units), float("nan")),
    "paper-static": Pipeline("token-wise INT16, static group scales", _integer("paper", StaticUnits)),
    "paper-truncating": Pipeline(
        "token-wise INT16, truncating requantizers", _integer("paper", TruncatingUnits), 7.5803
    ),
    "paper": Pipeline("token-wise INT16, rounding requantizers", _integer("paper", PaperUnits), kv=True),
    "paper-float-nonlinears": Pipeline("the same with float nonlinears", _integer("paper", FloatUnits)),
    "r1": Pipeline("base 2, g = 64, Q, K, V INT8", _integer("r1"), kv=True),
    "r2": Pipeline("base 2, g = 32, Q, K, V of 10 bits", _integer("r2"), kv=True),
    "r2-float-nonlinears": Pipeline("the same with float nonlinears", _integer("r2", FloatUnits)),
    "integer": Pipeline("r1 and a transformed product", _integer("integer"), kv=True),
    "integer-float-nonlinears": Pipeline("the same with float nonlinears", _integer("integer", FloatUnits)),
}
"""In the order of the ablation: the paper's rows, cumulatively, then ours."""


def is_quantized(path: Path) -> bool:
    """Whether a checkpoint is a file that ``calibrate`` wrote."""
    return path.name.endswith(quantized.SUFFIX)


def tokenizer_for(checkpoint: Path, tokenizer: Path | None) -> Tokenizer:
    """The tokenizer that was named, or the checkpoint's own: in a quantized file, or beside a float checkpoint."""
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    if not is_quantized(checkpoint):
        return find_tokenizer(checkpoint)
    packed = quantized.load(checkpoint).tokenizer
    if packed is None:
        raise ValueError(f"{checkpoint}: it holds no tokenizer; name one with --tokenizer")
    try:
        return unpack(packed)
    except ValueError as problem:
        raise ValueError(f"{checkpoint}: {problem}") from None


def open_quantized(path: Path, pipeline: str, kv: CacheFactory) -> IntegerDecoder:
    """The pipeline of a quantized file. Only those that a file holds all of can run."""
    units = {"integer": IntegerUnits, "paper": PaperUnits}
    if pipeline not in units:
        raise ValueError(f"a quantized checkpoint runs as {' or '.join(units)}, not as {pipeline}")
    model = quantized.load(path)
    if (pipeline == "paper") != (model.formats.root == "newton"):
        scheme = "paper" if model.formats.root == "newton" else "integer"
        raise ValueError(f"{path}: prepared for the pipeline {scheme}, not for {pipeline}")
    return IntegerDecoder(model, units[pipeline], kv)


def check_kv(pipeline: str, kv: str) -> None:
    """Raise ValueError if a pipeline has no use for a key/value scheme."""
    if kv != "dense" and not PIPELINES[pipeline].kv:
        able = ", ".join(name for name, found in PIPELINES.items() if found.kv)
        raise ValueError(f"--kv {kv} needs an integer pipeline ({able}), not {pipeline}")
