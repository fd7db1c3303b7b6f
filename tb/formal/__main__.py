"""``python -m tb.formal``: prove what :mod:`tb.formal.properties` claims, or show that planted faults are found."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import click
from tqdm import tqdm

from golden.commandline import CheckFailed, run, show
from tb.formal.engine import tools
from tb.formal.properties import PROPERTIES, Claim, claims, faults


def selected(names: Sequence[str], units: Sequence[str], planted: bool) -> list[Claim]:
    """The claims (or planted faults) of some properties and units. ValueError, one line, if there are none."""
    for name in names:
        if name not in PROPERTIES:
            raise ValueError(f"there is no property {name!r}; there are {', '.join(PROPERTIES)}")
    every = list(faults() if planted else claims())
    known = dict.fromkeys(claim.unit for claim in every)
    for unit in units:
        if unit not in known:
            raise ValueError(f"nothing is claimed of {unit!r}; the claims are about {', '.join(known)}")
    found = [c for c in every if (not names or c.name in names) and (not units or c.unit in units)]
    if not found:
        raise ValueError("none of these properties is claimed of these units")
    return found


def check(claim: Claim, timeout: int) -> dict[str, Any]:
    """One row of the table. For a planted fault the result is ``caught`` or ``missed``."""
    start = time.monotonic()
    outcome = claim.check(timeout)
    result = outcome.result
    if claim.fault:
        result = {"failed": "caught", "proven": "missed"}.get(result, result)
    return {
        "property": claim.name,
        "unit": claim.unit,
        "configuration": claim.configuration,
        **({"fault": claim.fault} if claim.fault else {}),
        "engine": claim.engine,
        "result": result,
        "seconds": round(time.monotonic() - start, 1),
        "detail": outcome.detail,
    }


@click.command()
@click.argument("properties", nargs=-1, metavar="[PROPERTY]...")
@click.option("--unit", "units", multiple=True, help="only what is claimed of this unit; may be repeated")
@click.option("--faults", "planted", is_flag=True, help="plant faults instead: each must be found")
@click.option("--jobs", "-j", default=min(2, os.cpu_count() or 1), type=click.IntRange(1), help="proofs at a time")
@click.option("--timeout", default=600, type=click.IntRange(1), help="seconds after which a proof is given up")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def main(
    properties: tuple[str, ...], units: tuple[str, ...], planted: bool, jobs: int, timeout: int, as_json: bool
) -> None:
    """Prove the PROPERTIES (default: all) for every input, stall pattern and reset, at small widths.

    Exit status 0: all proven (with --faults: all caught); 1: one is not; 2: a bad request or a missing tool.
    """
    chosen = selected(properties, units, planted)
    tools()
    rows: dict[int, dict[str, Any]] = {}
    with (
        ThreadPoolExecutor(jobs) as pool,
        tqdm(total=len(chosen), unit="proof", disable=None, file=sys.stderr) as bar,
    ):
        futures = {pool.submit(check, claim, timeout): k for k, claim in enumerate(chosen)}
        for future in as_completed(futures):
            rows[futures[future]] = future.result()
            bar.update()
    ordered = [rows[k] for k in range(len(chosen))]
    good = "caught" if planted else "proven"
    wrong = [row for row in ordered if row["result"] != good]
    title = (
        "Planted faults: each must be found" if planted else "Proofs: every input, stall pattern and reset, unbounded"
    )
    columns = [name for name in ordered[0] if name != "detail"]
    show(ordered, as_json, title, None if as_json else columns)
    for row in wrong:
        click.echo(f"{row['property']} of {row['unit']}: {row['result']}: {row['detail']}", err=True)
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(ordered)} {'faults not caught' if planted else 'claims not proven'}")
    if not as_json:
        click.echo(f"{len(ordered)} {'faults caught' if planted else 'claims proven'}")


if __name__ == "__main__":
    run(main, "tb.formal")
