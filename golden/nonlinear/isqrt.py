"""Integer square root and reciprocal square root of an unsigned word, as RMSNorm needs them.

``root``
    ``floor(sqrt(x))``, exact: by the digit recurrence (one root bit a step), or by Newton-Raphson with integer
    division from a power-of-two seed (*LLM Inference in a Flash* section 3.1.3), whose fixpoint is the same floor.
``reciprocal``
    ``1 / sqrt(x)`` as a *split* value ``mantissa * 2**-(exponent + root_bits - 1)``. An even shift first brings x to
    ``f * 2**(2 * exponent)`` with f in [1/4, 1), so that the relative error does not depend on x. Then either the
    paper's way, Newton-Raphson root and one division ``2**(2 * root_bits - 1) / root``, or a small table of seeds and
    a Newton step of three multiplications, without divider.

Largest relative error over all normalised radicands at ``root_bits = 16``: table with 48 seeds and one step 3.7e-4,
with 12 seeds 5.1e-3, with 192 seeds or with two steps 5.4e-5; Newton-Raphson and division 3.1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from math import isqrt as exact_isqrt

import numpy as np
from numpy.typing import ArrayLike

from golden import fixedpoint
from golden.config import UnitConfig, choice, flag, integer
from golden.fixedpoint import Int, bit_length, check, round_shift, within


@dataclass(frozen=True)
class IsqrtConfig(UnitConfig):
    """Configuration of the square root unit.

    Input: ``x``, unsigned ``in_bits``. Output: ``root``, unsigned ``width``, and for the reciprocal ``exponent``.
    Rounding: the root floors by definition, and so does the division; of the table form the two inner products of a
    Newton step are truncated and its last rounds half up. A mantissa that would reach ``2**root_bits`` saturates.
    """

    lanes: int = integer(1, 1, 64, "elements per beat")
    form: str = choice("digit", ("digit", "newton", "table"), "algorithm")
    output: str = choice("root", ("root", "reciprocal"), "floor of the square root, or its reciprocal (split)")
    in_bits: int = integer(32, 2, 62, "width of x")
    root_bits: int = integer(16, 8, 20, "reciprocal: bits of the mantissa")
    address_bits: int = integer(6, 3, 8, "table: 3/4 * 2**address_bits seeds")
    seed_bits: int = integer(8, 4, 8, "table: bits of a seed")
    steps: int = integer(1, 0, 2, "table: Newton steps")
    digits: int = integer(1, 1, 16, "digit: root bits per pipeline stage")
    serial: bool = flag(False, "one beat at a time through serial cores instead of a pipeline")

    def validate(self) -> None:
        if self.form == "digit" and self.output != "root":
            raise ValueError(f"output must be root for the digit form, not {self.output}")
        if self.form == "table" and self.output != "reciprocal":
            raise ValueError(f"output must be reciprocal for the table form, not {self.output}")
        if self.form == "newton" and not self.serial:
            raise ValueError("serial must be true for the newton form: its divisions run one bit a cycle")
        # Widths that hold whatever the data: those of the exponent, and in a Newton step of the table form.
        bits = self.root_bits
        within("exponent", 0, (self.in_bits + 1) >> 1, self.exponent_bits, signed=False)
        within("square", 0, ((1 << bits) - 1) ** 2 >> bits, bits, signed=False)
        within("factor", 0, 3 << bits, bits + 2, signed=False)

    @cached_property
    def half_bits(self) -> int:
        """Bits of the square root that the newton and digit forms find."""
        return self.root_bits if self.output == "reciprocal" else (self.in_bits + 1) // 2

    @cached_property
    def width(self) -> int:
        """Width of ``root``: the root itself, or the reciprocal's mantissa."""
        return self.half_bits

    @cached_property
    def even_bits(self) -> int:
        """``in_bits`` rounded up to even: the word in which x is normalised."""
        return self.in_bits + self.in_bits % 2

    @cached_property
    def normal_bits(self) -> int:
        """Width of the normalised radicand: as much of x as the form looks at."""
        return self.root_bits + 2 if self.form == "table" else 2 * self.root_bits

    @cached_property
    def exponent_bits(self) -> int:
        return (self.even_bits // 2).bit_length()

    @cached_property
    def iterations(self) -> int:
        """Newton-Raphson iterations that reach the floor from any radicand: a proven bound, not a test.

        The seed is the power of two with ``sqrt(x) < seed <= 2 * sqrt(x)``: a relative error of at most 1, and an
        iteration takes an error r to ``r**2 / (2 * (1 + r))``. Integer iterates lie at or below the real ones, and
        never below the floor. Once the real one is within 1 of the root, the integer is at most the floor plus 1,
        and from there one more iteration arrives, because an iterate above the floor always falls.
        """
        error, count = Fraction(1), 0
        while error * (1 << self.half_bits) >= 1:
            error, count = error * error / (2 * (1 + error)), count + 1
        return count + 1

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """``1 / (2 * sqrt(f))`` in the middle of each step of f, with ``seed_bits`` fraction bits, for addresses
        from ``2**(address_bits - 2)``; rounded from exact integers."""
        steps, scale = 1 << self.address_bits, 2 * self.seed_bits + 2
        result = []
        for k in range(steps // 4, steps):
            # (2**seed_bits / (2 * sqrt((k + 1/2) / steps)))**2 = 4**seed_bits * steps / (4 * k + 2)
            twice = exact_isqrt((steps << scale) // (4 * k + 2))
            result.append(min((twice + 1) >> 1, (1 << self.seed_bits) - 1))
        return tuple(result)


def normalise(config: IsqrtConfig, x: ArrayLike) -> tuple[Int, Int]:
    """``x = f * 2**(2 * exponent)`` with f in [1/4, 1): returns f in ``normal_bits`` fraction bits (what lies below
    is cut) and the exponent. 0 gives (0, 0)."""
    x = check("x", x, config.in_bits, signed=False)
    exponent = (bit_length(x) + 1) >> 1
    normal = x << (config.even_bits - 2 * exponent)
    spare = config.normal_bits - config.even_bits
    normal = normal << spare if spare >= 0 else normal >> -spare
    return check("normal", normal, config.normal_bits, signed=False), exponent


def newton_root(config: IsqrtConfig, radicand: ArrayLike) -> Int:
    """Floor of the square root by ``iterations`` steps ``next = (root + radicand // root) >> 1`` from the power of
    two above; a step that would not fall is not taken (that is where the fixpoint lies)."""
    n = config.half_bits
    radicand = check("radicand", radicand, 2 * n, signed=False)
    root = np.int64(1) << ((bit_length(radicand) + 1) >> 1)
    for _ in range(config.iterations):
        # The quotient of a root that has fallen to 0 (radicand 0) is never used.
        quotient = check("quotient", radicand // np.maximum(root, 1), n + 1, signed=False)
        root = check("root", np.minimum(root, (root + quotient) >> 1), n + 1, signed=False)
    return check("root", root, n, signed=False)


@lru_cache(maxsize=16)
def _seeds(config: IsqrtConfig) -> Int:
    """Seeds by address: 0 for radicands below 1/4, which only 0 is."""
    table = np.array([0] * (1 << (config.address_bits - 2)) + list(config.seeds), dtype=np.int64)
    table.setflags(write=False)
    return table


def table_reciprocal(config: IsqrtConfig, normal: ArrayLike) -> Int:
    """``2**root_bits / (2 * sqrt(f))`` from the seed table and ``steps`` Newton steps; 0 for 0.

    One step: ``square = y*y >> R``; ``product = 4f * square >> R``; ``y = rs(y * (3 * 2**R - product), R + 1)``.
    """
    bits = config.root_bits
    normal = check("normal", normal, config.normal_bits, signed=False)
    y = _seeds(config)[normal >> (config.normal_bits - config.address_bits)] << (bits - config.seed_bits)
    for _ in range(config.steps):
        square = y * y >> bits
        product = check("product", normal * square >> bits, bits + 1, signed=False)
        factor = (3 << bits) - product
        y = np.minimum(round_shift(y * factor, bits + 1), (1 << bits) - 1)
    return check("y", y, bits, signed=False)


def reciprocal(config: IsqrtConfig, x: ArrayLike) -> tuple[Int, Int]:
    """``1 / sqrt(x) ~ mantissa * 2**-(exponent + root_bits - 1)``.

    Returns (mantissa, exponent); the mantissa is about ``2**(root_bits - 1)`` to ``2**root_bits``. 0 gives (0, 0).
    """
    normal, exponent = normalise(config, x)
    if config.form == "table":
        return table_reciprocal(config, normal), exponent
    bits = config.root_bits
    root = newton_root(config, normal)
    mantissa = np.minimum((1 << (2 * bits - 1)) // np.maximum(root, 1), (1 << bits) - 1)
    return check("mantissa", np.where(root == 0, 0, mantissa), bits, signed=False), exponent


def isqrt(config: IsqrtConfig, x: ArrayLike) -> Int | tuple[Int, Int]:
    """What the unit computes: the root, or (mantissa, exponent) of the reciprocal, of each element."""
    if config.output == "reciprocal":
        return reciprocal(config, x)
    if config.form == "newton":
        return newton_root(config, check("x", x, config.in_bits, signed=False))
    return fixedpoint.isqrt(check("x", x, config.in_bits, signed=False))
