"""``python -m tb``: run the testbenches, and plant faults to show that they catch them."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import filter as matching
from typing import Any

import click
from tqdm import tqdm

from golden.commandline import CheckFailed, run, show
from golden.llm.capture import reference_capture_file
from golden.nonlinear.exp import ExpConfig
from hw.catalog import UNITS, Entry, find
from hw.verilog import to_verilog
from tb.mutate import FAULTS, mutant
from tb.simulate import SIMULATORS, Run, SimulatorMissing, require, simulate

COLUMNS = (
    "unit",
    "configuration",
    "simulator",
    "vectors",
    "real_rows",
    "cycles",
    "cycles_per_beat",
    "coverage",
    "result",
)


@click.group()
def main() -> None:
    """NearMem's testbenches."""


def planned(units: tuple[str, ...], configuration: str, simulator: str, beats: int) -> tuple[list[Run], list[str]]:
    """The runs that were asked for, and one line for each that is skipped."""
    if simulator not in ("all", *SIMULATORS):
        raise ValueError(f"the simulator must be one of all, {', '.join(SIMULATORS)}, not {simulator!r}")
    entries = [find(name) for name in units] if units else list(UNITS.values())
    wanted: tuple[str, ...] = SIMULATORS if simulator == "all" else (simulator,)
    skipped: list[str] = []
    runs: list[Run] = []
    if "verilator" in wanted:
        require("verilator")
    if "icarus" in wanted:
        try:
            require("icarus")
        except SimulatorMissing as missing:
            if simulator == "icarus":
                raise
            skipped.append(f"icarus runs skipped: {missing}")
            wanted = tuple(name for name in wanted if name != "icarus")
    for entry in entries:
        names: list[str] = []
        for pattern in ["*"] if configuration == "all" else configuration.split(","):
            found = matching(entry.configurations, pattern)
            # A plain name that a unit asked for by name does not have is told below.
            names += found or ([pattern] if units and "*" not in pattern else [])
        for name in dict.fromkeys(names):
            config = entry.configuration(name)
            for tool in wanted:
                # Icarus is the second opinion, on small configurations; on others only when it is asked for.
                if tool == "icarus" and name != "small" and simulator == "all":
                    continue
                runs.append(Run(entry.name, name, config, tool, beats))
    if not runs:
        raise ValueError(f"no unit has a configuration {configuration!r}")
    return runs, skipped


@main.command()
@click.argument("units", nargs=-1)
@click.option(
    "--config", "configuration", default="small,paper,pipeline*", help="names or patterns, with commas, or all"
)
@click.option("--sim", "simulator", default="all", help="verilator, icarus or all")
@click.option("--beats", default=20_000, type=click.IntRange(0), help="beats of the full-rate run")
@click.option("--seed", default=1, help="seed of the random rows and stalls")
@click.option("--jobs", "-j", default=min(2, os.cpu_count() or 1), type=click.IntRange(1), help="benches at a time")
@click.option("--real/--no-real", default=True, help="drive tensors of the reference checkpoint too")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def sim(
    units: tuple[str, ...],
    configuration: str,
    simulator: str,
    beats: int,
    seed: int,
    jobs: int,
    real: bool,
    as_json: bool,
) -> None:
    """Run the benches of UNITS (default: all) and print what was driven, covered and found."""
    runs, skipped = planned(units, configuration, simulator, beats)
    capture = reference_capture_file().resolve() if real else None
    for one in runs:
        one.capture, one.seed = capture, seed
    rows: dict[int, dict[str, Any]] = {}
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(runs), unit="bench", disable=None, file=sys.stderr) as bar:
        futures = {pool.submit(simulate, one): k for k, one in enumerate(runs)}
        for future in as_completed(futures):
            row = rows[futures[future]] = future.result()
            bar.update()
            bar.write(
                f"{row['result']} {row['unit']} {row['configuration']} on {row['simulator']}, {row['seconds']} s",
                file=sys.stderr,
            )
    ordered = [rows[k] for k in range(len(runs))]
    show(ordered, as_json, "Testbenches: every output bit against golden", None if as_json else COLUMNS)
    for line in skipped:
        click.echo(line, err=True)
    failed = [row for row in ordered if row["result"] != "PASS"]
    for row in failed:
        click.echo(f"{row['unit']} {row['configuration']} {row['simulator']}: {row.get('failure', '')}", err=True)
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(ordered)} benches failed")
    if not as_json:
        click.echo(f"{len(ordered)} benches passed")


@main.command()
@click.argument("units", nargs=-1)
@click.option("--fault", "faults", multiple=True, help=f"one of {', '.join(FAULTS)}; may be repeated (default: all)")
@click.option("--sim", "simulator", default="verilator", help="verilator or icarus")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def mutate(units: tuple[str, ...], faults: tuple[str, ...], simulator: str, as_json: bool) -> None:
    """Plant each fault in the `small` configuration of UNITS (default: all); every mutant must be caught."""
    for fault in faults:
        if fault not in FAULTS:
            raise ValueError(f"there is no fault {fault!r}; there are {', '.join(FAULTS)}")
    if simulator not in SIMULATORS:
        raise ValueError(f"the simulator must be one of {', '.join(SIMULATORS)}, not {simulator!r}")
    require(simulator)
    entries = [find(name) for name in units] if units else list(UNITS.values())
    wanted = [(entry, fault) for entry in entries for fault in faults or FAULTS]

    def attempt(entry: Entry, fault: str) -> dict[str, Any]:
        config = entry.configuration("small")
        text = mutant(entry, config, fault)
        row = {"unit": entry.name, "fault": fault, "simulator": simulator}
        if text == to_verilog(entry.component(config), entry.name):
            return row | {"result": "not applicable", "caught_by": "the unit has nothing of this kind"}
        outcome = simulate(Run(entry.name, f"mutant_{fault}", config, simulator, beats=2000), text)
        caught = outcome["result"] == "FAIL" and "build failed" not in outcome["failure"]
        return row | {
            "result": "caught" if caught else "SURVIVED",
            "caught_by": outcome.get("failure", "")[:150] if caught else outcome.get("failure", "nothing"),
        }

    # Faults are planted by patching shared code while a mutant is elaborated, so elaboration runs alone.
    rows = []
    with tqdm(total=len(wanted), unit="mutant", disable=None, file=sys.stderr) as bar:
        for entry, fault in wanted:
            rows.append(attempt(entry, fault))
            bar.update()
            bar.write(f"{rows[-1]['result']}: {fault} in {entry.name}", file=sys.stderr)
    show(rows, as_json, "Planted faults", None if as_json else ("unit", "fault", "simulator", "result", "caught_by"))
    survived = [row for row in rows if row["result"] == "SURVIVED"]
    if survived:
        raise CheckFailed(f"{len(survived)} of {len(rows)} planted faults survived")
    if not as_json:
        click.echo(f"{sum(row['result'] == 'caught' for row in rows)} planted faults, all caught")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def speed(as_json: bool) -> None:
    """How many 128-lane vectors per second go through the full-rate bench, in the simulator's own process time."""
    require("verilator")
    rows = []
    for name, config in {
        "128 lanes of 8 bit": ExpConfig(lanes=128, in_bits=8, out_bits=8, fraction_bits=5, rom_bits=5),
        "128 lanes of 16 bit": ExpConfig(lanes=128),
    }.items():
        row = simulate(Run("exp", name.replace(" ", "_"), config, "verilator", beats=200_000))
        rows.append({"unit": "exp", "configuration": name} | {k: row.get(k) for k in ("beats_per_second", "result")})
    show(rows, as_json, "Vectors per second, every output bit against golden")
    if any(row["result"] != "PASS" for row in rows):
        raise CheckFailed("a bench failed")


if __name__ == "__main__":
    run(main, "tb")
