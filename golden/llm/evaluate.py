"""How far a pipeline is from the float model on a text: perplexity, and the divergence of its distributions.

Both models read the same rows of tokens (teacher forcing). With the logits z of each token, in float64:

* perplexity: exp of the mean loss; *change*: ``100 * (exp(mean of loss - reference loss) - 1)`` percent, with the
  standard error of that mean over rows (a row's tokens are not independent of each other);
* KL(reference || pipeline), in milli-nats a token, with its standard error over rows; 1 mnat is 0.1 % of perplexity to
  be expected. Perplexity itself cannot tell pipelines apart below about 0.1 %; the divergence can;
* agreement: how often the most likely next token is the same.

A pipeline whose logits are not finite (beyond 1e30 counts as such), or whose perplexity is more than ten times the
reference's, has *diverged*. Perplexities beyond float64 are infinite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from golden.llm.reference import LanguageModel, log_softmax

#: Ratio to the reference's perplexity from which on a pipeline counts as diverged.
DIVERGED = 10.0
#: Magnitude of logits from which on they count as not finite: nothing computed from smaller ones leaves float64.
ABSURD = 1e30


@dataclass(frozen=True)
class Score:
    """Figures of one pipeline over all rows. Standard errors are None for a single row; what compares with a reference
    is None without one."""

    tokens: int
    perplexity: float
    change: float | None
    standard_error: float | None
    kl_mnat: float | None
    kl_standard_error: float | None
    agreement: float | None
    diverged: bool


def real_logits(model: LanguageModel, ids: Sequence[int] | NDArray[Any]) -> NDArray[np.float64]:
    """Logits (T, vocab) as real numbers, of a pipeline of any arithmetic."""
    return np.asarray(model.forward(ids), np.float64) * model.logit_scale


def clustered(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Mean a token of what rows sum up to, and its standard error over rows (None for a single row)."""
    total, n = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    mean = float(total.sum() / n.sum())
    if len(total) < 2:
        return mean, None
    spread = np.square(total - mean * n).sum() * len(total) / (len(total) - 1)
    return mean, float(np.sqrt(spread) / n.sum())


def evaluate(
    models: Mapping[str, LanguageModel],
    rows: Sequence[Sequence[int]],
    reference: LanguageModel | None = None,
    progress: bool = False,
) -> dict[str, Score]:
    """Score every model on rows of at least two tokens each. One row is in memory at a time, and the reference reads
    it once.

    Raises ValueError for shorter rows, or if the reference's logits are not finite.
    """
    if not rows or min(map(len, rows)) < 2:
        raise ValueError("scoring needs rows of at least two tokens")
    counts = [len(row) - 1 for row in rows]
    losses: dict[str, list[float]] = {name: [] for name in models}
    base: list[float] = []
    kl: dict[str, list[float]] = {name: [] for name in models}
    same: dict[str, int] = dict.fromkeys(models, 0)
    with tqdm(total=len(models) * sum(map(len, rows)), unit="token", unit_scale=True, disable=not progress) as bar:
        for row in rows:
            targets = np.asarray(row[1:])
            at = np.arange(len(targets))
            p = None
            if reference is not None:
                logits = real_logits(reference, row)[:-1]
                if not _usable(logits):
                    raise ValueError("the reference model's logits are not finite: there is nothing to compare with")
                p = log_softmax(logits)
                base.append(-float(p[at, targets].sum()))
            for name, model in models.items():
                bar.set_postfix_str(name, refresh=False)
                logits = real_logits(model, row)[:-1]
                q = log_softmax(logits) if _usable(logits) else None
                losses[name].append(np.inf if q is None else -float(q[at, targets].sum()))
                if p is not None:
                    kl[name].append(np.inf if q is None else float((np.exp(p) * (p - q)).sum()))
                    same[name] += 0 if q is None else int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
                bar.update(len(row))
    return {
        name: _score(losses[name], counts, base, kl[name], same[name] if reference is not None else None)
        for name in models
    }


def _usable(logits: NDArray[np.float64]) -> bool:
    return bool((np.abs(logits) < ABSURD).all())  # not so for NaN either


def _exp(loss: float) -> float:
    return float(np.exp(loss)) if loss < 700 else np.inf


def _score(losses: list[float], counts: list[int], base: list[float], kl: list[float], same: int | None) -> Score:
    tokens = sum(counts)
    loss = sum(losses) / tokens
    perplexity = _exp(loss)
    if same is None:
        return Score(tokens, perplexity, None, None, None, None, None, not np.isfinite(perplexity))
    if not np.isfinite(loss):
        return Score(tokens, np.inf, np.inf, None, np.inf, None, same / tokens, True)
    mean, error = clustered([a - b for a, b in zip(losses, base, strict=True)], counts)
    ratio = _exp(mean)
    divergence, divergence_error = clustered([1e3 * x for x in kl], counts)
    return Score(
        tokens=tokens,
        perplexity=perplexity,
        change=100 * (ratio - 1),
        standard_error=None if error is None or ratio == np.inf else 100 * ratio * error,
        kl_mnat=divergence,
        kl_standard_error=divergence_error,
        agreement=same / tokens,
        diverged=ratio > DIVERGED,
    )
