"""Golden against hardware, for every unit of the catalog: sampled configurations in Amaranth's simulator, `small`
in Verilator (and Icarus where it is installed) through cocotb."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tb.simulate
from golden.llm.capture import load, recorded, reference_capture_file, save
from golden.llm.checkpoint import REFERENCE
from golden.llm.checkpoint import load as load_checkpoint
from golden.llm.formats import SCHEMES
from hw.catalog import UNITS, find
from hw.verilog import LINT_WAIVERS, unit_verilog
from tb.__main__ import main, planned
from tb.bench import bench_of
from tb.mutate import FAULTS, mutant
from tb.packing import Packer, Row
from tb.quick import check_unit, session, simulate
from tb.stream import Mismatch

SAMPLES = 10
#: Wider units are simulated through Verilator only, by `make sim`: Amaranth's simulator takes minutes for each.
WIDEST = 32


def configurations(names=None, widest=None):
    return [
        pytest.param(entry.name, config, id=f"{entry.name}-{name}")
        for entry in UNITS.values()
        for name, config in entry.configurations.items()
        if (names is None or name in names) and (widest is None or config.lanes <= widest)
    ]


@pytest.mark.parametrize("unit, config", configurations(widest=WIDEST))
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
    # A unit whose beats are whole vectors has a size instead.
    field = "lanes" if "lanes" in small.__dataclass_fields__ else "size"
    for lanes in (1, 3, 8, 16):
        try:
            config = small.replace(**{field: lanes})
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


# -- the integer pipeline's own vectors -------------------------------------------------------------------------------
PIPELINE = [(entry.name, name) for entry in UNITS.values() for name in entry.configurations if "pipeline" in name]


@pytest.fixture(scope="module")
def capture():
    return load(reference_capture_file())


def pipeline_bench(unit, name="pipeline"):
    return bench_of(unit, find(unit).configurations[name])


def test_pipeline_configurations_are_those_of_the_model():
    units = SCHEMES["integer"].units(load_checkpoint(REFERENCE).config)
    for unit, name in PIPELINE:
        wanted = {"rmsnorm": "norm", "requantize": name.removeprefix("pipeline_")}.get(unit, unit)
        wanted = {"row": "up"}.get(wanted, "product_fwht" if (unit, name) == ("fwht", "pipeline_product") else wanted)
        assert find(unit).configurations[name] == getattr(units, wanted), (unit, name)
    assert {unit for unit, _ in PIPELINE} == {"softmax", "rmsnorm", "rope", "silu", "residual", "requantize", "fwht"}


def test_every_recorded_unit_has_a_bench_that_replays_it(capture):
    kinds = {type(entry.configurations["small"]): entry.name for entry in UNITS.values()}
    benches = {(unit, name): pipeline_bench(unit, name) for unit, name in PIPELINE}
    found = recorded(capture)
    replayed = [
        [
            unit
            for (unit, _), bench in benches.items()
            if unit == kinds.get(type(one.config)) and bench.replays(one.config)
        ]
        for one in found
    ]
    without = {type(one.config).__name__ for one, units in zip(found, replayed, strict=True) if not units}
    assert without == {"LinearConfig"}  # there is no hardware of these yet
    assert all(len(units) <= 1 for units in replayed)
    assert sum(map(len, replayed)) == sum(len(bench.replay(capture)) for bench in benches.values()) == 90


def test_configurations_that_the_pipeline_does_not_have_are_not_replayed(capture):
    row = find("requantize").configurations["pipeline_row"]
    assert len(bench_of("requantize", row).replay(capture)) == 21
    assert len(bench_of("requantize", row.replace(max_row=256)).replay(capture)) == 17  # all but the longest
    assert bench_of("requantize", row.replace(lanes=4)).replay(capture) == []
    for entry in UNITS.values():
        bench = bench_of(entry.name, entry.configurations["small"])
        assert bench.replay(capture) == []
        bench.real(capture)  # finds its float tensors among the units


@pytest.mark.parametrize("unit, name", PIPELINE)
def test_recorded_vectors_replay_and_changed_ones_do_not(unit, name, capture):
    """Golden function and unit both give what was recorded; neither gives it once an output or an input is changed."""
    bench = pipeline_bench(unit, name)
    one = bench.replay(capture)[-1]
    bench.adopt(one.tensors)
    one.rows, one.outputs = one.rows[-1:], one.outputs[-1:]
    outputs = bench.agreed(one)
    (field, values), *_ = one.outputs[0].data.items()
    wrong = values.copy()
    wrong[-1] ^= 1
    changed = Row({**outputs[0].data, field: wrong}, outputs[0].row, outputs[0].keep)
    right = session(bench, one.rows, "both random", 5, outputs)
    with pytest.raises(Mismatch, match=f"{field}: got"):
        simulate(bench, [(right, None), (session(bench, one.rows, expected=[changed]), None)])
    assert right.done
    one.outputs[0].data[field] = wrong
    with pytest.raises(Mismatch, match=f"{one.place}, row 0: recorded {field} is not what the golden function gives"):
        bench.agreed(one)
    one.outputs[0].data[field] = values
    (field, values), *_ = one.rows[0].data.items()
    one.rows[0].data[field] = values[::-1]
    with pytest.raises(Mismatch, match="is not what the golden function gives"):
        bench.agreed(one)


def test_simulators_drive_recorded_vectors_and_see_a_changed_one(capture, tmp_path):
    tool = "verilator"
    try:
        tb.simulate.require(tool)
    except tb.simulate.SimulatorMissing as missing:
        pytest.skip(str(missing))
    config = find("residual").configurations["pipeline"]
    row = tb.simulate.simulate(
        tb.simulate.Run("residual", "pipeline", config, tool, 500, reference_capture_file().resolve())
    )
    assert row["result"] == "PASS", row["failure"]
    rows = len(capture["units/positions"])
    assert row["real_rows"] == 2 * 4 * rows
    changed = capture["units/2/mlp_residual/y"].astype(np.int64)
    changed[3, 5] += 1
    save(tmp_path / "changed.npz", {**capture, "units/2/mlp_residual/y": changed})
    row = tb.simulate.simulate(tb.simulate.Run("residual", "pipeline", config, tool, 0, tmp_path / "changed.npz"))
    assert row["result"] == "FAIL"
    assert "real_tensors: layer 2, mlp_residual, row 3: recorded y is not what" in row["failure"]


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


def test_configurations_are_chosen_by_name_and_pattern():
    def names(units, configurations):
        return [(run.unit, run.configuration) for run in planned(units, configurations, "verilator", 0)[0]]

    assert names(("silu",), "paper,p*") == [("silu", "paper"), ("silu", "piecewise"), ("silu", "pipeline")]
    assert [name for _, name in names(("requantize",), "pipeline_*,small")][-2:] == ["pipeline_gate", "small"]
    assert set(names((), "pipeline*")) == set(PIPELINE)
    assert len(names((), "all")) == sum(len(entry.configurations) for entry in UNITS.values())
    with pytest.raises(ValueError, match=r"no unit has a configuration 'q\*'"):
        planned((), "q*", "verilator", 0)


def test_catalog_lists_each_unit_in_its_three_rooms():
    root = Path(__file__).parent.parent
    for entry in UNITS.values():
        for room in ("golden", "hw", "tb"):
            assert (root / room / entry.family / f"{entry.name}.py").exists()
        assert {"small", "paper"} <= set(entry.configurations)
    assert json.dumps([entry.name for entry in UNITS.values()])
