"""Sign patterns: which coordinates of a vector change sign before it is Walsh-Hadamard-transformed.

``y = s * x`` with s in {-1, +1} per coordinate. Signs and transform together are a rotation; another pattern is another
rotation at no cost, and a pattern is one bit a coordinate in a ROM. The most negative x has no counterpart, and counts
as the negative of the largest (:func:`symmetric`): y does so too, whatever s.

The paper's patterns come from a seed: bit i is the lowest bit of the i-th 32-bit output of the Mersenne Twister
(MT19937), 1 for +1. Layer l uses ``seed + 1000 * l`` for keys and ``seed + 1000 * (l + 500)`` for values.

Source: AXELRAM (sign flip of its write path; sign ROM of d bits a layer; selection of a pattern among candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, integer, power_of_two
from golden.fixedpoint import Int, address_bits, bounds, check

#: Seeds of the paper's patterns: its default, and what lies between two layers and between keys and values.
PAPER_SEED = 42
LAYER_STEP = 1000
VALUE_STEP = 500 * LAYER_STEP


@dataclass(frozen=True)
class SignsConfig(UnitConfig):
    """Configuration of the sign flip.

    Input: x, signed ``in_bits``, rows of ``size``; pattern, which of the ``patterns`` in the ROM. Output: y, signed
    ``in_bits``. Saturation: the most negative x.

    The ROM of form ``seeded`` holds the paper's patterns from ``seed`` on, keys and values of each layer in turn; that
    of form ``loaded`` is written through the table port.
    """

    size: int = power_of_two(128, 2, 256, "elements of a row, a power of two")
    in_bits: int = integer(16, 2, 32, "width of x")
    form: str = choice("loaded", ("loaded", "seeded"), "where the patterns come from")
    patterns: int = integer(64, 1, 256, "patterns in the ROM: two a layer")
    seed: int = integer(PAPER_SEED, 0, 1 << 31, "seeded: of the first layer's keys")

    @property
    def lanes(self) -> int:
        """Elements per beat: a row is one beat."""
        return self.size

    @cached_property
    def pattern_bits(self) -> int:
        """Width of a pattern's number."""
        return address_bits(self.patterns)

    @cached_property
    def rom(self) -> tuple[int, ...]:
        """Seeded: the ROM's words, bit i set where s of coordinate i is +1."""
        return tuple(word(pattern(layer_seed(self.seed, k // 2, bool(k % 2)), self.size)) for k in range(self.patterns))


def layer_seed(seed: int, layer: int, values: bool = False) -> int:
    """Seed of a layer's keys, or of its values."""
    return seed + LAYER_STEP * layer + (VALUE_STEP if values else 0)


@lru_cache
def pattern(seed: int, size: int) -> Int:
    """Signs (size,) in {-1, +1} of a seed; the array is read-only."""
    # `RandomState` is NumPy's frozen generator: its raw stream is that of MT19937's reference code.
    raw = np.random.RandomState(seed % (1 << 32))._bit_generator.random_raw(size)  # type: ignore[attr-defined]
    signs = 2 * (raw & 1).astype(np.int64) - 1
    signs.flags.writeable = False
    return signs


def word(signs: ArrayLike) -> int:
    """A pattern as a word: bit i is set where s of coordinate i is +1."""
    return sum(1 << k for k, s in enumerate(check_signs(signs).tolist()) if s > 0)


def from_word(bits: int, size: int) -> Int:
    """The pattern of a word: inverse of :func:`word`."""
    if bits >> size or bits < 0:
        raise ValueError(f"a pattern of {size} coordinates has {size} bits, not {bits.bit_length()}")
    return np.array([1 if bits >> k & 1 else -1 for k in range(size)], np.int64)


def check_signs(signs: ArrayLike, size: int | None = None) -> Int:
    """``signs`` as int64. ValueError unless all are -1 or +1, and there are ``size`` of them."""
    found = np.asarray(signs)
    if found.dtype.kind not in "iu" or not ((found == 1) | (found == -1)).all():
        raise ValueError("signs must be -1 or +1")
    if size is not None and found.shape[-1:] != (size,):
        raise ValueError(f"there must be {size} signs, not an array of shape {found.shape}")
    return found.astype(np.int64, copy=False)


def symmetric(x: ArrayLike, bits: int) -> Int:
    """x, signed ``bits``, without the most negative value: it becomes the negative of the largest."""
    return np.maximum(check("x", x, bits), -bounds(bits)[1])


def flip(x: ArrayLike, signs: ArrayLike, bits: int) -> Int:
    """``signs * symmetric(x)`` for rows x (…, size), signed ``bits``, and signs (size,), or (…, size)."""
    x = symmetric(x, bits)
    return x * check_signs(signs, x.shape[-1])


def signs(config: SignsConfig, x: ArrayLike, words: Sequence[int] | Int, select: ArrayLike) -> Int:
    """Rows x (…, size) with the signs of the patterns ``select`` (…) of a ROM of ``words`` (of ``config.rom``, where
    it is seeded). Raises ValueError for a pattern that the ROM does not have."""
    select = np.asarray(select)
    if select.size and (select.min() < 0 or select.max() >= config.patterns):
        raise ValueError(f"select must lie in 0..{config.patterns - 1}, not {select.min()}..{select.max()}")
    rom = np.array([from_word(int(w), config.size) for w in words])
    return flip(x, rom[select], config.in_bits)
