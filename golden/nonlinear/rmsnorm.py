"""Integer RMSNorm of a row: ``out_j = x_j / sqrt(sum(x**2) + eps) * G_j``, rounded to integers.

The scale of a token-wise quantised row cancels, so that x needs none: with ``s`` the scale of x and ``t`` that of the
output, the table holds ``G_j = round(gamma_j * sqrt(n) / t * 2**shift)`` and the row's ``eps`` is
``round(n * epsilon / s**2)`` (:func:`quantize_gamma`, :func:`integer_eps`).

==============  =============================================================  ====================================
intermediate    formula                                                        width
==============  =============================================================  ====================================
square          ``x * x``                                                      ``2 * in_bits - 1``, unsigned
total           ``eps + sum(square)``, exact                                   ``total_bits``, unsigned
y, h            ``1 / sqrt(total) ~ y * 2**-(h + root_bits - 1)``              ``root_bits``, see ``isqrt``
product         ``x * y``                                                      ``in_bits + root_bits``, signed
u               ``rs(product, root_bits - 1 - guard_bits)``                    ``in_bits + guard_bits + 1``, signed
scaled          ``u * G``                                                      sum of both, signed
down            ``guard_bits + h + shift``, one per row, 0 to ``scaled_bits``  ``down_bits``, unsigned
out             ``sat(rs(scaled, down))``                                      ``out_bits``, signed
==============  =============================================================  ====================================

The root is the paper's (section 3.1.3: Newton-Raphson with integer division, then one division for the reciprocal) or
a table of seeds with Newton steps; both are in :mod:`golden.nonlinear.isqrt`, with their errors (at 16 bits 3.1e-5 and
3.7e-4, common to all elements of a row). ``u`` keeps ``guard_bits`` more than x itself, so that it adds
``2**-(guard_bits + 1)`` of a unit of x to an element's error. Rounding is half up, then saturation.
A row of zeros gives zeros. ``out = group`` adds the group-wise form of :mod:`golden.nonlinear.requantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, bounds, check, round_shift, saturate, within
from golden.nonlinear.isqrt import IsqrtConfig, reciprocal
from golden.nonlinear.requantize import RequantizeConfig, Requantized, requantize


@dataclass(frozen=True)
class RmsNormConfig(UnitConfig):
    """Configuration of the RMSNorm unit.

    Input: x, signed ``in_bits``, rows of 1 to ``hidden`` elements; per row ``eps``, unsigned ``eps_bits``, and
    ``shift``, signed ``shift_bits``. Table: G, signed ``gamma_bits``, one word of ``lanes`` elements per address.

    Raises
    ------
    ValueError
        Beside the range of each field, what :class:`RequantizeConfig` says when ``out`` is group.
    """

    lanes: int = integer(8, 1, 64, "elements per beat")
    in_bits: int = integer(
        16, 4, 24, "width of x: more than 16 for rows with outlier channels beyond 1000 times the rest"
    )
    hidden: int = integer(4096, 1, 16384, "longest row")
    gamma_bits: int = integer(16, 2, 24, "width of the table's G")
    form: str = choice("table", ("table", "newton"), "reciprocal square root")
    root_bits: int = integer(16, 8, 20, "bits of the reciprocal root's mantissa")
    address_bits: int = integer(6, 3, 8, "table: 3/4 * 2**address_bits seeds of the root")
    steps: int = integer(1, 0, 2, "table: Newton steps")
    guard_bits: int = integer(2, 0, 7, "bits that u keeps below x")
    out_bits: int = integer(16, 4, 24, "width of the normalised element")
    out: str = choice("token", ("token", "group"), "output as it is, or requantised by groups")
    group: int = integer(128, 1, 1024, "group: elements that share a scale, a multiple of lanes")
    group_bits: int = integer(8, 4, 16, "group: width of q")
    overlap: bool = flag(False, "take the next row in while one is given out")

    def validate(self) -> None:
        if self.out == "group":
            self.requantizer  # noqa: B018 - built for its checks
        # The words of x, y and G give the ranges of what is computed of them, whatever the data.
        low, high = (edge * ((1 << self.root_bits) - 1) for edge in bounds(self.in_bits))
        half = 1 << self.product_shift >> 1
        within("square", 0, bounds(self.in_bits)[0] ** 2, self.square_bits, signed=False)
        within("product", low, high, self.product_bits)
        within("u", (low + half) >> self.product_shift, (high + half) >> self.product_shift, self.u_bits)
        reach = 1 << (self.u_bits + self.gamma_bits - 2)
        within("scaled", -reach, reach, self.scaled_bits)
        within("down", 0, self.scaled_bits, self.down_bits, signed=False)

    @cached_property
    def beats(self) -> int:
        """Beats of the longest row."""
        return -(-self.hidden // self.lanes)

    @cached_property
    def square_bits(self) -> int:
        return 2 * self.in_bits - 1

    @cached_property
    def eps_bits(self) -> int:
        """Width of ``eps``: that of the largest sum of squares, ``hidden * 2**(2 * in_bits - 2)``."""
        return (self.hidden << (2 * self.in_bits - 2)).bit_length()

    @cached_property
    def total_bits(self) -> int:
        """Width of sum and eps together."""
        return ((self.hidden << (2 * self.in_bits - 2)) + (1 << self.eps_bits) - 1).bit_length()

    @cached_property
    def root(self) -> IsqrtConfig:
        """Configuration of the reciprocal square root."""
        return IsqrtConfig(
            form=self.form,
            output="reciprocal",
            in_bits=self.total_bits,
            root_bits=self.root_bits,
            address_bits=self.address_bits,
            steps=self.steps,
            serial=True,
        )

    @cached_property
    def product_bits(self) -> int:
        return self.in_bits + self.root_bits

    @cached_property
    def product_shift(self) -> int:
        return self.root_bits - 1 - self.guard_bits

    @cached_property
    def u_bits(self) -> int:
        return self.in_bits + self.guard_bits + 1

    @cached_property
    def scaled_bits(self) -> int:
        return self.u_bits + self.gamma_bits

    @cached_property
    def shift_bits(self) -> int:
        """Width of the row's ``shift``: enough to reach a shift of 0 and one that leaves nothing."""
        return self.scaled_bits.bit_length() + 1

    @cached_property
    def down_bits(self) -> int:
        """Width of ``down``, clamped to ``scaled_bits``: a larger shift leaves nothing either."""
        return self.scaled_bits.bit_length()

    @cached_property
    def requantizer(self) -> RequantizeConfig:
        """Configuration of the group-wise stage."""
        return RequantizeConfig(
            lanes=self.lanes, form="group", in_bits=max(8, self.out_bits), out_bits=self.group_bits, group=self.group
        )


def normalize(
    config: RmsNormConfig,
    x: ArrayLike,
    gamma: ArrayLike,
    eps: ArrayLike = 0,
    shift: ArrayLike = 0,
    keep: ArrayLike | None = None,
) -> Int:
    """The normalised elements, signed ``out_bits``, before any requantisation.

    Parameters
    ----------
    x : int array (…, n), n in 1..hidden
    gamma : int array (n,) or longer
    eps, shift : int arrays (…): one per row
    keep : bool array (…, n), optional
        Elements that count; the others are taken as 0. All by default.
    """
    x = check("x", x, config.in_bits)
    if keep is not None:
        x = np.where(keep, x, 0)
    gamma = check("gamma", gamma, config.gamma_bits)
    if x.ndim == 0 or gamma.ndim == 0:
        raise ValueError("x and gamma must be rows, not single numbers")
    n = x.shape[-1]
    if not 1 <= n <= config.hidden:
        raise ValueError(f"a row must have 1..{config.hidden} elements, not {n}")
    if gamma.shape[-1] < n:
        raise ValueError(f"gamma must have at least {n} elements, not {gamma.shape[-1]}")
    eps = check("eps", eps, config.eps_bits, signed=False)
    shift = check("shift", shift, config.shift_bits)

    square = x * x
    total = check("total", np.add.reduce(square, axis=-1) + eps, config.total_bits, signed=False)
    y, h = reciprocal(config.root, total)
    u = round_shift(x * y[..., None], config.product_shift)
    scaled = u * gamma[:n]
    down = np.minimum(np.maximum(config.guard_bits + h + shift, 0), config.scaled_bits)
    return saturate(round_shift(scaled, down[..., None]), config.out_bits)


def rmsnorm(
    config: RmsNormConfig,
    x: ArrayLike,
    gamma: ArrayLike,
    eps: ArrayLike = 0,
    shift: ArrayLike = 0,
    keep: ArrayLike | None = None,
) -> Int | Requantized:
    """What the unit gives out: :func:`normalize`, and with ``out = group`` its group-wise requantisation."""
    out = normalize(config, x, gamma, eps, shift, keep)
    return requantize(config.requantizer, out) if config.out == "group" else out


# -- what the controller prepares offline ------------------------------------------------------------------------------
def quantize_gamma(config: RmsNormConfig, gamma: ArrayLike, n: int, out_scale: float) -> tuple[Int, int]:
    """(G, shift) for float weights: ``G = round(gamma * sqrt(n) / out_scale * 2**shift)``, with the largest shift at
    which all of G fits its word and the row's field allows. Runs at model load, not in the pipeline."""
    real: Any = np.asarray(gamma, np.float64) * np.sqrt(n) / out_scale
    low, high = bounds(config.gamma_bits)
    first, last = bounds(config.shift_bits)
    for shift in range(last, first - 1, -1):
        scaled = np.round(np.ldexp(real, shift))
        if not real.size or (scaled.min() >= low and scaled.max() <= high):
            return scaled.astype(np.int64), shift
    raise ValueError(f"gamma / out_scale reaches {float(np.abs(real).max()):g}, too much for any shift")


def integer_eps(config: RmsNormConfig, epsilon: float, n: int, scale: float) -> int:
    """The row's ``eps``, ``round(n * epsilon / scale**2)``, for the model's epsilon when x stands for ``x * scale``.

    Raises OverflowError if it exceeds its word. That needs a row whose largest element is below ``sqrt(epsilon)``
    when it fills its own word: such a row takes a coarser scale.
    """
    eps = round(n * epsilon / scale**2)
    if eps >= 1 << config.eps_bits:
        raise OverflowError(
            f"eps would be {eps}, which does not fit unsigned({config.eps_bits}): coarsen the row's scale"
        )
    return eps
