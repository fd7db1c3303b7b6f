"""Which sign patterns to use: the gradient-free selection (``search-signs``), and the study of what they are worth
(``axelram-study``).

A candidate pattern of a layer is scored on what a few calibration rows send through it, by one of two criteria:

* ``mse``: the paper's. Mean squared error of 2,000 keys, normalised, after quantization. Values keep their patterns.
* ``attention``: this project's. For keys, what quantization does to the attention of the rows' real queries: half the
  variance of the logits' error under each query's own distribution, which is KL(exact || quantized) to second order,
  in nats. For values, the squared error of the context over its squared length.

Candidates are the patterns of seeds ``(seed + 1000 * layer) * 10000 + c``, as in the paper's code (for values
``layer + 500``); the first of the best is taken. All of it is the integer functions that the hardware computes, apart
from the comparison with what was there before.

Source: AXELRAM (Algorithm 1, Tables I and III).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from golden import float16
from golden.commandline import check_output, show
from golden.fixedpoint import Int, isqrt
from golden.llm.checkpoint import REFERENCE
from golden.llm.checkpoint import load as load_checkpoint
from golden.llm.evaluate import Score, evaluate
from golden.llm.formats import Units
from golden.llm.integer import IntegerDecoder
from golden.llm.kvcache import DenseCache, Heads, Probabilities
from golden.llm.options import FLOAT, checkpoint_options
from golden.llm.pipelines import PIPELINES, Workshop, tokenizer_for
from golden.llm.reference import Decoder
from golden.llm.rotated import NORM_EXPONENT, Patterns, RotatedCache, RotatedConfig
from golden.llm.text import check_vocabulary, consumed, read_text, sequences
from golden.llm.train import split
from golden.nonlinear.requantize import requantize
from golden.rotated import lloyd_max
from golden.rotated.fwht import fwht, hadamard
from golden.rotated.signs import PAPER_SEED, flip, layer_seed, pattern, word
from golden.rotated.write_path import WritePathConfig

Real = NDArray[np.float64]

CRITERIA = ("mse", "attention")
#: Vectors that ``mse`` looks at.
VECTORS = 2000
#: ``attention`` looks at every fourth query of a row.
QUERY_STEP = 4

#: The paper's Table I (mean, standard deviation, worst of ten seeds) and Table III (optimised), increase of perplexity.
PAPER: dict[str, dict[int, tuple[float, float, float, float | None]]] = {
    "LLaMA-3.1-8B": {2: (0.10, 0.01, 0.11, 0.10), 3: (0.02, 0.00, 0.02, 0.02), 4: (0.00, 0.00, 0.01, 0.00)},
    "Qwen2.5-3B": {2: (8.13, 16.9, 58.43, 0.82), 3: (9.64, 14.9, 51.00, 0.58), 4: (1.10, 0.85, 2.98, 0.25)},
    "Qwen3-8B": {2: (12.2, 2.51, 17.5, None), 3: (0.48, 0.29, 1.09, None), 4: (0.04, 0.01, 0.05, None)},
}


@dataclass
class Layer:
    """What a layer saw, one array a row of text: keys and queries after the rotary embedding, values."""

    keys: list[Heads] = field(default_factory=list)
    values: list[Heads] = field(default_factory=list)
    queries: list[Heads] = field(default_factory=list)
    scale: float = 0.0  # of the logits, in nats


class _Recorder(DenseCache):
    """The dense cache, which notes what it is asked."""

    def __init__(self, layers: list[Layer], base2: bool, units: Units, capacity: int):
        super().__init__(units, capacity)
        self.layers, self.base2 = layers, base2

    def append(self, layer: int, keys: Heads, values: Int) -> None:
        super().append(layer, keys, values)
        row, e, _ = requantize(self.units.head_row, values)
        assert e is not None
        self.layers[layer].keys.append(keys)
        self.layers[layer].values.append(Heads(row, e[..., 0]))

    def attend(
        self, layer: int, queries: Heads, constant: tuple[int, int], window: int | None, softmax: Probabilities
    ) -> Int:
        self.layers[layer].queries.append(queries)
        scale = constant[0] * 2.0 ** -constant[1] * (np.log(2.0) if self.base2 else 1.0)
        self.layers[layer].scale = scale * (self.units.model.head_dim if self.units.formats.transform else 1)
        return super().attend(layer, queries, constant, window, softmax)


def record(model: IntegerDecoder, rows: Sequence[Sequence[int]]) -> list[Layer]:
    """What every layer sees of rows of tokens, with the dense cache."""
    layers = [Layer() for _ in range(model.config.layers)]
    recorder = model.with_cache(partial(_Recorder, layers, model.operators.base2))
    for row in rows:
        recorder.forward(row)
    return layers


class _Stream:
    """The keys, or the values, of one layer and all rows: integers and what a pattern makes of them."""

    def __init__(self, heads: Sequence[Heads], config: WritePathConfig, generator: np.random.Generator):
        self.config = config
        self.x = np.concatenate([h.x.reshape(-1, config.size) for h in heads])
        exponent = np.concatenate([h.e.reshape(-1) for h in heads])
        self.scale = np.exp2(exponent.astype(np.float64))[:, None]
        self.root = isqrt((self.x * self.x).sum(axis=-1))
        self.norm = np.sqrt((self.x.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
        stored = float16.from_integer(self.root, exponent - NORM_EXPONENT)
        mantissa, biased = float16.parts(stored)
        self.stored = np.ldexp(mantissa.astype(np.float64), biased - 25 + NORM_EXPONENT)[:, None]
        positive = np.array(lloyd_max.codebook(config.bits).centroids) * 2.0**-lloyd_max.FRACTION_BITS
        self.codes = np.concatenate((-positive[::-1], positive))
        self.chosen = np.sort(generator.permutation(np.flatnonzero(self.root))[:VECTORS])
        self.hadamard = hadamard(config.size).product(np.eye(config.size, dtype=np.int64)).astype(np.float64)

    @cached_property
    def real(self) -> Real:
        """The vectors as they are, on the wide scale."""
        return self.x * self.scale

    def restored(self, signs: Int) -> Real:
        """The vectors as they come back from quantization under one pattern, on the wide scale."""
        turned = fwht(self.config.transform, flip(self.x, signs, self.config.in_bits))
        index = lloyd_max.quantize(self.config.quantizer, turned, self.root)
        return (self.codes[index] @ self.hadamard) * signs * (self.stored / self.config.size)

    def mse(self, restored: Real) -> float:
        """Mean squared error of the chosen vectors, scaled to length 1."""
        part = self.chosen
        return float(np.square((restored[part] - self.real[part]) / (self.norm[part] * self.scale[part])).mean())


class _Attention:
    """The attention of one layer's queries, exact, and how much a change of keys or values changes it."""

    def __init__(self, layer: Layer, keys: _Stream, values: _Stream):
        self.parts: list[tuple[slice, int, Real, Real, Real]] = []
        first, real_keys, self.values = 0, keys.real, values.real
        for queries in layer.queries:
            count, heads, size = queries.x.shape
            kv = layer.keys[0].x.shape[1]
            rows = slice(first, first + count * kv)
            position = np.arange(0, count, QUERY_STEP)
            hidden = np.arange(count) > position[:, None]
            for head in range(heads):
                group = head // (heads // kv)
                q = queries.x[position, head] * np.exp2(queries.e[position, head].astype(np.float64))[:, None]
                q = q * layer.scale
                logits = np.where(hidden, -np.inf, q @ real_keys[rows].reshape(count, kv, size)[:, group].T)
                p = np.exp(logits - logits.max(axis=-1, keepdims=True))
                p /= p.sum(axis=-1, keepdims=True)
                context = p @ self.values[rows].reshape(count, kv, size)[:, group]
                self.parts.append((rows, group, q, p, context))
            first = rows.stop
        self.kv, self.size = kv, size

    def _head(self, x: Real, rows: slice, group: int) -> Real:
        return x[rows].reshape(-1, self.kv, self.size)[:, group]

    def divergence(self, error: Real) -> float:
        """KL of the attention, to second order, in nats, if keys are off by ``error``."""
        total, count = 0.0, 0
        for rows, group, q, p, _ in self.parts:
            off = q @ self._head(error, rows, group).T
            mean = (p * off).sum(axis=-1, keepdims=True)
            total += 0.5 * float((p * np.square(off - mean)).sum())
            count += len(q)
        return total / count

    def context_error(self, error: Real) -> float:
        """Squared error of the context over its squared length, if values are off by ``error``."""
        wrong = right = 0.0
        for rows, group, _, p, context in self.parts:
            wrong += float(np.square(p @ self._head(error, rows, group)).sum())
            right += float(np.square(context).sum())
        return wrong / right


class Search:
    """Scores of sign patterns on what a model's layers see of calibration rows; no draw is without its seed."""

    def __init__(self, model: IntegerDecoder, rows: Sequence[Sequence[int]]):
        self.units, self.size = model.model.units, model.config.head_dim
        RotatedCache(self.units, 1)  # refuses what it cannot hold
        self.layers = record(model, rows)

    def streams(self, layer: int, key_bits: int, value_bits: int) -> tuple[_Stream, _Stream, _Attention]:
        """Keys, values and attention of a layer."""
        writer = partial(WritePathConfig, lanes=self.size, size=self.size)
        found, generator = self.layers[layer], np.random.default_rng(layer)
        keys = _Stream(found.keys, writer(in_bits=self.units.rope.out_bits, bits=key_bits), generator)
        values = _Stream(found.values, writer(in_bits=16, bits=value_bits), generator)
        return keys, values, _Attention(found, keys, values)

    def best(
        self, key_bits: int, value_bits: int, candidates: int, seed: int = PAPER_SEED, progress: bool = False
    ) -> dict[str, Patterns]:
        """By each criterion, the best of the candidates for every layer."""
        chosen: dict[str, list[tuple[int, int]]] = {criterion: [] for criterion in CRITERIA}
        layers = range(len(self.layers))
        with tqdm(total=len(layers) * candidates, unit="pattern", disable=not progress) as bar:
            for layer in layers:
                keys, values, attention = self.streams(layer, key_bits, value_bits)
                costs = np.zeros((3, candidates))
                drawn = [[self._candidate(seed, layer, kind, c) for c in range(candidates)] for kind in (False, True)]
                for c in range(candidates):
                    restored = keys.restored(drawn[0][c])
                    costs[0, c] = keys.mse(restored)
                    costs[1, c] = attention.divergence(restored - keys.real)
                    costs[2, c] = attention.context_error(values.restored(drawn[1][c]) - values.real)
                    bar.update()
                by_mse, by_logits, by_context = costs.argmin(axis=1)
                own = pattern(layer_seed(seed, layer, True), self.size)
                chosen["mse"].append((word(drawn[0][by_mse]), word(own)))
                chosen["attention"].append((word(drawn[0][by_logits]), word(drawn[1][by_context])))
        return {
            name: Patterns(self.size, tuple(k for k, _ in found), tuple(v for _, v in found))
            for name, found in chosen.items()
        }

    def _candidate(self, seed: int, layer: int, values: bool, c: int) -> Int:
        return pattern(layer_seed(seed, layer, values) * 10000 + c, self.size)

    def spread(self, layer: int, bits: int, seeds: Sequence[int]) -> list[float]:
        """Divergence of a layer's attention under the patterns of some seeds, in nats."""
        keys, _, attention = self.streams(layer, bits, bits)
        return [
            attention.divergence(keys.restored(pattern(layer_seed(seed, layer), self.size)) - keys.real)
            for seed in seeds
        ]

    def norms(self, layer: int) -> Real:
        """Norms of a layer's keys, in the units in which they are stored."""
        return np.concatenate(
            [(np.linalg.norm(h.x, axis=-1) * np.exp2(h.e - NORM_EXPONENT)).ravel() for h in self.layers[layer].keys]
        )


# -- the commands ------------------------------------------------------------------------------------------------------
def _texts(checkpoint: Path, text: Path | None) -> str:
    """The text that was named, or what the reference checkpoint was not trained on."""
    if text is not None:
        return read_text(text)
    if checkpoint.resolve() != REFERENCE.resolve():
        raise ValueError("--text is needed for a checkpoint other than the reference")
    return "\n".join(split()[1].values())


def _check_length(option: str, length: int, limit: int) -> int:
    if length > limit:
        raise ValueError(f"{option} must be at most the model's {limit} positions, not {length}")
    return length


@click.command("search-signs")
@checkpoint_options(FLOAT)
@click.option("--text", type=click.Path(path_type=Path), required=True, help="UTF-8 text to calibrate on.")
@click.option("--key-bits", type=click.IntRange(1, 6), default=3, show_default=True, help="Bits of a key's index.")
@click.option("--value-bits", type=click.IntRange(1, 6), default=3, show_default=True, help="Bits of a value's index.")
@click.option("--criterion", type=click.Choice(CRITERIA), default="attention", show_default=True)
@click.option("--candidates", type=click.IntRange(1, 10000), default=200, show_default=True, help="Patterns a layer.")
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Rows of text.")
@click.option("--length", type=click.IntRange(2), default=256, show_default=True, help="Tokens of a row.")
@click.option("--seed", type=click.IntRange(0, 1 << 31), default=PAPER_SEED, show_default=True)
@click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="File for --signs.")
def search_command(
    checkpoint: Path,
    tokenizer: Path | None,
    text: Path,
    key_bits: int,
    value_bits: int,
    criterion: str,
    candidates: int,
    samples: int,
    length: int,
    seed: int,
    output: Path,
) -> None:
    """Choose the sign patterns of every layer among candidates, on calibration rows; no gradients."""
    check_output(output, text, tokenizer)
    loaded = load_checkpoint(checkpoint)
    words = tokenizer_for(checkpoint, tokenizer)
    check_vocabulary(words, loaded.config)
    length = _check_length("--length", length, loaded.config.max_positions)
    rows = sequences(words, read_text(text), length, samples * length)
    model = PIPELINES["integer"].build(Workshop(loaded, rows, progress=True), DenseCache)
    assert isinstance(model, IntegerDecoder)
    found = Search(model, rows).best(key_bits, value_bits, candidates, seed, progress=True)[criterion]
    found.save(
        output,
        checkpoint_sha256=loaded.sha256(),
        criterion=criterion,
        key_bits=key_bits,
        value_bits=value_bits,
        candidates=candidates,
        samples=samples,
        length=length,
        seed=seed,
    )
    click.echo(
        f"{output}: patterns of {loaded.config.layers} layers, the best of {candidates} by {criterion}", err=True
    )


@click.command("axelram-study")
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), default=REFERENCE, help=f"{FLOAT}  [default: the reference]"
)
@click.option("--tokenizer", type=click.Path(path_type=Path), help="By default the one in or beside the checkpoint.")
@click.option(
    "--text", type=click.Path(path_type=Path), help="UTF-8 text to score, by default the reference's held-out one."
)
@click.option("--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Tokens of it to score.")
@click.option("--length", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a row.")
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Rows to calibrate on, of 256.")
@click.option("--candidates", type=click.IntRange(1, 10000), default=200, show_default=True, help="Patterns a layer.")
@click.option("--seeds", type=click.IntRange(1, 100), default=10, show_default=True, help="Seeds 1, 2, … of patterns.")
@click.option("--bits", default="2,3,4", show_default=True, help="Widths of an index, separated by commas.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def study_command(
    checkpoint: Path,
    tokenizer: Path | None,
    text: Path | None,
    tokens: int,
    length: int,
    samples: int,
    candidates: int,
    seeds: int,
    bits: str,
    as_json: bool,
) -> None:
    """The paper's Tables I and III on a checkpoint of your own: how much sign patterns matter, and what choosing them
    is worth. Every scored token attends to the quantized cache alone."""
    widths = []
    for item in bits.split(","):
        if not item.strip().isdigit() or not 1 <= int(item) <= 6:
            raise ValueError(f"--bits must be numbers from 1 to 6 with commas between them, not {bits!r}")
        widths.append(int(item))
    words = tokenizer_for(checkpoint, tokenizer)
    loaded = load_checkpoint(checkpoint)
    check_vocabulary(words, loaded.config)
    source = _texts(checkpoint, text)
    length = min(length, loaded.config.max_positions)
    sample = min(256, loaded.config.max_positions)
    scored = sequences(words, source, length, tokens)
    rows = sequences(words, source, sample, samples * sample, skip=consumed(words, scored))
    model = PIPELINES["integer"].build(Workshop(loaded, rows, progress=True), DenseCache)
    assert isinstance(model, IntegerDecoder)
    study = Study(model, Decoder(loaded), scored, rows, range(1, seeds + 1), candidates)
    found = study.run(list(dict.fromkeys(widths)))
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    show(
        found["summary"],
        False,
        f"{checkpoint.name}: increase of perplexity over float {found['float_perplexity']}, {tokens:,} tokens",
    )
    show(found["paper"], False, "The paper's Tables I and III")
    show(found["layers"], False, "Norms of keys, and KL of the attention over seeds (mnat)")
    show(found["runs"], False, "All runs")


class Study:
    """Perplexity under the patterns of some seeds and under chosen ones, and layer by layer what they differ in."""

    def __init__(
        self,
        model: IntegerDecoder,
        reference: Decoder,
        scored: Sequence[Sequence[int]],
        rows: Sequence[Sequence[int]],
        seeds: Sequence[int],
        candidates: int,
    ):
        self.model, self.reference, self.scored, self.seeds = model, reference, scored, seeds
        self.candidates = candidates
        self.search = Search(model, rows)

    def run(self, widths: Sequence[int]) -> dict[str, Any]:
        """All tables: ``summary``, ``runs``, ``layers``, ``paper``."""
        layers, size = self.model.config.layers, self.model.config.head_dim
        patterns: dict[tuple[int, str], Patterns] = {}
        for bits in widths:
            for seed in self.seeds:
                patterns[bits, f"seed {seed}"] = Patterns.seeded(layers, size, seed, PAPER_SEED)
            best = self.search.best(bits, bits, self.candidates, progress=True)
            for criterion, chosen in best.items():
                patterns[bits, criterion] = chosen
        models = {"dense": self.model} | {
            f"{bits} {name}": self.model.with_cache(
                partial(RotatedCache, config=RotatedConfig(key_bits=bits, value_bits=bits), patterns=found)
            )
            for (bits, name), found in patterns.items()
        }
        scores = evaluate(models, self.scored, self.reference, progress=True)
        base = scores["dense"].perplexity / (1 + (scores["dense"].change or 0.0) / 100)
        runs = [_run("dense", None, scores["dense"], base)]
        runs += [_run(name, bits, scores[f"{bits} {name}"], base) for bits, name in patterns]
        return {
            "float_perplexity": round(base, 4),
            "tokens": scores["dense"].tokens,
            "summary": [self._summary(bits, runs) for bits in widths],
            "layers": [self._layer(layer, widths) for layer in range(layers)],
            "paper": [
                {"model": model, "bits": bits} | dict(zip(("mean", "std", "worst", "optimised"), figures, strict=True))
                for model, table in PAPER.items()
                for bits, figures in table.items()
            ],
            "runs": runs,
        }

    def _summary(self, bits: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A row of Tables I and III; standard deviations are the population's, as in the paper."""
        mine = {run["patterns"]: run for run in runs if run["bits"] == bits}
        seeded = [mine[f"seed {seed}"] for seed in self.seeds]
        increase, kl = ([run[key] for run in seeded] for key in ("increase", "kl_mnat"))
        worst = int(np.argmax(kl))
        row: dict[str, Any] = {
            "bits": bits,
            "mean": round(float(np.mean(increase)), 4),
            "std": round(float(np.std(increase)), 4),
            "worst": max(increase),
            "kl_mnat": round(float(np.mean(kl)), 2),
            "kl_std": round(float(np.std(kl)), 2),
            "kl_worst": kl[worst],
            "kl_worst_seed": self.seeds[worst],
        }
        for criterion in CRITERIA:
            run = mine[criterion]
            row[criterion] = run["increase"]
            row[f"{criterion}_kl"] = run["kl_mnat"]
            row[f"{criterion}_beaten_by"] = sum(other < run["kl_mnat"] for other in kl)
        return row

    def _layer(self, layer: int, widths: Sequence[int]) -> dict[str, Any]:
        norms = self.search.norms(layer)
        row: dict[str, Any] = {
            "layer": layer,
            "norm_min": round(float(norms.min()), 2),
            "norm_mean": round(float(norms.mean()), 2),
            "norm_max": round(float(norms.max()), 2),
            "norm_std/mean": round(float(norms.std() / norms.mean()), 3),
        }
        for bits in widths:
            kl = 1000 * np.array(self.search.spread(layer, bits, self.seeds))
            row[f"b{bits}_kl"] = round(float(kl.mean()), 3)
            row[f"b{bits}_std/mean"] = round(float(kl.std() / kl.mean()), 3)
            row[f"b{bits}_worst/mean"] = round(float(kl.max() / kl.mean()), 3)
        return row


def _run(name: str, bits: int | None, score: Score, base: float) -> dict[str, Any]:
    return {
        "bits": bits,
        "patterns": name,
        "perplexity": round(score.perplexity, 4),
        "increase": round(score.perplexity - base, 4),
        "kl_mnat": round(score.kl_mnat or 0.0, 3),
        "kl_standard_error": None if score.kl_standard_error is None else round(score.kl_standard_error, 3),
    }
