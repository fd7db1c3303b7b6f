"""``python -m hw``: the catalog, and Verilog of one unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from golden.commandline import atomic_write, check_writable, run, show
from hw.catalog import UNITS, find
from hw.operations import KINDS
from hw.operations import operations as count
from hw.verilog import core_file, unit_verilog


@click.group()
def main() -> None:
    """NearMem's units as hardware."""


@main.command("list")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def list_units(as_json: bool) -> None:
    """Print the catalog."""
    rows: list[dict[str, Any]] = []
    for entry in UNITS.values():
        config = entry.configurations["paper"]
        unit = entry.component(config)
        rows.append(
            {
                "name": entry.name,
                "family": entry.family,
                "configurations": list(entry.configurations),
                "latency": unit.latency,
                "initiation_interval": unit.initiation_interval,
                "throughput": f"{unit.config.lanes} elements per cycle, {unit.passes} pass"
                + ("es" if unit.passes > 1 else ""),
            }
        )
    if not as_json:
        rows = [row | {"configurations": ", ".join(row["configurations"])} for row in rows]
    show(rows, as_json, "Units (latency and throughput of the paper configuration)")


@main.command()
@click.argument("units", nargs=-1, required=True)
@click.option("--config", "configuration", default="paper", help="named configuration (default: paper)")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def operations(units: tuple[str, ...], configuration: str, settings: tuple[str, ...], as_json: bool) -> None:
    """Count the operators in the elaborated netlist of UNITS, module by module."""
    rows: list[dict[str, Any]] = []
    for entry in [find(name) for name in units]:
        config = entry.configuration(configuration, settings)
        for name, operators in count(entry.component(config)):
            if any(operators.values()):
                rows.append({"unit": entry.name, "module": name} | {kind: operators[kind] for kind in KINDS})
    show(rows, as_json, "Operators in the elaborated netlist")


@main.command()
@click.argument("unit")
@click.option("--config", "configuration", default="paper", help="named configuration (default: paper)")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Verilog file to write")
@click.option("--core", is_flag=True, help="also write a FuseSoC .core file beside it")
def emit(unit: str, configuration: str, settings: tuple[str, ...], output: Path, core: bool) -> None:
    """Write the Verilog of one UNIT: one flat file, the same bytes every time."""
    entry = find(unit)
    config = entry.configuration(configuration, settings)
    check_writable(output)
    description = output.with_suffix(".core") if core else None
    if description:
        if description == output:
            raise ValueError(f"--core writes {description} beside the Verilog, which needs another name")
        check_writable(description)
    text = unit_verilog(entry.component(config), entry.name)
    with atomic_write(output) as file:
        file.write(text)
    if description:
        with atomic_write(description) as file:
            file.write(core_file(entry.name, output.name))


@main.command()
@click.argument("units", nargs=-1)
@click.option("--config", "configuration", default="paper", help="named configuration (default: paper)")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="folder")
def verilog(units: tuple[str, ...], configuration: str, output: Path) -> None:
    """Write Verilog and a FuseSoC core file of UNITS (default: all) into a folder."""
    entries = [find(name) for name in units] if units else list(UNITS.values())
    configs = [entry.configuration(configuration) for entry in entries]
    check_writable(output / "unit.v")
    for entry, config in zip(entries, configs):
        name = entry.name
        text = unit_verilog(entry.component(config), name)
        for path, content in (
            (output / f"{name}.v", text),
            (output / f"{name}.core", core_file(name, f"{name}.v")),
        ):
            with atomic_write(path) as file:
                file.write(content)
        click.echo(output / f"{name}.v")


if __name__ == "__main__":
    run(main, "hw")
