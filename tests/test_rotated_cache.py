"""The rotated key/value cache, the selection of sign patterns, and the study, against floating point."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from golden.__main__ import main
from golden.fixedpoint import Int
from golden.float16 import parts
from golden.llm.checkpoint import REFERENCE, load
from golden.llm.formats import SCHEMES
from golden.llm.integer import IntegerDecoder
from golden.llm.kvcache import Heads
from golden.llm.prepare import quantize
from golden.llm.rotated import Patterns, RotatedCache, RotatedConfig, layer_centroids
from golden.llm.rotations import Search
from golden.rotated import signs
from golden.rotated.lloyd_max import solve

SIZE = 128


@pytest.fixture(scope="module")
def model() -> IntegerDecoder:
    return IntegerDecoder(quantize(load(REFERENCE), SCHEMES["integer"]))


def hadamard(size: int = SIZE) -> np.ndarray:
    k = np.arange(size)
    return 1.0 - 2.0 * (np.bitwise_count(k[:, None] & k) & 1)


def restored(index: Int, norm: Int, word: int, bits: int) -> np.ndarray:
    """What stored vectors stand for, in real numbers."""
    positive = solve(bits).centroids
    mantissa, biased = parts(norm.astype(np.int64))
    length = mantissa * 2.0 ** (biased - 25)
    turned = np.concatenate((-positive[::-1], positive))[index] @ hadamard()
    return turned * signs.from_word(word, SIZE) * length[..., None] / SIZE


@pytest.mark.parametrize("bits", [2, 3, 6])
def test_attention_is_that_of_the_dequantized_vectors(model: IntegerDecoder, bits: int) -> None:
    units, count, generator = model.model.units, 40, np.random.default_rng(bits)
    cache = RotatedCache(units, count, RotatedConfig(key_bits=bits, value_bits=7 - bits))
    keys = Heads(generator.integers(-40000, 40000, (count, 1, SIZE)), generator.integers(0, 4, (count, 1)))
    queries = Heads(generator.integers(-30000, 30000, (count, 2, SIZE)), generator.integers(0, 4, (count, 2)))
    values = generator.integers(-(1 << 18), 1 << 18, (count, 1, SIZE))
    seen: dict[str, Any] = {}
    constant = (50000, 58)  # of transformed queries and keys

    def probabilities(scores: Any, keep: np.ndarray) -> Int:
        seen["scores"] = scores.fixed(6)
        p = generator.integers(0, 1 << 12, seen["scores"].shape) * keep
        seen["p"] = p
        return p

    cache.append(0, keys, values)
    context = cache.attend(0, queries, constant, None, probabilities)
    k = restored(cache.keys.index[0, 0], cache.keys.norm[0, 0], cache.patterns.keys[0], bits) * 2.0**16
    q = queries.x * 2.0 ** queries.e[..., None]
    wanted = np.einsum("thd,sd->hts", q, k) * SIZE * constant[0] * 2.0 ** (6 - constant[1])
    inside = np.abs(wanted) < 32000
    assert inside.mean() > 0.5
    error = np.abs(seen["scores"] - wanted)[inside]
    assert error.max() <= 0.51 + 2e-4 * np.abs(wanted[inside]).max()
    v = restored(cache.values.index[0, 0], cache.values.norm[0, 0], cache.patterns.values[0], 7 - bits) * 2.0**16
    wanted = np.einsum("hts,sd->thd", seen["p"] / 2.0**16, v)
    assert np.abs(context - wanted).max() <= 1e-3 * np.abs(wanted).max() + 1


def test_vectors_come_back_as_well_as_the_codebook_says(model: IntegerDecoder) -> None:
    generator = np.random.default_rng(1)
    cache = RotatedCache(model.model.units, 200, RotatedConfig(key_bits=3))
    x = np.rint(generator.standard_normal((200, 1, SIZE)) * 5000).astype(np.int64)
    cache.append(0, Heads(x, np.zeros((200, 1), np.int64)), x)
    back = restored(cache.keys.index[0, 0], cache.keys.norm[0, 0], cache.patterns.keys[0], 3) * 2.0**16
    error = np.square(back - x[:, 0]).sum() / np.square(x).sum()
    assert 0.030 < error < 0.037  # 0.0340 on a sphere, 0.0345 of the normal distribution


@pytest.mark.parametrize("constant", [(32768, 40), (65535, 58), (1, 3)])
@pytest.mark.parametrize("transformed", [True, False])
def test_centroids_carry_the_layers_constant(constant: tuple[int, int], transformed: bool) -> None:
    found, down = layer_centroids(4, constant, SIZE, transformed)
    wanted = solve(4).centroids * constant[0] * 2.0 ** -constant[1] / (1 if transformed else SIZE)
    np.testing.assert_allclose(found * 2.0**-down, wanted, rtol=2e-4)
    assert found.max() < 1 << 18 and found.max() >= 1 << 16


def test_sizes(model: IntegerDecoder) -> None:
    ids = [int(token) for token in np.random.default_rng(2).integers(1, 1000, 30)]
    for config, bits in ((RotatedConfig(), 400 + 400), (RotatedConfig(key_bits=5, value_bits=2), 656 + 272)):
        cache = RotatedCache(model.model.units, 30, config)
        model.with_cache(lambda units, capacity, cache=cache: cache).forward(ids, cache)
        assert cache.size_bits == 30 * 4 * bits
        assert cache.written_bytes == 30 * 4 * bits // 8
    cache = RotatedCache(model.model.units, 30, RotatedConfig(sinks=2, recent=8, update=4))
    model.with_cache(lambda units, capacity: cache).forward(ids, cache)
    token = 4 * 2 * (128 * 8 + 8)
    assert cache.size_bits == 30 * 4 * 800 + 10 * token  # 20 of the 28 after the sinks have left, in fours
    assert cache.written_bytes == 30 * (4 * 800 + token) // 8


def test_patterns_are_written_and_read(tmp_path: Path) -> None:
    found = Patterns.seeded(3, 16, 5, 42)
    assert found.keys[1] == signs.word(signs.pattern(1005, 16))
    assert found.values[2] == signs.word(signs.pattern(42 + 1000 * 502, 16))
    found.save(tmp_path / "signs.json", why="a test")
    assert Patterns.load(tmp_path / "signs.json") == found
    with pytest.raises(ValueError, match="of 3 layers with heads of 16, the model has 4 of 128"):
        Patterns.load(tmp_path / "signs.json").check(4, 128)
    for text, message in {
        "[": "no file of sign patterns",
        "[]": "no file of sign patterns",
        '{"size": 16}': "'keys' is missing",
        '{"size": 300, "keys": [], "values": []}': "size must lie in 2..256",
        '{"size": 16, "keys": ["zz"], "values": ["0"]}': "no file of sign patterns",
        '{"size": 16, "keys": ["10000"], "values": ["0"]}': "words of 16 bits",
        '{"size": 16, "keys": ["1"], "values": []}': "as many of one as of the other",
    }.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Patterns.load(tmp_path / "bad.json")


@pytest.fixture(scope="module")
def search(model: IntegerDecoder) -> Search:
    generator = np.random.default_rng(3)
    return Search(model, [[0, *generator.integers(1, 1000, 40).tolist()] for _ in range(2)])


def test_search_is_repeatable_and_takes_the_best(model: IntegerDecoder, search: Search) -> None:
    best = search.best(3, 2, 6)
    assert best == search.best(3, 2, 6)
    keys, values, attention = search.streams(1, 3, 2)
    drawn = [signs.pattern((42 + 1000) * 10000 + c, SIZE) for c in range(6)]
    errors = [keys.mse(keys.restored(s)) for s in drawn]
    assert best["mse"].keys[1] == signs.word(drawn[int(np.argmin(errors))])
    assert best["mse"].values[1] == signs.word(signs.pattern(42 + 1000 * 501, SIZE))
    off = [attention.divergence(keys.restored(s) - keys.real) for s in drawn]
    assert best["attention"].keys[1] == signs.word(drawn[int(np.argmin(off))])
    drawn = [signs.pattern((42 + 1000 * 501) * 10000 + c, SIZE) for c in range(6)]
    off = [attention.context_error(values.restored(s) - values.real) for s in drawn]
    assert best["attention"].values[1] == signs.word(drawn[int(np.argmin(off))])


def test_search_restores_what_the_cache_stores(model: IntegerDecoder, search: Search) -> None:
    keys, _, _ = search.streams(0, 3, 3)
    word = Patterns.seeded(4, SIZE).keys[0]
    cache = RotatedCache(model.model.units, 41)
    found = search.layers[0]
    cache.append(0, found.keys[0], np.zeros((41, 1, SIZE), np.int64))
    stored = restored(cache.keys.index[0, 0], cache.keys.norm[0, 0], word, 3) * 2.0**16
    off = np.linalg.norm(keys.restored(signs.from_word(word, SIZE))[:41] - stored, axis=1)
    assert (off < 5e-4 * np.linalg.norm(stored, axis=1)).all()  # the codebook's 12 fraction bits


def test_criteria_are_zero_for_exact_vectors_and_grow(search: Search) -> None:
    keys, values, attention = search.streams(2, 3, 3)
    assert keys.mse(keys.real) == attention.divergence(0 * keys.real) == attention.context_error(0 * values.real) == 0
    # A second-order form: twice the error, four times the divergence; a shift common to all keys does nothing.
    error = 0.001 * keys.real * np.random.default_rng(4).standard_normal((len(keys.real), 1))
    assert attention.divergence(2 * error) == pytest.approx(4 * attention.divergence(error))
    assert attention.divergence(np.broadcast_to(keys.real[:1], keys.real.shape)) == pytest.approx(0, abs=1e-9)
    assert attention.context_error(values.real) == pytest.approx(1)


# -- command line ------------------------------------------------------------------------------------------------------
def golden(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text((Path(__file__).parent.parent / "golden" / "llm" / "reference.py").read_text(encoding="utf-8"))
    return path


def test_commands(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "signs.json"
    few = ["--candidates", 3, "--samples", 2, "--length", 64]
    found = golden("search-signs", "--checkpoint", REFERENCE, "--text", text, *few, "-o", out)
    assert found.exit_code == 0, found.output
    first = out.read_text()
    golden("search-signs", "--checkpoint", REFERENCE, "--text", text, *few, "-o", out)
    assert out.read_text() == first
    common = ["perplexity", "--checkpoint", REFERENCE, "--text", text, "--tokens", 256, "--length", 128]
    common += ["--calibration-tokens", 256, "--json"]
    kl = []
    for options in (["--kv", "dense"], [*"--kv rotated --key-bits 4 --value-bits 4 --signs".split(), out]):
        found = golden(*common, *options)
        assert found.exit_code == 0, found.output
        kl.append(json.loads(found.stdout)[0]["kl_mnat"])
    assert kl[0] < kl[1] < 60


def test_study(text: Path) -> None:
    few = ["--tokens", 128, "--seeds", 2, "--candidates", 2, "--samples", 1, "--bits", "3"]
    found = golden("axelram-study", "--text", text, *few, "--json")
    assert found.exit_code == 0, found.output
    study = json.loads(found.stdout)
    assert [run["patterns"] for run in study["runs"]] == ["dense", "seed 1", "seed 2", "mse", "attention"]
    (row,) = study["summary"]
    increases = [run["increase"] for run in study["runs"][1:3]]
    assert row["mean"] == pytest.approx(np.mean(increases), abs=1e-3) and row["worst"] == max(increases)
    assert len(study["layers"]) == 4 and len(study["paper"]) == 9
    table = golden("axelram-study", "--text", text, *few)
    assert table.exit_code == 0 and "Qwen2.5-3B" in table.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["perplexity", "--key-bits", "3"], "--key-bits needs --kv rotated, not dense"),
        (["perplexity", "--kv", "int4", "--signs", "x"], "--signs needs --kv rotated, not int4"),
        (["perplexity", "--kv", "rotated", "--key-bits", "7"], "7 is not in the range 1<=x<=6"),
        (["perplexity", "--kv", "rotated", "--update", "2"], "update must lie in 1..1 with recent = 0, not 2"),
        (["perplexity", "--kv", "rotated", "--signs", "nowhere"], "no such file of sign patterns"),
        (["perplexity", "--kv", "rotated", "--pipeline", "float"], "--kv rotated needs an integer pipeline"),
        (["search-signs", "-o", "x", "--length", "513"], "--length must be at most the model's 512 positions, not 513"),
        (["search-signs", "-o", "no/folder/x"], "no such folder"),
        (["search-signs", "-o", "x", "--samples", "99999"], "too few for"),
        (["axelram-study", "--bits", "3,x"], "--bits must be numbers from 1 to 6 with commas between them"),
        (["axelram-study", "--tokens", "999999"], "too few for 999999"),
    ],
)
def test_wrong_command_lines_are_told_in_one_line(
    arguments: list[str], message: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [*arguments, "--checkpoint", REFERENCE, "--text", text]
    result = golden(*given)
    told = str(result.exception) if not isinstance(result.exception, SystemExit) else result.output
    assert result.exit_code and message in told
    assert not (tmp_path / "x").exists()


def test_heads_that_are_no_power_of_two_are_refused(model: IntegerDecoder) -> None:
    config = load(REFERENCE).config
    units = (
        SCHEMES["integer"]
        .replace(transform=False)
        .units(type(config)("llama", 32, 1, 2, 1, 24, 56, 40, max_positions=64))
    )
    with pytest.raises(ValueError, match="power of two from 2 to 256, not 24"):
        RotatedCache(units, 4)
