"""Component of :mod:`golden.rotated.fwht`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import Module, Mux, Signal, Value, signed

from golden.rotated.fwht import FwhtConfig
from hw.pipeline import Pipeline
from hw.unit import Unit, beat_layout


def butterflies(values: Sequence[Any]) -> list[Any]:
    """One stage in its folded wiring: neighbours 2i and 2i + 1 give their sum at i, their difference in the second
    half at i."""
    pairs = list(zip(values[::2], values[1::2], strict=True))
    return [a + b for a, b in pairs] + [a - b for a, b in pairs]


class Fwht(Unit):
    """``o.y = H i.x``, as golden ``fwht``: a row is one beat.

    ``i``: {x}; ``o``: {y}. Parallel: one row per cycle, latency ``stages / stages_per_cycle``. Folded: a row every
    ``cycles`` cycles, which is the latency too: the registers that hold the row are the output, and the next row's
    first stage runs in the cycle in which the result is taken.
    """

    def __init__(self, config: FwhtConfig) -> None:
        super().__init__(
            config,
            i=beat_layout({"x": signed(config.in_bits)}, config.size),
            o=beat_layout({"y": signed(config.out_bits)}, config.size),
        )
        parallel = -(-config.stages // config.stages_per_cycle)
        self.latency = parallel if config.form == "parallel" else config.cycles

    @property
    def initiation_interval(self) -> int:
        return 1 if self.config.form == "parallel" else self.config.cycles

    def row_cycles(self, elements: int) -> int:
        return (elements // self.config.size - 1) * self.initiation_interval + 1 + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        x = [i.payload.x[k] for k in range(config.size)]
        y = self._parallel(m, x) if config.form == "parallel" else self._folded(m, x)
        m.d.comb += [o.payload.y[k].eq(value) for k, value in enumerate(y)]
        return m

    def _parallel(self, m: Module, x: list[Any]) -> list[Any]:
        """All stages; a value is as wide as its stage needs."""
        i, o = self.i, self.o
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        pipe = Pipeline(m, advance, i.valid)
        for stage in range(self.config.stages):
            half = 1 << stage
            y = list(x)
            for k in range(self.config.size):
                if not k & half:
                    # ~(~a + b) is a - b, in fewer gates: it shares more with a + b.
                    y[k], y[k + half] = x[k] + x[k + half], ~(~x[k] + x[k + half])
            registered = (stage + 1) % self.config.stages_per_cycle == 0 or stage == self.config.stages - 1
            x = pipe.stage(y) if registered else y
        m.d.comb += o.valid.eq(pipe.valid)
        return x

    def _folded(self, m: Module, x: list[Any]) -> list[Value]:
        """One stage every ``size / (2 * butterflies)`` cycles. Each cycle takes the foremost elements of ``row``, which
        moves up, and appends their sums to one queue, their differences to another; a stage's last cycle puts both
        back into ``row``."""
        config, i, o = self.config, self.i, self.o
        size, step = config.size, 2 * config.butterflies
        shape = signed(config.out_bits)
        row = [Signal(shape, name=f"row{k}", reset_less=True) for k in range(size)]
        left = Signal(range(config.cycles), name="left")  # cycles until the row is done
        full = Signal()
        busy = left.any()
        accept, move = Signal(), Signal()
        m.d.comb += [
            o.valid.eq(full & ~busy),
            i.ready.eq(~busy & (~full | o.ready)),
            accept.eq(i.valid & i.ready),
            move.eq(accept | busy),
        ]
        with m.If(accept):
            m.d.sync += [full.eq(1), left.eq(config.cycles - 1)]
        with m.Elif(busy):
            m.d.sync += left.eq(left - 1)
        with m.Elif(o.ready):
            m.d.sync += full.eq(0)
        source = []
        for k in range(size):
            value = Signal(shape, name=f"source{k}")
            m.d.comb += value.eq(Mux(busy, row[k], x[k]))
            source.append(value)
        found = [value[: config.out_bits].as_signed() for value in butterflies(source[:step])]
        sums, differences = found[: config.butterflies], found[config.butterflies :]
        per_stage = size // step
        if per_stage == 1:
            with m.If(move):
                m.d.sync += [r.eq(v) for r, v in zip(row, found, strict=True)]
            return row
        # Queues of what the stage's earlier cycles gave; the oldest first once it is in its last one.
        waiting = (per_stage - 1) * config.butterflies
        first = [Signal(shape, name=f"sum{k}", reset_less=True) for k in range(waiting)]
        second = [Signal(shape, name=f"difference{k}", reset_less=True) for k in range(waiting)]
        within = Signal(range(per_stage), name="within")  # cycle of the stage
        last = within == per_stage - 1
        with m.If(move):
            m.d.sync += within.eq(within + 1)
            for queue, new in ((first, sums), (second, differences)):
                m.d.sync += [q.eq(v) for q, v in zip(queue, (queue + new)[config.butterflies :], strict=True)]
            moved = source[step:] + source[:step]
            whole = first + sums + second + differences
            m.d.sync += [r.eq(Mux(last, w, v)) for r, w, v in zip(row, whole, moved, strict=True)]
        return row
