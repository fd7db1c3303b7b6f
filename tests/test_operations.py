"""Operation counts of AXELRAM's units at full size, from the elaborated netlist, beside the paper's."""

from __future__ import annotations

from collections import Counter

from click.testing import CliRunner

from golden.rotated.write_path import WritePathConfig
from hw.__main__ import main
from hw.catalog import find
from hw.operations import operations
from hw.rotated.write_path import WritePath

COUNTED = 8
"""Operators on words of up to so many bits are counters, addresses and exponents."""


def counts(unit: str, configuration: str = "paper", widest: int = COUNTED) -> dict[str, Counter[str]]:
    entry = find(unit)
    found = operations(entry.component(entry.configurations[configuration]), widest)
    return {name: operators for name, operators in found if any(operators.values())}


def test_transform_is_896_additions() -> None:
    """The paper says 448, which is the number of butterflies: each of them adds and subtracts."""
    assert counts("fwht") == {"top": Counter(additions=896, negations=0, multiplications=0, comparisons=0)}
    assert counts("fwht", "paper_folded")["top"]["additions"] == 128  # 64 butterflies, seven times


def test_write_path_multiplies_three_times_between_norm_and_indices() -> None:
    found = counts("write_path")
    assert found["top.transform"]["additions"] == 896
    assert found["top"]["multiplications"] == 2**2 - 1
    assert 0 <= found["top"]["comparisons"] - 128 * 3 < 8  # three a coordinate, and some where the norm is rounded
    # The squares of the norm are adders of partial products.
    assert sum(operators["multiplications"] for operators in found.values()) == 3


def test_products_between_norm_and_indices_follow_the_bits() -> None:
    for bits in (1, 2, 4):
        unit = WritePath(WritePathConfig(lanes=8, size=8, bits=bits))
        top = dict(operations(unit, COUNTED))["top"]
        assert top["multiplications"] == 2 ** (bits - 1) - 1


def test_read_path_adds_127_times_and_multiplies_once() -> None:
    found = counts("read_path")
    config = find("read_path").configurations["paper"]
    assert found["top.lookup.tree"] == Counter(additions=127, negations=0, multiplications=0, comparisons=0)
    assert found["top.lookup"]["multiplications"] == 1
    # 32 multipliers, used in each of 16 cycles: the positive half of the paper's 1024 products.
    beats = config.size // config.build_lanes
    assert found["top.table"]["multiplications"] * beats == 512
    assert sum(operators["multiplications"] for operators in found.values()) == 1 + 512 // beats


def test_macro_is_its_paths() -> None:
    found = counts("axelram")
    assert found["top.write_path.transform"]["additions"] == 896
    assert found["top.lookup.tree"]["additions"] == 127
    multiplications = {name: c["multiplications"] for name, c in found.items() if c["multiplications"]}
    assert multiplications == {"top.write_path": 3, "top.table": 32, "top.lookup": 1}


def test_operations_command() -> None:
    result = CliRunner().invoke(main, ["operations", "fwht", "--config", "small", "--json"])
    assert result.exit_code == 0 and '"additions": 24' in result.output
    wrong = CliRunner().invoke(main, ["operations", "nothing"])
    assert "there is no unit 'nothing'" in str(wrong.exception)
