"""The recipes: what is run for each target, and how its figures are read.

``gates``
    The recipe that the peers' figures were made with: ``hierarchy -check; synth -flatten; abc -g gates;
    opt_clean -purge; stat; ltp -noff``. ``cells`` are gates without flip-flops, ``depth`` the longest path in gates.
``ecp5``, ``ice40``
    Yosys' flow for the family, then nextpnr: LFE5U-85F, speed grade 6, out of context (any number of ports), or
    iCE40 HX8K in its ct256 package. ``f_max_mhz`` is of the slowest clock, and None with a ``note`` where the unit
    does not fit.
``asic``
    The generic netlist mapped to a cell library: ``area_um2``, and ``delay_ps``, ABC's longest path between
    registers without clock-to-output, set-up and wires, where the library has timing and Yosys is pyosys.

Row memories (:class:`hw.memory.RowMemory`) are black boxes for ``gates`` and ``asic`` and are reported as
``memory_bits``; the FPGA flows map them to block RAM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from golden.commandline import CheckFailed
from synth.design import Design
from synth.liberty import Library
from synth.tools import Yosys, nextpnr_version, run_nextpnr
from synth.workspace import Job, ToolFailed, shown

TARGETS = ("gates", "ecp5", "ice40", "asic")

#: Raised when a recipe or the reading of its figures changes, so that stored results are made again.
REVISION = "2"

#: What the devices hold: LUTs, flip-flops, block RAMs, multipliers, pins (None: out of context).
DEVICES = {
    "ecp5": {"luts": 83640, "flip_flops": 83640, "brams": 208, "dsps": 156},
    "ice40": {"luts": 7680, "flip_flops": 7680, "brams": 32, "pins": 206},
}

_NEXTPNR = {
    "ecp5": ["--85k", "--package", "CABGA756", "--speed", "6", "--out-of-context", "--freq", "200"],
    "ice40": ["--hx8k", "--package", "ct256", "--pcf-allow-unconstrained", "--freq", "100"],
}

#: Cells that end a path of an FPGA netlist, and those that are latches in a generic one.
_SEQUENTIAL = {"ecp5": ("TRELLIS_FF", "DP16KD", "TRELLIS_DPR16X4"), "ice40": ("SB_DFF*", "SB_RAM40_4K*")}
_LATCHES = re.compile(r"\$_?(DLATCH|dlatch|ADLATCH|adlatch|SR_|sr$)")

#: Longest delay that ABC maps for, in picoseconds: relaxed, so that area comes first; and the load of each output.
ABC_DELAY = 2000
ABC_CONSTRAINTS = "set_load 0.02 [all_outputs]\n"


def cells_of(job: Job, file: str, top: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Number of cells of each type in the top module, and that module's whole report, from ``stat -json``."""
    text = job.read(file)
    modules = json.loads(text[text.index("{") :])["modules"]
    report = modules.get(f"\\{top}") or modules[top]
    counts = report.get("num_cells_by_type", {})
    return {name.lstrip("\\"): count_of(count) for name, count in counts.items()}, report


def count_of(value: Any) -> int:
    """A cell count; with a library ``stat`` gives an object of count and area."""
    return int(value["count"] if isinstance(value, Mapping) else value)


def depth_of(job: Job, file: str) -> int:
    """Longest path from what ``ltp`` wrote: 0 if there is none."""
    found = re.search(r"Longest topological path in \S+ \(length=(-?\d+)\)", job.read(file))
    return max(0, int(found[1])) if found else 0


def latches_of(counts: Mapping[str, int]) -> int:
    return sum(count for name, count in counts.items() if _LATCHES.match(name))


def without(names: Sequence[str]) -> str:
    """Commands that take cells out, so that no path leads through them."""
    return "".join(f"delete t:{name}\n" for name in names)


def memory_bits(design: Design, counts: Mapping[str, int]) -> int:
    return sum(bits * counts.get(name, 0) for name, bits in design.memories.items())


def no_hidden_cells(name: str, counts: Mapping[str, int]) -> None:
    """A cell that the recipe left unmapped would be counted as one gate."""
    strange = [kind for kind in counts if kind.startswith("$") and not kind.startswith("$_")]
    if strange:
        raise CheckFailed(f"{name}: the netlist still holds {', '.join(strange)}")


def no_latches(job: Job, name: str) -> None:
    """CheckFailed if a design holds latches before the mapping, which would fail at them or hide them in loops."""
    if (job.folder / "before.json").is_file():
        text = job.read("before.json")
        modules = json.loads(text[text.index("{") :])["modules"].values()
        latches = sum(latches_of(module.get("num_cells_by_type", {})) for module in modules)
        if latches:
            raise CheckFailed(f"{name}: {latches} latches; a unit has none")


def gates_job(base: Path, yosys: Yosys, name: str, design: Design) -> Job:
    script = (
        f"read_verilog @/design.v\nhierarchy -check -top {design.top}\nsynth -flatten -top {design.top}\n"
        "write_rtlil @/generic.il\nabc -g gates\nopt_clean -purge\ntee -q -o @/stat.json stat -json\n"
        f"{without(list(design.memories))}tee -q -o @/depth.txt ltp -noff\n"
    )
    key = ["gates", REVISION, yosys.key, str(design.memories)]
    return Job(base, f"{name}-gates", {"design.v": design.boxed}, script, key)


def gates(base: Path, yosys: Yosys, name: str, design: Design) -> dict[str, Any]:
    """Figures of the peers' recipe; leaves the generic netlist in ``generic.il`` for :func:`asic`."""

    def make(job: Job) -> dict[str, Any]:
        yosys.run(job)
        counts, _ = cells_of(job, "stat.json", design.top)
        own = {kind: count for kind, count in counts.items() if kind not in design.memories and kind != "$scopeinfo"}
        no_hidden_cells(name, own)
        latches = latches_of(own)
        flip_flops = sum(count for kind, count in own.items() if "DFF" in kind or kind == "$_FF_")
        return {
            "cells": sum(own.values()) - flip_flops - latches,
            "flip_flops": flip_flops,
            "latches": latches,
            "depth": depth_of(job, "depth.txt"),
            "memory_bits": memory_bits(design, counts),
        }

    return gates_job(base, yosys, name, design).result(make, needs=["generic.il"])


def fpga(base: Path, yosys: Yosys, name: str, design: Design, family: str, route: bool = True) -> dict[str, Any]:
    """Resources and clock of an FPGA family. Cells that do not fit are told in ``note``, without a clock."""

    def make(job: Job) -> dict[str, Any]:
        try:
            yosys.run(job)
        except ToolFailed:
            no_latches(job, name)
            raise
        no_latches(job, name)
        counts, report = cells_of(job, "stat.json", design.top)
        counts.pop("$scopeinfo", None)
        figures = family_figures(family, counts)
        figures["latches"] = latches_of(counts)
        figures["depth"] = depth_of(job, "depth.txt")
        figures["memory_bits"] = sum(design.memories.values())
        figures["f_max_mhz"] = None
        used = figures | {"pins": report["num_port_bits"]}
        short = [
            f"{used[key]:,} {key.replace('_', '-')} of {limit:,}"
            for key, limit in DEVICES[family].items()
            if used[key] > limit
        ]
        if short:
            return figures | {"note": f"does not fit: {', '.join(short)}"}
        if not route:
            return figures | {"note": "not routed"}
        arguments = [
            *_NEXTPNR[family],
            "--json",
            job.path("netlist.json"),
            "--report",
            job.path("report.json"),
        ]
        if not run_nextpnr(job, family, [*arguments, "--timing-allow-fail"]):
            log = job.read("nextpnr.log")
            problem = next((line for line in log.splitlines() if line.startswith("ERROR:")), "")
            if re.search(
                r"no (more )?BELs|no Bels|Unable to (place|find)|[Ff]ailed to (place|expand|legalise)",
                problem,
            ):
                return figures | {"note": f"does not fit: {problem.removeprefix('ERROR:').strip()}"}
            raise ToolFailed(f"{job.name}: nextpnr-{family} failed; see {shown(job.folder / 'nextpnr.log')}")
        report = json.loads(job.read("report.json"))
        clocks = [clock["achieved"] for clock in report["fmax"].values()]
        figures["f_max_mhz"] = round(min(clocks), 1) if clocks else None
        if not clocks:
            figures["note"] = "no path between registers"
        packed = "TRELLIS_COMB" if family == "ecp5" else "ICESTORM_LC"
        figures["luts"] = report["utilization"][packed]["used"]
        return figures

    # proc and a purge first: alias wires of array ports stop the families' flows.
    script = (
        f"read_verilog @/design.v\nhierarchy -check -top {design.top}\nproc\nopt_clean -purge\n"
        f"tee -q -o @/before.json stat -json\nsynth_{family} -top {design.top} -json @/netlist.json\n"
        f"tee -q -o @/stat.json stat -json\n{without(_SEQUENTIAL[family])}tee -q -o @/depth.txt ltp\n"
    )
    key = [family, REVISION, yosys.key, nextpnr_version(family), str(route), *_NEXTPNR[family]]
    return Job(base, f"{name}-{family}", {"design.v": design.text}, script, key).result(make)


def family_figures(family: str, counts: Mapping[str, int]) -> dict[str, Any]:
    """cells, flip_flops, luts, brams and dsps from the cell counts of a family's netlist."""

    def total(*names: str) -> int:
        return sum(count for kind, count in counts.items() if kind.startswith(names))

    if family == "ecp5":
        flip_flops = total("TRELLIS_FF")
        # A carry cell is two look-up tables, a 16 x 4 bit RAM four of them.
        luts = total("LUT4") + 2 * total("CCU2C") + 4 * total("TRELLIS_DPR16X4")
        brams, dsps = total("DP16KD"), total("MULT18X18D")
    else:
        flip_flops = total("SB_DFF")
        luts, brams, dsps = total("SB_LUT4"), total("SB_RAM40_4K"), total("SB_MAC16")
    cells = sum(counts.values()) - flip_flops
    return {"cells": cells, "flip_flops": flip_flops, "luts": luts, "brams": brams, "dsps": dsps}


def asic(
    base: Path,
    yosys: Yosys,
    name: str,
    design: Design,
    library: Library,
    dont_use_flops: Sequence[str] = (),
) -> dict[str, Any]:
    """Area, and delay where there is one, of the generic netlist mapped to a library."""
    generic = gates(base, yosys, name, design)
    source = gates_job(base, yosys, name, design)
    flags = " ".join(f"-liberty {file}" for file in library.files)
    bans = "".join(f" -dont_use {pattern}" for pattern in dont_use_flops)
    timed = library.timed and yosys.native

    def make(job: Job) -> dict[str, Any]:
        yosys.run(job)
        counts, report = cells_of(job, "stat.json", design.top)
        own = {kind: count for kind, count in counts.items() if kind not in design.memories and kind != "$scopeinfo"}
        unmapped = [kind for kind in own if kind.startswith("$")]
        if unmapped:
            raise CheckFailed(f"{name}: the library has no cell for {', '.join(unmapped)}")
        flip_flops = sum(own.get(kind, 0) for kind in library.flip_flops)
        result = {
            "cells": sum(own.values()) - flip_flops,
            "flip_flops": flip_flops,
            "latches": generic["latches"],
            "depth": depth_of(job, "depth.txt"),
            "memory_bits": generic["memory_bits"],
            "area_um2": round(float(report["area"]), 3),
            "delay_ps": None,
        }
        delays = re.findall(r"Delay = *([0-9.]+) ps", job.read("yosys.log"))
        if timed and delays:
            result["delay_ps"] = float(delays[-1])
        return result

    options = f" -constr @/constraints -D {ABC_DELAY}" if timed else ""
    script = (
        f"read_rtlil {source.path('generic.il')}\ndfflibmap {flags}{bans}\nopt_clean\n"
        f"abc {flags}{options}\nopt_clean -purge\ntee -q -o @/stat.json stat -json {flags}\n"
        + "".join(f"read_liberty -lib -ignore_miss_func {file}\n" for file in library.files)
        + f"{without([*design.memories, *library.flip_flops])}tee -q -o @/depth.txt ltp\n"
    )
    key = ["asic", REVISION, yosys.key, library.name, library.digest]
    return Job(base, f"{name}-asic", {"constraints": ABC_CONSTRAINTS}, script, key).result(make)
