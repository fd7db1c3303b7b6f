"""Runs recipes for many configurations, two at a time, with progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from golden.commandline import CheckFailed
from golden.config import UnitConfig
from hw.catalog import UNITS, Entry, find
from synth import liberty, recipes, results
from synth.design import design_of
from synth.tools import find_yosys
from synth.workspace import build_folder

#: Runs at once: each takes a core and, for a large unit, a gigabyte.
WORKERS = 2

#: The routine run (``--all``, ``summary --measure``) places and routes, and maps, what has at most this many generic
#: gates, and ``summary`` counts the gates of no larger ones; these keep their recorded figures until they are asked for
#: by name.
ROUTINE_CELLS = {"gates": 60_000, "ecp5": 10_000, "ice40": 10_000, "asic": 60_000}


@dataclass(frozen=True)
class Task:
    """One configuration to measure for one target. ``label`` is the configuration's name in tables."""

    unit: str
    label: str
    config: UnitConfig
    target: str
    library: liberty.Library | None = None
    dont_use_flops: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.unit}-{self.label}".replace(" ", "-").replace("=", "_")


def configurations(entry: Entry, chosen: Sequence[str], settings: Sequence[str]) -> dict[str, UnitConfig]:
    """Configurations to measure, by label: those chosen (all of the entry by default), with settings applied."""
    names = list(chosen) or list(entry.configurations)
    suffix = " ".join(["", *settings])
    return {name + suffix: entry.configuration(name, list(settings)) for name in names}


def catalog_order() -> list[tuple[str, str]]:
    """(unit, configuration) of the whole catalog."""
    return [(entry.name, name) for entry in UNITS.values() for name in entry.configurations]


def named_task(target: str, unit: str, configuration: str, library: liberty.Library | None = None) -> Task:
    """Task of a configuration of the catalog."""
    return Task(unit, configuration, UNITS[unit].configurations[configuration], target, library)


def routine(
    target: str,
    names: Sequence[tuple[str, str]],
    base: Path,
    gates: Sequence[dict[str, Any]] | None = None,
) -> list[tuple[str, str]]:
    """The (unit, configuration) pairs that a routine run measures for a target (see ``ROUTINE_CELLS``); their gates
    are measured first where they are not given."""
    if gates is None:
        gates, _ = measure_all([named_task("gates", *name) for name in names], base)
    small = {(row["unit"], row["configuration"]) for row in gates if row["cells"] <= ROUTINE_CELLS[target]}
    return [name for name in names if name in small]


def recorded_small(names: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those whose gates a routine run counts anew: with at most ``ROUTINE_CELLS`` of record, or none on record."""
    known = results.read(results.file_of("gates"), missing_ok=True)
    return [name for name in names if known.get(name, {}).get("cells", 0) <= ROUTINE_CELLS["gates"]]


def measure(base: Path, task: Task) -> dict[str, Any]:
    """One row: unit, configuration, target, and the target's figures."""
    yosys = find_yosys()
    design = design_of(base, find(task.unit), task.config)
    if task.target == "gates":
        figures = recipes.gates(base, yosys, task.name, design)
    elif task.target == "asic":
        library = task.library or liberty.sky130(base)
        figures = recipes.asic(base, yosys, task.name, design, library, task.dont_use_flops)
        figures["library"] = library.name
    else:
        figures = recipes.fpga(base, yosys, task.name, design, task.target)
    return {"unit": task.unit, "configuration": task.label, "target": task.target} | figures


def with_peer(row: dict[str, Any]) -> dict[str, Any]:
    """A gates row with the peer's figure beside it, where the configuration equals one."""
    entry = UNITS.get(row["unit"])
    if row["target"] != "gates" or entry is None or row["configuration"] not in entry.peers:
        return row
    peer, cells = entry.peers[row["configuration"]]
    return row | {"peer": peer, "peer_cells": cells, "ratio": round(row["cells"] / cells, 3)}


def _worker(base: Path, task: Task) -> tuple[dict[str, Any] | None, str, float]:
    start = time.monotonic()
    try:
        return measure(base, task), "", time.monotonic() - start
    except (CheckFailed, ValueError, OSError) as problem:
        return None, str(problem), time.monotonic() - start


def measure_all(tasks: Sequence[Task], base: Path | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """(rows, failures) of all tasks in their order; a failure is one line and stops nothing else."""
    base = base or build_folder()
    base.mkdir(parents=True, exist_ok=True)
    find_yosys()
    outcome: dict[int, tuple[dict[str, Any] | None, str, float]] = {}
    if len(tasks) == 1:
        outcome[0] = _worker(base, tasks[0])
    elif tasks:
        # Large ones first keep both workers busy to the end; their size is only known from the figures of record.
        known = results.read(results.file_of("gates"), missing_ok=True)
        sizes = [known.get((task.unit, task.label), {}).get("cells", 10_000) for task in tasks]
        order = sorted(range(len(tasks)), key=lambda k: -sizes[k])
        console = Console(stderr=True)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with (
            ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool,
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ):
            bar = progress.add_task("synthesis", total=len(tasks))
            futures = {pool.submit(_worker, base, tasks[k]): k for k in order}
            for future in as_completed(futures):
                k = futures[future]
                outcome[k] = future.result()
                progress.update(bar, advance=1, description=f"{tasks[k].unit} {tasks[k].label} {tasks[k].target}")
                if not console.is_terminal and outcome[k][2] > 5:
                    click.echo(
                        f"synth: {len(outcome)}/{len(tasks)} {tasks[k].unit} {tasks[k].label} {tasks[k].target}: "
                        f"{outcome[k][2]:.0f} s",
                        file=sys.stderr,
                    )
    rows, failures = [], []
    for k, task in enumerate(tasks):
        row, problem, _ = outcome[k]
        if row is None:
            failures.append(f"{task.unit} {task.label} {task.target}: {problem}")
        else:
            rows.append(with_peer(row))
            if row["latches"]:
                failures.append(f"{task.unit} {task.label}: {row['latches']} latches; a unit has none")
    return rows, failures
