"""Component of :mod:`golden.nonlinear.requantize`, and the narrowing shifter that other units build in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned

from golden.nonlinear.requantize import RequantizeConfig
from hw.arithmetic import bit_length, or_tree, tree
from hw.memory import RowMemory
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout

#: Quotient digits per pipeline stage of the group form.
DIGITS_PER_STAGE = 4


def shift_window(m: Module, x: Value, shift: Value, bits: int, name: str) -> tuple[Value, Value]:
    """Low ``bits`` bits of ``x >> shift``, and whether the bits above them differ from the sign of x (overflow).

    The large steps of the shift come first, so that each step only keeps what the later ones can still bring down:
    about half of a full shifter.
    """
    x, shift = Value.cast(x), Value.cast(shift)
    sign, word, overflow = x[-1], x, []
    for j in reversed(range(len(shift))):
        step = 1 << j
        kept = min(len(word), bits + step - 1)
        moved = Cat(word[step : step + kept], sign.replicate(max(0, step + kept - len(word))))
        stage = Signal(kept, name=f"{name}_{j}")
        m.d.comb += stage.eq(Mux(shift[j], moved, word))
        lost, lost_moved = word[kept:], word[step + kept :]
        if len(lost):
            overflow.append(~shift[j] & (lost[:step] ^ sign.replicate(len(lost[:step]))).any())
        if len(lost_moved):
            overflow.append((lost_moved ^ sign.replicate(len(lost_moved))).any())
        word = stage
    if len(word) < bits:
        word = Cat(word, sign.replicate(bits - len(word)))
    elif len(word) > bits:  # no shift bits at all
        overflow.append((word[bits:] ^ sign.replicate(len(word) - bits)).any())
    return word[:bits], Cat(*overflow).any() if overflow else C(0, 1)


def rounding(term: Value) -> Value:
    """What is added to round half up; a name of its own so that a planted fault can take it away (``tb.mutate``)."""
    return term


def round_window(m: Module, window: Value, name: str) -> Value:
    """Round half up by the lowest bit of a ``bits + 1`` window; only ``2**(bits-1)`` can leave the word and
    saturates. Signed, ``bits`` wide."""
    window = Value.cast(window)
    bits = len(window) - 1
    rounded = Signal(bits, name=name)
    m.d.comb += rounded.eq(window[1:] + rounding(window[0]))
    carried = ~window[-1] & rounded[-1]
    return (rounded ^ carried.replicate(bits)).as_signed()


def narrow_by(m: Module, x: Value, shift: Value, bits: int, name: str) -> Value:
    """``sat(rs(x, shift))`` of a signed word for a run-time unsigned shift: golden ``saturate(round_shift(x, shift))``.
    Combinational; about half the gates of a full shift followed by a clamp."""
    x = Value.cast(x)
    window, overflow = shift_window(m, Cat(C(0, 1), x), shift, bits + 1, name)
    overflow = overflow | (window[-1] ^ x[-1])
    rounded = round_window(m, window, f"{name}_rounded")
    return Mux(overflow, Cat((~x[-1]).replicate(bits - 1), x[-1]), rounded).as_signed()


class Requantize(Unit):
    """Requantises rows, as golden ``requantize``.

    ``i``: {x, keep, last}, in the static form also {multiplier, shift} of the row; ``o``: {q, keep, last}, in the token
    form also {e}, in the group form also {e, code} with ``c = code + 4``, both of the block that the beat belongs to.

    One beat per cycle. ``static``: latency 2. ``token`` and ``group`` store a block of the row while its largest
    magnitude is found and give it out after its end, while the next block comes in: a row of n elements takes
    ``ceil(n / lanes) + min(ceil(n / lanes), block beats) + latency`` cycles, latency 6 (token) or
    ``6 + ceil(out_bits / 4)`` (group). The group form sustains one beat per cycle over rows and groups of any length.
    The token form's buffer holds ``max_row`` elements: after a row (or block) of that length the next beat waits
    4 cycles, then enters as beats of it leave, so that ``row_cycles`` holds for rows of up to ``max_row`` elements.
    """

    def __init__(self, config: RequantizeConfig) -> None:
        form = config.form
        row_in, row_out = {}, {}
        if form == "static":
            row_in = {"multiplier": unsigned(config.multiplier_bits), "shift": unsigned(config.shift_bits)}
        elif form == "token":
            row_out = {"e": unsigned(config.exponent_bits)}
        else:
            row_out = {"e": signed(config.exponent_bits), "code": unsigned(2)}
        super().__init__(
            config,
            i=row_layout(config.lanes, {"x": signed(config.in_bits)}, row_in),
            o=row_layout(config.lanes, {"q": signed(config.out_bits)}, row_out),
        )
        if form == "static":
            self.latency = 2
        else:
            self.passes = 2
            self.latency = 6 if form == "token" else 6 + -(-config.out_bits // DIGITS_PER_STAGE)

    def row_cycles(self, elements: int) -> int:
        beats = -(-elements // self.config.lanes)
        stored = 0 if self.config.form == "static" else min(beats, self.config.block_beats)
        return beats + stored + self.latency

    @property
    def depth(self) -> int:
        """Beats that the buffer of the token and group form holds."""
        beats: int = self.config.block_beats
        # Five beats come in between the last one of a group and the cycle in which its first one leaves.
        return max(2, beats) if self.config.form == "token" else beats + 5

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        lanes = range(config.lanes)
        advance = Signal()
        m.d.comb += advance.eq(~o.valid | o.ready)
        if config.form == "static":
            m.d.comb += i.ready.eq(advance)
            carry = {"keep": i.payload.keep, "last": i.payload.last, "shift": i.payload.shift}
            pipe = Pipeline(m, advance, i.valid, carry)
            product = pipe.stage([(i.payload.x[k] * i.payload.multiplier)[: config.product_bits] for k in lanes])
            q = [
                narrow_by(m, p.as_signed(), pipe["shift"], config.out_bits, f"narrow{k}") for k, p in enumerate(product)
            ]
            q = pipe.stage(q)
        else:
            pipe, x = self._store(m, advance)
            q = (self._token_lanes if config.form == "token" else self._group_lanes)(m, pipe, x)
            m.d.comb += o.payload.e.eq(pipe["s"] if config.form == "token" else pipe["s"] - 2)
            if config.form == "group":
                m.d.comb += o.payload.code.eq(pipe["code"])
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.q[k].eq(value) for k, value in enumerate(q)]
        return m

    # -- token and group: a buffer of beats, and the scale of each block beside it ------------------------------------
    def _store(self, m: Module, advance: Signal) -> tuple[Pipeline, list[Value]]:
        """The buffer. Returns a pipeline at the point where a beat and the scale of its block are read, carrying keep,
        last and the scale (s, and code in the group form), and the lanes of that beat."""
        config, i, depth = self.config, self.i, self.depth
        lanes = range(config.lanes)
        address_bits = (depth - 1).bit_length()
        m.submodules.data = data = RowMemory(depth, config.lanes * config.in_bits)
        m.submodules.tags = tags = RowMemory(depth, config.lanes + 2)
        m.submodules.scales = scales = RowMemory(depth, config.shift_bits + (2 if config.form == "group" else 0))

        def pointer(name: str) -> Signal:
            """An address below one bit that flips at each turn, so that a full buffer differs from an empty one."""
            return Signal(address_bits + 1, name=name)

        def after(p: Signal) -> Value:
            at_end = p[:-1] == depth - 1
            return Mux(at_end, Cat(C(0, address_bits), ~p[-1]), p + 1)[: address_bits + 1]

        # Write side: it never waits for the read side, except for room.
        used = Signal(range(depth + 1))
        accept, leave = Signal(), Signal()
        m.d.comb += [i.ready.eq(used != depth), accept.eq(i.valid & i.ready)]
        m.d.sync += used.eq(used + accept - leave)
        write = pointer("write")
        place = Signal(range(config.block_beats), name="place")
        block_last = Signal()
        m.d.comb += block_last.eq(i.payload.last | (place == config.block_beats - 1))
        with m.If(accept):
            m.d.sync += [write.eq(after(write)), place.eq(Mux(block_last, 0, place + 1))]
        m.d.comb += [
            data.write_address.eq(write[:-1]),
            data.write_data.eq(Value.cast(i.payload.x)),
            data.write_enable.eq(accept),
            tags.write_address.eq(write[:-1]),
            tags.write_data.eq(Cat(i.payload.keep, i.payload.last, block_last)),
            tags.write_enable.eq(accept),
        ]
        scale, scale_valid, committed_next = self._scale(
            m, accept, ~place.any(), block_last, after(write), [i.payload.x[k] for k in lanes]
        )
        committed, scale_write = pointer("committed"), Signal(address_bits)
        with m.If(scale_valid):
            m.d.sync += [committed.eq(committed_next), scale_write.eq(self._next(scale_write))]
        m.d.comb += [
            scales.write_address.eq(scale_write),
            scales.write_data.eq(scale),
            scales.write_enable.eq(scale_valid),
        ]

        # Read side: the tags first, because they say whether the beat after needs the next scale.
        read, scale_read = pointer("read"), Signal(address_bits)
        tags_valid, tags_at = Signal(), Signal(address_bits, reset_less=True)
        issue = read != committed
        keep, last, ends = tags.read_data[: config.lanes], tags.read_data[-2], tags.read_data[-1]
        beat_valid = Signal()
        beat_keep, beat_last = Signal(config.lanes, reset_less=True), Signal(reset_less=True)
        m.d.comb += [
            leave.eq(advance & tags_valid),
            tags.read_address.eq(read[:-1]),
            tags.read_enable.eq(advance),
            data.read_address.eq(tags_at),
            data.read_enable.eq(advance),
            scales.read_address.eq(scale_read),
            scales.read_enable.eq(advance),
        ]
        with m.If(advance):
            m.d.sync += [tags_valid.eq(issue), tags_at.eq(read[:-1]), beat_valid.eq(tags_valid)]
            m.d.sync += [beat_keep.eq(keep), beat_last.eq(last)]
            with m.If(issue):
                m.d.sync += read.eq(after(read))
            with m.If(tags_valid & ends):
                m.d.sync += scale_read.eq(self._next(scale_read))
        s = scales.read_data[: config.shift_bits]
        carry = {"keep": beat_keep, "last": beat_last, "s": s}
        if config.form == "group":
            carry["code"] = scales.read_data[-2:]
        x = [data.read_data.word_select(k, config.in_bits).as_signed() for k in lanes]
        return Pipeline(m, advance, beat_valid, carry), x

    def _next(self, address: Signal) -> Value:
        return Mux(address == self.depth - 1, 0, address + 1)[: len(address)]

    def _scale(
        self, m: Module, accept: Value, first: Value, last: Value, following: Value, x: Sequence[Value]
    ) -> tuple[Value, Value, Value]:
        """Scale of each block: (scale, valid, pointer behind the block), 2 (token) or 3 (group) cycles after its last
        beat was accepted. Nothing here waits."""
        config = self.config
        group = config.form == "group"
        keys = []
        for k, value in enumerate(x):
            # The magnitude less one for x < 0, with the sign below it: keys order as magnitudes do.
            spread = value[:-1] ^ value[-1].replicate(config.in_bits - 1)
            key = Signal(config.in_bits if group else config.in_bits - 1, name=f"key{k}")
            m.d.comb += key.eq(Mux(self.i.payload.keep[k], Cat(value[-1], spread) if group else spread, 0))
            keys.append(key)
        made = 0

        def larger(a: Value, b: Value) -> Signal:
            nonlocal made
            made += 1
            larger = Signal(config.in_bits, name=f"larger{made}")
            m.d.comb += larger.eq(Mux(b > a, b, a))
            return larger

        beat = Signal(len(keys[0]), name="beat_widest", reset_less=True)
        widest = Signal(len(keys[0]), name="widest", reset_less=True)
        beat_valid, beat_first, beat_last = Signal(), Signal(reset_less=True), Signal(reset_less=True)
        beat_following = Signal(len(following), name="beat_following", reset_less=True)
        done = Signal(name="widest_valid")
        done_following = Signal(len(following), name="widest_following", reset_less=True)
        m.d.sync += [
            beat.eq(tree(keys, larger) if group else or_tree(keys)),
            beat_valid.eq(accept),
            beat_first.eq(first),
            beat_last.eq(last),
            beat_following.eq(following),
            done.eq(beat_valid & beat_last),
            done_following.eq(beat_following),
        ]
        before = Mux(beat_first, 0, widest)
        with m.If(beat_valid):
            m.d.sync += widest.eq(Mux(beat > before, beat, before) if group else beat | before)
        if not group:
            s = bit_length(widest[config.out_bits - 1 :])[: config.shift_bits]
            return s, done, done_following

        largest = Signal(config.in_bits, name="largest", reset_less=True)
        s = Signal(config.shift_bits, name="fine", reset_less=True)
        valid = Signal(name="largest_valid")
        valid_following = Signal(len(following), name="largest_following", reset_less=True)
        magnitude = Signal(config.in_bits, name="magnitude")
        m.d.comb += magnitude.eq(widest[1:] + widest[0])
        m.d.sync += [
            largest.eq(magnitude),
            s.eq(bit_length(magnitude[config.out_bits :])),
            valid.eq(done),
            valid_following.eq(done_following),
        ]
        # floor(largest / 2**e), and below it whether anything was cut off.
        quarters = Cat(C(0, 2), largest)
        window, _ = shift_window(m, Cat(quarters, C(0, 1)), s, config.out_bits + 2, "normal")
        cut = Signal(len(quarters), name="cut")
        m.d.comb += cut.eq(quarters & ~(C(-1, len(quarters)).as_unsigned() << s))
        normal = Signal(config.out_bits + 3, name="normal")
        m.d.comb += normal.eq(Cat(cut.any(), window))
        above = {k: normal > 2 * config.limit * k for k in (4, 5, 6, 7, 8)}
        code, coarser = Signal(2), Signal()
        m.d.comb += coarser.eq(above[7])
        with m.If(above[7]):
            m.d.comb += code.eq(above[8])
        with m.Elif(above[6]):
            m.d.comb += code.eq(3)
        with m.Elif(above[5]):
            m.d.comb += code.eq(2)
        with m.Else():
            m.d.comb += code.eq(above[4])
        return Cat((s + coarser)[: config.shift_bits], code), valid, valid_following

    def _token_lanes(self, m: Module, pipe: Pipeline, x: Sequence[Value]) -> list[Value]:
        windows = [
            shift_window(m, Cat(C(0, 1), value), pipe["s"], self.config.out_bits + 1, f"shifted{k}")[0]
            for k, value in enumerate(x)
        ]
        windows = pipe.stage(windows)
        result: list[Value] = pipe.stage([round_window(m, w, f"rounded{k}") for k, w in enumerate(windows)])
        return result

    def _group_lanes(self, m: Module, pipe: Pipeline, x: Sequence[Value]) -> list[Value]:
        """Golden ``_group``: the dividend, then its quotient by c = code + 4, digit by digit from the top. With
        a divisor of three bits and a dividend of ``out_bits + 3`` that is a fifth of a reciprocal multiplier."""
        config = self.config
        bits = config.out_bits
        c = Cat(pipe["code"], C(1, 1))
        dividend = []
        for k, value in enumerate(x):
            eighths, _ = shift_window(m, Cat(C(0, 3), value), pipe["s"], config.eighths_bits, f"shifted{k}")
            # c << (bits - 1) makes the dividend non-negative.
            dividend.append((eighths + Cat(rounding(c), C(0, bits - 3), c))[1 : config.eighths_bits])
        # Each word holds the remainder at the top, the dividend's digits to come, and the quotient's digits so far.
        words = pipe.stage(dividend)
        for start in range(0, bits, DIGITS_PER_STAGE):
            c = Cat(pipe["code"], C(1, 1))
            for digit in range(start, min(bits, start + DIGITS_PER_STAGE)):
                words = [self._digit(m, word, c, f"digit{digit}_{k}") for k, word in enumerate(words)]
            words = pipe.stage(words)
        # The offset of 2**(bits-1) leaves by inverting the sign.
        return [Cat(word[: bits - 1], ~word[bits - 1]).as_signed() for word in words]

    def _digit(self, m: Module, word: Value, c: Value, name: str) -> Signal:
        """One step of the restoring division of ``word`` = {remainder (3 bits), rest}: the digit enters below."""
        result = Signal(len(word), name=name)
        partial = word[-4:]
        fits = partial >= c
        m.d.comb += result.eq(Cat(fits, word[:-4], Mux(fits, partial - c, partial)[:3]))
        return result
