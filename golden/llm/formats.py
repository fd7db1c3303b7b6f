"""The number formats of the integer pipeline: one configuration for a model, and every unit's configuration from it.

==================  =========================================================================================
tensor              format
==================  =========================================================================================
residual stream,    INT32 with ``fraction_bits`` = 16 fraction bits: the *wide* format.  The residual unit saturates,
linear outputs      and so do the linear layers; nothing wraps.
norm inputs         token-wise INT16: one power of two per token (requantizer, form ``token``)
linear inputs       INT8 with a dynamic scale c * 2**e per token and group (requantizer, form ``group``)
weights             INT8, with an unsigned ``multiplier_bits`` multiplier per row and group, one shift per matrix
queries, keys       token-wise INT16 per head, rotated (17 bits), optionally Walsh-Hadamard-transformed, then
                    ``query_bits`` and ``key_bits`` with one scale c * 2**e per token and head
values              ``value_bits`` with one scale c * 2**e per token and head
scores              INT16 with ``score_fraction_bits`` fraction bits, in powers of two; they saturate
probabilities       unsigned 16 bits
context             wide
gate                INT16 with ``gate_fraction_bits`` fraction bits; it saturates
up                  token-wise INT16
silu(gate) * up     exact, INT32; optionally Walsh-Hadamard-transformed in blocks of ``product_block``
logits              wide
==================  =========================================================================================

Source: *LLM Inference in a Flash* section 3.1 for the widths; scales, base 2 and fraction bits are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from golden.config import UnitConfig, choice, flag, integer
from golden.llm.config import ModelConfig
from golden.llm.linear import LinearConfig
from golden.nonlinear.requantize import RequantizeConfig
from golden.nonlinear.residual import ResidualConfig
from golden.nonlinear.rmsnorm import RmsNormConfig, integer_eps
from golden.nonlinear.rope import RopeConfig
from golden.nonlinear.silu import SiluConfig
from golden.nonlinear.softmax import SoftmaxConfig
from golden.rotated.fwht import FwhtConfig

LANES = 8


@dataclass(frozen=True)
class Formats(UnitConfig):
    """What may be chosen about a model's number formats.

    Raises
    ------
    ValueError
        One line with the field, the value and what is accepted.
    """

    group: int = integer(64, 4, 1024, "elements of a linear layer's input that share a scale")
    activation_bits: int = integer(8, 4, 12, "width of a linear layer's input")
    weight_bits: int = integer(8, 4, 8, "width of a weight")
    multiplier_bits: int = integer(8, 3, 12, "width of a weight group's multiplier")
    query_bits: int = integer(8, 4, 16, "width of a query in the scores")
    key_bits: int = integer(8, 4, 16, "width of a stored key")
    value_bits: int = integer(8, 4, 16, "width of a stored value")
    transform: bool = flag(True, "Walsh-Hadamard-transform queries and keys")
    transform_product: bool = flag(True, "Walsh-Hadamard-transform silu(gate) * up in blocks")
    fraction_bits: int = integer(16, 8, 24, "fraction bits of the wide format")
    norm_bits: int = integer(16, 8, 24, "width of a normalised element before it is requantized")
    root: str = choice("table", ("table", "newton"), "reciprocal square root of RMSNorm")
    score_fraction_bits: int = integer(6, 0, 14, "fraction bits of a score")
    gate_fraction_bits: int = integer(8, 0, 14, "fraction bits of a gate")

    def validate(self) -> None:
        if self.norm_bits <= self.activation_bits:
            raise ValueError(f"norm_bits must be above activation_bits = {self.activation_bits}, not {self.norm_bits}")
        gate, wide = self.gate_fraction_bits, self.fraction_bits
        if gate > wide:
            raise ValueError(f"gate_fraction_bits must be at most fraction_bits = {wide}, not {gate}")

    def units(self, model: ModelConfig) -> Units:
        """Configurations of the units that this model needs."""
        return Units(self, model)


@dataclass(frozen=True)
class Units:
    """The configuration of every unit, by the place it has in a layer."""

    formats: Formats
    model: ModelConfig

    def __post_init__(self) -> None:
        head_dim = self.model.head_dim
        if self.formats.transform and head_dim & (head_dim - 1):
            raise ValueError(f"transform needs a head_dim that is a power of two, not {head_dim}")
        # Built for their checks: what no unit can do is refused before any work.
        for name in ("norm", "head_norm", "rope", "query", "key", "value", "softmax", "context", "silu", "product"):
            getattr(self, name)
        for inputs in (self.model.dim, self.model.query_dim, self.model.hidden):
            self.linear(inputs)
        _ = self.eps, self.head_eps

    def _row(self, longest: int) -> RequantizeConfig:
        """Wide rows of up to ``longest`` elements to token-wise INT16."""
        whole = -(-longest // LANES) * LANES
        return RequantizeConfig(lanes=LANES, form="token", in_bits=32, out_bits=16, max_row=whole)

    def _group(self, in_bits: int, out_bits: int, group: int) -> RequantizeConfig:
        lanes = gcd(LANES, group)
        return RequantizeConfig(lanes=lanes, form="group", in_bits=in_bits, out_bits=out_bits, group=group)

    def linear(self, inputs: int) -> LinearConfig:
        f = self.formats
        return LinearConfig(
            inputs=inputs,
            group=min(f.group, inputs),
            activation_bits=f.activation_bits,
            weight_bits=f.weight_bits,
            multiplier_bits=f.multiplier_bits,
        )

    @cached_property
    def norm_row(self) -> RequantizeConfig:
        return self._row(self.model.dim)

    @cached_property
    def norm(self) -> RmsNormConfig:
        f, group = self.formats, min(self.formats.group, self.model.dim)
        return RmsNormConfig(
            lanes=gcd(LANES, group),
            hidden=self.model.dim,
            form=f.root,
            out_bits=f.norm_bits,
            out="group",
            group=group,
            group_bits=f.activation_bits,
        )

    @cached_property
    def head_row(self) -> RequantizeConfig:
        """Queries and keys of a head."""
        return self._row(self.model.head_dim)

    @cached_property
    def head_norm(self) -> RmsNormConfig:
        return RmsNormConfig(lanes=LANES, hidden=self.model.head_dim, form=self.formats.root)

    @cached_property
    def rope(self) -> RopeConfig:
        # A turn lengthens an element by up to sqrt(2): one bit more, so that nothing saturates.
        return RopeConfig(lanes=LANES, head_dim=self.model.head_dim, data_bits=16, out_bits=17)

    @cached_property
    def fwht(self) -> FwhtConfig:
        return FwhtConfig(size=self.model.head_dim, in_bits=self.rope.out_bits)

    @property
    def turned_bits(self) -> int:
        """Width of a query or key before it is requantized."""
        return self.fwht.out_bits if self.formats.transform else self.rope.out_bits

    @cached_property
    def query(self) -> RequantizeConfig:
        return self._group(self.turned_bits, self.formats.query_bits, self.model.head_dim)

    @cached_property
    def key(self) -> RequantizeConfig:
        return self._group(self.turned_bits, self.formats.key_bits, self.model.head_dim)

    @cached_property
    def value(self) -> RequantizeConfig:
        return self._group(32, self.formats.value_bits, self.model.head_dim)

    @cached_property
    def softmax(self) -> SoftmaxConfig:
        longest = min(max(self.model.max_positions, LANES), 1 << 18)
        return SoftmaxConfig(
            lanes=LANES, fraction_bits=self.formats.score_fraction_bits, buffer=min(longest, 4096), max_row=longest
        )

    @cached_property
    def context(self) -> RequantizeConfig:
        f = self.formats
        return self._group(32, f.activation_bits, min(f.group, self.model.query_dim))

    @cached_property
    def gate(self) -> RequantizeConfig:
        """The gate to INT16: a shift (its multiplier is 1)."""
        return RequantizeConfig(lanes=LANES, form="static", in_bits=32, out_bits=16, multiplier_bits=1)

    @cached_property
    def up(self) -> RequantizeConfig:
        return self._row(self.model.hidden)

    @cached_property
    def silu(self) -> SiluConfig:
        return SiluConfig(lanes=LANES, gate_fraction_bits=self.formats.gate_fraction_bits)

    @property
    def product_block(self) -> int:
        """Elements of silu(gate) * up that are transformed together: the largest power of two that divides a row and
        fits a group; 1 without transform."""
        hidden, group = self.model.hidden, self.formats.group
        return min(hidden & -hidden, 1 << (group.bit_length() - 1), 256) if self.formats.transform_product else 1

    @cached_property
    def product_fwht(self) -> FwhtConfig:
        """Only with a ``product_block`` above 1."""
        return FwhtConfig(size=self.product_block, in_bits=self.silu.out_bits)

    @cached_property
    def product(self) -> RequantizeConfig:
        f, block = self.formats, self.product_block
        in_bits = self.product_fwht.out_bits if block > 1 else self.silu.out_bits
        return self._group(in_bits, f.activation_bits, min(f.group, self.model.hidden))

    @cached_property
    def residual(self) -> ResidualConfig:
        return ResidualConfig(lanes=LANES)

    @property
    def eps(self) -> int:
        """The norms' ``eps`` for rows with an exponent of 0."""
        return integer_eps(self.norm, self.model.norm_eps, self.model.dim, self.wide_scale)

    @property
    def head_eps(self) -> int:
        """The same of the heads' own norms."""
        return integer_eps(self.head_norm, self.model.norm_eps, self.model.head_dim, self.wide_scale)

    # -- scales of what is not on the wide scale -----------------------------------------------------------------------
    @property
    def wide_scale(self) -> float:
        """Real value of 1 in the wide format."""
        return 2.0**-self.formats.fraction_bits

    @property
    def product_scale(self) -> float:
        """Real value of 1 in silu(gate) * up, apart from up's own exponent."""
        return 2.0 ** -(self.formats.gate_fraction_bits + self.formats.fraction_bits)


SCHEMES: dict[str, Formats] = {
    "integer": Formats(),
    "r1": Formats(transform_product=False),
    "r2": Formats(group=32, query_bits=10, key_bits=10, value_bits=10, multiplier_bits=10, transform_product=False),
    "paper": Formats(
        query_bits=14, key_bits=14, value_bits=14, transform=False, transform_product=False, root="newton"
    ),
}
"""Formats that have a name: the project's own, two that its
specification measured first, and the paper's (token-wise INT16 inside, Newton-Raphson)."""
