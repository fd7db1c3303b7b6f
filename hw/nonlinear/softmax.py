"""Component of :mod:`golden.nonlinear.softmax`."""

from __future__ import annotations

from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned

from golden.nonlinear.softmax import Mode, SoftmaxConfig
from hw.arithmetic import Divider, adder_tree, bit_length, min_tree
from hw.memory import RowMemory
from hw.nonlinear.exp import constants_layout, split_lanes, split_stages
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout

#: Registers from an accepted beat to its result, apart from the exponential's: address, memory, mask and minimum,
#: product, shift, sum or prefix sum, output.
STAGES = 7


def prefix_sums(values: list[Any], bits: int) -> list[Any]:
    """Sums of the first 1, 2, … values modulo ``2**bits``, in ``ceil(log2(n))`` levels (Sklansky's network)."""
    if len(values) == 1:
        return [Value.cast(values[0])[:bits]]
    half = 1 << ((len(values) - 1).bit_length() - 1)
    low, high = prefix_sums(values[:half], bits), prefix_sums(values[half:], bits)
    return low + [(low[-1] + value)[:bits] for value in high]


class Softmax(Unit):
    """Probabilities of a row of scores, as golden ``softmax``, ``reduce`` and ``normalise``.

    ``i``: {x, keep, last}, with ``run_time_scale`` also ``constants``, with ``streaming`` also ``mode`` (see golden
    ``Mode``) and ``chain`` (the row continues the statistics of the last stored or reduced row). ``keep`` may have
    holes anywhere; row fields are the same on every beat of a row.

    ``o``: {p, keep, last, empty, overlong}, with ``streaming`` also ``statistics``, ``exponent`` and ``total``.
    ``keep`` is as given and p is 0 wherever it is 0; ``empty`` marks every beat of a row under statistics without a
    kept element, all of whose p are 0. A reduced row gives one beat with ``statistics`` = 1, ``keep`` = 0 and the
    statistics (which are 0 on all other beats). A stored row longer than the buffer is treated as a reduced one:
    its one output beat has ``overlong`` = 1, and the row can be sent again to be normalised.

    One beat per cycle in each pass. A stored row takes ``2 * ceil(n / lanes) + latency`` cycles, a reduced one
    ``ceil(n / lanes) + reduce_latency``, a normalised one ``ceil(n / lanes) + normalise_latency``; with E stages of
    the exponential and R reciprocal bits these are ``2 * E + R + 16``, ``E + R + 11`` and ``E + 7``. The next row is
    accepted while the last results of a row are still on their way, and normalised rows follow without a gap; a row
    is not accepted while another is between its passes, because both share the exponential lanes.
    """

    passes = 2

    def __init__(self, config: SoftmaxConfig) -> None:
        row_in: dict[str, Any] = {}
        row_out: dict[str, Any] = {"empty": 1, "overlong": 1}
        if config.run_time_scale:
            row_in["constants"] = constants_layout(config.exp)
        if config.streaming:
            row_in |= {"mode": 2, "chain": 1}
            row_out |= {"statistics": 1, "exponent": config.exponent_bits, "total": config.total_bits}
        super().__init__(
            config,
            i=row_layout(config.lanes, {"x": signed(config.score_bits)}, row_in),
            o=row_layout(config.lanes, {"p": unsigned(config.probability_bits)}, row_out),
        )
        stages = split_stages(config.exp)
        self.latency = 2 * stages + config.reciprocal_bits + 16
        self.reduce_latency = stages + config.reciprocal_bits + 11
        self.normalise_latency = stages + STAGES

    def row_cycles(self, elements: int, mode: Mode = Mode.STORED) -> int:
        """Documented cycles of a row that runs alone (see :meth:`Unit.row_cycles`), by its mode."""
        beats = self.config.beats(elements)
        if mode == Mode.STORED and beats <= self.config.buffer_beats:
            return 2 * beats + self.latency
        return beats + (self.normalise_latency if mode & Mode.NORMALISE else self.reduce_latency)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes, x_bits = config.lanes, config.score_bits
        mode = i.payload.mode if config.streaming else C(Mode.STORED, 2)
        chain = i.payload.chain if config.streaming else C(0, 1)
        advance = Signal()
        filling, reading, emitting = Signal(init=1), Signal(), Signal()  # three of the states, see below
        accept = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance & filling), accept.eq(i.valid & i.ready)]

        # -- row memory: every beat goes through it, so that both passes read the lanes' input from one place --------
        depth = config.buffer_beats
        m.submodules.rows = memory = RowMemory(depth, lanes * (x_bits + 1))
        count, final = Signal(range(depth)), Signal(range(depth), reset_less=True)
        start = Signal(init=1)  # the next beat is a row's first
        wrapped = Signal()  # the row has filled the memory
        only_statistics, overlong = Signal(), Signal()
        empty = Signal(init=1)  # no kept element in the statistics
        last_read = count == final
        step = Mux(count == depth - 1, 0, count + 1)
        with m.If(accept):
            m.d.sync += [count.eq(step), start.eq(i.payload.last), wrapped.eq(wrapped | (count == depth - 1))]
            with m.If(i.payload.last):
                m.d.sync += [
                    count.eq(0),
                    final.eq(count),
                    wrapped.eq(0),
                    overlong.eq(wrapped & ~mode.any()),
                    only_statistics.eq(wrapped | mode[0]),
                ]
        with m.If(advance & reading):
            m.d.sync += count.eq(Mux(last_read, 0, step))
        m.d.comb += [
            memory.write_enable.eq(accept),
            memory.write_address.eq(count),
            memory.write_data.eq(Cat(*(i.payload.x[k] for k in range(lanes)), i.payload.keep)),
            memory.read_enable.eq(advance),
        ]
        second = reading | (filling & mode[1])
        pipe = Pipeline(
            m,
            advance,
            (filling & i.valid) | reading,
            {
                "last": Mux(reading, last_read, i.payload.last),
                "second": second,
                "fresh": start & ~(chain & ~empty),
                "address": count,
            },
        )
        pipe.stage()
        m.d.comb += memory.read_address.eq(pipe.carry.pop("address"))
        if config.run_time_scale:
            constants = Signal(i.payload.constants.shape(), reset_less=True)
            with m.If(accept):
                m.d.sync += constants.eq(i.payload.constants)
            pipe.carry["constants"] = constants
        pipe.stage()
        pipe.carry["keep"] = memory.read_data[lanes * x_bits :]

        # -- m * 2**-z: t = top - x is x with all bits but the sign inverted ------------------------------------------
        t = []
        for k in range(lanes):
            x = memory.read_data[k * x_bits : (k + 1) * x_bits]
            t.append(Cat(~x[:-1], x[-1]))
        mantissa, z = split_lanes(pipe, config.exp, t, row="constants")
        pipe.carry.pop("constants", None)
        if config.form == "base2":
            mantissa = [(a | a[config.term_bits].replicate(config.term_bits))[: config.term_bits] for a in mantissa]
        else:
            mantissa = [a[: config.term_bits] for a in mantissa]

        # -- masks, and the beat's least exponent; what is not valid counts as not kept -------------------------------
        keep = [bit & pipe.valid for bit in pipe["keep"]]
        pipe.carry["keep"] = Cat(*keep)
        idle = pipe["second"] & empty
        mantissa = [a & (bit & ~idle).replicate(len(a)) for a, bit in zip(mantissa, keep, strict=True)]
        beat_min = min_tree([e | (~bit).replicate(len(e)) for e, bit in zip(z, keep, strict=True)])
        mantissa, z, beat_min = pipe.stage(mantissa, z, beat_min)

        # -- reference and factor: running minimum and a power of two in pass 1, both of the row in pass 2 ------------
        zmin = Signal(config.exponent_bits, reset_less=True)
        excess = Signal(config.excess_bits, reset_less=True)
        r = Signal(config.reciprocal_bits - 1, reset_less=True)  # without its top bit, which is always 1
        before = zmin | pipe["fresh"].replicate(len(zmin))
        drops = beat_min < before
        least = Mux(drops, beat_min, before)
        with m.If(advance & pipe.valid & ~pipe["second"]):
            m.d.sync += zmin.eq(least)
        limit = config.total_bits.bit_length()
        drop = Mux(drops, before - beat_min, 0)[: config.exponent_bits]
        # All ones shift the whole sum out: where it starts afresh, and where the reference drops that far.
        drop = _clamp(drop, limit) | pipe["fresh"].replicate(limit)
        reference = Signal(signed(config.shift_bits + 1))
        m.d.comb += reference.eq(Mux(pipe["second"], zmin - excess, least))
        factor = Cat(r & pipe["second"].replicate(len(r)), C(1, 1))
        product = [(a * factor)[: config.product_bits] for a in mantissa]
        amount_bits = (config.product_bits + config.pad_bits).bit_length()
        amounts = []
        for exponent in z:
            amount = exponent - reference
            if config.streaming:  # statistics of another row may lie below this one's scores
                amount = Mux(amount[-1], 0, amount)
            amounts.append(_clamp(amount[: config.shift_bits], amount_bits))
        pipe.carry["drop"] = drop
        product, amounts = pipe.stage(product, amounts)

        # -- one shifter for the terms of pass 1 and the q of pass 2 --------------------------------------------------
        shifted = pipe.stage([Cat(C(0, config.pad_bits), a) >> n for a, n in zip(product, amounts, strict=True)])
        to_term = config.reciprocal_bits - 1 + config.pad_bits - config.sum_guard_bits
        to_q = config.pad_bits + config.product_shift
        terms = [word[to_term : to_term + config.term_bits + config.sum_guard_bits] for word in shifted]
        quotients = [word[to_q : to_q + config.q_bits] for word in shifted]
        high = [q[config.guard_bits :] for q in quotients]
        low = [q[: config.guard_bits] for q in quotients]
        beat_sum = adder_tree(terms)[: config.beat_sum_bits]
        if config.rounding == "diffuse":
            high, low, beat_sum = pipe.stage(high, prefix_sums(low, config.guard_bits + 1), beat_sum)
        else:
            high, low, beat_sum = pipe.stage(high, [bits[-1] for bits in low], beat_sum)

        # -- sum, and what leaves -------------------------------------------------------------------------------------
        total = Signal(config.total_bits, reset_less=True)
        with m.If(advance & pipe.valid & ~pipe["second"]):
            m.d.sync += total.eq((total >> pipe["drop"]) + beat_sum)
        if config.rounding == "diffuse":
            # Bit guard_bits of each running sum is the parity of its rounded value; neighbours differ by at most 1.
            residue = Signal(config.guard_bits, init=1 << (config.guard_bits - 1))
            parity = [(residue + bits)[config.guard_bits] for bits in low]
            ups = [a ^ b for a, b in zip(parity, [C(0, 1), *parity[:-1]], strict=True)]
            with m.If(advance & pipe.valid & pipe["second"]):
                after = (residue + low[-1])[: config.guard_bits]
                m.d.sync += residue.eq(Mux(pipe["last"], 1 << (config.guard_bits - 1), after))
        else:
            ups = low
        probabilities = []
        for whole, up in zip(high, ups, strict=True):
            rounded = whole + up
            over = rounded[config.probability_bits :].any()
            probabilities.append(rounded[: config.probability_bits] | over.replicate(config.probability_bits))
        finished = pipe.valid & pipe["last"] & ~pipe["second"]
        pipe.valid = (pipe.valid & pipe["second"]) | emitting
        pipe.carry = {"keep": pipe["keep"], "last": pipe["last"] | emitting, "empty": empty}
        pipe.carry["overlong"] = overlong & emitting
        if config.streaming:
            pipe.carry |= {
                "statistics": emitting,
                "exponent": zmin & emitting.replicate(len(zmin)),
                "total": total & emitting.replicate(len(total)),
            }
        probabilities = pipe.stage(probabilities)
        m.d.comb += [o.valid.eq(pipe.valid), *(o.payload[name].eq(value) for name, value in pipe.carry.items())]
        m.d.comb += [o.payload.p[k].eq(value) for k, value in enumerate(probabilities)]

        # -- one reciprocal per row -----------------------------------------------------------------------------------
        m.submodules.divider = divider = Divider(config.reciprocal_bits, config.divisor_bits, head=True)
        least_bits = config.sum_guard_bits + config.mantissa_low_bits
        # The total's bits from its least possible top bit on say by how much it must come down.
        length = bit_length(total[least_bits - 1 :])
        wide = Cat(C(0, max(0, config.divisor_bits - least_bits)), total)
        m.d.comb += [
            divider.i.payload.divisor.eq((wide >> excess)[max(0, least_bits - config.divisor_bits) :]),
            divider.i.payload.head.eq(1 << (config.divisor_bits - 1)),
        ]
        # One state bit each: take a row in, drain the pipeline, measure the total, divide, wait, then read the row
        # again or emit its statistics.
        draining, measuring, dividing, waiting = (
            Signal(name=name) for name in ("draining", "measuring", "dividing", "waiting")
        )
        divided = waiting & divider.o.valid
        m.d.comb += [divider.i.valid.eq(dividing), divider.o.ready.eq(waiting)]
        m.d.sync += [measuring.eq(draining & advance & finished), dividing.eq(measuring)]
        with m.If(accept & i.payload.last & ~mode[1]):
            m.d.sync += [filling.eq(0), draining.eq(1)]
        with m.If(advance & finished):
            m.d.sync += draining.eq(0)
        with m.If(measuring):
            m.d.sync += [excess.eq(length - 1), empty.eq(~total.any())]
        with m.If(dividing):
            m.d.sync += waiting.eq(1)
        with m.If(divided):
            m.d.sync += [
                waiting.eq(0),
                r.eq(divider.o.payload.quotient),
                emitting.eq(only_statistics),
                reading.eq(~only_statistics),
            ]
        with m.If(advance & (emitting | (reading & last_read))):
            m.d.sync += [emitting.eq(0), reading.eq(0), filling.eq(1)]
        return m


def _clamp(x: Any, bits: int) -> Value:
    """An unsigned shift amount in ``bits`` bits: all ones for everything that does not fit."""
    x = Value.cast(x)
    if len(x) <= bits:
        return Cat(x, C(0, bits - len(x)))
    return x[:bits] | x[bits:].any().replicate(bits)
