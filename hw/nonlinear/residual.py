"""Component of :mod:`golden.nonlinear.residual`."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned

from golden.nonlinear.residual import ResidualConfig
from hw.nonlinear.requantize import rounding, shift_window
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout


class Residual(Unit):
    """``o.y = sat(i.a + rs(i.b * 2**i.shift))`` for each lane, as golden ``residual``.

    ``i``: {a, b, keep, last, shift}; ``o``: {y, keep, last}, with ``flag_saturated`` also {saturated}: whether a kept
    element of this beat saturated. One beat per cycle, latency 2.
    """

    def __init__(self, config: ResidualConfig) -> None:
        super().__init__(
            config,
            i=row_layout(
                config.lanes,
                {"a": signed(config.a_bits), "b": signed(config.b_bits)},
                {"shift": signed(config.shift_bits)},
            ),
            o=row_layout(
                config.lanes,
                {"y": signed(config.a_bits)},
                {"saturated": unsigned(1)} if config.flag_saturated else None,
            ),
        )
        self.latency = 2

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes, bits = range(config.lanes), config.a_bits
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        pipe = Pipeline(m, advance, i.valid, {"keep": i.payload.keep, "last": i.payload.last})
        # One shifter for both directions: b starts at its leftmost place and only moves to the right.
        amount = Signal(config.amount_bits, name="amount")
        m.d.comb += amount.eq(config.max_left - i.payload.shift)
        a, window, beyond = [], [], []
        for k in lanes:
            b = i.payload.b[k]
            aligned, overflow = shift_window(m, Cat(C(0, 1 + config.max_left), b), amount, bits + 2, f"aligned{k}")
            # An aligned b beyond bits + 1 decides the sum's sign, and that it saturates, whatever a is.
            a.append(i.payload.a[k])
            window.append(aligned)
            beyond.append(Cat(overflow | (aligned[-1] ^ b[-1]), b[-1]))
        a, window, beyond = pipe.stage(a, window, beyond)
        y, saturated = [], []
        for k in lanes:
            # The bit below the cut rounds half up as the carry into the sum.
            total = Signal(signed(bits + 2), name=f"total{k}")
            addend = Cat(rounding(window[k][0]), window[k][1:]).as_signed()
            m.d.comb += total.eq((Cat(C(1, 1), a[k]).as_signed() + addend) >> 1)
            sign = Mux(beyond[k][0], beyond[k][1], total[-1])
            over = beyond[k][0] | (total[bits - 1 :] != total[-1].replicate(3))
            y.append(Mux(over, Cat((~sign).replicate(bits - 1), sign), total[:bits]).as_signed())
            saturated.append(over & pipe["keep"][k])
        y, saturated = pipe.stage(y, Cat(*saturated).any() if config.flag_saturated else C(0, 1))
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.y[k].eq(value) for k, value in enumerate(y)]
        if config.flag_saturated:
            m.d.comb += Value.cast(o.payload.saturated).eq(saturated)
        return m
