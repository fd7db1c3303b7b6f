"""How fast the decoders are: tokens per second of float32 NumPy, float32 PyTorch and integers, in one run.

Other jobs share the machine, so that every round measures all decoders one after the other; a figure is the median of
its rounds, a ratio the median of the ratios within a round.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from golden.commandline import show
from golden.llm.checkpoint import REFERENCE, Checkpoint, load
from golden.llm.formats import Formats
from golden.llm.integer import IntegerDecoder
from golden.llm.prepare import quantize
from golden.llm.reference import Decoder, LanguageModel
from golden.llm.text import sequences
from golden.llm.tokenizer import find_tokenizer
from golden.llm.torch_decoder import TorchDecoder
from golden.llm.train import split

#: The decoder that ratios refer to.
BASELINE = "NumPy float32"
#: Tokens of a prefilled sequence, tokens decoded one by one, and how many sequences take turns.
PREFILL, DECODE, SEQUENCES = 512, 128, 4


def prefill(model: LanguageModel, tokens: Sequence[int]) -> float:
    """Tokens per second of one sequence at once."""
    started = time.perf_counter()
    model.forward(tokens)
    return len(tokens) / (time.perf_counter() - started)


def decode(model: LanguageModel, tokens: Sequence[int]) -> float:
    """Tokens per second of a sequence token by token; as in greedy generation, each step looks for the arg-max."""
    cache = model.new_cache(len(tokens))
    started = time.perf_counter()
    for token in tokens:
        int(np.argmax(model.forward([token], cache)[-1]))
    return len(tokens) / (time.perf_counter() - started)


def compare(
    models: Mapping[str, LanguageModel],
    measure: Callable[[LanguageModel, Sequence[int]], float],
    rows: Sequence[Sequence[int]],
    rounds: int,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Measure every model ``rounds`` times, in turns, on rows of tokens that alternate; a row of a table for each.

    The first time of each model is not counted: it fills caches. The first model is the one that ratios refer to.
    """
    found: dict[str, list[float]] = {name: [] for name in models}
    for k, tokens in enumerate(islice(cycle(rows), rounds + 1)):
        for name, model in models.items():
            rate = measure(model, tokens)
            if k:
                found[name].append(rate)
            progress()
    base = next(iter(found.values()))
    for name, rates in found.items():
        ratio = median(rate / other for rate, other in zip(rates, base, strict=True))
        yield {"pipeline": name, "tokens_per_second": round(median(rates), 1), "ratio": round(ratio, 4)}


def decoders(checkpoint: Checkpoint) -> dict[str, LanguageModel]:
    """All decoders of a checkpoint by name, :data:`BASELINE` first; PyTorch's only where it is installed."""
    head_dim = checkpoint.config.head_dim
    formats = Formats(transform=not head_dim & (head_dim - 1))
    models: dict[str, LanguageModel] = {BASELINE: Decoder(checkpoint)}
    try:
        importlib.import_module("torch").set_num_threads(1)
    except ModuleNotFoundError:
        pass
    else:
        models["PyTorch float32"] = TorchDecoder(checkpoint)
    models["integer"] = IntegerDecoder(quantize(checkpoint, formats))
    return models


def held_out() -> list[list[int]]:
    """Rows of :data:`PREFILL` tokens that the reference checkpoint was not trained on."""
    words = find_tokenizer(REFERENCE)
    return sequences(words, "\n".join(split()[1].values()), PREFILL, PREFILL * SEQUENCES)


@click.command("speed")
@click.option(
    "--checkpoint",
    "others",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also decode this checkpoint (Hugging Face folder, llama2.c or GGUF file).",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Times that each is measured.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def speed_command(others: tuple[Path, ...], rounds: int, as_json: bool) -> None:
    """Tokens per second of the decoders, and their ratio to the float32 NumPy decoder."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":
        click.echo("set OPENBLAS_NUM_THREADS=1 to measure one core: NumPy may use several", err=True)
    rows, checkpoints = held_out(), [(place, load(place)) for place in (REFERENCE, *others)]
    table: list[dict[str, Any]] = []
    for place, checkpoint in checkpoints:
        models = decoders(checkpoint)
        if len(models) < 3 and not table:
            click.echo("PyTorch is not installed (extra train): its decoder is left out", err=True)
        count = min(DECODE, checkpoint.config.max_positions)
        ids = [[token % checkpoint.config.vocab for token in row[:count]] for row in rows]
        works = [("decode", decode, ids)]
        if place == REFERENCE:
            works.insert(0, ("prefill", prefill, rows))
        for work, measure, tokens in works:
            total = (rounds + 1) * len(models)
            name = "reference" if place == REFERENCE else place.name
            with tqdm(total=total, desc=f"{name} {work}", unit="run", leave=False) as bar:
                for row in compare(models, measure, tokens, rounds, bar.update):
                    table.append({"checkpoint": name, "work": work, **row})
    show(table, as_json, f"Tokens per second, and the ratio to {BASELINE}; median of {rounds} rounds")
