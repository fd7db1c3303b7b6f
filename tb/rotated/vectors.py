"""Vectors that the benches of this family share: corners, and every distribution that matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden.fixedpoint import Int, bounds, round_shift
from golden.llm.checkpoint import REFERENCE, load
from golden.llm.formats import SCHEMES
from golden.llm.integer import IntegerDecoder
from golden.llm.kvcache import Heads
from golden.llm.prepare import quantize
from golden.llm.rotations import record
from golden.llm.text import sequences
from golden.llm.tokenizer import find_tokenizer
from golden.llm.train import split


def corners(size: int, bits: int) -> dict[str, list[Int]]:
    """Named vectors (size,), signed ``bits``: zero, one-hot, all equal, full scale, alternating, norms around 1."""
    low, high = bounds(bits)
    flat, k = np.ones(size, np.int64), np.arange(size)

    def one_hot(place: int, value: int) -> Int:
        return np.where(k == place, value, 0)

    return {
        "zero": [0 * flat],
        "one-hot": [one_hot(p, v) for p in sorted({0, size // 2, size - 1}) for v in (1, -1, high, low)],
        "all equal": [v * flat for v in (1, -1, high, low, high // 3)],
        "alternating": [np.where(k % 2, low, high), np.where(k % 2, high, low), np.where(k < size // 2, high, low)],
        "norms around 1": [np.where(k < n, (-1) ** k, 0) for n in range(min(size, 5) + 1)],
    }


def random_vector(generator: np.random.Generator, size: int, bits: int, kind: int) -> Int:
    """Uniform, normal of any scale, or with one coordinate far above the rest."""
    low, high = bounds(bits)
    if kind % 3 == 0:
        return generator.integers(low, high + 1, size)
    x = generator.standard_normal(size) * high / 4
    if kind % 3 == 1:
        x *= 2.0 ** -generator.integers(0, bits)
    else:
        x[generator.integers(size)] *= 1000
    return np.clip(np.rint(x), low, high).astype(np.int64)


def random_vectors(generator: np.random.Generator, count: int, size: int, bits: int) -> Int:
    """Many of them (count, size) at once: normal of any scale, every fourth uniform."""
    low, high = bounds(bits)
    x = generator.standard_normal((count, size)) * high / 4 * 2.0 ** -generator.integers(0, bits, count)[:, None]
    x[::4] = generator.integers(low, high + 1, (len(x[::4]), size))
    return np.clip(np.rint(x), low, high).astype(np.int64)


def filling(x: Any, bits: int) -> tuple[Int, int]:
    """Real values on the power-of-two scale at which the largest fills a word: (integers, exponent)."""
    x = np.asarray(x, np.float64)
    exponent = int(np.frexp(np.abs(x).max())[1]) - bits + 1
    low, high = bounds(bits)
    scaled: NDArray[np.float64] = np.rint(x * 2.0**-exponent)
    return np.clip(scaled, low, high).astype(np.int64), exponent


def heads(capture: Mapping[str, Any], size: int, site: str) -> Iterator[NDArray[np.float64]]:
    """The captured ``query``, ``key`` or ``value`` vectors (size,) of every 16th token, of larger heads the first
    elements; none where heads are smaller."""
    for name, values in capture.items():
        if name.endswith(f"/{site}") and not name.startswith("units/") and values.shape[-1] >= size:
            yield from np.asarray(values, np.float64)[::16, :, :size].reshape(-1, size)


@lru_cache
def decoded(tokens: int, layer: int) -> tuple[Heads, Heads]:
    """Keys and queries of one layer of the reference checkpoint after the rotary embedding, as the integer pipeline
    has them while it reads ``tokens`` tokens of the text that the checkpoint was not trained on: x (tokens * heads,
    head_dim), e (tokens * heads,)."""
    checkpoint = load(REFERENCE)
    text = "\n".join(split()[1].values())
    rows = sequences(find_tokenizer(REFERENCE), text, checkpoint.config.max_positions, tokens)
    found = record(IntegerDecoder(quantize(checkpoint, SCHEMES["integer"])), rows)[layer]
    size = checkpoint.config.head_dim
    keys, queries = (
        Heads(np.concatenate([h.x.reshape(-1, size) for h in part]), np.concatenate([h.e.ravel() for h in part]))
        for part in (found.keys, found.queries)
    )
    return keys, queries


def fitted(heads: Heads, bits: int) -> Heads:
    """The same in words of ``bits``: the few vectors that need more are rounded to a coarser exponent."""
    over = np.maximum([int(np.abs(row).max()).bit_length() + 1 - bits for row in heads.x], 0)
    return Heads(round_shift(heads.x, over[:, None]), heads.e + over)
