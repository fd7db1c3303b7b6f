"""The figures of record: committed, compared with at every run, and changed only by ``--update``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from golden.commandline import atomic_write

FOLDER = Path(__file__).resolve().parent / "results"

#: What may not grow, by target, and by how much.
METRIC = {"gates": "cells", "ecp5": "luts", "ice40": "luts", "asic": "area_um2"}
LIMIT = 0.05

Rows = dict[tuple[str, str], dict[str, Any]]


def file_of(target: str) -> Path:
    return FOLDER / f"{target}.json"


def read(path: Path, missing_ok: bool = False) -> Rows:
    """Recorded rows by (unit, configuration). ValueError, one line, if the file is not a list of such rows."""
    if missing_ok and not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text())
        return {(row["unit"], row["configuration"]): row for row in rows}
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not a list of results") from None


def write(path: Path, rows: Iterable[dict[str, Any]], order: Sequence[tuple[str, str]]) -> None:
    """Record rows beside those that are there; what ``order`` (the catalog) no longer has is dropped."""
    known = read(path, missing_ok=True)
    known.update({(row["unit"], row["configuration"]): row for row in rows})
    with atomic_write(path) as file:
        lines = [json.dumps(known[name]) for name in order if name in known]
        file.write("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")


def compare(rows: Iterable[dict[str, Any]], recorded: Rows, limit: float = LIMIT) -> tuple[list[str], list[str]]:
    """(offenders, new): a line for what grew by more than ``limit``, and a name for what is not recorded yet."""
    offenders, remarks = [], []
    for row in rows:
        metric = METRIC[row["target"]]
        name = f"{row['unit']} {row['configuration']}"
        old = recorded.get((row["unit"], row["configuration"]))
        if old is None:
            remarks.append(f"{name} {row['target']}")
            continue
        before, now = old.get(metric), row.get(metric)
        if before is None or now is None:
            continue
        if now > before * (1 + limit):
            percent = f"{100 * (now / before - 1):+.1f} %" if before else "from nothing"
            offenders.append(f"{name}: {metric} grew from {before:,} to {now:,} ({percent}); --update records it")
    return offenders, remarks
