"""Score pipelines on a text, on the command line: one (``perplexity``), the paper's table (``ablate``), or one format
changed at a time (``ablate --formats``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import click

from golden.commandline import show
from golden.llm.caches import Cache, kv_options
from golden.llm.calibrate import PREPARATIONS, calibrate
from golden.llm.checkpoint import load
from golden.llm.config import ModelConfig
from golden.llm.evaluate import Score, evaluate
from golden.llm.integer import IntegerDecoder
from golden.llm.kvcache import DenseCache
from golden.llm.options import ANY, FLOAT, checkpoint_options, text_option
from golden.llm.pipelines import (
    PAPER_FLOAT,
    PIPELINES,
    Workshop,
    check_kv,
    is_quantized,
    open_quantized,
    tokenizer_for,
)
from golden.llm.reference import Decoder, LanguageModel
from golden.llm.text import check_vocabulary, consumed, read_text, sequences

#: One change at a time to the formats and the preparation of ``integer``.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "integer": ({}, {}),
    "group = 32": ({"group": 32}, {}),
    "group = 128": ({"group": 128}, {}),
    "activations of 12 bits": ({"activation_bits": 12}, {}),
    "queries of 14 bits": ({"query_bits": 14}, {}),
    "keys of 14 bits": ({"key_bits": 14}, {}),
    "values of 14 bits": ({"value_bits": 14}, {}),
    "multipliers of 12 bits": ({"multiplier_bits": 12}, {}),
    "multipliers of 4 bits": ({"multiplier_bits": 4}, {}),
    "norm outputs of 20 bits": ({"norm_bits": 20}, {}),
    "norm outputs of 12 bits": ({"norm_bits": 12}, {}),
    "queries and keys not transformed": ({"transform": False}, {}),
    "product not transformed": ({"transform_product": False}, {}),
    "residual stream not rotated": ({}, {"rotate": False}),
    "not smoothed": ({}, {"smooth": "none"}),
    "weights rounded to nearest": ({}, {"compensate": False}),
    "Newton-Raphson root": ({"root": "newton"}, {}),
}


@dataclass(frozen=True)
class Request:
    """What is to be scored, and on what to calibrate."""

    checkpoint: Path
    tokenizer: Path | None
    text: Path
    tokens: int
    length: int
    calibration: Path | None
    calibration_tokens: int
    group: int | None

    def rows(self, config: ModelConfig, calibrates: bool) -> tuple[list[list[int]], list[list[int]]]:
        """Rows to score, and rows to calibrate on (none unless needed)."""
        words = tokenizer_for(self.checkpoint, self.tokenizer)
        check_vocabulary(words, config)
        length, text = min(self.length, config.max_positions), read_text(self.text)
        scored = sequences(words, text, length, self.tokens)
        if not calibrates:
            return scored, []
        if self.calibration is not None:
            return scored, sequences(words, read_text(self.calibration), length, self.calibration_tokens)
        try:
            return scored, sequences(words, text, length, self.calibration_tokens, skip=consumed(words, scored))
        except ValueError as problem:
            raise ValueError(f"{problem}; name a text with --calibration, or score fewer --tokens") from None


def _request(accepts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a :class:`Request`, which a command gets as its first argument, and ``--json``."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def wrapped(**given: Any) -> None:
            request = Request(**{item.name: given.pop(item.name) for item in fields(Request)})
            command(request, **given)

        options = [
            checkpoint_options(accepts),
            text_option("to score"),
            click.option(
                "--tokens", type=click.IntRange(2), default=20480, show_default=True, help="Tokens of it to score."
            ),
            click.option("--length", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a row."),
            click.option(
                "--calibration",
                type=click.Path(path_type=Path),
                help="Text to calibrate on. By default what follows the scored tokens in --text.",
            ),
            click.option(
                "--calibration-tokens", type=click.IntRange(2), default=8192, show_default=True, help="Tokens of it."
            ),
            click.option("--group", type=click.IntRange(4, 1024), help="Elements that share a scale."),
            click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects."),
        ]
        decorated: Callable[..., None] = wrapped
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _row(name: str, kv: str, score: Score) -> dict[str, Any]:
    """A table's row; what diverged says so instead of a number of many digits."""
    return {
        "pipeline": name,
        "kv": kv,
        "tokens": score.tokens,
        "perplexity": round(score.perplexity, 4),
        "change": None if score.change is None else round(score.change, 4),
        "standard_error": None if score.standard_error is None else round(score.standard_error, 4),
        "kl_mnat": None if score.kl_mnat is None else round(score.kl_mnat, 4),
        "kl_standard_error": None if score.kl_standard_error is None else round(score.kl_standard_error, 4),
        "agreement": None if score.agreement is None else round(score.agreement, 4),
        "diverged": score.diverged,
    }


def _print(rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    if as_json:
        # JSON knows no infinity.
        finite = [
            {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in row.items()}
            for row in rows
        ]
        show(finite, True)
        return
    named = {
        "change": "change %",
        "standard_error": "± %",
        "kl_mnat": "KL mnat",
        "kl_standard_error": "± mnat",
        "agreement": "same token",
        "paper_change": "paper change %",
    }
    table = []
    for row in rows:
        shown: dict[str, Any] = {}
        for key, value in row.items():
            if key == "diverged":
                continue
            if row["diverged"] and key in ("change", "standard_error", "kl_standard_error"):
                value = "diverged" if key == "change" else None
            elif key == "perplexity" and value > 1e6:
                value = f"{value:.0e}"
            shown[named.get(key, key)] = value
        table.append(shown)
    show(table, False, title)


@click.command("perplexity")
@_request(ANY)
@click.option(
    "--pipeline", type=click.Choice(list(PIPELINES)), default="integer", show_default=True, help="Arithmetic to use."
)
@kv_options
@click.option("--reference", type=click.Path(path_type=Path), help="Float checkpoint that a quantized file came from.")
def perplexity_command(request: Request, as_json: bool, pipeline: str, kv: Cache, reference: Path | None) -> None:
    """Score one pipeline on a text, beside the float model.

    A quantized file (of ``calibrate``) is compared only with the float checkpoint named by --reference."""
    check_kv(pipeline, kv.name)
    if pipeline == "float" and request.calibration is not None:
        raise ValueError("--calibration needs a pipeline other than float")
    model: LanguageModel
    base: LanguageModel | None = None
    if is_quantized(request.checkpoint):
        if request.calibration is not None or request.group is not None:
            option = "--group" if request.calibration is None else "--calibration"
            raise ValueError(f"{option} needs a float checkpoint, not a quantized one")
        quantized = open_quantized(request.checkpoint, pipeline, kv.build)
        if reference is not None:
            source = load(reference)
            if source.sha256() != quantized.model.provenance.get("source_sha256"):
                raise ValueError(f"{reference}: not the checkpoint that {request.checkpoint} was made from")
            base = Decoder(source)
        model, (scored, _) = quantized, request.rows(quantized.config, False)
    else:
        if reference is not None:
            raise ValueError("--reference belongs to a quantized checkpoint; a float one is its own reference")
        loaded = load(request.checkpoint)
        scored, rows = request.rows(loaded.config, pipeline != "float")
        model = PIPELINES[pipeline].build(Workshop(loaded, rows, request.group, progress=True), kv.build)
        base = Decoder(loaded)
    score = evaluate({pipeline: model}, scored, base, progress=True)[pipeline]
    _print([_row(pipeline, kv.name, score)], as_json, "")


@click.command("ablate")
@_request(FLOAT)
@click.option("--pipelines", help="Only these, separated by commas.")
@click.option("--formats", is_flag=True, help="Instead, change one format of the integer pipeline at a time.")
def ablate_command(request: Request, as_json: bool, pipelines: str | None, formats: bool) -> None:
    """The paper's Table 1 on a checkpoint of your own, and this project's pipelines beside it."""
    wanted = list(PIPELINES) if pipelines is None else [name.strip() for name in pipelines.split(",")]
    for name in wanted:
        if name not in PIPELINES:
            raise ValueError(f"{name!r} is no pipeline; accepted: {', '.join(PIPELINES)}")
    if formats and pipelines is not None:
        raise ValueError("--formats and --pipelines exclude each other")
    if is_quantized(request.checkpoint):
        raise ValueError(f"{request.checkpoint}: an ablation needs a float checkpoint, not a quantized one")
    loaded = load(request.checkpoint)
    scored, rows = request.rows(loaded.config, True)
    shop = Workshop(loaded, rows, request.group, progress=True)
    title = f"{request.checkpoint.name}: {sum(map(len, scored)):,} tokens of {request.text.name}"
    if formats:
        _print(_study(shop, scored), as_json, f"{title}, one format changed at a time")
        return
    models = {name: PIPELINES[name].build(shop, DenseCache) for name in wanted}
    table = []
    for name, score in evaluate(models, scored, Decoder(loaded), progress=True).items():
        paper = PIPELINES[name].paper
        row = _row(name, "dense", score)
        row["paper_change"] = None if paper is None else _paper_change(paper)
        table.append(row)
    _print(table, as_json, f"{title} in rows of {len(scored[0])}")


def _paper_change(paper: float) -> float | str:
    """The paper's change of perplexity in percent; NaN in its table means that the pipeline diverged."""
    return "diverged" if isnan(paper) else round(100 * (paper / PAPER_FLOAT - 1), 2)


def _study(shop: Workshop, scored: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A row for each of :data:`CHANGES`."""
    models: dict[str, LanguageModel] = {}
    for name, (changed, prepared) in CHANGES.items():
        formats = shop.formats("integer").replace(**changed)
        how = PREPARATIONS["integer"].replace(**prepared)
        models[name] = IntegerDecoder(calibrate(shop.checkpoint, shop.rows, formats, how, progress=True))
    found = evaluate(models, scored, Decoder(shop.checkpoint), progress=True)
    return [_row(name, "dense", score) for name, score in found.items()]
