"""The components of hw.rotated against golden, in Amaranth's simulator; the catalog does not list them yet."""

from __future__ import annotations

from importlib import import_module

import pytest

from golden.rotated import axelram as golden_axelram
from golden.rotated import fwht as golden_fwht
from golden.rotated import lloyd_max as golden_lloyd_max
from golden.rotated import read_path as golden_read_path
from golden.rotated import signs as golden_signs
from golden.rotated import value_path as golden_value_path
from golden.rotated import write_path as golden_write_path
from hw.catalog import Entry
from hw.rotated import axelram as hw_axelram
from hw.rotated import fwht as hw_fwht
from hw.rotated import lloyd_max as hw_lloyd_max
from hw.rotated import read_path as hw_read_path
from hw.rotated import signs as hw_signs
from hw.rotated import value_path as hw_value_path
from hw.rotated import write_path as hw_write_path
from tb.quick import check_unit

ENTRIES = [
    Entry(
        name="fwht",
        family="rotated",
        component=hw_fwht.Fwht,
        golden=golden_fwht.fwht,
        configurations={
            "small": golden_fwht.FwhtConfig(size=8, in_bits=7),
            "small_folded": golden_fwht.FwhtConfig(size=16, in_bits=5, form="folded", butterflies=2),
            "paper": golden_fwht.FwhtConfig(),
            "paper_folded": golden_fwht.FwhtConfig(form="folded", butterflies=64),
            "pipeline": golden_fwht.FwhtConfig(in_bits=17),
            "pipeline_product": golden_fwht.FwhtConfig(size=64, in_bits=32),
            "peer64": golden_fwht.FwhtConfig(size=64, in_bits=8),
            "peer128": golden_fwht.FwhtConfig(in_bits=8),
            "folded128": golden_fwht.FwhtConfig(in_bits=8, form="folded", butterflies=64),
        },
        peers={
            "peer64": ("parallel, from formula, 64 points of 8 bit", 17060),
            "peer128": ("parallel, from formula, 128 points of 8 bit", 41553),
            "folded128": ("parallel, from formula, 128 points of 8 bit", 41553),
        },
    ),
    Entry(
        name="signs",
        family="rotated",
        component=hw_signs.Signs,
        golden=golden_signs.signs,
        configurations={
            "small": golden_signs.SignsConfig(size=8, in_bits=5, patterns=5),
            "paper": golden_signs.SignsConfig(),
            "paper_seeded": golden_signs.SignsConfig(form="seeded"),
        },
    ),
    Entry(
        name="lloyd_max",
        family="rotated",
        component=hw_lloyd_max.LloydMax,
        golden=golden_lloyd_max.quantize,
        configurations={
            "small": golden_lloyd_max.LloydMaxConfig(lanes=3, in_bits=9, norm_bits=6),
            "small_programmable": golden_lloyd_max.LloydMaxConfig(lanes=3, in_bits=7, form="programmable"),
            "paper": golden_lloyd_max.LloydMaxConfig(lanes=128),
            "paper_2bit": golden_lloyd_max.LloydMaxConfig(lanes=128, bits=2),
            "paper_4bit": golden_lloyd_max.LloydMaxConfig(lanes=128, bits=4),
            "lane_frozen": golden_lloyd_max.LloydMaxConfig(lanes=1, bits=4, in_bits=16, form="frozen", ties="upper"),
            "lane_frozen_lower": golden_lloyd_max.LloydMaxConfig(lanes=1, bits=4, in_bits=16, form="frozen"),
            "lane_programmable": golden_lloyd_max.LloydMaxConfig(
                lanes=1, bits=4, in_bits=16, form="programmable", ties="upper"
            ),
        },
        peers={
            "lane_frozen": ("frozen 4-bit lane, from formula", 104),
            "lane_frozen_lower": ("frozen 4-bit lane, from formula", 104),
            "lane_programmable": ("FINN thresholding, 4 bit, 16 bit in", 1266),
        },
    ),
    Entry(
        name="write_path",
        family="rotated",
        component=hw_write_path.WritePath,
        golden=golden_write_path.write_path,
        configurations={
            "small": golden_write_path.WritePathConfig(lanes=8, size=8, in_bits=6, patterns=3),
            "small_folded": golden_write_path.WritePathConfig(lanes=2, size=16, in_bits=7, bits=2, patterns=3),
            "paper": golden_write_path.WritePathConfig(),
            "paper_folded": golden_write_path.WritePathConfig(lanes=8),
        },
    ),
    Entry(
        name="read_path",
        family="rotated",
        component=hw_read_path.ReadPath,
        golden=golden_read_path.read_path,
        configurations={
            "small": golden_read_path.ReadPathConfig(
                size=8, in_bits=6, table_bits=16, score_bits=14, build_lanes=2, patterns=3
            ),
            "small_binary16": golden_read_path.ReadPathConfig(
                size=8, in_bits=6, form="binary16", build_lanes=4, patterns=3
            ),
            "paper": golden_read_path.ReadPathConfig(),
            "paper_binary16": golden_read_path.ReadPathConfig(form="binary16"),
        },
    ),
    Entry(
        name="value_path",
        family="rotated",
        component=hw_value_path.ValuePath,
        golden=golden_value_path.value_path,
        configurations={
            "small": golden_value_path.ValuePathConfig(
                size=8, weight_bits=12, max_row=50, z_bits=22, fraction_bits=6, out_bits=20, drain_lanes=2, patterns=3
            ),
            "paper": golden_value_path.ValuePathConfig(),
        },
    ),
    Entry(
        name="axelram",
        family="rotated",
        component=hw_axelram.Axelram,
        golden=golden_axelram.axelram,
        configurations={
            "small": golden_axelram.AxelramConfig(
                size=8, in_bits=6, capacity=13, table_bits=16, score_bits=14, build_lanes=2, patterns=3
            ),
            "paper": golden_axelram.AxelramConfig(),
        },
    ),
]

SMALL = [(entry, name) for entry in ENTRIES for name in entry.configurations if name.startswith(("small", "lane_"))]


@pytest.mark.parametrize("entry, name", SMALL, ids=[f"{entry.name}-{name}" for entry, name in SMALL])
def test_small_configurations_equal_golden(entry: Entry, name: str) -> None:
    check_unit(import_module(entry.bench).BENCH(entry, entry.configurations[name]), seed=1)


@pytest.mark.parametrize("entry", ENTRIES[:4], ids=[entry.name for entry in ENTRIES[:4]])
@pytest.mark.parametrize("seed", range(3))
def test_random_configurations_equal_golden(entry: Entry, seed: int) -> None:
    check_unit(import_module(entry.bench).BENCH(entry, entry.sample(seed)), seed=seed, brief=True)
