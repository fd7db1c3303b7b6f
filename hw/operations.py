"""How many operators a unit is made of: adders, multipliers and comparators in the elaborated netlist, before any
logic is simplified, module by module."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from amaranth.back import rtlil

#: What is counted: name -> cells of the elaborated netlist. A subtraction is an addition; a conditional one too.
KINDS: dict[str, tuple[str, ...]] = {
    "additions": ("add", "sub"),
    "negations": ("neg",),
    "multiplications": ("mul",),
    "comparisons": ("lt", "le", "gt", "ge"),
}


class Module(NamedTuple):
    """A module of the hierarchy: its name, dotted from the top, and how many operators of each kind it has itself."""

    name: str
    operators: Counter[str]


def operations(component: Any, widest: int | None = None) -> Iterator[Module]:
    """The modules of a component, the top one first. Operators of which no operand has more than ``widest`` bits are
    left out (none by default): counters and addresses are not the arithmetic of a data path."""
    kinds = {cell: kind for kind, cells in KINDS.items() for cell in cells}
    text = rtlil.convert(component, emit_src=False)
    for module in re.split(r"(?m)^module ", text)[1:]:
        found: Counter[str] = Counter({kind: 0 for kind in KINDS})
        for cell in re.finditer(r"(?m)^  cell \$(\w+) .*\n((?:    .*\n)*)", module):
            if cell[1] in kinds:
                widths = [int(n) for n in re.findall(r"\\[AB]_WIDTH (\d+)", cell[2])]
                if widest is None or max(widths) > widest:
                    found[kinds[cell[1]]] += 1
        yield Module(module.split("\n", 1)[0].removeprefix("\\"), found)
