"""The proofs: a fast part of them, the faults that they must catch, and the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from amaranth.hdl import Module

from golden.commandline import run
from hw.catalog import UNITS
from hw.pipeline import SkidBuffer
from tb.formal import engine
from tb.formal.__main__ import main
from tb.formal.faults import mutant
from tb.formal.monitors import FREE_START, Rules
from tb.formal.properties import PROPERTIES, Claim, claims, configurations, faults, switches

#: (property, unit, configuration) of the proofs that run here; ``make formal`` runs all.
QUICK = [
    ("skid_order", "SkidBuffer", "8 bit"),
    ("skid_paths", "SkidBuffer", "8 bit"),
    ("stream_rules", "exp", "small"),
    ("stream_paths", "exp", "small"),
    ("stream_order", "exp", "small"),
    ("stream_rules", "requantize", "small_token"),
    ("stream_order", "isqrt", "small serial=true"),
    ("trees", "max_tree", "1 to 9 lanes of 4 bit"),
    ("bit_length", "bit_length", "words of 1 to 9 bit"),
    ("divider", "Divider", "4 by 3 bit"),
]

#: The planted faults that run here: (property, unit, fault).
QUICK_FAULTS = [
    ("skid_order", "SkidBuffer", "drops the word that comes while it stalls"),
    ("skid_paths", "SkidBuffer", "ready passes through"),
    ("stream_rules", "exp", "registers move while stalled"),
    ("stream_rules", "exp", "valid survives reset"),
    ("stream_paths", "exp", "valid waits for ready"),
    ("stream_order", "exp", "a stage does not register valid"),
    ("trees", "max_tree", "compares as unsigned"),
    ("bit_length", "bit_length", "one for zero"),
]


@pytest.fixture(autouse=True)
def build_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(engine, "BUILD", tmp_path / "formal")
    yield tmp_path / "formal"
    engine.tools.cache_clear()


def find(planted: bool, *words: str) -> Claim:
    for claim in faults() if planted else claims():
        if (claim.name, claim.unit, claim.fault if planted else claim.configuration) == words:
            return claim
    raise AssertionError(f"no claim {words}")


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_claim_is_proven(words: tuple[str, str, str]) -> None:
    assert find(False, *words).check() == engine.Outcome("proven")


@pytest.mark.parametrize("words", QUICK_FAULTS, ids=" ".join)
def test_planted_fault_is_found(words: tuple[str, str, str]) -> None:
    outcome = find(True, *words).check()
    assert outcome.result == "failed", outcome
    # It says what broke: an assertion of the monitor with a trace, or the path.
    assert (".py:" in outcome.detail and ".vcd" in outcome.detail) or "reaches" in outcome.detail


def test_counterexample_of_a_unit_with_a_memory_has_a_trace(build_folder: Path) -> None:
    entry = UNITS["requantize"]
    monitor = Rules(entry.component(entry.configurations["small_token"]), "eager")
    outcome = engine.prove("memory", monitor, (FREE_START,))
    assert outcome.result == "failed" and str(build_folder) in outcome.detail


def test_proof_that_takes_too_long_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "run", lambda *_: "SBY [run] DONE (TIMEOUT, rc=8)\n")
    assert find(False, *QUICK[0]).check() == engine.Outcome("unknown", "no answer in time")


def test_every_property_has_claims_and_faults() -> None:
    assert {claim.name for claim in claims()} == set(PROPERTIES) == {claim.name for claim in faults()}


def test_no_two_claims_share_a_folder() -> None:
    folders = [claim.folder for claim in (*claims(), *faults())]
    assert len(folders) == len(set(folders))
    assert not any(set(folder) & set(" /:") for folder in folders)


def test_every_planted_fault_still_applies() -> None:
    for claim in faults():
        assert claim.build() is not None


def test_every_unit_is_under_the_stream_rules() -> None:
    for name in ("stream_rules", "stream_paths"):
        assert set(UNITS) <= {claim.unit for claim in claims() if claim.name == name}


@pytest.mark.parametrize("unit", UNITS)
def test_variants_reach_every_choice_or_are_illegal(unit: str) -> None:
    entry = UNITS[unit]
    found = configurations(entry)
    variants = [config for name, config in found.items() if name not in entry.configurations]
    assert len({switches(config) for config in variants}) == len(variants)
    forms = {getattr(config, "form", None) for config in found.values()}
    assert forms >= {getattr(config, "form", None) for config in entry.configurations.values()}


def test_fault_that_no_longer_applies_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"^the planted fault in hw\.pipeline no longer applies: 'nowhere' occurs 0 times$"
    ):
        mutant("hw.pipeline", {"nowhere": ""})


def test_mutant_leaves_the_original_alone() -> None:
    changed = mutant("hw.pipeline", {"i.ready.eq(~full)": "i.ready.eq(0)"})
    assert changed.SkidBuffer is not SkidBuffer
    assert mutant("hw.pipeline", {}).SkidBuffer is not changed.SkidBuffer


class Passes(SkidBuffer):
    """A stream that is a wire."""

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.comb += [self.o.valid.eq(self.i.valid), self.o.payload.eq(self.i.payload), self.i.ready.eq(self.o.ready)]
        return m


def test_paths_are_found_through_wires_but_not_through_registers() -> None:
    pairs = [("o__ready", "i__ready"), ("i__valid", "o__valid"), ("o__ready", "o__valid")]
    assert engine.no_path("wire", Passes(2), pairs) == engine.Outcome(
        "failed", "o__ready reaches i__ready; i__valid reaches o__valid"
    )
    assert engine.no_path("skid", SkidBuffer(2), pairs) == engine.Outcome("proven")
    assert engine.no_path("typo", Passes(2), [("o__redy", "i__ready")]).result == "error"


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tb.formal", *arguments])
    with pytest.raises(SystemExit) as stop:
        run(main, "tb.formal")
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_command_prints_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "skid_paths", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row.pop("seconds") >= 0
    assert row == {
        "property": "skid_paths",
        "unit": "SkidBuffer",
        "configuration": "8 bit",
        "engine": "structure",
        "result": "proven",
        "detail": "",
    }
    assert command(monkeypatch, "skid_paths", "--faults") == 0
    out = capsys.readouterr().out
    assert "ready passes through" in out and "2 faults caught" in out


def test_failure_and_missed_fault_exit_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, arguments, line in (
        ("failed", (), "tb.formal: 1 of 1 claims not proven"),
        ("unknown", (), "tb.formal: 1 of 1 claims not proven"),
        ("proven", ("--faults",), "tb.formal: 2 of 2 faults not caught"),
        ("error", ("--faults",), "tb.formal: 2 of 2 faults not caught"),
    ):
        monkeypatch.setattr(Claim, "check", lambda *_, found=found: engine.Outcome(found))
        assert command(monkeypatch, "skid_paths", *arguments) == 1
        assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["liveness"], "there is no property 'liveness'; there are skid_order, skid_paths,"),
        (["trees", "--unit", "fft"], "nothing is claimed of 'fft'; the claims are about SkidBuffer,"),
        (["trees", "--unit", "exp"], "none of these properties is claimed of these units"),
        (["-j", "0"], "Invalid value for '--jobs' / '-j'"),
    ],
)
def test_bad_request_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tb.formal: error: {message}") and captured.err.count("\n") == 1


def test_missing_tool_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], build_folder: Path
) -> None:
    engine.tools.cache_clear()
    monkeypatch.setattr(engine, "SCRIPTS", {"no-such-solver": "no-such-package"})
    assert command(monkeypatch, "skid_paths") == 2
    expected = "no-such-solver is not installed; proofs need it: pip install no-such-package"
    assert capsys.readouterr().err == f"tb.formal: error: {expected}\n"
    assert not build_folder.exists()


def test_tools_are_found_with_nothing_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    engine.tools.cache_clear()
    assert set(engine.tools()) == {*engine.SCRIPTS, "yosys-abc"}
    assert all(Path(path).is_absolute() for path in engine.tools().values())
