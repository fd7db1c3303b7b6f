"""``python -m synth``: what units cost, the one cost table, gate-level netlists and their proof."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from golden.commandline import CheckFailed, atomic_write, run, show
from hw.catalog import UNITS, find
from synth import liberty, results
from synth import summary as costs
from synth.design import design_of
from synth.measure import Task, catalog_order, configurations, measure_all, named_task, recorded_small, routine
from synth.netlist import gate_level, prove, unit_netlist
from synth.recipes import TARGETS
from synth.tools import find_yosys
from synth.workspace import build_folder

COLUMNS = {
    "gates": ["cells", "flip_flops", "latches", "depth", "memory_bits", "peer", "peer_cells", "ratio"],
    "ecp5": ["luts", "flip_flops", "latches", "depth", "brams", "dsps", "f_max_mhz", "note"],
    "ice40": ["luts", "flip_flops", "latches", "depth", "brams", "f_max_mhz", "note"],
    "asic": ["area_um2", "delay_ps", "cells", "flip_flops", "latches", "depth", "memory_bits", "library"],
}


@click.group()
def main() -> None:
    """What NearMem's units cost in gates, look-up tables, square micrometres and megahertz."""


@main.command()
@click.argument("units", nargs=-1, metavar="[UNIT]...")
@click.option("--all", "all_units", is_flag=True, help="every unit of the catalog")
@click.option("--config", "chosen", multiple=True, help="named configuration; may be repeated (default: all)")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("--target", type=click.Choice(TARGETS), default="gates", show_default=True)
@click.option(
    "--liberty",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Liberty file (asic); may be repeated",
)
@click.option("--dont-use-flop", "bans", multiple=True, metavar="PATTERN", help="flip-flops not to be used (asic)")
@click.option("--results", "record", type=click.Path(path_type=Path), help="figures of record to compare with")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
@click.option("--update", is_flag=True, help="record the figures instead of comparing them")
def area(
    units: tuple[str, ...],
    all_units: bool,
    chosen: tuple[str, ...],
    settings: tuple[str, ...],
    target: str,
    files: tuple[Path, ...],
    bans: tuple[str, ...],
    record: Path | None,
    as_json: bool,
    update: bool,
) -> None:
    """Measure UNITs for one target and compare with the figures of record.

    With --all and no --config, ecp5, ice40 and asic leave out the configurations with more gates than a routine run
    has time for (synth.measure.ROUTINE_CELLS); name the unit to measure them all.
    """
    if bool(units) == all_units:
        raise ValueError("name at least one UNIT, or give --all" if not units else "give UNITs or --all, not both")
    if (files or bans) and target != "asic":
        raise ValueError(f"--liberty and --dont-use-flop are for --target asic, not {target}")
    if settings and update:
        raise ValueError("--update records named configurations, not those changed by --set")
    if files and update and record is None:
        raise ValueError("--update with --liberty needs --results FILE, since the default file is for sky130")
    entries = list(UNITS.values()) if all_units else [find(name) for name in dict.fromkeys(units)]
    base = build_folder()
    library = None
    if target == "asic":
        library = liberty.from_files(base, files) if files else liberty.sky130(base)
    path = record or (None if files else results.file_of(target))
    if record is not None and not update:
        results.read(record)
    small = routine(target, catalog_order(), base) if all_units and not chosen and target != "gates" else None
    tasks = []
    for entry in entries:
        if all_units and chosen:
            names = [name for name in chosen if name in entry.configurations]
            if not names:
                continue
        else:
            names = list(chosen)
        for label, config in configurations(entry, names, settings).items():
            if small is not None and (entry.name, label) not in small:
                continue
            tasks.append(Task(entry.name, label, config, target, library, bans))
    if not tasks:
        raise ValueError(f"no unit has a configuration {' or '.join(map(repr, chosen))}")
    rows, failures = measure_all(tasks, base)
    offenders: list[str] = []
    remarks: list[str] = []
    if update and path is not None:
        results.write(path, [recorded(row) for row in rows if not row["latches"]], catalog_order())
    elif path is not None and not settings:
        offenders, remarks = results.compare(rows, results.read(path, missing_ok=True))
    title = f"Cost of units, target {target}"
    show(rows, as_json, title, ["unit", "configuration", *COLUMNS[target]])
    finish([*failures, *offenders], remarks)


@main.command()
@click.argument("units", nargs=-1, metavar="[UNIT]...")
@click.option("--measure", is_flag=True, help="also measure ecp5 and asic, for what a routine run has time for")
@click.option("--markdown", "as_markdown", is_flag=True, help="print the table for the README")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def summary(units: tuple[str, ...], measure: bool, as_markdown: bool, as_json: bool) -> None:
    """The one cost table of all UNITs (default: the catalog), every target beside the others.

    Gates are measured now for configurations up to synth.measure.ROUTINE_CELLS gates; the other figures are those of
    record, and with --measure those of ecp5 and asic (sky130) are measured too, with limits of their own. What is
    measured is compared with the figures of record: a growth by more than 5 % ends with status 1 after the table.
    """
    base = build_folder()
    chosen = {find(unit).name for unit in units} or set(UNITS)
    names = [name for name in catalog_order() if name[0] in chosen]
    figures = costs.figures_of_record()
    targets = ("gates", "ecp5", "asic") if measure else ("gates",)
    library = liberty.sky130(base) if measure else None
    counted = recorded_small(names)
    rows, problems = measure_all([named_task("gates", *name) for name in counted], base)
    if measure:
        tasks = [
            named_task(target, *name, library if target == "asic" else None)
            for target in targets[1:]
            for name in routine(target, counted, base, rows)
        ]
        more, failures = measure_all(tasks, base)
        rows, problems = rows + more, problems + failures
    remarks: list[str] = []
    for target in targets:
        mine = [row for row in rows if row["target"] == target]
        offenders, notes = results.compare(mine, figures[target])
        problems, remarks = problems + offenders, remarks + notes
        figures[target] = figures[target] | {(row["unit"], row["configuration"]): row for row in mine}
    peers = {(entry.name, name): peer for entry in UNITS.values() for name, peer in entry.peers.items()}
    table = costs.table(names, figures, peers)
    if as_markdown:
        click.echo(costs.markdown(table))
    else:
        show(table, as_json, "Cost of units")
        if not as_json:
            click.echo(costs.LEGEND)
    finish(problems, remarks)


@main.command()
@click.argument("unit")
@click.option("--config", "chosen", default="small", show_default=True, help="named configuration")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Verilog file to write")
def netlist(unit: str, chosen: str, settings: tuple[str, ...], output: Path) -> None:
    """Write the gate-level Verilog of one UNIT: the gates that ``area`` counts, for any simulator, no library."""
    entry = find(unit)
    with atomic_write(output) as file:
        file.write(unit_netlist(entry, entry.configuration(chosen, settings), "-".join([chosen, *settings])))


@main.command()
@click.argument("units", nargs=-1, required=True, metavar="UNIT...")
@click.option("--config", "chosen", default="small", show_default=True, help="named configuration")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("--netlist", "given", type=click.Path(path_type=Path), help="Verilog to prove instead of our netlist")
@click.option("--limit", type=click.FloatRange(min=1), default=600, show_default=True, help="seconds for each unit")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def equivalence(
    units: tuple[str, ...], chosen: str, settings: tuple[str, ...], given: Path | None, limit: float, as_json: bool
) -> None:
    """Prove that the gate-level netlist of each UNIT equals its RTL, without vectors."""
    if given is not None and len(units) > 1:
        raise ValueError("--netlist belongs to one UNIT")
    base, yosys, rows, problems = build_folder(), find_yosys(), [], []
    configs = [(find(unit), find(unit).configuration(chosen, settings)) for unit in units]
    for entry, config in configs:
        name = "-".join([entry.name, chosen, *settings]).replace("=", "_")
        design = design_of(base, entry, config)
        text = read_verilog(given) if given is not None else gate_level(base, yosys, name, design)
        row = {"unit": entry.name, "configuration": " ".join([chosen, *settings])}
        try:
            rows.append(row | {"proven": prove(base, yosys, name, design, text, limit), "result": "equal"})
        except CheckFailed as difference:
            rows.append(row | {"proven": None, "result": "not proven"})
            problems.append(str(difference))
    show(rows, as_json, "Netlist against RTL")
    finish(problems, [])


def read_verilog(path: Path) -> str:
    """The text of a Verilog file. ValueError, one line, for what is plainly something else."""
    text = path.read_bytes().decode("utf-8", "replace")
    if "\ufffd" in text or "endmodule" not in text:
        raise ValueError(f"{path}: not a Verilog file: it has no module")
    return text


def recorded(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is recorded: without what the catalog knows better."""
    return {key: value for key, value in row.items() if key not in ("peer", "peer_cells", "ratio")}


def finish(problems: Sequence[str], remarks: Sequence[str]) -> None:
    """Say what is wrong, one line each, and end with status 1 if anything is."""
    if remarks:
        click.echo(f"synth: note: {len(remarks)} figures are not recorded yet: {', '.join(remarks)}", err=True)
    for line in problems:
        click.echo(f"synth: {' '.join(line.split())}", err=True)
    if problems:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    run(main, "synth")
