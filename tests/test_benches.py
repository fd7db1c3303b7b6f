"""Golden against hardware, for every unit of the catalog: sampled configurations in Amaranth's simulator, `small`
in Verilator (and Icarus where it is installed) through cocotb."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tb.simulate
from golden.llm.capture import reference_capture_file
from hw.catalog import UNITS, find
from hw.verilog import LINT_WAIVERS, unit_verilog
from tb.__main__ import main
from tb.bench import bench_of
from tb.mutate import FAULTS, mutant
from tb.packing import Packer, Row
from tb.quick import check_unit, session, simulate
from tb.stream import Mismatch

SAMPLES = 10


def configurations(names=None):
    return [
        pytest.param(entry.name, config, id=f"{entry.name}-{name}")
        for entry in UNITS.values()
        for name, config in entry.configurations.items()
        if names is None or name in names
    ]


@pytest.mark.parametrize("unit, config", configurations())
def test_every_configuration_equals_golden(unit, config):
    check_unit(bench_of(unit, config), seed=3, brief=config != find(unit).configurations["small"])


@pytest.mark.parametrize("seed", range(SAMPLES))
@pytest.mark.parametrize("unit", UNITS)
def test_sampled_configurations_equal_golden(unit, seed):
    check_unit(bench_of(unit, find(unit).sample(seed)), seed=seed, brief=seed % 2 == 1)


@pytest.mark.parametrize("unit", UNITS)
def test_lanes_from_one_to_sixteen(unit):
    entry = find(unit)
    small = entry.configurations["small"]
    tried = 0
    for lanes in (1, 3, 8, 16):
        try:
            config = small.replace(lanes=lanes)
        except ValueError:
            continue  # a group that does not divide into beats of this many lanes
        check_unit(bench_of(unit, config), seed=lanes)
        tried += 1
    assert tried >= 2


@pytest.mark.parametrize("simulator", tb.simulate.SIMULATORS)
@pytest.mark.parametrize("unit", UNITS)
def test_small_configuration_in_simulators(unit, simulator):
    try:
        tb.simulate.require(simulator)
    except tb.simulate.SimulatorMissing as missing:
        pytest.skip(str(missing))
    capture = reference_capture_file().resolve()
    run = tb.simulate.Run(unit, "small", find(unit).configurations["small"], simulator, 5000, capture)
    row = tb.simulate.simulate(run)
    assert row["result"] == "PASS", row["failure"]
    assert row["vectors"] > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(fault):
    """In a unit that has something of this kind; `make mutate` goes through all of them."""
    entry = find("residual" if fault == "sign" else "exp")
    config = entry.configurations["small"]
    text = mutant(entry, config, fault)
    tool = "icarus" if shutil.which("iverilog") else "verilator"
    row = tb.simulate.simulate(tb.simulate.Run(entry.name, f"mutant_{fault}", config, tool, beats=500), text)
    assert row["result"] == "FAIL"
    assert "build failed" not in row["failure"]


# -- the product: Verilog ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("unit, config", configurations({"small", "paper"}))
def test_verilog_is_lint_clean_and_deterministic(unit, config, tmp_path):
    import subprocess

    from tb.verilator import ROOT

    entry = find(unit)
    text = unit_verilog(entry.component(config), unit)
    assert text == unit_verilog(entry.component(config), unit)
    assert "latch" not in text
    (tmp_path / f"{unit}.v").write_text(text)
    done = subprocess.run(
        [ROOT / "bin" / "verilator_bin", "--lint-only", "-Wall", *LINT_WAIVERS, "--top-module", unit, f"{unit}.v"],
        cwd=tmp_path, env={"VERILATOR_ROOT": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:2000]


@pytest.mark.parametrize("unit, config", configurations({"small", "paper"}))
def test_port_names_are_stable(unit, config):
    text = unit_verilog(find(unit).component(config), unit)
    ports = set(text[text.index(f"module {unit}(") :].split("(", 1)[1].split(")", 1)[0].replace(",", " ").split())
    wanted = {"clk", "rst", "i__valid", "i__payload", "i__ready", "o__valid", "o__payload", "o__ready"}
    assert wanted <= ports
    assert ports - wanted <= {"table__valid", "table__payload", "table__ready"}


# -- the bench itself -------------------------------------------------------------------------------------------------
def test_packing_round_trip():
    from amaranth.hdl import signed

    from hw.unit import row_layout

    packer = Packer(row_layout(3, {"x": signed(5), "y": 16}, {"shift": 3}), 3)
    rows = [Row({"x": np.array([-16, 15, 0, 1]), "y": np.array([1, 2, 65535, 4])}, {"shift": 5})]
    fields = packer.unpack(packer.pack(rows))
    assert fields["x"].tolist() == [[16, 15, 0], [1, 0, 0]]
    assert fields["y"].tolist() == [[1, 2, 65535], [4, 0, 0]]
    assert fields["keep"].tolist() == [7, 1]
    assert fields["last"].tolist() == [0, 1]
    assert fields["shift"].tolist() == [5, 5]


def test_session_sees_a_dropped_valid_and_a_changed_payload():
    bench = bench_of("exp", find("exp").configurations["small"])
    rows = bench.random(np.random.default_rng(0))
    for second in ((0, 7), (1, 8)):
        s = session(bench, rows)
        s.observe(0, 1, 7, 0)
        with pytest.raises(Mismatch, match="valid dropped|payload changed"):
            s.observe(0, *second, 0)


def test_bench_fails_on_a_missing_and_on_an_extra_beat():
    bench = bench_of("exp", find("exp").configurations["small"])
    rows = bench.random(np.random.default_rng(0))
    short, long = session(bench, rows), session(bench, rows)
    short.expect.words = list(short.expect.words)[:-1]
    with pytest.raises(Mismatch, match="a beat (more|follows)"):
        simulate(bench, [(short, None)])
    long.expect.words = [*long.expect.words, 0]
    long.expect.masks = [*long.expect.masks, 0]
    long.expect.lasts = None
    with pytest.raises(Mismatch, match="no end after"):
        simulate(bench, [(long, None)], limit=2000)


# -- command line -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sim", "nothing"], "there is no unit 'nothing'; the catalog has"),
        (["sim", "exp", "--config", "huge"], "exp has no configuration 'huge'; it has"),
        (["sim", "exp", "--sim", "spice"], "the simulator must be one of all, verilator, icarus, not 'spice'"),
        (["mutate", "exp", "--fault", "gremlin"], "there is no fault 'gremlin'; there are rounding"),
    ],
)
def test_wrong_command_lines_are_told_in_one_line(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_catalog_lists_each_unit_in_its_three_rooms():
    root = Path(__file__).parent.parent
    for entry in UNITS.values():
        for room in ("golden", "hw", "tb"):
            assert (root / room / entry.family / f"{entry.name}.py").exists()
        assert {"small", "paper"} <= set(entry.configurations)
    assert json.dumps([entry.name for entry in UNITS.values()])
