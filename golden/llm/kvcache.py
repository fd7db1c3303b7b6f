"""Key/value caches of the integer pipeline: what attention reads, what a token costs to store and to write.

A cache takes the keys and values of new tokens in wide formats and keeps them in its own. ``attend`` gives the context
of queries whose tokens are already in it. Between them lies a policy that all schemes share (:class:`Windows`): the
first ``sinks`` tokens and the most recent ones stay dense, older ones are handed to the scheme ``update`` at a time
(*LLM Inference in a Flash*: 0, 128, 32; AQPIM: 8, 32, 1; AXELRAM: 0, 0, 1). Which tokens a query sees compressed
depends only on its own position, so that prefill and decoding give the same bits.

:class:`DenseCache` stores everything dense: keys and values INT8 (or the formats' widths) with one scale c * 2**e per
token and head. A compressed scheme derives from it, and provides four methods: compress some tokens, scores against
what is compressed, its context, its size. :class:`NarrowCache` (fewer bits) is the simplest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from golden.config import UnitConfig, integer
from golden.fixedpoint import Int, check, largest, matmul, round_shift, saturate, saturating_shift
from golden.llm.formats import Units
from golden.nonlinear.requantize import RequantizeConfig, requantize
from golden.rotated.fwht import fwht

#: Bits that the scale c * 2**e of one token and head takes: two for c, six for e + 4.
SCALE_BITS = 8
#: Octaves by which a value's scale may lie below the coarsest so far and still be kept exactly.
VALUE_SPAN = 8
#: Scores held at a time while a prompt is read: small enough for a core's own cache.
BLOCK_SCORES = 1 << 17


class Tap(Protocol):
    """Called with every unit's inputs and outputs: layer, place in the layer, the unit's configuration, and arrays by
    name. It must not change them."""

    def __call__(self, layer: int, place: str, config: Any, tensors: Mapping[str, Any], /) -> None: ...


def no_tap(layer: int, place: str, config: Any, tensors: Mapping[str, Any], /) -> None:
    """Records nothing."""


class Heads(NamedTuple):
    """Vectors of heads: x (tokens, heads, head_dim), each token and head with its exponent e (tokens, heads).
    The real value is ``x * 2**e`` on a scale that the model knows (wide, or that of the heads' own norms)."""

    x: Int
    e: Int


class Queries(NamedTuple):
    """Queries as a scheme may want them: as they came, and as they meet dense keys, where there are any."""

    heads: Heads
    codes: Codes | None


class Codes(NamedTuple):
    """Requantized heads: q (tokens, heads, head_dim), e and c (tokens, heads): ``x ~ q * c * 2**e``."""

    q: Int
    e: Int
    c: Int


@dataclass(frozen=True)
class Windows(UnitConfig):
    """Which tokens stay dense: the first ``sinks``, and the last ``recent`` of the others; when these are exceeded, the
    ``update`` oldest of them are compressed together."""

    sinks: int = integer(0, 0, 1 << 18, "tokens at the beginning that are never compressed")
    recent: int = integer(0, 0, 1 << 18, "most recent tokens that are not yet compressed")
    update: int = integer(1, 1, 1 << 12, "tokens that are compressed together")

    def validate(self) -> None:
        if self.update > max(self.recent, 1):
            limit = max(self.recent, 1)
            raise ValueError(f"update must lie in 1..{limit} with recent = {self.recent}, not {self.update}")

    @property
    def dense(self) -> bool:
        """Whether any token is ever seen dense."""
        return bool(self.sinks or self.recent)

    def compressed(self, tokens: int | Int) -> Int:
        """How many tokens after the sinks are compressed once ``tokens`` are in the cache."""
        over = np.asarray(tokens, np.int64) - self.sinks - self.recent
        return np.maximum(-(-over // self.update), 0) * self.update

    def old(self, position: Int, key: Int) -> NDArray[np.bool_]:
        """Whether the query at ``position`` sees the token ``key`` compressed; the arguments broadcast."""
        return (key >= self.sinks) & (key < self.sinks + self.compressed(position + 1))


class Scores:
    """Logits of queries (heads, T) against keys (S,), exact until a format is chosen.

    ``dot * factor_q * factor_k * 2**(shift_q + shift_k - fraction)``, where ``factor`` and ``shift`` are the scales of
    query and key and the model's constant; in powers of two, or in nats (the model's constant decides).
    """

    def __init__(self, dot: Int, query: tuple[Int, Int], key: tuple[Int, Int], fraction: int):
        self.dot, self.fraction = dot, fraction
        self.query, self.key = query, key

    def fixed(self, fraction_bits: int, bits: int = 16) -> Int:
        """Fixed point with ``fraction_bits``, rounded half up once, saturated to ``bits``."""
        (cq, eq), (ck, ek) = self.query, self.key
        lq, lk = int(eq.min()), int(ek.min())
        down = self.fraction - fraction_bits - lq - lk
        room = largest(self.dot).bit_length() + int(cq.max()).bit_length() + int(ck.max()).bit_length()
        spread = int(eq.max()) - lq + int(ek.max()) - lk
        if room + spread <= 60 and down >= 0:
            scaled = self.dot * (cq << (eq - lq)) * (ck << (ek - lk))
            return saturate(round_shift(scaled, down), bits)
        # Scales too far apart for one carrier: shift each element by its own amount.
        return saturating_shift(self.dot * cq * ck, self.fraction - fraction_bits - eq - ek, bits)


class Mixed:
    """Scores of which some come from another source: ``old`` where ``where`` says so, else ``recent``."""

    def __init__(self, where: NDArray[np.bool_], old: Logits, recent: Logits):
        self.where, self.old, self.recent = where, old, recent

    def fixed(self, fraction_bits: int, bits: int = 16) -> Int:
        return np.where(self.where, self.old.fixed(fraction_bits, bits), self.recent.fixed(fraction_bits, bits))


class Logits(Protocol):
    """Logits whose format is still to be chosen."""

    def fixed(self, fraction_bits: int, bits: int = 16) -> Int:
        """Fixed point with ``fraction_bits``, rounded half up, saturated to ``bits``: (heads, T, S)."""


class Probabilities(Protocol):
    """Softmax of one block: scores (heads, T, S), keep (T, S) -> unsigned 16-bit probabilities (heads, T, S)."""

    def __call__(self, scores: Logits, keep: NDArray[np.bool_], /) -> Int: ...


class KVCache(Protocol):
    """What the decoder asks of a cache."""

    length: int
    capacity: int
    tap: Tap

    def append(self, layer: int, keys: Heads, values: Int) -> None:
        """Store the keys and values (wide, (T, kv_heads, head_dim)) of the next T tokens of a layer.

        Raises ValueError if there is no room for them."""

    def attend(
        self, layer: int, queries: Heads, constant: tuple[int, int], window: int | None, softmax: Probabilities
    ) -> Int:
        """Context (T, heads, head_dim), wide, of the last T tokens appended to a layer.

        ``constant`` is (multiplier, fraction): a logit is ``q . k * multiplier * 2**-fraction``. ``window`` is the
        model's own sliding window."""

    def advance(self, count: int) -> None:
        """``count`` tokens are complete: all layers have them."""

    @property
    def size_bits(self) -> int:
        """What the tokens so far occupy."""

    @property
    def written_bytes(self) -> int:
        """What has been written so far, a token's move from the window to the scheme included."""


#: Builds an empty cache of a model's units for so many positions.
CacheFactory = Callable[[Units, int], KVCache]


class Store:
    """Keys and values as integers, with one scale c * 2**e per token and head, of all layers."""

    def __init__(self, units: Units, capacity: int, key_bits: int, value_bits: int):
        m = units.model
        self.units, self.key_bits, self.value_bits = units, key_bits, value_bits
        shape = (m.layers, m.kv_heads, capacity)
        self.keys = np.zeros((*shape, m.head_dim), np.int8 if key_bits <= 8 else np.int16)
        self.values = np.zeros((*shape, m.head_dim), np.int8 if value_bits <= 8 else np.int16)
        self.scales = np.zeros((4, *shape), np.int8)  # key e, key c, value e, value c

    @property
    def token_bits(self) -> int:
        """Bits of one token in all layers."""
        m = self.units.model
        return m.layers * m.kv_heads * (m.head_dim * (self.key_bits + self.value_bits) + 2 * SCALE_BITS)

    def put(self, layer: int, first: int, key: Codes, value: Codes) -> None:
        """Write tokens from position ``first`` on."""
        part = np.s_[layer, :, first : first + len(key.q)]
        self.keys[part], self.values[part] = key.q.swapaxes(0, 1), value.q.swapaxes(0, 1)
        exponent = np.stack((key.e, value.e))
        # The finest dense scale is 4 * 2**-2, and a scheme may requantize its codes, which again may be as fine.
        check("exponent", exponent + 4, SCALE_BITS - 2, signed=False)
        for k, scale in enumerate((exponent[0], key.c, exponent[1], value.c)):
            self.scales[k][part] = scale.T

    def get(self, layer: int, first: int, last: int) -> tuple[Codes, Codes]:
        """Codes of the tokens of some positions."""
        part = np.s_[layer, :, first:last]
        key_e, key_c, value_e, value_c = (self.scales[k][part].T.astype(np.int64) for k in range(4))
        keys, values = (x[part].swapaxes(0, 1).astype(np.int64) for x in (self.keys, self.values))
        return Codes(keys, key_e, key_c), Codes(values, value_e, value_c)

    def scores(self, layer: int, query: Codes, constant: tuple[int, int], seen: int) -> Scores:
        """Logits of queries (T, heads, head_dim) against the first ``seen`` keys."""
        m, count = self.units.model, len(query.q)
        q = query.q.reshape(count, m.kv_heads, m.group, m.head_dim).transpose(1, 2, 0, 3)
        dot = matmul(q.reshape(m.kv_heads, -1, m.head_dim), self.keys[layer, :, :seen].swapaxes(1, 2))
        key_e, key_c = (np.repeat(self.scales[k, layer, :, :seen].astype(np.int64), m.group, axis=0) for k in (0, 1))
        return Scores(
            dot.reshape(m.heads, count, seen),
            ((query.c * constant[0]).T[..., None], query.e.T[..., None]),
            (key_c[:, None], key_e[:, None]),
            constant[1],
        )

    def context(self, layer: int, p: Int, seen: int, member: NDArray[np.bool_] | None = None) -> Int:
        """Probabilities (heads, T, seen) times values: wide (T, heads, head_dim). T are the last positions.

        ``weight = rs(p * c, base - e)`` with ``base = max(e) - VALUE_SPAN`` over the tokens up to the query, or those
        that are ``member`` (T, seen) for it (p is 0 elsewhere): 16 + 3 + VALUE_SPAN bits;
        ``context = sat(rs(sum of weight * v, 16 - base))``.
        """
        m = self.units.model
        e, c = (self.scales[k, layer, :, :seen].astype(np.int64) for k in (2, 3))  # (kv_heads, S)
        if member is None:
            reach = np.maximum.accumulate(e, axis=1)[:, seen - p.shape[1] :]  # (kv_heads, T)
        else:
            reach = np.where(member, e[:, None], -2).max(axis=-1)
        p = p.reshape(m.kv_heads, m.group, -1, seen)
        lowest = e.min(axis=1)
        if int((reach.max(axis=1) - lowest).max()) <= VALUE_SPAN:
            # Nothing is rounded: any common grid gives the same sums.
            base = np.broadcast_to(lowest[:, None], reach.shape)
            weight = p * (c << (e - lowest[:, None]))[:, None, None]
        else:
            base = reach - VALUE_SPAN
            weight = round_shift(p * c[:, None, None], (base[:, :, None] - e[:, None])[:, None])
        check("weight", weight, 16 + 3 + VALUE_SPAN, signed=False)
        total = matmul(weight.reshape(m.kv_heads, -1, seen), self.values[layer, :, :seen])
        total = total.reshape(m.kv_heads, m.group, -1, m.head_dim)
        wide = saturating_shift(total, 16 - base[:, None, :, None], 32)
        return wide.reshape(m.heads, -1, m.head_dim).swapaxes(0, 1)


def _codes(config: RequantizeConfig, x: Int) -> Codes:
    """Requantize each head as one group."""
    q, e, c = requantize(config, x)
    assert e is not None and c is not None
    return Codes(q, e[..., 0], c[..., 0])


class DenseCache:
    """Everything dense, in the formats' widths. Base of the schemes that compress what leaves the window."""

    windows: Windows | None = None
    #: Whether the scores against compressed keys take queries in the dense format too.
    reads_codes = True

    def __init__(self, units: Units, capacity: int):
        self.units, self.capacity, self.length = units, capacity, 0
        self.tap: Tap = no_tap
        self.dense = Store(units, capacity, units.formats.key_bits, units.formats.value_bits)
        self._compressed = [0] * units.model.layers

    # -- what a scheme provides ----------------------------------------------------------------------------------------
    def _compress(self, layer: int, first: int, last: int) -> None:
        """Compress the dense tokens of these positions."""
        raise NotImplementedError

    def _old_scores(self, layer: int, query: Queries, constant: tuple[int, int], seen: int) -> Logits:
        """Logits (heads, T, seen) against what is compressed; anything elsewhere."""
        raise NotImplementedError

    def _old_context(self, layer: int, p: Int, seen: int, old: NDArray[np.bool_]) -> Int:
        """Context, wide (T, heads, head_dim), of what each query sees compressed (old (T, seen), its own future and
        what lies outside the model's window left out); p (heads, T, seen) is 0 elsewhere."""
        raise NotImplementedError

    @property
    def _old_token_bits(self) -> int:
        """Bits of a compressed token in all layers."""
        return 0

    # -- storage -------------------------------------------------------------------------------------------------------
    def append(self, layer: int, keys: Heads, values: Int) -> None:
        last = self._room(len(values))
        key = self._enter(layer, "key", self.units.key, self._turn(layer, "key", keys.x))
        value = self._enter(layer, "value", self.units.value, values)
        self.dense.put(layer, self.length, Codes(key.q, key.e + keys.e, key.c), value)
        if self.windows is not None:
            done, target = self._compressed[layer], int(self.windows.compressed(last))
            if target > done:
                self._compress(layer, self.windows.sinks + done, self.windows.sinks + target)
                self._compressed[layer] = target

    def advance(self, count: int) -> None:
        self.length += count

    def _room(self, count: int) -> int:
        """Positions with ``count`` more tokens. ValueError if there is no room for them."""
        last = self.length + count
        if last > self.capacity:
            raise ValueError(f"{last} positions are more than the {self.capacity} there is room for")
        return last

    def _turn(self, layer: int, place: str, x: Int) -> Int:
        if not self.units.formats.transform:
            return x
        y = fwht(self.units.fwht, x)
        self.tap(layer, f"{place}_fwht", self.units.fwht, {"x": x, "y": y})
        return y

    def _enter(self, layer: int, place: str, config: RequantizeConfig, x: Int) -> Codes:
        """Requantize heads as they enter the scores, or the store."""
        found = _codes(config, x)
        self.tap(
            layer, f"{place}_codes", config, {"x": x, "q": found.q, "e": found.e[..., None], "c": found.c[..., None]}
        )
        return found

    @property
    def size_bits(self) -> int:
        old = self._compressed[-1]
        return (self.length - old) * self.dense.token_bits + old * self._old_token_bits

    @property
    def written_bytes(self) -> int:
        return -(-(self.length * self.dense.token_bits + self._compressed[-1] * self._old_token_bits) // 8)

    # -- attention -----------------------------------------------------------------------------------------------------
    def attend(
        self, layer: int, queries: Heads, constant: tuple[int, int], window: int | None, softmax: Probabilities
    ) -> Int:
        m, count = self.units.model, len(queries.x)
        dense = self.reads_codes or self.windows is None or self.windows.dense
        codes = self._query_codes(layer, queries) if dense else None
        context = np.empty((count, m.heads, m.head_dim), np.int64)
        step = max(1, BLOCK_SCORES // (m.heads * (self.length + count)))
        for first in range(0, count, step):
            rows = slice(first, min(first + step, count))
            seen = self.length + rows.stop  # keys up to the block's last query
            position, key = np.arange(self.length + first, seen)[:, None], np.arange(seen)
            keep = key <= position if window is None else (key <= position) & (key > position - window)
            part = None if codes is None else Codes(*(x[rows] for x in codes))
            old = None if self.windows is None else self.windows.old(position, key)
            scores: Logits | None = None if part is None else self.dense.scores(layer, part, constant, seen)
            if scores is not None and (old is None or not old.any()):
                context[rows] = self.dense.context(layer, softmax(scores, keep), seen)
                continue
            query = Queries(Heads(*(x[rows] for x in queries)), part)
            found = self._old_scores(layer, query, constant, seen)
            assert old is not None
            if scores is None:
                context[rows] = self._old_context(layer, softmax(found, keep), seen, old & keep)
                continue
            p = softmax(Mixed(old, found, scores), keep)
            parts = (
                self.dense.context(layer, np.where(old, 0, p), seen),
                self._old_context(layer, np.where(old, p, 0), seen, old & keep),
            )
            context[rows] = saturate(parts[0] + parts[1], 32)
        return context

    def _query_codes(self, layer: int, queries: Heads) -> Codes:
        """Queries as they meet dense keys."""
        q, e, c = self._enter(layer, "query", self.units.query, self._turn(layer, "query", queries.x))
        return Codes(q, e + queries.e, c)


class NarrowCache(DenseCache):
    """Older tokens in fewer bits, each requantized from its dense codes: the baseline of the compressed schemes."""

    def __init__(self, units: Units, capacity: int, bits: int = 4, windows: Windows | None = None):
        super().__init__(units, capacity)
        self.windows = Windows(recent=32) if windows is None else windows
        self.old = Store(units, capacity, bits, bits)
        f, head_dim = units.formats, units.model.head_dim
        wide = max(f.key_bits, f.value_bits) + 3
        if bits >= min(f.key_bits, f.value_bits):
            raise ValueError(f"bits must be below those of dense keys and values, not {bits}")
        self._narrow = RequantizeConfig(lanes=1, form="group", in_bits=wide, out_bits=bits, group=head_dim)

    def _compress(self, layer: int, first: int, last: int) -> None:
        narrow = []
        for codes in self.dense.get(layer, first, last):
            found = _codes(self._narrow, codes.q * codes.c[..., None])
            narrow.append(Codes(found.q, found.e + codes.e, found.c))
        self.old.put(layer, first, *narrow)

    def _old_scores(self, layer: int, query: Queries, constant: tuple[int, int], seen: int) -> Logits:
        assert query.codes is not None
        return self.old.scores(layer, query.codes, constant, seen)

    def _old_context(self, layer: int, p: Int, seen: int, old: NDArray[np.bool_]) -> Int:
        return self.old.context(layer, p, seen, old)

    @property
    def _old_token_bits(self) -> int:
        return self.old.token_bits
