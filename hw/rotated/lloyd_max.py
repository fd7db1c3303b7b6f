"""Component of :mod:`golden.rotated.lloyd_max`, and the comparator lane that the write path builds in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from amaranth.hdl import C, Cat, Module, Mux, Signal, Value, signed, unsigned

from golden.rotated.lloyd_max import LloydMaxConfig
from hw.arithmetic import equals
from hw.pipeline import Pipeline
from hw.unit import Unit, row_layout, table_layout


class Threshold(NamedTuple):
    """A positive threshold in units of y: its floor, unsigned, and whether it lies above that."""

    floor: Value
    beyond: Value


def scale(m: Module, config: LloydMaxConfig, norm: Value) -> list[Threshold]:
    """The thresholds of a row: one product each. A norm of 0 puts them out of reach."""
    empty = ~norm.any()
    found = []
    for k, t in enumerate(config.positive):
        product = Signal(config.product_bits, name=f"threshold{k}")
        m.d.comb += product.eq(norm * C(t, config.factor_bits))
        whole = product[config.fraction_bits :]
        width = max(len(whole), config.in_bits)
        floor = Cat(whole, C(0, width - len(whole))) | empty.replicate(width)
        found.append(Threshold(floor, product[: config.fraction_bits].any()))
    return found


def lane(m: Module, y: Value, thresholds: Sequence[Threshold], ties: str, name: str) -> Value:
    """Index of one coordinate.

    y is folded to a magnitude by its sign alone, without a carry; what that leaves out, and a threshold between two
    integers, are one more bit below the comparison. The most negative y of ties to the lower index costs a bit.
    """
    upper = ties == "upper"
    # Ties to the upper index: y >= t, or -y > t, which is ~y >= t. To the lower: z = y - 1, and the same of z >= t.
    z = Value.cast(y)
    if not upper:
        below = Signal(signed(len(z) + 1), name=f"{name}_below")
        m.d.comb += below.eq(y - 1)
        z = below
    negative = z[-1]
    size = z[:-1] ^ negative.replicate(len(z) - 1)
    exact = negative if upper else ~negative  # the side on which the floor alone decides
    reached = Signal(len(thresholds), name=name)
    m.d.comb += reached.eq(Cat(Cat(exact | ~t.beyond, size) >= Cat(C(1, 1), t.floor) for t in thresholds))
    return Cat(_count(list(reached)) ^ negative.replicate(_count_bits(thresholds)), ~negative)


def _count_bits(thresholds: Sequence[Any]) -> int:
    return len(thresholds).bit_length()


def _count(reached: Sequence[Value]) -> Value:
    """How many of 2**n - 1 flags are set, of which none is set above one that is not: n bits."""
    if not reached:
        return C(0, 0)
    middle = len(reached) // 2
    top = reached[middle]
    rest = [Mux(top, above, below) for below, above in zip(reached[:middle], reached[middle + 1 :], strict=True)]
    return Cat(_count(rest), top)


class LloydMax(Unit):
    """``o.index = #{thresholds < i.y}`` for each lane, as golden ``quantize``.

    ``i``: {y, keep, last}, scaled also {norm}; ``o``: {index, keep, last}; ``table`` (programmable): address k holds
    positive threshold k, in ascending order; load it between rows. One beat per cycle, latency 1, scaled 2: thresholds,
    then comparators.
    """

    def __init__(self, config: LloydMaxConfig) -> None:
        scaled, programmable = config.form == "scaled", config.form == "programmable"
        super().__init__(
            config,
            i=row_layout(
                config.lanes,
                {"y": signed(config.in_bits)},
                {"norm": unsigned(config.norm_bits)} if scaled else None,
            ),
            o=row_layout(config.lanes, {"index": unsigned(config.bits)}),
            table=table_layout(config.count, unsigned(config.in_bits - 1)) if programmable and config.count else None,
        )
        self.latency = 2 if scaled else 1

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        config, i, o = self.config, self.i, self.o
        advance = Signal()
        m.d.comb += [advance.eq(~o.valid | o.ready), i.ready.eq(advance)]
        pipe = Pipeline(m, advance, i.valid, {"keep": i.payload.keep, "last": i.payload.last})
        y: list[Any] = [i.payload.y[k] for k in range(config.lanes)]
        if config.form == "scaled":
            found = scale(m, config, i.payload.norm)
            y, floors, beyond = pipe.stage(y, [t.floor for t in found], [t.beyond for t in found])
            thresholds = [Threshold(*pair) for pair in zip(floors, beyond, strict=True)]
        elif config.form == "frozen":
            thresholds = [Threshold(C(t, config.in_bits - 1), C(0, 1)) for t in config.positive]
        else:
            thresholds = [Threshold(t, C(0, 1)) for t in self._table(m)]
        index = pipe.stage([lane(m, v, thresholds, config.ties, f"reached{k}") for k, v in enumerate(y)])
        m.d.comb += [o.valid.eq(pipe.valid), o.payload.keep.eq(pipe["keep"]), o.payload.last.eq(pipe["last"])]
        m.d.comb += [o.payload.index[k].eq(value) for k, value in enumerate(index)]
        return m

    def _table(self, m: Module) -> list[Value]:
        """The programmable thresholds."""
        config = self.config
        found = [Signal(config.in_bits - 1, name=f"threshold{k}", reset_less=True) for k in range(config.count)]
        if found:
            table = self.table
            m.d.comb += table.ready.eq(1)
            for k, threshold in enumerate(found):
                with m.If(table.valid & equals(table.payload.address, k)):
                    m.d.sync += threshold.eq(table.payload.data)
        return found
