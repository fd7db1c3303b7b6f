"""Bench of the sign flip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import Int
from golden.rotated.signs import SignsConfig, from_word, layer_seed, pattern, signs, word
from tb.bench import Bench, Case, Generator
from tb.packing import Row
from tb.rotated.vectors import corners, filling, heads, random_vector, random_vectors


def table_words(patterns: int, size: int) -> list[int]:
    """Patterns for a table: all +1, all -1, alternating, then seeded ones."""
    full = (1 << size) - 1
    fixed = [full, 0, full // 3]
    return [*fixed, *(word(pattern(layer_seed(7, k), size)) for k in range(patterns))][:patterns]


def table_signs(patterns: int, size: int) -> Int:
    """The same as signs (patterns, size)."""
    return np.array([from_word(w, size) for w in table_words(patterns, size)])


def beat_words(signs: Int, lanes: int) -> list[int]:
    """Signs (patterns, size) as words of ``lanes`` bits, a pattern's first beat first: bit k is set for +1."""
    return [word(part) for part in signs.reshape(-1, lanes)]


class SignsBench(Bench):
    config: SignsConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        loaded = self.config.form == "loaded"
        self.words = table_words(self.config.patterns, self.config.size) if loaded else list(self.config.rom)

    def row(self, x: Any, k: int) -> Row:
        return Row({"x": np.asarray(x, np.int64)}, {"pattern": k % self.config.patterns})

    def directed(self) -> list[Case]:
        groups = corners(self.config.size, self.config.in_bits)
        cases = [Case(name, [self.row(x, k) for k, x in enumerate(group)]) for name, group in groups.items()]
        every = [self.row(np.arange(self.config.size) % 3 - 1, k) for k in range(self.config.patterns)]
        return [*cases, Case("every pattern", every)]

    def random(self, generator: Generator) -> list[Row]:
        picks = generator.integers(0, self.config.patterns, 9)
        vectors = (random_vector(generator, self.config.size, self.config.in_bits, k) for k in range(9))
        return [self.row(x, int(k)) for x, k in zip(vectors, picks, strict=True)]

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        vectors = random_vectors(generator, beats, self.config.size, self.config.in_bits)
        return [self.row(x, k) for k, x in enumerate(vectors)]

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        found = heads(capture, self.config.size, "key")
        return [self.row(filling(x, self.config.in_bits)[0], k) for k, x in enumerate(found)]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        x = np.stack([row.data["x"] for row in rows])
        select = np.array([row.row["pattern"] for row in rows])
        return [Row({"y": part}) for part in signs(self.config, x, self.words, select)]

    def table(self) -> list[tuple[int, int]]:
        return list(enumerate(self.words)) if self.config.form == "loaded" else []


BENCH = SignsBench
