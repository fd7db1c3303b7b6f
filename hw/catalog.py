"""The list of units: the one place that knows them all. Simulation, synthesis, Verilog, documents and tests go
through it; adding a unit is a golden file, a hardware file, a testbench of the same name, and one entry here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from golden.config import UnitConfig
from golden.llm.checkpoint import REFERENCE
from golden.llm.config import ModelConfig
from golden.llm.formats import SCHEMES
from golden.nonlinear import exp as golden_exp
from golden.nonlinear import isqrt as golden_isqrt
from golden.nonlinear import requantize as golden_requantize
from golden.nonlinear import residual as golden_residual
from golden.nonlinear import rmsnorm as golden_rmsnorm
from golden.nonlinear import rope as golden_rope
from golden.nonlinear import silu as golden_silu
from golden.nonlinear import softmax as golden_softmax
from golden.rotated import axelram as golden_axelram
from golden.rotated import fwht as golden_fwht
from golden.rotated import lloyd_max as golden_lloyd_max
from golden.rotated import read_path as golden_read_path
from golden.rotated import signs as golden_signs
from golden.rotated import value_path as golden_value_path
from golden.rotated import write_path as golden_write_path
from hw.nonlinear import exp as hw_exp
from hw.nonlinear import isqrt as hw_isqrt
from hw.nonlinear import requantize as hw_requantize
from hw.nonlinear import residual as hw_residual
from hw.nonlinear import rmsnorm as hw_rmsnorm
from hw.nonlinear import rope as hw_rope
from hw.nonlinear import silu as hw_silu
from hw.nonlinear import softmax as hw_softmax
from hw.rotated import axelram as hw_axelram
from hw.rotated import fwht as hw_fwht
from hw.rotated import lloyd_max as hw_lloyd_max
from hw.rotated import read_path as hw_read_path
from hw.rotated import signs as hw_signs
from hw.rotated import value_path as hw_value_path
from hw.rotated import write_path as hw_write_path
from hw.unit import Unit


@dataclass(frozen=True)
class Entry:
    """One unit.

    Attributes
    ----------
    name, family : str
        File name and folder of the unit in ``golden/``, ``hw/`` and ``tb/``.
    component : callable
        Builds the Amaranth component from a configuration.
    golden : callable
        The golden function.
    configurations : dict
        Named configurations: ``small`` (odd sizes, short rows), ``paper`` (full size), ``pipeline`` (what the integer
        pipeline needs for the reference checkpoint; several where it needs several), and those that stand beside a
        peer's figures (named in ``peers``).
    peers : dict
        Configuration name -> (peer, gates) at equal parameters, for the cost table.
    board : str
        Configuration that an FPGA board gets by default: one that fits the common boards and builds in minutes.
    """

    name: str
    family: str
    component: Callable[..., Unit]
    golden: Callable[..., Any]
    configurations: dict[str, UnitConfig]
    peers: dict[str, tuple[str, int]] = field(default_factory=dict)
    board: str = "small"

    @property
    def bench(self) -> str:
        """Module of the testbench (``tb`` may not be imported from here)."""
        return f"tb.{self.family}.{self.name}"

    def configuration(self, name: str, settings: tuple[str, ...] | list[str] = ()) -> UnitConfig:
        """A named configuration with ``field=value`` settings applied. ValueError, one line, if there is none."""
        if name not in self.configurations:
            raise ValueError(f"{self.name} has no configuration {name!r}; it has {', '.join(self.configurations)}")
        return self.configurations[name].with_settings(settings)

    def sample(self, seed: int, tries: int = 1000) -> UnitConfig:
        """A random legal configuration, the same for the same seed: each field from its accepted range, sizes kept
        to what simulates in seconds."""
        generator = random.Random(f"{self.name}/{seed}")
        kind = type(self.configurations["small"])
        for _ in range(tries):
            values: dict[str, Any] = {}
            for item in fields(kind):  # type: ignore[arg-type]
                meta = item.metadata
                if "options" in meta:
                    values[item.name] = generator.choice(meta["options"])
                elif "flag" in meta:
                    values[item.name] = generator.random() < 0.5
                else:
                    high = min(meta["high"], _SAMPLED.get(item.name, meta["high"]))
                    if "power" in meta:
                        values[item.name] = 1 << generator.randint(meta["low"].bit_length() - 1, high.bit_length() - 1)
                    else:
                        values[item.name] = generator.randint(meta["low"], high)
            try:
                return kind(**values)
            except ValueError:
                continue
        raise RuntimeError(f"no legal configuration of {self.name} in {tries} tries")


#: Largest values of these fields in random configurations.
_SAMPLED = {"lanes": 5, "size": 8, "bits": 4, "build_lanes": 4, "drain_lanes": 4, "patterns": 9, "capacity": 50}

#: What the golden integer pipeline calls for: the `pipeline` configurations are these, not copies of them.
_PIPELINE = SCHEMES["integer"].units(
    ModelConfig.from_huggingface(json.loads((REFERENCE / "config.json").read_text(encoding="utf-8")))
)

_ENTRIES = [
    Entry(
        name="exp",
        family="nonlinear",
        component=hw_exp.Exp,
        golden=golden_exp.exp,
        configurations={
            "small": golden_exp.ExpConfig(lanes=3, in_bits=9, out_bits=8, fraction_bits=5, rom_bits=3),
            "paper": golden_exp.ExpConfig(form="ibert", run_time_scale=True),
            "base2": golden_exp.ExpConfig(),
            "lane_base2": golden_exp.ExpConfig(lanes=1),
            "lane_rom32": golden_exp.ExpConfig(lanes=1, rom_bits=5, interpolate=False),
            "lane_ibert": golden_exp.ExpConfig(lanes=1, form="ibert", scale_log2=8),
            "lane_ibert_run_time": golden_exp.ExpConfig(lanes=1, form="ibert", run_time_scale=True),
            "lane_table8": golden_exp.ExpConfig(lanes=1, form="table", in_bits=8, fraction_bits=4, out_bits=8),
            "lane_table10": golden_exp.ExpConfig(lanes=1, form="table", in_bits=10, fraction_bits=6, out_bits=16),
        },
        peers={
            "lane_ibert": ("I-BERT lane, range-narrowed", 1035),
            "lane_ibert_run_time": ("I-BERT lane, run-time constants", 8609),
            "lane_table8": ("table 8 to 8 bit", 166),
            "lane_table10": ("table 10 to 16 bit", 1315),
        },
    ),
    Entry(
        name="silu",
        family="nonlinear",
        component=hw_silu.Silu,
        golden=golden_silu.swiglu,
        configurations={
            "small": golden_silu.SiluConfig(
                lanes=3,
                gate_bits=9,
                gate_fraction_bits=5,
                up_bits=7,
                out_bits=10,
                out_shift=4,
                sigma_bits=9,
                exp_fraction_bits=7,
                rom_bits=3,
                reciprocal_bits=4,
            ),
            "paper": golden_silu.SiluConfig(form="ibert", run_time_scale=True),
            "base2": golden_silu.SiluConfig(),
            "piecewise": golden_silu.SiluConfig(form="piecewise"),
            "pipeline": _PIPELINE.silu,
            "lane_poly": golden_silu.SiluConfig(
                lanes=1,
                form="ibert",
                gate_bits=8,
                gate_fraction_bits=4,
                sigma_bits=9,
                multiply=False,
                out_bits=8,
            ),
            "lane_base2": golden_silu.SiluConfig(lanes=1, multiply=False, out_bits=16),
            "lane_piecewise": golden_silu.SiluConfig(lanes=1, form="piecewise", multiply=False, out_bits=16),
            "lane_table8": golden_silu.SiluConfig(
                lanes=1, form="table", gate_bits=8, gate_fraction_bits=4, multiply=False, out_bits=8
            ),
            "lane_table10": golden_silu.SiluConfig(
                lanes=1, form="table", gate_bits=10, gate_fraction_bits=6, multiply=False, out_bits=10
            ),
        },
        peers={
            "lane_poly": ("ITA GELU polynomial lane, 8 bit", 2765),
            "lane_piecewise": ("ITA GELU polynomial lane, 8 bit", 2765),
            "lane_table8": ("SiLU table Q4.4", 174),
            "lane_table10": ("SiLU table Q4.6", 662),
        },
    ),
    Entry(
        name="requantize",
        family="nonlinear",
        component=hw_requantize.Requantize,
        golden=golden_requantize.requantize,
        configurations={
            "small": golden_requantize.RequantizeConfig(lanes=3, in_bits=13, out_bits=6, group=9),
            "small_token": golden_requantize.RequantizeConfig(
                form="token", lanes=3, in_bits=13, out_bits=7, max_row=24
            ),
            "small_static": golden_requantize.RequantizeConfig(
                form="static", lanes=3, in_bits=11, out_bits=6, multiplier_bits=4, max_shift=13
            ),
            "paper": golden_requantize.RequantizeConfig(),
            "paper_token": golden_requantize.RequantizeConfig(form="token", out_bits=16),
            "paper_static": golden_requantize.RequantizeConfig(form="static"),
            # One unit for all token-wise rows, with room for the longest of them.
            "pipeline_row": max(_PIPELINE.norm_row, _PIPELINE.head_row, _PIPELINE.up, key=lambda c: c.max_row),
            "pipeline_key": _PIPELINE.key,  # and queries: the same
            "pipeline_value": _PIPELINE.value,
            "pipeline_context": _PIPELINE.context,
            "pipeline_product": _PIPELINE.product,
            "pipeline_gate": _PIPELINE.gate,
            "peer16": golden_requantize.RequantizeConfig(form="static", lanes=16, in_bits=26),
            "peer16_group": golden_requantize.RequantizeConfig(lanes=16, in_bits=26),
        },
        peers={
            "peer16": ("ITA requantizer, 16 lanes", 37038),
            "peer16_group": ("ITA requantizer, 16 lanes (finds no scale)", 37038),
        },
    ),
    Entry(
        name="isqrt",
        family="nonlinear",
        component=hw_isqrt.Isqrt,
        golden=golden_isqrt.isqrt,
        configurations={
            "small": golden_isqrt.IsqrtConfig(lanes=3, in_bits=9),
            "paper": golden_isqrt.IsqrtConfig(form="newton", serial=True, in_bits=43),
            "digit": golden_isqrt.IsqrtConfig(in_bits=43, digits=2),
            "serial": golden_isqrt.IsqrtConfig(in_bits=43, serial=True),
            "reciprocal_newton": golden_isqrt.IsqrtConfig(form="newton", output="reciprocal", in_bits=43, serial=True),
            "reciprocal_table": golden_isqrt.IsqrtConfig(form="table", output="reciprocal", in_bits=43, serial=True),
            "peer16": golden_isqrt.IsqrtConfig(form="table", output="reciprocal", in_bits=16),
            "digit16": golden_isqrt.IsqrtConfig(in_bits=16),
        },
        peers={
            "peer16": ("MASE fixed_isqrt, 16 bit", 7403),
        },
    ),
    Entry(
        name="rmsnorm",
        family="nonlinear",
        component=hw_rmsnorm.RmsNorm,
        golden=golden_rmsnorm.rmsnorm,
        configurations={
            "small": golden_rmsnorm.RmsNormConfig(
                lanes=3, in_bits=9, hidden=26, gamma_bits=7, root_bits=10, out_bits=10, guard_bits=1
            ),
            "paper": golden_rmsnorm.RmsNormConfig(form="newton", out="group"),
            "token": golden_rmsnorm.RmsNormConfig(),
            "overlap": golden_rmsnorm.RmsNormConfig(overlap=True),
            "pipeline": _PIPELINE.norm,
            "peer64": golden_rmsnorm.RmsNormConfig(
                lanes=4, in_bits=8, hidden=64, gamma_bits=8, root_bits=10, out_bits=8, overlap=True
            ),
            "shared64": golden_rmsnorm.RmsNormConfig(
                lanes=4, in_bits=8, hidden=64, gamma_bits=8, root_bits=10, out_bits=8
            ),
        },
        peers={
            "peer64": ("MASE rms_norm_2d, 64 elements of 8 bit, 4 per cycle", 34224),
        },
    ),
    Entry(
        name="residual",
        family="nonlinear",
        component=hw_residual.Residual,
        golden=golden_residual.residual,
        configurations={
            "small": golden_residual.ResidualConfig(lanes=3, a_bits=9, b_bits=7, max_left=5, max_right=4),
            "paper": golden_residual.ResidualConfig(),
            "narrow": golden_residual.ResidualConfig(b_bits=16),
            "pipeline": _PIPELINE.residual,
        },
    ),
    Entry(
        name="softmax",
        family="nonlinear",
        component=hw_softmax.Softmax,
        golden=golden_softmax.softmax,
        configurations={
            "small": golden_softmax.SoftmaxConfig(
                lanes=3,
                score_bits=9,
                probability_bits=10,
                fraction_bits=6,
                rom_bits=3,
                mantissa_bits=9,
                buffer=20,
                max_row=500,
                reciprocal_bits=13,
                guard_bits=4,
            ),
            "paper": golden_softmax.SoftmaxConfig(form="ibert", run_time_scale=True),
            "base2": golden_softmax.SoftmaxConfig(),
            "pipeline": _PIPELINE.softmax,
            "peer16": golden_softmax.SoftmaxConfig(
                lanes=16,
                score_bits=8,
                probability_bits=8,
                fraction_bits=5,
                rom_bits=5,
                interpolate=False,
                mantissa_bits=8,
                buffer=64,
                max_row=64,
                reciprocal_bits=11,
                guard_bits=4,
                streaming=False,
            ),
        },
        peers={"peer16": ("ITA softmax, 16 a cycle, rows of 64", 35845)},
        board="base2",
    ),
    Entry(
        name="rope",
        family="nonlinear",
        component=hw_rope.Rope,
        golden=golden_rope.rope,
        configurations={
            "small": golden_rope.RopeConfig(
                lanes=3,
                head_dim=10,
                data_bits=9,
                out_bits=9,
                position_bits=10,
                phase_bits=20,
                angle_bits=12,
                segment_bits=3,
                trig_bits=10,
            ),
            "paper": golden_rope.RopeConfig(),
            "theta10000": golden_rope.RopeConfig(frozen=True),
            "theta500000_llama3": golden_rope.RopeConfig(frozen=True, theta=500_000, scaling="llama3"),
            "lane": golden_rope.RopeConfig(lanes=1),
            "pipeline": _PIPELINE.rope,
        },
    ),
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
            "pipeline": _PIPELINE.fwht,
            "pipeline_product": _PIPELINE.product_fwht,
            "peer64": golden_fwht.FwhtConfig(size=64, in_bits=8, stages_per_cycle=6),
            "registered64": golden_fwht.FwhtConfig(size=64, in_bits=8),
            "peer128": golden_fwht.FwhtConfig(in_bits=8),
            "folded128": golden_fwht.FwhtConfig(in_bits=8, form="folded", butterflies=64),
        },
        peers={
            "peer64": ("parallel, from formula, 64 points of 8 bit", 17060),
            "registered64": ("parallel, from formula, 64 points of 8 bit", 17060),
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

UNITS: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def find(name: str) -> Entry:
    """The entry of a unit. ValueError, one line, if there is none of that name."""
    if name not in UNITS:
        raise ValueError(f"there is no unit {name!r}; the catalog has {', '.join(UNITS)}")
    return UNITS[name]
