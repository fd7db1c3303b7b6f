"""Continue a text on the command line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from golden.llm.checkpoint import Checkpoint, load
from golden.llm.reference import Decoder, LanguageModel, generate
from golden.llm.tokenizer import find_tokenizer, load_tokenizer, stream_text

PIPELINES: dict[str, Callable[[Checkpoint], LanguageModel]] = {"float": Decoder}
"""The pipelines that can generate, by the name ``--pipeline`` takes."""


@click.command("generate")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="Hugging Face folder or llama2.c file.",
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="By default the one beside the checkpoint.")
@click.option("--prompt", default="", help="Text to continue.")
@click.option("--tokens", type=click.IntRange(0), default=128, show_default=True, help="Tokens to generate.")
@click.option("--greedy", is_flag=True, help="Always take the likeliest token; the default.")
@click.option("--temperature", type=float, help="Draw tokens at this temperature instead.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draw.")
@click.option(
    "--pipeline",
    type=click.Choice(list(PIPELINES)),
    default="float",
    show_default=True,
    help="Arithmetic to use.",
)
def generate_command(
    checkpoint: Path,
    tokenizer: Path | None,
    prompt: str,
    tokens: int,
    greedy: bool,
    temperature: float | None,
    seed: int,
    pipeline: str,
) -> None:
    """Continue a text: prompt and continuation on standard output, tokens per second on standard error."""
    if greedy and temperature is not None:
        raise ValueError("--greedy and --temperature exclude each other")
    loaded = load(checkpoint)
    words = find_tokenizer(checkpoint) if tokenizer is None else load_tokenizer(tokenizer)
    if words.vocab > loaded.config.vocab:
        raise ValueError(
            f"the tokenizer has {words.vocab} entries and the checkpoint only {loaded.config.vocab}; "
            "they do not belong together"
        )
    model = PIPELINES[pipeline](loaded)
    ids = words.encode(prompt)
    count, started = 0, time.monotonic()

    def counted() -> Iterator[int]:
        nonlocal count
        for token in generate(model, ids, tokens, temperature or 0.0, seed, loaded.config.stops):
            count += 1
            yield token

    for piece in stream_text(words, ids, counted()):
        click.echo(piece, nl=False)
    rate = count / (time.monotonic() - started)
    click.echo()
    click.echo(f"{count} tokens, {rate:.1f} token/s", err=True)
