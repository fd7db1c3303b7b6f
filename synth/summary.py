"""The one cost table: what a configuration costs on every target, and what its peer costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synth import results

#: Columns: name in the table, and the figures of record (file, key) that it comes from.
COLUMNS = {
    "gates": ("gates", "cells"),
    "FF": ("gates", "flip_flops"),
    "latches": ("gates", "latches"),
    "depth": ("gates", "depth"),
    "memory bits": ("gates", "memory_bits"),
    "LUTs": ("ecp5", "luts"),
    "MHz": ("ecp5", "f_max_mhz"),
    "sky130 µm²": ("asic", "area_um2"),
    "ASAP7 µm²": ("asap7", "area_um2"),
    "ASAP7 ps": ("asap7", "delay_ps"),
}

#: Under the table.
LEGEND = (
    "gates, FF, depth: generic netlist (row memories apart). LUTs, MHz: LFE5U-85F, speed grade 6, out of context. "
    "sky130: area of the mapped cells. ASAP7: area, and the longest path between registers without wires. "
    "ratio: gates over the peer's gates, same recipe and parameters."
)

FILES = ("gates", "ecp5", "ice40", "asic", "asap7")


def figures_of_record() -> dict[str, results.Rows]:
    return {name: results.read(results.file_of(name), missing_ok=True) for name in FILES}


def table(
    names: Sequence[tuple[str, str]],
    figures: Mapping[str, results.Rows],
    peers: Mapping[tuple[str, str], tuple[str, int]],
) -> list[dict[str, Any]]:
    """One row for each (unit, configuration); a figure that nobody has measured is None."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"unit": name[0], "configuration": name[1]}
        for column, (file, key) in COLUMNS.items():
            value = figures[file].get(name, {}).get(key)
            row[column] = rounded(value, 1 if column == "ASAP7 µm²" else 0) if isinstance(value, float) else value
        peer, gates = peers.get(name, (None, None))
        ratio = round(row["gates"] / gates, 2) if gates and row["gates"] is not None else None
        rows.append(row | {"peer": peer, "peer gates": gates, "ratio": ratio})
    return rows


def rounded(value: float, digits: int) -> float | int:
    return round(value, digits) if digits else round(value)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for a README, with its legend."""
    names = list(rows[0]) if rows else []

    def text(value: Any) -> str:
        if value is None:
            return ""
        return f"{value:,}" if isinstance(value, (int, float)) else str(value).replace("|", "\\|")

    numeric = {name: all(isinstance(row[name], (int, float, type(None))) for row in rows) for name in names}
    lines = [
        "| " + " | ".join(names) + " |",
        "|" + "|".join("--:" if numeric[name] else "---" for name in names) + "|",
    ]
    lines += ["| " + " | ".join(text(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + f"\n\n{LEGEND}"
