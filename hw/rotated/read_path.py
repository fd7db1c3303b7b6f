"""Component of :mod:`golden.rotated.read_path`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib import stream
from amaranth.lib.data import ArrayLayout, StructLayout
from amaranth.lib.wiring import Component, In, Out

from golden import float16 as golden_float16
from golden.rotated.lloyd_max import FRACTION_BITS
from golden.rotated.read_path import ReadPathConfig
from hw import float16
from hw.arithmetic import add_or_subtract, round_shift
from hw.memory import RowMemory
from hw.nonlinear.requantize import narrow_by
from hw.pipeline import Pipeline, Spread
from hw.rotated.fwht import Fwht
from hw.rotated.signs import flip, load
from hw.unit import Unit, beat_layout, table_layout


def cell(index: Value) -> tuple[Value, Value]:
    """Which positive centroid an index stands for, and whether its sign is negative: golden ``cells``."""
    above = index[-1]
    return index[:-1] ^ (~above).replicate(len(index) - 1), ~above


def pick(entries: Sequence[Value], select: Value) -> Value:
    """``entries[select]``: a tree of multiplexers."""
    entries = list(entries)
    for bit in select:
        entries = [Mux(bit, odd, even) for even, odd in zip(entries[::2], entries[1::2], strict=True)]
    return entries[0]


class SignedTree(Component):
    """``+-v[0] +- v[1] +- …`` with one adder per addition: 2**n values and their signs.

    A node adds or subtracts its right side, as the two signs agree or not, and takes its left side's sign along; so
    does the sum, which is returned with the sign that is still to be applied. One stage per level; all stages move with
    ``advance``. In ``binary16`` a sign is a bit of the value, and the adders are IEEE's.
    """

    def __init__(self, size: int, bits: int, binary16: bool) -> None:
        self.size, self.bits, self.binary16 = size, bits, binary16
        self.latency = (size - 1).bit_length()
        self.sum_bits = 16 if binary16 else bits + self.latency
        super().__init__(
            {
                "advance": In(1),
                "value": In(ArrayLayout(unsigned(16) if binary16 else signed(bits), size)),
                "negative": In(size),
                "sum": Out(unsigned(16) if binary16 else signed(self.sum_bits)),
                "sum_negative": Out(1),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        pipe = Pipeline(m, self.advance, C(1, 1), name="level")
        values: list[Any] = [self.value[k] for k in range(self.size)]
        signs: list[Any] = list(self.negative)
        while len(values) > 1:
            if self.binary16:
                pairs = zip(values[::2], values[1::2], strict=True)
                name = f"level{pipe.depth}_sum"
                values = pipe.stage([float16.add(m, a, b, f"{name}{k}") for k, (a, b) in enumerate(pairs)])
                continue
            sums = []
            for k in range(0, len(values), 2):
                sums.append(add_or_subtract(values[k], values[k + 1], signs[k] ^ signs[k + 1]))
            values, signs = pipe.stage(sums, signs[::2])
        m.d.comb += self.sum.eq(values[0])
        m.d.comb += self.sum_negative.eq(0 if self.binary16 else signs[0])
        return m


class Table(Component):
    """The table of one query: takes {query, shift, pattern}, holds the entries until the next.

    ``ready`` falls when a query is accepted and rises ``query_cycles`` later, when its table is complete: sign flip,
    folded transform, then ``build_lanes`` coordinates a cycle, whose entries enter a register file that shifts.
    """

    def __init__(self, config: ReadPathConfig) -> None:
        self.config = config
        self.transform = Fwht(config.transform)
        self.transform._MustUse__silence = True  # read for its cycles even where nothing is elaborated
        self.beats = config.size // config.build_lanes
        self.stages = 2 if config.form == "binary16" else 1
        self.query_cycles = 1 + self.transform.latency + 1 + self.beats + self.stages
        query = {
            "x": ArrayLayout(signed(config.in_bits), config.size),
            "shift": unsigned(config.shift_bits),
            "pattern": unsigned(config.pattern_bits),
        }
        super().__init__(
            {
                "query": In(stream.Signature(StructLayout(query))),
                "load": In(stream.Signature(read_table_layout(config))),
                "entries": Out(ArrayLayout(ArrayLayout(signed(config.entry_bits), config.half), config.size)),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, query, write = self.config, self.query, self.load
        lanes, half = config.build_lanes, config.half

        # -- signs and transform ---------------------------------------------------------------------------------------
        m.submodules.signs = rom = RowMemory(config.patterns, config.size)
        is_pattern = write.payload.address < config.patterns
        load(m, rom, write.payload.address, write.payload.data, write.valid & is_pattern)
        m.submodules.transform = transform = self.transform
        building, done = Signal(), Signal()
        accept = Signal()
        x = [Signal(signed(config.in_bits), name=f"x{k}", reset_less=True) for k in range(config.size)]
        shift = Signal(config.shift_bits, reset_less=True)
        m.d.comb += [
            write.ready.eq(1),
            query.ready.eq(~building),
            accept.eq(query.valid & ~building),
            rom.read_address.eq(query.payload.pattern),
            rom.read_enable.eq(accept),
        ]
        with m.If(accept):
            m.d.sync += [a.eq(query.payload.x[k]) for k, a in enumerate(x)]
            m.d.sync += [shift.eq(query.payload.shift), building.eq(1)]
        with m.Elif(done):
            m.d.sync += building.eq(0)
        accepted = Signal()
        m.d.sync += accepted.eq(accept)
        m.d.comb += transform.i.valid.eq(accepted)
        m.d.comb += [transform.i.payload.x[k].eq(v) for k, v in enumerate(flip(x, rom.read_data))]
        m.submodules.spread = spread = Spread(signed(config.transform.out_bits), lanes, self.beats)
        m.d.comb += [
            spread.i.valid.eq(transform.o.valid),
            transform.o.ready.eq(spread.i.ready),
            Value.cast(spread.i.payload).eq(Value.cast(transform.o.payload)),
            spread.o.ready.eq(1),
        ]

        # -- products --------------------------------------------------------------------------------------------------
        turned = [spread.o.payload[k] for k in range(lanes)]
        pipe = Pipeline(m, C(1, 1), spread.o.valid, name="build")
        if config.form == "binary16":
            away = -Cat(shift, C(0, 1)).as_signed()
            u = pipe.stage([float16.from_integer(m, v, away, f"u{k}") for k, v in enumerate(turned)])
            codes = golden_float16.from_integer(config.frozen, -FRACTION_BITS).tolist()
            entries = pipe.stage(
                [float16.multiply(m, v, C(c, 16), f"p{k}_{j}") for k, v in enumerate(u) for j, c in enumerate(codes)]
            )
        else:
            products = pipe.stage([v * c for v in turned for c in self._centroids(m)])
            entries = [round_shift(v, config.table_drop)[: config.entry_bits].as_signed() for v in products]
        table = [
            Signal(signed(config.entry_bits), name=f"entry{k}_{j}", reset_less=True)
            for k in range(config.size)
            for j in range(half)
        ]
        with m.If(pipe.valid):
            m.d.sync += [a.eq(b) for a, b in zip(table, table[lanes * half :] + list(entries), strict=True)]
        count = Signal(range(self.beats))
        with m.If(pipe.valid):
            m.d.sync += count.eq(Mux(done, 0, count + 1))
        m.d.comb += done.eq(pipe.valid & (count == self.beats - 1))
        for k in range(config.size):
            m.d.comb += [self.entries[k][j].eq(table[k * half + j]) for j in range(half)]
        return m

    def _centroids(self, m: Module) -> list[Value]:
        """The positive centroids, as signed words that are not negative."""
        config, write = self.config, self.load
        if config.codebook == "frozen":
            return [C(c, signed(config.code_bits + 1)) for c in config.frozen]
        found = []
        for j in range(config.half):
            centroid = Signal(config.centroid_bits, name=f"centroid{j}", reset_less=True)
            with m.If(write.valid & (write.payload.address == config.patterns + j)):
                m.d.sync += centroid.eq(write.payload.data)
            found.append(Cat(centroid, C(0, 1)).as_signed())
        return found


def read_table_layout(config: ReadPathConfig) -> StructLayout:
    """Writes into the read path: sign patterns, and after them the centroids where these are programmable."""
    programmable = config.codebook == "programmable"
    width = max(config.size, config.centroid_bits) if programmable else config.size
    return table_layout(config.patterns + (config.half if programmable else 0), unsigned(width))


class Lookup(Component):
    """Scores from a table: one stored vector per cycle, ``latency`` cycles, stages that all move with ``advance``.

    A vector's fields {index, norm, shift, last} enter with ``valid``; ``o`` is {score, last}.
    """

    def __init__(self, config: ReadPathConfig) -> None:
        self.config = config
        self.tree = SignedTree(config.size, config.entry_bits, config.form == "binary16")
        self.tree._MustUse__silence = True  # read for its latency even where nothing is elaborated
        self.latency = 1 + self.tree.latency + (1 if config.form == "binary16" else 2)
        vector = {
            "index": ArrayLayout(unsigned(config.bits), config.size),
            "norm": unsigned(16),
            "shift": unsigned(config.shift_bits),
            "last": unsigned(1),
        }
        super().__init__(
            {
                "i": In(stream.Signature(StructLayout(vector))),
                "o": Out(stream.Signature(score_layout(config))),
                "entries": In(ArrayLayout(ArrayLayout(signed(config.entry_bits), config.half), config.size)),
            }
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        binary16 = config.form == "binary16"
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        carried = {name: i.payload[name] for name in ("norm", "shift", "last")}
        pipe = Pipeline(m, advance, i.valid, carried)
        found = []
        for k in range(config.size):
            which, negative = cell(i.payload.index[k])
            entry = pick([self.entries[k][j] for j in range(config.half)], which)
            if binary16:
                entry = Cat(entry[:-1], entry[-1] ^ negative)
            found.append((entry, negative))
        values, signs = pipe.stage([v for v, _ in found], Cat(*(n for _, n in found)))
        m.submodules.tree = tree = self.tree
        m.d.comb += [tree.advance.eq(advance), tree.negative.eq(signs)]
        m.d.comb += [tree.value[k].eq(v) for k, v in enumerate(values)]
        for _ in range(tree.latency):
            pipe.stage()
        if binary16:
            score = pipe.stage(float16.multiply(m, tree.sum, pipe["norm"], "score"))
        else:
            mantissa, biased = float16.parts(pipe["norm"])
            factor = Cat(mantissa, C(0, 1)).as_signed()
            signed_factor = Mux(tree.sum_negative, -factor, factor)[:12].as_signed()
            amount = (pipe["shift"] + C(30, 5) - biased)[: config.shift_bits + 1]
            scaled, amount = pipe.stage((tree.sum * signed_factor)[: config.scaled_bits].as_signed(), amount)
            score = pipe.stage(narrow_by(m, scaled, amount, config.score_bits, "score")[: config.score_bits])
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.score.eq(score), o.payload.last.eq(pipe["last"])]
        return m


def score_layout(config: ReadPathConfig) -> StructLayout:
    """One score a beat: signed, or binary16."""
    shape = unsigned(16) if config.form == "binary16" else signed(config.score_bits)
    return StructLayout({"score": shape, "last": unsigned(1)})


class ReadPath(Unit):
    """Scores of a query against stored vectors, as golden ``read_path``.

    ``i``: {data, query, norm, shift, pattern, last}. A beat with ``query`` set holds a query: element k in
    ``data[k]``, with its shift and pattern. The beats after it hold stored vectors, ``index[k]`` in the low bits of
    ``data[k]``, with their norms; ``last`` comes back with the score. ``o``: {score, last}, one beat per stored vector.
    ``table``: address k holds sign pattern k, bit i set for +1; programmable: address ``patterns + j`` positive
    centroid j, ascending; load it between rows.

    One stored vector per cycle, latency ``1 + log2(size) + 2`` (binary16: ``+ 1``) cycles: lookup, tree, norm,
    rounding. A query takes ``query_cycles`` until the first vector is accepted, ``size / build_lanes`` of them for the
    table.
    """

    def __init__(self, config: ReadPathConfig) -> None:
        self.table_part, self.lookup = Table(config), Lookup(config)
        for part in (self.table_part, self.lookup):
            part._MustUse__silence = True  # read for their cycles even where nothing is elaborated
        row = {
            "norm": unsigned(16),
            "shift": unsigned(config.shift_bits),
            "pattern": unsigned(config.pattern_bits),
            "query": unsigned(1),
            "last": unsigned(1),
        }
        super().__init__(
            config,
            i=beat_layout({"data": signed(max(config.in_bits, config.bits))}, config.size, row),
            o=score_layout(config),
            table=read_table_layout(config),
        )
        self.query_cycles = self.table_part.query_cycles
        self.latency = self.lookup.latency

    def row_cycles(self, elements: int) -> int:
        """Of a query and the vectors after it."""
        return self.query_cycles + elements // self.config.size - 1 + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        m.submodules.table, m.submodules.lookup = table, lookup = self.table_part, self.lookup
        shift = Signal(config.shift_bits, reset_less=True)
        take = Signal()
        # A stored vector reads the table in the cycle in which it is accepted: a query may follow at once.
        m.d.comb += [
            i.ready.eq(table.query.ready & lookup.i.ready),
            take.eq(i.valid & i.ready),
            table.query.valid.eq(i.valid & i.payload.query & lookup.i.ready),
            table.query.payload.shift.eq(i.payload.shift),
            table.query.payload.pattern.eq(i.payload.pattern),
            lookup.i.valid.eq(i.valid & ~i.payload.query & table.query.ready),
            lookup.i.payload.norm.eq(i.payload.norm),
            lookup.i.payload.shift.eq(shift),
            lookup.i.payload.last.eq(i.payload.last),
            lookup.entries.eq(table.entries),
            o.valid.eq(lookup.o.valid),
            lookup.o.ready.eq(o.ready),
            o.payload.eq(lookup.o.payload),
            self.table.ready.eq(table.load.ready),
            table.load.valid.eq(self.table.valid),
            table.load.payload.eq(self.table.payload),
        ]
        for k in range(config.size):
            m.d.comb += [
                table.query.payload.x[k].eq(i.payload.data[k][: config.in_bits].as_signed()),
                lookup.i.payload.index[k].eq(i.payload.data[k][: config.bits]),
            ]
        with m.If(take & i.payload.query):
            m.d.sync += shift.eq(i.payload.shift)
        return m
