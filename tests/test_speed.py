"""What measures the decoders' speed, and the PyTorch decoder beside which they stand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from golden.llm import speed
from golden.llm.checkpoint import REFERENCE, load
from golden.llm.reference import Decoder


class Model:
    """Takes down what it is asked."""

    config: Any = None

    def __init__(self, name: str, log: list[tuple[str, list[int]]]):
        self.name, self.log = name, log

    def new_cache(self, capacity: int | None = None) -> list[int]:
        return []

    def forward(self, tokens: Sequence[int], cache: Any = None) -> np.ndarray:
        self.log.append((self.name, list(tokens)))
        return np.zeros((len(tokens), 4))


def test_models_take_turns_on_alternating_rows_after_one_round_that_does_not_count():
    log: list[tuple[str, list[int]]] = []
    rates = iter([1.0, 1.0, 10.0, 5.0, 20.0, 2.0, 30.0, 6.0])

    def measure(model: Any, tokens: Sequence[int]) -> float:
        model.forward(tokens)
        return next(rates)

    models = {"first": Model("first", log), "second": Model("second", log)}
    steps: list[None] = []
    rows = list(speed.compare(models, measure, [[1], [2]], 3, lambda: steps.append(None)))
    assert log == [(name, [k]) for k in (1, 2, 1, 2) for name in ("first", "second")]
    assert len(steps) == 8
    assert rows == [
        {"pipeline": "first", "tokens_per_second": 20.0, "ratio": 1.0},
        {"pipeline": "second", "tokens_per_second": 5.0, "ratio": 0.2},  # of 0.5, 0.1 and 0.2
    ]


def test_prefill_is_one_call_and_decoding_one_call_a_token():
    log: list[tuple[str, list[int]]] = []
    assert speed.prefill(Model("m", log), [3, 1, 2]) > 0
    assert log == [("m", [3, 1, 2])]
    assert speed.decode(Model("m", log), [3, 1]) > 0
    assert log[1:] == [("m", [3]), ("m", [1])]


def test_held_out_rows_are_whole():
    rows = speed.held_out()
    assert [len(row) for row in rows] == [speed.PREFILL] * speed.SEQUENCES
    assert rows[0] != rows[1]


def test_command_prints_every_decoder_and_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(speed, "DECODE", 2)
    monkeypatch.setattr(speed, "held_out", lambda: [[5, 6, 7]])
    found = CliRunner().invoke(speed.speed_command, ["--json", "--rounds", "1"], catch_exceptions=False)
    assert found.exit_code == 0
    table = json.loads(found.stdout)
    names = [speed.BASELINE, "integer"]
    assert [(row["work"], row["pipeline"]) for row in table if row["pipeline"] in names] == [
        (work, name) for work in ("prefill", "decode") for name in names
    ]
    assert all(row["tokens_per_second"] > 0 for row in table)
    assert all(row["ratio"] == 1 for row in table if row["pipeline"] == speed.BASELINE)


def test_torch_decoder_gives_the_reference_logits():
    pytest.importorskip("torch")
    from golden.llm.torch_decoder import TorchDecoder

    checkpoint = load(REFERENCE)
    ids = np.random.default_rng(1).integers(0, checkpoint.config.vocab, 40)
    expected, model = Decoder(checkpoint).forward(ids), TorchDecoder(checkpoint)
    np.testing.assert_allclose(model.forward(ids), expected, atol=1e-3)
    cache = model.new_cache(40)
    parts = [model.forward(part, cache) for part in np.split(ids, [17, 18, 19])]
    np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-3)
