"""Component of :mod:`golden.nonlinear.isqrt`, and the serial cores that RMSNorm builds in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, unsigned
from amaranth.lib import stream
from amaranth.lib.data import StructLayout
from amaranth.lib.wiring import Component, In, Out

from golden.nonlinear.isqrt import IsqrtConfig
from hw.arithmetic import SquareRoot, bit_length, round_shift
from hw.nonlinear.exp import lookup
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout


def normalise(config: IsqrtConfig, x: Value) -> tuple[Value, Value]:
    """Golden ``normalise``, combinational: (f in ``normal_bits``, exponent)."""
    exponent = ((bit_length(x) + 1) >> 1)[: config.exponent_bits]
    away = (config.even_bits // 2 - exponent)[: config.exponent_bits]
    shifted = Cat(x, C(0, config.even_bits - config.in_bits)) if config.even_bits > config.in_bits else x
    for level in reversed(range(config.exponent_bits)):
        shifted = Mux(away[level], shifted << (2 << level), shifted)[: config.even_bits]
    spare = config.normal_bits - config.even_bits
    normal = Cat(C(0, spare), shifted) if spare > 0 else shifted[-spare:]
    return normal, exponent


def seed_of(config: IsqrtConfig, normal: Value) -> Value:
    """The table's seed in ``root_bits``: 0 for a normalised radicand of 0."""
    quarter = 1 << (config.address_bits - 2)
    seed = lookup([0] * quarter + list(config.seeds), normal[-config.address_bits :], config.seed_bits)
    return Cat(C(0, config.root_bits - config.seed_bits), seed)


def improved(config: IsqrtConfig, product: Value) -> Value:
    """``rs(product, root_bits + 1)`` of a Newton step's last product, saturated to ``root_bits``."""
    bits = config.root_bits
    y = round_shift(product, bits + 1)[: bits + 1]
    return Mux(y[bits], C((1 << bits) - 1, bits), y[:bits])


def result_layout(config: IsqrtConfig) -> StructLayout:
    """What a core returns: {root}, with ``exponent`` beside it for the reciprocal."""
    fields: dict[str, Any] = {"root": unsigned(config.width)}
    if config.output == "reciprocal":
        fields["exponent"] = unsigned(config.exponent_bits)
    return StructLayout(fields)


def divisions(config: IsqrtConfig) -> int:
    """Serial divisions of a :class:`NewtonCore`: one an iteration, and one for the reciprocal."""
    return config.iterations + (config.output == "reciprocal")


def core_latency(config: IsqrtConfig) -> int:
    """Cycles of :func:`serial_core` from the one that accepts a radicand to the one in which the result is valid."""
    if config.form == "digit":
        return config.half_bits + 1
    if config.form == "table":
        return 2 + 3 * config.steps
    return 1 + divisions(config) * (config.half_bits + 2)


class TableCore(Component):
    """Golden ``reciprocal`` by table and Newton steps on one multiplier: one radicand at a time.

    A result is valid ``2 + 3 * steps`` cycles after its radicand was accepted.
    Ports: stream ``i`` of the radicand, stream ``o`` of {root, exponent}.
    """

    def __init__(self, config: IsqrtConfig) -> None:
        self.config = config
        self.latency = core_latency(config)
        super().__init__(
            {"i": In(stream.Signature(unsigned(config.in_bits))), "o": Out(stream.Signature(result_layout(config)))}
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, bits = self.config, self.config.root_bits
        busy, ready = Signal(), Signal()
        normal = Signal(config.normal_bits, reset_less=True)
        exponent = Signal(config.exponent_bits, reset_less=True)
        y = Signal(bits, reset_less=True)
        # square (root_bits) and 3 * 2**root_bits - product (root_bits + 2) take turns in one register.
        work = Signal(bits + 2, reset_less=True)
        phase = Signal(range(2 + 3 * config.steps))
        m.d.comb += [
            self.i.ready.eq(~busy),
            self.o.valid.eq(ready),
            self.o.payload.root.eq(y),
            self.o.payload.exponent.eq(exponent),
        ]
        # phase 0: seed; then of each step 1: square, 2: product, 3: improved y.
        a, b = Signal(bits + 2), Signal(bits)
        product = a * b
        seed = seed_of(config, normal)
        turn = (phase - 1)[:2] if config.steps < 2 else Mux(phase > 3, phase - 4, phase - 1)[:2]
        m.d.comb += [a.eq(work), b.eq(y)]
        with m.If(~turn.any()):
            m.d.comb += a.eq(y)
        with m.Elif(turn == 1):
            m.d.comb += [a.eq(normal), b.eq(work)]
        with m.If(~busy):
            first, size = normalise(config, self.i.payload)
            m.d.sync += [normal.eq(first), exponent.eq(size), phase.eq(0), busy.eq(self.i.valid)]
        with m.Elif(~ready):
            m.d.sync += [phase.eq(phase + 1), ready.eq(phase == 3 * config.steps if config.steps else 1)]
            with m.If(~phase.any()):
                m.d.sync += y.eq(seed)
            if config.steps:
                with m.Elif(~turn.any()):
                    m.d.sync += work.eq(product >> bits)
                with m.Elif(turn == 1):
                    m.d.sync += work.eq((3 << bits) - (product >> bits))
                with m.Else():
                    m.d.sync += y.eq(improved(config, product))
        with m.Elif(self.o.ready):
            m.d.sync += [busy.eq(0), ready.eq(0)]
        return m


class NewtonCore(Component):
    """Newton-Raphson root by serial division, and for the reciprocal one division more: one radicand at a time.

    A division takes ``half_bits + 2`` cycles (its quotient is known to fit ``half_bits + 1``, so it starts with the
    rest of the dividend as remainder); a result is valid ``1 + divisions * (half_bits + 2)`` cycles after its
    radicand was accepted, whatever its value. Ports as of :class:`TableCore`.
    """

    def __init__(self, config: IsqrtConfig) -> None:
        self.config = config
        self.divisions = divisions(config)
        self.latency = core_latency(config)
        super().__init__(
            {"i": In(stream.Signature(unsigned(config.in_bits))), "o": Out(stream.Signature(result_layout(config)))}
        )

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, n = self.config, self.config.half_bits
        gives_reciprocal = config.output == "reciprocal"
        busy = Signal()
        radicand = Signal(2 * n, reset_less=True)
        exponent = Signal(config.exponent_bits, reset_less=True)
        root = Signal(n + 1, reset_less=True)
        # The quotient's bits enter where the low part of the dividend leaves.
        quotient = Signal(n + 1, reset_less=True)
        remainder = Signal(n + 1, reset_less=True)
        bit = Signal(range(n + 2))
        division = Signal(range(self.divisions + 1))
        done = division == self.divisions
        m.d.comb += [self.i.ready.eq(~busy), self.o.valid.eq(busy & done)]
        if gives_reciprocal:
            m.d.comb += [self.o.payload.root.eq(root), self.o.payload.exponent.eq(exponent)]
        else:
            m.d.comb += self.o.payload.root.eq(root)

        partial = Cat(quotient[-1], remainder)
        difference = partial - root
        fits = ~difference[-1]
        fallen = ((root + quotient) >> 1)[: n + 1]
        better = Mux(fallen < root, fallen, root)
        with m.If(~busy):
            if gives_reciprocal:
                first, size = normalise(config, self.i.payload)
                m.d.sync += exponent.eq(size)
            else:
                first = Cat(self.i.payload, C(0, 2 * n - config.in_bits))
                size = ((bit_length(self.i.payload) + 1) >> 1)[: config.exponent_bits]
            seed = Cat(~size.any(), *(size == k for k in range(1, n + 1)))
            if gives_reciprocal:
                # The radicand is normalised: the power of two above its root is always the same. 0 stays 0.
                seed = Cat(~size.any(), C(0, n - 1), size.any())
            m.d.sync += [
                busy.eq(self.i.valid),
                radicand.eq(first),
                root.eq(seed),
                Cat(quotient, remainder).eq(first),
                bit.eq(0),
                division.eq(0),
            ]
        with m.Elif(~done):
            m.d.sync += [
                bit.eq(bit + 1),
                quotient.eq(Cat(fits, quotient)),
                remainder.eq(Mux(fits, difference, partial)),
            ]
            with m.If(bit == n + 1):
                m.d.sync += [
                    bit.eq(0),
                    division.eq(division + 1),
                    root.eq(better),
                    Cat(quotient, remainder).eq(radicand),
                ]
                if gives_reciprocal:
                    with m.If(division == self.divisions - 2):
                        m.d.sync += Cat(quotient, remainder).eq(1 << (2 * n - 1))
                    with m.If(division == self.divisions - 1):
                        top = C((1 << n) - 1, n + 1)
                        m.d.sync += root.eq(Mux(root.any(), Mux(quotient[n], top, quotient), 0))
        with m.Elif(self.o.ready):
            m.d.sync += busy.eq(0)
        return m


def serial_core(config: IsqrtConfig) -> Any:
    """The serial core of a configuration; free again in the cycle after the one in which its result is taken."""
    if config.form == "digit":
        return SquareRoot(config.in_bits)
    return TableCore(config) if config.form == "table" else NewtonCore(config)


def digit_stages(pipe: Pipeline, config: IsqrtConfig, x: Sequence[Value]) -> list[Value]:
    """Append the digit recurrence of each lane: ``digits`` root bits a stage."""
    n = config.half_bits
    rest = [Cat(value, C(0, 2 * n - config.in_bits)) for value in x]
    root: list[Value] = [C(0, 0)] * len(x)
    remainder: list[Value] = [C(0, 0)] * len(x)
    for found in range(n):
        for k in range(len(x)):
            partial = Cat(rest[k][-2:], remainder[k])
            trial = Cat(C(1, 2), root[k])
            difference = partial - trial
            fits = ~difference[-1]
            root[k] = Cat(fits, root[k])
            # The remainder is at most twice the root.
            remainder[k] = Mux(fits, difference, partial)[: found + 2]
            rest[k] = rest[k][:-2]
        if (found + 1) % config.digits == 0 or found + 1 == n:
            if found + 1 == n:
                return pipe.stage(root)
            rest, root, remainder = pipe.stage(rest, root, remainder)
    raise AssertionError("a square root has at least one bit")


def table_stages(pipe: Pipeline, config: IsqrtConfig, x: Sequence[Value]) -> tuple[list, list]:
    """Append golden ``table_reciprocal`` of each lane: ``2 + 3 * steps`` stages, a multiplier in each of a step's."""
    bits = config.root_bits
    normal, exponent = zip(*(normalise(config, value) for value in x), strict=True)
    normal, exponent = pipe.stage(list(normal), list(exponent))
    y = [seed_of(config, value) for value in normal]
    normal, exponent, y = pipe.stage(normal, exponent, y)
    for _ in range(config.steps):
        square = [(v * v)[bits:] for v in y]
        normal, exponent, y, square = pipe.stage(normal, exponent, y, square)
        product = [(f * s)[bits : 2 * bits + 1] for f, s in zip(normal, square, strict=True)]
        normal, exponent, y, product = pipe.stage(normal, exponent, y, product)
        factor = [((3 << bits) - p)[: bits + 2] for p in product]
        y = [improved(config, v * f) for v, f in zip(y, factor, strict=True)]
        normal, exponent, y = pipe.stage(normal, exponent, y)
    return y, exponent


class Isqrt(Unit):
    """``floor(sqrt(x))`` of each lane as {root}, or the split ``1 / sqrt(x)`` as {root, exponent}: golden ``isqrt``.

    Pipelined: one beat per cycle, latency ``ceil(half_bits / digits)`` (digit) or ``2 + 3 * steps`` (table) cycles.
    Serial: one beat at a time through one core a lane, one beat every ``half_bits + 2`` (digit), ``3 + 3 * steps``
    (table) or ``2 + divisions * (half_bits + 2)`` (newton) cycles, whatever the values.
    """

    def __init__(self, config: IsqrtConfig) -> None:
        root = {name: field.shape for name, field in result_layout(config)}
        super().__init__(
            config, i=row_layout(config.lanes, {"x": unsigned(config.in_bits)}), o=row_layout(config.lanes, root)
        )
        if config.serial:
            self.latency = core_latency(config)
        elif config.form == "digit":
            self.latency = -(-config.half_bits // config.digits)
        else:
            self.latency = 2 + 3 * config.steps

    @property
    def initiation_interval(self) -> int:
        return self.latency + 1 if self.config.serial else 1

    def row_cycles(self, elements: int) -> int:
        beats = -(-elements // self.config.lanes)
        return (beats - 1) * self.initiation_interval + 1 + self.latency

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        x = [i.payload.x[k] for k in range(config.lanes)]
        if config.serial:
            cores = [serial_core(config) for _ in x]
            # All cores take the same number of cycles: they run in step.
            m.d.comb += [i.ready.eq(cores[0].i.ready), o.valid.eq(cores[0].o.valid)]
            keep, last = Signal(config.lanes, reset_less=True), Signal(reset_less=True)
            with m.If(i.ready):
                m.d.sync += [keep.eq(i.payload.keep), last.eq(i.payload.last)]
            m.d.comb += [o.payload.keep.eq(keep), o.payload.last.eq(last)]
            for k, core in enumerate(cores):
                m.submodules[f"core{k}"] = core
                m.d.comb += [core.i.valid.eq(i.valid), core.i.payload.eq(x[k]), core.o.ready.eq(o.ready)]
                if config.form == "digit":
                    m.d.comb += o.payload.root[k].eq(core.o.payload)
                else:
                    m.d.comb += o.payload.root[k].eq(core.o.payload.root)
                if config.output == "reciprocal":
                    m.d.comb += o.payload.exponent[k].eq(core.o.payload.exponent)
            return m
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        pipe = Pipeline(m, advance, i.valid, {"keep": i.payload.keep, "last": i.payload.last})
        exponent: list[Value] = []
        if config.form == "digit":
            root = digit_stages(pipe, config, x)
        else:
            root, exponent = table_stages(pipe, config, x)
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.root[k].eq(value) for k, value in enumerate(root)]
        m.d.comb += [o.payload.exponent[k].eq(value) for k, value in enumerate(exponent)]
        return m
