"""Component of :mod:`golden.nonlinear.rmsnorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned
from amaranth.lib.data import ArrayLayout

from golden.nonlinear.rmsnorm import RmsNormConfig
from hw.arithmetic import adder_tree
from hw.memory import RowMemory
from hw.nonlinear.isqrt import core_latency, serial_core
from hw.nonlinear.requantize import Requantize, narrow_by
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout, table_layout


class RmsNorm(Unit):
    """RMSNorm of each row, as golden ``rmsnorm``, with a table of G.

    ``i``: {x, keep, last, eps, shift}; ``o``: {y, keep, last}, and with ``out = group`` {q, keep, last, e, code} with
    ``c = code + 4``. ``table``: address k holds G of the elements ``k * lanes`` and up; load it between rows.
    Only the last beat of a row may be partial. More than ``hidden`` elements in a row are not supported.

    Two passes: a row is stored while its squares add up, then read back once its root is known. One beat per cycle in
    both, ``2 * ceil(n / lanes) + latency`` cycles per row whatever its values, latency 10 for the table form (7 and 3
    for each Newton step), ``6 + divisions * (root_bits + 2)`` for the newton form (114 at 16 bits); with
    ``out = group`` also the cycles of that stage, as :class:`Requantize` gives them. The next row's first beat is
    accepted in the cycle after the last result was taken. With ``overlap`` a row is taken in while earlier ones are
    worked on: rows follow each other without a gap as long as the root's latency is below their number of beats.
    """

    passes = 2

    def __init__(self, config: RmsNormConfig) -> None:
        row_in = {"eps": unsigned(config.eps_bits), "shift": signed(config.shift_bits)}
        if config.out == "token":
            o = row_layout(config.lanes, {"y": signed(config.out_bits)})
        else:
            e = {"e": signed(config.requantizer.exponent_bits), "code": unsigned(2)}
            o = row_layout(config.lanes, {"q": signed(config.group_bits)}, e)
        super().__init__(
            config,
            i=row_layout(config.lanes, {"x": signed(config.in_bits)}, row_in),
            o=o,
            table=table_layout(config.beats, ArrayLayout(signed(config.gamma_bits), config.lanes)),
        )
        self.latency = core_latency(config.root) + 5
        self.requantize = Requantize(config.requantizer) if config.out == "group" else None
        if self.requantize is not None:
            self.requantize._MustUse__silence = True  # read for its cycles even where nothing is elaborated

    def row_cycles(self, elements: int) -> int:
        beats = -(-elements // self.config.lanes)
        if self.requantize is None:
            return 2 * beats + self.latency
        return beats + self.latency + self.requantize.row_cycles(elements)

    @property
    def depth(self) -> int:
        """Beats of the row memory: one row, and with ``overlap`` what comes in while the root is computed."""
        config = self.config
        return config.beats + (min(config.beats, core_latency(config.root) + 6) if config.overlap else 0)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes = range(config.lanes)

        # The normalised row, on its way to the output or to the requantiser.
        out_valid, out_ready, out_last = Signal(), Signal(), Signal()
        advance = Signal()
        m.d.comb += advance.eq(~out_valid | out_ready)

        # -- pass 1: store the row and add its squares -----------------------------------------------------------------
        accept, go = Signal(), Signal()
        # Lanes that are not kept count as zeros, here and in the second pass.
        x_in = [Mux(i.payload.keep[k], i.payload.x[k], 0) for k in lanes]
        first = Signal(init=1)
        with m.If(accept):
            m.d.sync += first.eq(i.payload.last)
        squares_valid = Signal()
        squares_first, squares_last = Signal(reset_less=True), Signal(reset_less=True)
        squares_eps = Signal(config.eps_bits, reset_less=True)
        squares_shift = Signal(signed(config.shift_bits), reset_less=True)
        total = Signal(config.total_bits, reset_less=True)
        total_shift = Signal(signed(config.shift_bits), reset_less=True)
        total_valid = Signal()

        # -- pass 2: what has been stored, beat by beat ----------------------------------------------------------------
        giving = Signal()
        consume, consume_last = Signal(), Signal()
        y = Signal(config.root_bits, reset_less=True)
        down = Signal(config.down_bits, reset_less=True)
        x_row, row_keep, row_last, room = self._memory(m, accept, consume, x_in)
        m.d.comb += [consume.eq(giving & advance), consume_last.eq(consume & row_last)]

        # -- between them: the root ------------------------------------------------------------------------------------
        m.submodules.rsqrt = root = serial_core(config.root)
        m.d.comb += [
            root.i.valid.eq(total_valid),
            root.i.payload.eq(total),
            go.eq(~total_valid | root.i.ready),
        ]
        root_shift = Signal(signed(config.shift_bits), reset_less=True)
        with m.If(root.i.ready):
            m.d.sync += root_shift.eq(total_shift)
        m.d.comb += root.o.ready.eq(~giving | consume_last)
        with m.If(root.o.ready):
            sum_down = root.o.payload.exponent + root_shift + config.guard_bits
            m.d.sync += [
                giving.eq(root.o.valid),
                y.eq(root.o.payload.root),
                down.eq(Mux(sum_down < 0, 0, Mux(sum_down > config.scaled_bits, config.scaled_bits, sum_down))),
            ]

        # -- the lanes -------------------------------------------------------------------------------------------------
        pipe = Pipeline(m, advance, giving, {"keep": row_keep, "last": row_last, "down": down}, name="p")
        y_signed = Cat(y, C(0, 1)).as_signed()
        half = (1 << config.product_shift) >> 1
        if config.overlap:
            squares = []
            for k, value in enumerate(x_in):
                square = Signal(config.square_bits, name=f"square{k}", reset_less=True)
                with m.If(go):
                    m.d.sync += square.eq(value * value)
                squares.append(square)
            product = pipe.stage([(x * y_signed + half)[: config.product_bits] for x in x_row])
        else:
            # One multiplier a lane does both passes: they never overlap, and the pipe is empty in the first.
            loading = Signal(init=1)
            with m.If(accept & i.payload.last):
                m.d.sync += loading.eq(0)
            with m.Elif(out_valid & out_ready & out_last):
                m.d.sync += loading.eq(1)
            product = pipe.stage(self._shared(m, loading, x_in, x_row, y_signed, half))
            squares = [value[: config.square_bits] for value in product]
        with m.If(go):
            m.d.sync += [
                squares_valid.eq(accept),
                squares_first.eq(first),
                squares_last.eq(i.payload.last),
                squares_eps.eq(i.payload.eps),
                squares_shift.eq(i.payload.shift),
                total_valid.eq(squares_valid & squares_last),
            ]
            with m.If(squares_valid):
                before = Mux(squares_first, squares_eps, total)
                m.d.sync += [
                    total.eq(before + adder_tree([Value.cast(s).as_unsigned() for s in squares])),
                    total_shift.eq(squares_shift),
                ]
        m.d.comb += i.ready.eq(go & (room if config.overlap else loading))
        m.d.comb += accept.eq(i.valid & i.ready)

        gamma = self._gamma(m, advance, consume, consume_last)
        u = [value[config.product_shift : config.product_bits].as_signed() for value in product]
        scaled = pipe.stage([(a * b)[: config.scaled_bits] for a, b in zip(u, gamma, strict=True)])
        result = [narrow_by(m, s.as_signed(), pipe["down"], config.out_bits, f"out{k}") for k, s in enumerate(scaled)]
        result = pipe.stage(result)
        m.d.comb += [out_valid.eq(pipe.valid), out_last.eq(pipe["last"])]

        if self.requantize is None:
            m.d.comb += [o.valid.eq(out_valid), out_ready.eq(o.ready)]
            m.d.comb += [o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(out_last)]
            m.d.comb += [o.payload.y[k].eq(value) for k, value in enumerate(result)]
            return m
        m.submodules.requantize = stage = self.requantize
        m.d.comb += [stage.i.valid.eq(out_valid), out_ready.eq(stage.i.ready)]
        m.d.comb += [stage.i.payload.keep.eq(pipe["keep"]), stage.i.payload.last.eq(out_last)]
        m.d.comb += [stage.i.payload.x[k].eq(value) for k, value in enumerate(result)]
        m.d.comb += [o.valid.eq(stage.o.valid), stage.o.ready.eq(o.ready), o.payload.eq(stage.o.payload)]
        return m

    def _shared(
        self, m: Module, loading: Value, x_in: Sequence[Value], x_row: Sequence[Value], y: Value, half: int
    ) -> list[Value]:
        """Products of both passes: ``x * x``, or ``x * y`` and half a unit of the later cut."""
        config = self.config
        products = []
        for k, (new, stored) in enumerate(zip(x_in, x_row, strict=True)):
            a = Signal(signed(config.in_bits), name=f"a{k}")
            b = Signal(signed(max(config.in_bits, config.root_bits + 1)), name=f"b{k}")
            m.d.comb += [a.eq(Mux(loading, new, stored)), b.eq(Mux(loading, new, y))]
            rounding = Mux(loading, 0, half)
            products.append((a * b + rounding)[: max(config.product_bits, config.square_bits)])
        return products

    def _memory(
        self, m: Module, accept: Value, consume: Value, x: Sequence[Value]
    ) -> tuple[list[Value], Value, Value, Value]:
        """The row memory as a queue of beats whose head is always on the outputs: (lanes, keep, last), and whether it
        has room. A beat shows two cycles after it was accepted; nobody asks before its row's root is known."""
        config, depth = self.config, self.depth
        width = config.lanes * config.in_bits
        m.submodules.row = memory = RowMemory(depth, width + config.lanes + 1)
        write, read = (Signal(len(memory.write_address), name=name) for name in ("write", "read"))

        def after(address: Signal) -> Value:
            return Mux(address == depth - 1, 0, address + 1)[: len(address)]

        following = Mux(consume, after(read), read)
        with m.If(accept):
            m.d.sync += write.eq(after(write))
        m.d.sync += read.eq(following)
        m.d.comb += [
            memory.write_address.eq(write),
            memory.write_data.eq(Cat(*x, self.i.payload.keep, self.i.payload.last)),
            memory.write_enable.eq(accept),
            memory.read_address.eq(following),
            memory.read_enable.eq(1),
        ]
        used = Signal(range(depth + 1))
        m.d.sync += used.eq(used + accept - consume)
        head = memory.read_data
        lanes = [head.word_select(k, config.in_bits).as_signed() for k in range(config.lanes)]
        return lanes, head[width : width + config.lanes], head[-1], used != depth

    def _gamma(self, m: Module, advance: Value, consume: Value, consume_last: Value) -> list[Value]:
        """G of the beat that was consumed one step ago."""
        config, table = self.config, self.table
        m.submodules.gamma = memory = RowMemory(config.beats, config.lanes * config.gamma_bits)
        place = Signal(len(memory.read_address), name="place")
        with m.If(consume):
            m.d.sync += place.eq(Mux(consume_last, 0, place + 1))
        m.d.comb += [
            table.ready.eq(1),
            memory.write_address.eq(table.payload.address),
            memory.write_data.eq(Value.cast(table.payload.data)),
            memory.write_enable.eq(table.valid),
            memory.read_address.eq(place),
            memory.read_enable.eq(advance),
        ]
        return [memory.read_data.word_select(k, config.gamma_bits).as_signed() for k in range(config.lanes)]
