"""Bench of the macro."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from golden.fixedpoint import bounds
from golden.llm.rotated import NORM_EXPONENT
from golden.rotated.axelram import Axelram, AxelramConfig
from tb.bench import Bench, Case, Generator
from tb.packing import Packer, Row
from tb.rotated.signs import beat_words, table_signs
from tb.rotated.vectors import corners, decoded, filling, fitted, heads, random_vector, random_vectors

#: What stands in the memory of a macro for heads of this size, and what it is asked: one layer of the reference.
REFERENCE_SIZE, REFERENCE_LAYER, REFERENCE_QUERIES = 128, 2, 64


class AxelramBench(Bench):
    """A row is some writes and a query."""

    config: AxelramConfig

    def __init__(self, entry: Any, config: Any) -> None:
        super().__init__(entry, config)
        c = self.config
        self.output = Packer(self.unit.o.payload.shape(), 1)
        self.signs = table_signs(c.patterns, c.size)
        read = c.read
        self.shift = c.in_bits if c.form == "binary16" else max(0, read.scaled_bits - c.score_bits - 6)

    def row(
        self,
        vectors: Any,
        query: Any,
        last: int | None = None,
        k: int = 0,
        exponent: Any = 0,
        shift: int | None = None,
        address: Any = None,
    ) -> Row:
        """Writes of vectors, by default to the addresses from 0, then a query of the addresses up to ``last``."""
        c = self.config
        vectors = np.asarray(vectors, np.int64).reshape(-1, c.size)
        count = len(vectors)
        address = np.arange(count) if address is None else np.asarray(address)
        last = count - 1 if last is None else last
        shift = min(self.shift, (1 << c.read.shift_bits) - 1) if shift is None else shift
        ends = (np.arange(count + 1) == count).astype(np.int64)
        per_beat = {
            "query": ends,
            "address": np.append(address, last),
            "exponent": np.append(np.broadcast_to(exponent, count), 0),
            "shift": ends * shift,
            "pattern": np.full(count + 1, k % c.patterns),
        }
        return Row({"x": np.concatenate((vectors.ravel(), np.asarray(query, np.int64)))}, per_beat)

    def directed(self) -> list[Case]:
        c, generator = self.config, np.random.default_rng(5)
        count = min(c.capacity, 5)
        low, high = bounds(c.in_bits)
        cases = []
        for name, group in corners(c.size, c.in_bits).items():
            some = random_vectors(generator, count, c.size, c.in_bits)
            rows = [self.row([*some[1:], x], x, k=k, exponent=-k) for k, x in enumerate(group)]
            cases.append(Case(name, rows))
        ramp = np.clip(np.arange(c.size) * 7 - 3 * c.size, low, high)
        some = random_vectors(generator, count, c.size, c.in_bits)
        cases += [
            Case("one vector", [self.row(some[:1], ramp)]),
            Case("queries without writes", [self.row(some, ramp), *(self.row([], x, n) for n, x in enumerate(some))]),
            Case(
                "overwritten",
                [self.row(np.concatenate((some, some[::-1])), ramp, count - 1, address=[*range(count)] * 2)],
            ),
            Case("last address first", [self.row(some, ramp, count - 1, address=[*range(count)][::-1])]),
            Case("every pattern", [self.row(some, ramp, k=k) for k in range(c.patterns)]),
            Case(
                "full", [self.row(random_vectors(generator, n, c.size, c.in_bits), ramp) for n in [min(c.capacity, 99)]]
            ),
        ]
        return cases

    def random(self, generator: Generator) -> list[Row]:
        c, rows = self.config, []
        written = 0
        for k in range(6):
            count = int(generator.integers(0 if written else 1, min(c.capacity, 9) + 1))
            vectors = [random_vector(generator, c.size, c.in_bits, k + j) for j in range(count)]
            written = max(written, count)
            last = int(generator.integers(0, written))
            query = random_vector(generator, c.size, c.in_bits, k)
            rows.append(self.row(vectors, query, last, k, generator.integers(-20, 4, count)))
        return rows

    def volume(self, generator: Generator, beats: int) -> list[Row]:
        c = self.config
        count = min(c.capacity, max(1, beats // 8))
        queries = random_vectors(generator, 5, c.size, c.in_bits)
        first = self.row(random_vectors(generator, count, c.size, c.in_bits), queries[0])
        return [first, *(self.row([], q, count - 1) for q in queries[1:])]

    def timed(self, generator: Generator) -> list[Row]:
        c = self.config
        some = random_vectors(generator, min(c.capacity, 7), c.size, c.in_bits)
        return [self.row(some[:n], some[0]) for n in (1, len(some))]

    def row_cycles(self, row: Row) -> int:
        writes = len(row) // self.config.size - 1
        unit: Any = self.unit
        return int(unit.read_cycles(writes, int(row.row["address"][-1]) + 1))

    def real(self, capture: Mapping[str, Any]) -> list[Row]:
        """A memory full of one layer's keys, as the golden LLM has them, and 64 queries of the same layer; of smaller
        heads, captured keys of all layers and some queries."""
        c = self.config
        if c.size == REFERENCE_SIZE:
            found, asked = (fitted(part, c.in_bits) for part in decoded(c.capacity, REFERENCE_LAYER))
            stored, exponent = found.x[: c.capacity], found.e[: c.capacity] - NORM_EXPONENT
            queries = list(asked.x[:: max(1, len(asked.x) // REFERENCE_QUERIES)][:REFERENCE_QUERIES])
        else:
            keys = [filling(x, c.in_bits) for x in heads(capture, c.size, "key")][: c.capacity]
            if not keys:
                return []
            stored, exponent = np.array([x for x, _ in keys]), np.array([e for _, e in keys])
            queries = [filling(q, c.in_bits)[0] for q in heads(capture, c.size, "query")][::16]
        first = self.row(stored, queries[0], exponent=exponent, shift=0)
        return [first, *(self.row([], q, len(stored) - 1, shift=0) for q in queries[1:])]

    def expected(self, rows: Sequence[Row]) -> list[Row]:
        c, found = self.config, []
        macro = Axelram(c)
        for row in rows:
            data, fields = row.data["x"].reshape(-1, c.size), row.row
            signs = self.signs[fields["pattern"][0]]
            macro.write(fields["address"][:-1], data[:-1], signs, fields["exponent"][:-1])
            score = macro.read(data[-1], int(fields["address"][-1]), signs, fields["shift"][-1])
            last = np.arange(len(score)) == len(score) - 1
            found.append(Row({"score": score}, {"last": last.astype(np.int64)}))
        return found

    def table(self) -> list[tuple[int, int]]:
        return list(enumerate(beat_words(self.signs, self.config.size)))


BENCH = AxelramBench
