"""Continue a text on the command line."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from golden.llm.caches import Cache, kv_options
from golden.llm.checkpoint import load
from golden.llm.config import ModelConfig
from golden.llm.options import ANY, checkpoint_options
from golden.llm.pipelines import (
    PIPELINES,
    Workshop,
    check_kv,
    is_quantized,
    open_quantized,
    tokenizer_for,
)
from golden.llm.reference import Decoder, LanguageModel, generate
from golden.llm.text import check_vocabulary, read_text, sequences
from golden.llm.tokenizer import Tokenizer, stream_text


@click.command("generate")
@checkpoint_options(ANY)
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(0), default=128, show_default=True, help="Tokens to generate.")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token; the default.")
@click.option("--temperature", type=float, help="Draw tokens at this temperature instead.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the draw.")
@click.option(
    "--pipeline",
    type=click.Choice(list(PIPELINES)),
    help="Arithmetic to use.  [default: float, and of a quantized file integer]",
)
@kv_options
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Text on which a pipeline other than float is calibrated; by default text that the float model draws.",
)
@click.option(
    "--compare/--no-compare",
    default=True,
    help="Say how many greedy tokens agree with the float model's.  [default: compare]",
)
@click.option("--beside", is_flag=True, help="Print the float model's greedy text below.")
def generate_command(
    checkpoint: Path,
    tokenizer: Path | None,
    prompt: str,
    tokens: int,
    greedy: bool,
    temperature: float | None,
    seed: int,
    pipeline: str | None,
    kv: Cache,
    calibration: Path | None,
    compare: bool,
    beside: bool,
) -> None:
    """Continue a text: prompt and continuation on standard output, tokens per second on standard error.

    A pipeline other than float, run greedily, also says how many of its tokens agree with the float model's.
    """
    if greedy and temperature is not None:
        raise ValueError("--greedy and --temperature exclude each other")
    if beside and temperature:
        raise ValueError("--beside needs --greedy: drawn texts differ anyway")
    name = pipeline or ("integer" if is_quantized(checkpoint) else "float")
    check_kv(name, kv.name)
    if name == "float" and calibration is not None:
        raise ValueError("--calibration needs a pipeline other than float")
    model: LanguageModel
    reference: LanguageModel | None = None
    if is_quantized(checkpoint):
        if beside or calibration is not None:
            option = "--beside" if beside else "--calibration"
            raise ValueError(f"{option} needs a float checkpoint, not a quantized one")
        model = open_quantized(checkpoint, name, kv.build)
        words = tokenizer_for(checkpoint, tokenizer)
        check_vocabulary(words, model.config)
        ids = words.encode(prompt)
    else:
        loaded = load(checkpoint)
        words = tokenizer_for(checkpoint, tokenizer)
        check_vocabulary(words, loaded.config)
        reference, ids = Decoder(loaded), words.encode(prompt)
        generate(reference, ids, tokens, temperature or 0.0, seed)  # refuses a bad request before any work is done
        rows = [] if name == "float" else calibration_rows(reference, words, calibration)
        model = PIPELINES[name].build(Workshop(loaded, rows, progress=True), kv.build)
    made, rate = _stream(model, words, ids, tokens, temperature or 0.0, seed)
    click.echo(f"{len(made)} tokens, {rate:.1f} token/s", err=True)
    if len(made) < tokens:
        click.echo(f"the model ended the text after {len(made)} tokens", err=True)
    if reference is not None and name != "float" and not temperature and (compare or beside):
        wanted = list(generate(reference, ids, tokens, stops=model.config.stops))
        if compare:
            click.echo(agreement(made, wanted), err=True)
        if beside:
            click.echo("".join(stream_text(words, ids, wanted)))


def agreement(made: Sequence[int], wanted: Sequence[int]) -> str:
    """How far two greedy texts are the same, in words."""
    length = max(len(made), len(wanted))
    same = [a == b for a, b in zip(made, wanted, strict=False)]
    common = same.index(False) if False in same else len(same)
    if len(made) == len(wanted) == common:
        return f"all {common} greedy tokens agree with the float model's"
    return (
        f"the first {common} of {length} greedy tokens agree with the float model's, "
        f"{sum(same)} of {length} at the same place"
    )


def calibration_rows(
    reference: Decoder, words: Tokenizer, text: Path | None, tokens: int = 4096, length: int = 256
) -> list[list[int]]:
    """Rows to calibrate on: of a text, or four drawn from the float model itself."""
    config: ModelConfig = reference.config
    length = min(length, config.max_positions)
    if text is not None:
        return sequences(words, read_text(text), length, tokens)
    opening = [words.bos] if words.bos is not None else [0]
    return [opening + list(generate(reference, opening, length - 1, 1.0, seed)) for seed in range(4)]


def _stream(
    model: LanguageModel, words: Tokenizer, ids: Sequence[int], tokens: int, temperature: float, seed: int
) -> tuple[list[int], float]:
    """Print prompt and continuation as they come: the tokens, and how many a second."""
    made: list[int] = []
    following = generate(model, ids, tokens, temperature, seed, model.config.stops)
    started = time.monotonic()

    def kept() -> Iterator[int]:
        for token in following:
            made.append(token)
            yield token

    for piece in stream_text(words, ids, kept()):
        click.echo(piece, nl=False)
    rate = len(made) / (time.monotonic() - started)
    click.echo()
    return made, rate
