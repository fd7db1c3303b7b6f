"""AXELRAM's key/value cache in the golden LLM (``--kv rotated``): keys and values as indices of a fixed codebook in a
rotated domain, attention by lookup, nothing turned back.

Keys go through :mod:`golden.rotated.write_path` as they leave the rotary embedding (17 bits), values as token-wise
INT16. A stored norm is binary16, in units of 1 on the wide scale (for models that normalise their heads, in units of
``2**16`` on the gain's). Scores come from :mod:`golden.rotated.read_path`, whose programmable centroids carry all that
is constant in a layer: what it gives is the softmax's input, and one multiplication a key is left. The context comes
from :mod:`golden.rotated.value_path`, in the wide format. A query's exponent goes into its shift.

The macro has no memory for keys that are not compressed: by default every token is seen compressed from the start, its
own query included. With ``sinks`` or ``recent`` these tokens are kept in the dense format as well, and seen dense.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from golden import float16
from golden.commandline import atomic_write
from golden.config import UnitConfig, integer
from golden.fixedpoint import Int
from golden.llm.formats import Units
from golden.llm.kvcache import DenseCache, Heads, Queries, Windows
from golden.nonlinear.requantize import requantize
from golden.rotated import lloyd_max, read_path, signs, value_path, write_path
from golden.rotated.lloyd_max import MAX_BITS
from golden.rotated.read_path import ReadPathConfig
from golden.rotated.value_path import ValuePathConfig
from golden.rotated.write_path import WritePathConfig

CENTROID_BITS = 18
TABLE_BITS = 28
#: A stored norm counts in units of ``2**NORM_EXPONENT``: 1 on the wide scale.
NORM_EXPONENT = 16


@dataclass(frozen=True)
class RotatedConfig(UnitConfig):
    """What may be chosen about the cache."""

    key_bits: int = integer(3, 1, MAX_BITS, "bits of a key's index")
    value_bits: int = integer(3, 1, MAX_BITS, "bits of a value's index")
    sinks: int = integer(0, 0, 1 << 18, "tokens at the beginning that are seen dense")
    recent: int = integer(0, 0, 1 << 18, "most recent tokens that are seen dense")
    update: int = integer(1, 1, 1 << 12, "tokens that leave the recent ones together")
    seed: int = integer(signs.PAPER_SEED, 0, 1 << 31, "of the sign patterns, where none are given")

    def validate(self) -> None:
        _ = self.windows

    @cached_property
    def windows(self) -> Windows:
        return Windows(self.sinks, self.recent, self.update)


@dataclass(frozen=True)
class Patterns:
    """Sign patterns of a model: one word (:func:`golden.rotated.signs.word`) a layer for keys and for values."""

    size: int
    keys: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def seeded(cls, layers: int, size: int, seed: int = signs.PAPER_SEED, value_seed: int | None = None) -> Patterns:
        """The paper's patterns of a seed; its study of seeds keeps the values' at 42."""
        return cls(
            size,
            tuple(signs.word(signs.pattern(signs.layer_seed(seed, i), size)) for i in range(layers)),
            tuple(
                signs.word(signs.pattern(signs.layer_seed(seed if value_seed is None else value_seed, i, True), size))
                for i in range(layers)
            ),
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Patterns:
        """Patterns from a file of :meth:`save`. ValueError, one line, for anything else."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(2, "no such file of sign patterns", str(path))
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            size, keys, values = found["size"], found["keys"], found["values"]
            if not isinstance(size, int) or isinstance(size, bool) or not 2 <= size <= 256:
                raise ValueError("size must lie in 2..256")
            words = [[int(word, 16) for word in part] for part in (keys, values)]
        except (ValueError, KeyError, TypeError) as problem:
            told = f"{problem.args[0]!r} is missing" if isinstance(problem, KeyError) else str(problem)
            raise ValueError(f"{path}: no file of sign patterns (of search-signs): {told}") from None
        if len(words[0]) != len(words[1]) or any(not 0 <= word < 1 << size for part in words for word in part):
            raise ValueError(f"{path}: keys and values must be words of {size} bits, as many of one as of the other")
        return cls(size, tuple(words[0]), tuple(words[1]))

    def save(self, path: str | os.PathLike[str], **provenance: Any) -> None:
        """Write a JSON file: size, keys and values as hexadecimal words, and where they are from."""
        width = -(-self.size // 4)
        found = {
            "size": self.size,
            "keys": [f"{word:0{width}x}" for word in self.keys],
            "values": [f"{word:0{width}x}" for word in self.values],
            "provenance": provenance,
        }
        with atomic_write(path) as file:
            file.write(json.dumps(found, indent=1) + "\n")

    def check(self, layers: int, size: int) -> None:
        """Raise ValueError unless these are the patterns of a model of that shape."""
        if (len(self.keys), self.size) != (layers, size):
            raise ValueError(
                f"the sign patterns are those of {len(self.keys)} layers with heads of {self.size}, "
                f"the model has {layers} of {size}"
            )


def layer_centroids(bits: int, constant: tuple[int, int], size: int, transformed: bool) -> tuple[Int, int]:
    """Positive centroids (``2**(bits - 1)``,) of :data:`CENTROID_BITS`, and P: ``C * 2**-P`` is a centroid of the
    normal distribution, divided by ``size``, times the constant of the scores (where ``transformed``, that is the one
    of transformed queries and keys, which has the division in it)."""
    multiplier, fraction = constant
    real = lloyd_max.solve(bits).centroids * (multiplier if transformed else multiplier / size)
    down = CENTROID_BITS - math.frexp(float(real.max()))[1]
    found = np.rint(np.ldexp(real, down)).astype(np.int64)
    if found.max() >> CENTROID_BITS:
        down -= 1
        found = np.rint(np.ldexp(real, down)).astype(np.int64)
    return found, down + fraction


class RotatedScores:
    """Logits (heads, T, S) of queries against stored keys, as the read path gives them in the format that is chosen."""

    def __init__(self, cache: RotatedCache, layer: int, queries: Heads, constant: tuple[int, int], seen: int):
        self.cache, self.layer, self.queries, self.constant, self.seen = cache, layer, queries, constant, seen

    def fixed(self, fraction_bits: int, bits: int = 16) -> Int:
        """Fixed point with ``fraction_bits``, rounded half up, saturated to ``bits``."""
        cache, layer, m = self.cache, self.layer, self.cache.units.model
        config = cache.reader.replace(score_bits=bits)
        codes, down = layer_centroids(config.bits, self.constant, m.head_dim, cache.units.formats.transform)
        # score = sum * m * 2**(X - 25) * 2**(16 + table_drop + e - down), and 2**(X - 30 - shift) is what is applied.
        shift = down - 21 - fraction_bits - config.table_drop - self.queries.e
        cache.tap(layer, "key_read", config, {"x": self.queries.x, "shift": shift, "centroids": codes})
        index, norm = cache.keys.index[layer], cache.keys.norm[layer]
        found = np.empty((m.heads, len(shift), self.seen), np.int64)
        for kv in range(m.kv_heads):
            group, key = np.s_[kv * m.group : (kv + 1) * m.group], np.s_[kv, : self.seen]
            x, shifts = (part[:, group].swapaxes(0, 1) for part in (self.queries.x, shift))
            stored = index[key], norm[key]
            found[group] = read_path.read_path(config, x, cache.key_signs[layer], *stored, shifts, codes)
        return found


class _Vectors:
    """Stored vectors of all layers: index (layers, kv_heads, capacity, size), norm, binary16, without the last axis."""

    def __init__(self, shape: tuple[int, int, int], size: int):
        self.index = np.zeros((*shape, size), np.uint8)
        self.norm = np.zeros(shape, np.uint16)


class RotatedCache(DenseCache):
    """Keys and values at ``key_bits`` and ``value_bits`` an element and 16 bits a vector.

    Raises ValueError for heads that are no power of two up to 256."""

    reads_codes = False

    def __init__(
        self,
        units: Units,
        capacity: int,
        config: RotatedConfig | None = None,
        patterns: Patterns | None = None,
    ):
        super().__init__(units, capacity)
        self.config = config = RotatedConfig() if config is None else config
        self.windows = config.windows
        m, size = units.model, units.model.head_dim
        if size & (size - 1) or not 2 <= size <= 256:
            raise ValueError(f"a rotated cache needs a head_dim that is a power of two from 2 to 256, not {size}")
        self.patterns = Patterns.seeded(m.layers, size, config.seed) if patterns is None else patterns
        self.patterns.check(m.layers, size)
        self.key_signs, self.value_signs = (
            [signs.from_word(word, size) for word in words] for words in (self.patterns.keys, self.patterns.values)
        )
        self.key_writer = WritePathConfig(lanes=size, size=size, in_bits=units.rope.out_bits, bits=config.key_bits)
        self.value_writer = WritePathConfig(lanes=size, size=size, in_bits=16, bits=config.value_bits)
        self.reader = ReadPathConfig(
            size=size,
            in_bits=units.rope.out_bits,
            bits=config.key_bits,
            codebook="programmable",
            centroid_bits=CENTROID_BITS,
            table_bits=TABLE_BITS,
            score_bits=units.softmax.score_bits,
            build_lanes=min(8, size),
        )
        self.values_reader = ValuePathConfig(
            size=size,
            bits=config.value_bits,
            max_row=units.softmax.max_row,
            z_bits=max(28, min(32, 36 - size.bit_length())),  # as many more as a smaller transform adds fewer
            fraction_bits=units.formats.fraction_bits,
            drain_lanes=min(8, size),
        )
        shape = (m.layers, m.kv_heads, capacity)
        self.keys, self.values = _Vectors(shape, size), _Vectors(shape, size)

    # -- writing -------------------------------------------------------------------------------------------------------
    def append(self, layer: int, keys: Heads, values: Int) -> None:
        if self.windows is not None and self.windows.dense:
            super().append(layer, keys, values)
        else:
            self._room(len(values))
        row, e, _ = requantize(self.units.head_row, values)
        assert e is not None
        self._write(layer, "key", self.key_writer, keys, self.keys, self.key_signs[layer])
        self._write(layer, "value", self.value_writer, Heads(row, e[..., 0]), self.values, self.value_signs[layer])

    def _compress(self, layer: int, first: int, last: int) -> None:
        """Nothing: tokens are written through the write path as they come."""

    def _write(
        self, layer: int, place: str, config: WritePathConfig, heads: Heads, store: _Vectors, pattern: Int
    ) -> None:
        exponent = heads.e - NORM_EXPONENT
        found = write_path.write_path(config, heads.x, pattern, exponent)
        part = np.s_[layer, :, self.length : self.length + len(heads.x)]
        store.index[part], store.norm[part] = found.indices.swapaxes(0, 1), found.norm.T
        tensors = {"x": heads.x, "exponent": exponent, "signs": pattern, "index": found.indices, "norm": found.norm}
        self.tap(layer, f"{place}_write", config, tensors)

    # -- reading -------------------------------------------------------------------------------------------------------
    def _old_scores(self, layer: int, query: Queries, constant: tuple[int, int], seen: int) -> RotatedScores:
        return RotatedScores(self, layer, query.heads, constant, seen)

    def _old_context(self, layer: int, p: Int, seen: int, old: NDArray[np.bool_]) -> Int:
        m, count = self.units.model, p.shape[1]
        found = np.empty((count, m.heads, m.head_dim), np.int64)
        for kv in range(m.kv_heads):
            index, norm = self.values.index[layer, kv, :seen], self.values.norm[layer, kv, :seen].astype(np.int64)
            _, exponent = float16.parts(norm)
            top = np.where(old, exponent, 1).max(axis=-1)
            part = np.s_[kv * m.group : (kv + 1) * m.group]
            tops = np.broadcast_to(top, (m.group, count))
            self.tap(layer, "value_read", self.values_reader, {"p": p[part], "top": tops})
            y = value_path.value_path(self.values_reader, index, norm, p[part], tops, self.value_signs[layer])
            found[:, part] = y.swapaxes(0, 1)
        return found

    # -- what it takes -------------------------------------------------------------------------------------------------
    @property
    def _old_token_bits(self) -> int:
        m = self.units.model
        return m.layers * m.kv_heads * (self.key_writer.vector_bits + self.value_writer.vector_bits)

    @property
    def _dense_tokens(self) -> int:
        """Tokens that are kept dense as well."""
        assert self.windows is not None
        return self.length - int(self.windows.compressed(self.length))

    @property
    def size_bits(self) -> int:
        return self.length * self._old_token_bits + self._dense_tokens * self.dense.token_bits

    @property
    def written_bytes(self) -> int:
        assert self.windows is not None
        token = self._old_token_bits + (self.dense.token_bits if self.windows.dense else 0)
        return -(-self.length * token // 8)
