"""Plants faults in units and shows that their benches catch them.

A fault is planted while a unit is elaborated, so that the mutant goes through the same Verilog and the same bench as
the unit itself:

``rounding``  every rounding shift drops its constant and truncates
``sign``      pipeline registers and sign casts lose their sign, so that a later widening extends by zeros
``keep``      the last beat's keep is taken as all ones
``stall``     the unit believes that the receiver is always ready
``reset``     a reset in mid-row does not reach the unit
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from amaranth.hdl import C, Module, Value, ValueCastable
from amaranth.lib.wiring import Component, connect, flipped

import hw.arithmetic
from hw.catalog import Entry
from hw.pipeline import Pipeline
from hw.verilog import to_verilog


class Around(Component):
    """A unit with one of its ports tampered with: same ports outside."""

    def __init__(self, unit: Any, fault: str) -> None:
        self.unit, self.fault = unit, fault
        super().__init__(unit.signature)

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        m.submodules.unit = unit = self.unit
        for name in unit.signature.members:
            if (self.fault, name) not in (("keep", "i"), ("stall", "o")):
                connect(m, flipped(getattr(self, name)), getattr(unit, name))
        if self.fault == "keep":
            m.d.comb += [
                unit.i.valid.eq(self.i.valid),
                self.i.ready.eq(unit.i.ready),
                Value.cast(unit.i.payload).eq(Value.cast(self.i.payload)),
            ]
            with m.If(self.i.payload.last):
                m.d.comb += unit.i.payload.keep.eq(-1)
        if self.fault == "stall":
            m.d.comb += [
                unit.o.ready.eq(1),
                self.o.valid.eq(unit.o.valid),
                Value.cast(self.o.payload).eq(Value.cast(unit.o.payload)),
            ]
        return m


def truncate(x: Any, shift: Any, *limit: int) -> Any:
    if isinstance(shift, int) and shift <= 0:
        return Value.cast(x) << -shift
    return Value.cast(x) >> shift


def nothing_added(term: Any) -> Any:
    return C(0, len(Value.cast(term)))


def unsigned_register(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(self: Pipeline, value: Any, name: str) -> Any:
        made = original(self, value, name)
        if isinstance(made, (list, tuple)) or isinstance(value, ValueCastable):
            return made
        return Value.cast(made).as_unsigned()

    return register


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Elaborate inside this to get the fault into everything that is built."""
    with ExitStack() as stack:
        if fault == "rounding":
            for module in [m for name, m in sys.modules.items() if name.startswith("hw.")]:
                for name in ("round_shift", "round_shift_by"):
                    if module is not hw.arithmetic and hasattr(module, name):
                        stack.enter_context(patch.object(module, name, truncate))
                if hasattr(module, "rounding"):
                    stack.enter_context(patch.object(module, "rounding", nothing_added))
        elif fault == "sign":
            stack.enter_context(patch.object(Pipeline, "_register", unsigned_register(Pipeline._register)))
            stack.enter_context(patch.object(Value, "as_signed", Value.as_unsigned))
        yield


FAULTS = ("rounding", "sign", "keep", "stall", "reset")


def mutant(entry: Entry, config: Any, fault: str) -> str:
    """Verilog of the unit with a fault in it."""
    unit: Any = entry.component(config)
    with planted(fault):
        if fault in ("keep", "stall"):
            unit = Around(unit, fault)
        text = to_verilog(unit, entry.name)
    if fault == "reset":
        text = cut_reset(text)
    return text


def cut_reset(text: str) -> str:
    """The top module's reset reaches none of its logic: every use of ``rst`` reads a constant 0, except the ports."""
    lines = []
    for line in text.splitlines(keepends=True):
        if re.match(r"\s*(module |input rst;|wire rst;)", line) or ".rst(rst)" in line:
            lines.append(line.replace(".rst(rst)", ".rst(1'b0)"))
        else:
            lines.append(re.sub(r"(?<![\w\\$.])rst(?!\w)", "1'b0", line))
    return "".join(lines)
