"""Linear layer on group-wise INT8: what the compute-in-flash array and its scale stage compute for one matrix.

The array gives one INT32 sum per output and group; everything behind it is a small multiplier and a shift::

    acc[o, g]    = sum of q[k] * w[o, k] over the group                     exact, ``acc_bits``
    scaled[o, g] = acc[o, g] * c[g] * m[o, g]                               ``scaled_bits``
    base         = max(e) - span                                            one per row of activations
    term[o, g]   = rs(scaled[o, g], base - e[g])                            to the left for e[g] > base, ``term_bits``
    total[o]     = sum of term[o, g] over the groups                        ``total_bits``
    y[o]         = sat(sat(rs(total[o], down - base)) + bias[o])            ``out_bits``

An activation is ``q * c * 2**e * input_scale`` (group form of :mod:`golden.nonlinear.requantize`), a weight is
``w * m * 2**-down * output_scale / input_scale``. The multipliers m are chosen *before* the weights are rounded
(:func:`quantize_weights`), so that their own rounding costs nothing. A group more than ``span`` octaves finer than the
row's coarsest is rounded to that grid: the accumulator's width is a constant, whatever the activations.

Source: *LLM Inference in a Flash* section 3.1.2 (group-wise INT8 by INT8, INT32 sums).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from golden.config import UnitConfig, integer
from golden.fixedpoint import (
    EXACT_FLOAT64,
    Int,
    Stationary,
    as_int,
    bounds,
    check,
    matmul,
    round_shift,
    saturate,
    saturating_shift,
)

Array = NDArray[np.float32]

#: Matrices of up to this many weights keep the folded form that BLAS multiplies with; larger ones fold block by block.
RESIDENT_WEIGHTS = 1 << 24
#: Weights folded at a time in a larger matrix.
BLOCK_WEIGHTS = 1 << 22


@dataclass(frozen=True)
class LinearConfig(UnitConfig):
    """Configuration of a linear layer.

    Input: q, signed ``activation_bits``; per group c (4 to 7) and e. Weights: signed ``weight_bits``; per output and
    group m, unsigned ``multiplier_bits``. Output: y, signed ``out_bits``.
    Rounding: half up where a group is much finer than the row's coarsest, and once for y, which saturates before and
    after the bias.

    Raises
    ------
    ValueError
        Beside the range of each field: group sums that could leave INT32, totals that could leave 2**53 (which is what
        the vectorised products here hold exactly).
    """

    inputs: int = integer(4096, 1, 1 << 18, "elements of a row")
    group: int = integer(64, 1, 1 << 18, "elements that share a scale")
    activation_bits: int = integer(8, 4, 12, "width of q")
    weight_bits: int = integer(8, 4, 8, "width of w")
    multiplier_bits: int = integer(8, 3, 12, "width of m")
    span: int = integer(8, 0, 16, "octaves below the coarsest group's scale that are kept exactly")
    out_bits: int = integer(32, 8, 40, "width of y")

    def validate(self) -> None:
        if self.acc_bits > 32:
            raise ValueError(f"group must be so small that its sums fit signed(32), not {self.group}")
        reach = bounds(self.activation_bits)[1] * 7 << self.span
        if reach * self.weight_limit * ((1 << self.multiplier_bits) - 1) * self.inputs >= EXACT_FLOAT64:
            raise ValueError(f"span must be so small that no total exceeds 2**53, not {self.span}")

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def weight_limit(self) -> int:
        """Largest magnitude of w."""
        return bounds(self.weight_bits)[1]

    @property
    def acc_bits(self) -> int:
        """Width of a group's sum: both operands are symmetric, at most ``2**(bits-1) - 1`` in magnitude."""
        return (bounds(self.activation_bits)[1] * self.weight_limit * min(self.group, self.inputs)).bit_length() + 1

    @property
    def scaled_bits(self) -> int:
        return self.acc_bits + 3 + self.multiplier_bits

    @property
    def term_bits(self) -> int:
        return self.scaled_bits + self.span

    @property
    def total_bits(self) -> int:
        return self.term_bits + (self.groups - 1).bit_length()


@dataclass(frozen=True)
class LinearWeights:
    """A quantized matrix: w int8 (outputs, inputs), m uint16 (outputs, groups), the matrix's ``down`` shift (of several
    matrices that were :func:`joined <join>`, one for each output), and bias int32 (outputs,) on the output's scale, or
    None."""

    config: LinearConfig
    w: NDArray[np.int8]
    m: NDArray[np.uint16]
    down: int | Int
    bias: NDArray[np.int32] | None = None
    _kept: list[Stationary] = field(default_factory=list, repr=False, compare=False)

    @property
    def outputs(self) -> int:
        return self.w.shape[0]

    @property
    def bits(self) -> int:
        """Size in bits of weights, multipliers and bias."""
        c, bias = self.config, 0 if self.bias is None else 32 * self.outputs
        return self.w.size * c.weight_bits + self.m.size * c.multiplier_bits + bias

    def _folded(self, first: int, last: int) -> Stationary:
        m = np.repeat(self.m[first:last].astype(np.int64), self.config.group, axis=1)[:, : self.config.inputs]
        return Stationary((self.w[first:last] * m).T)

    def blocks(self) -> list[tuple[int, int]]:
        """Ranges of outputs that are multiplied at a time."""
        step = self.outputs if self.w.size <= RESIDENT_WEIGHTS else max(1, BLOCK_WEIGHTS // self.config.inputs)
        return [(first, min(first + step, self.outputs)) for first in range(0, self.outputs, step)]

    def folded(self, first: int, last: int) -> Stationary:
        """``w * m`` of some outputs, (inputs, outputs), kept where the whole matrix is small."""
        if last - first < self.outputs:
            return self._folded(first, last)
        if not self._kept:
            self._kept.append(self._folded(first, last))
        return self._kept[0]


def join(matrices: Sequence[LinearWeights]) -> LinearWeights:
    """Matrices that read the same rows, as one whose outputs are theirs one after the other."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    bias = None
    if any(matrix.bias is not None for matrix in matrices):
        none = [np.zeros(matrix.outputs, np.int32) for matrix in matrices]
        bias = np.concatenate([x if m.bias is None else m.bias for m, x in zip(matrices, none, strict=True)])
    return LinearWeights(
        first.config,
        np.concatenate([matrix.w for matrix in matrices]),
        np.concatenate([matrix.m for matrix in matrices]),
        np.concatenate([np.full(matrix.outputs, matrix.down) for matrix in matrices]),
        bias,
    )


@dataclass(frozen=True)
class Aligned:
    """Rows of activations on their grids, shared by the matrices that read them: q (rows, inputs), base (rows,), and
    ``x = q * c * 2**(e - base)``, where that is whole. ``rounded`` are the rows with a group finer than the grid, with
    c and ``left = e - base`` of their groups."""

    shape: tuple[int, ...]
    q: Int
    base: Int
    x: Int
    rounded: Int
    c: Int
    left: Int


def align(config: LinearConfig, q: ArrayLike, e: ArrayLike, c: ArrayLike) -> Aligned:
    """Put rows (…, inputs), with scales (…, groups), on their grids.

    Raises OverflowError for values outside their widths, ValueError for shapes that do not belong together.
    """
    q, e, c = check("q", q, config.activation_bits), as_int("e", e), check("c", c, 3, signed=False)
    if q.shape[-1:] != (config.inputs,) or e.shape != (*q.shape[:-1], config.groups) or c.shape != e.shape:
        raise ValueError(
            f"q must be (…, {config.inputs}) with scales (…, {config.groups}), not {q.shape}, {e.shape}, {c.shape}"
        )
    rows = q.reshape(-1, config.inputs)
    e, c = e.reshape(-1, config.groups), c.reshape(-1, config.groups)
    base = np.maximum.reduce(e, axis=1) - config.span
    left = e - base[:, None]
    rounded, none = np.empty(0, np.int64), left[:0]
    if left.item(left.argmin()) >= 0:
        factor = c << left
    else:
        fine = per_element(config, left < 0) & (rows != 0)  # a group that is all zeros lies on any grid
        rounded = np.flatnonzero(fine.any(axis=1))
        factor = c << np.maximum(left, 0)
    x = rows * (factor if config.groups == 1 else per_element(config, factor))
    few = (c[rounded], left[rounded]) if rounded.size else (none, none)
    return Aligned(q.shape[:-1], rows, base, x, rounded, *few)


def per_element(config: LinearConfig, values: NDArray[Any]) -> NDArray[Any]:
    """Spread values per group, (rows, groups), over the elements of their rows: (rows, inputs)."""
    return np.repeat(values, config.group, axis=1)[:, : config.inputs]


def linear(weights: LinearWeights, q: ArrayLike, e: ArrayLike, c: ArrayLike) -> Int:
    """Rows (…, inputs), with scales (…, groups), times a matrix: (…, outputs), signed ``out_bits``.

    Raises what :func:`align` raises.
    """
    return project(weights, align(weights.config, q, e, c))


def project(weights: LinearWeights, rows: Aligned) -> Int:
    """:func:`linear` of rows that are aligned already."""
    config = weights.config
    blocks = weights.blocks()
    parts = [weights.folded(first, last).product(rows.x) for first, last in blocks]
    total = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    if rows.rounded.size:
        total[rows.rounded] = _totals(weights, rows.q[rows.rounded], rows.c, rows.left)
    total = check("total", total, config.total_bits)
    y = saturating_shift(total, weights.down - rows.base[:, None], config.out_bits)
    if weights.bias is not None:
        y = saturate(y + weights.bias, config.out_bits)
    return y.reshape(*rows.shape, weights.outputs)


def _totals(weights: LinearWeights, q: Int, c: Int, left: Int) -> Int:
    """Totals of rows with groups finer than the grid, group by group."""
    config, total = weights.config, np.zeros((len(q), weights.outputs), np.int64)
    for g in range(config.groups):
        part = slice(g * config.group, (g + 1) * config.group)
        acc = check("acc", matmul(q[:, part], weights.w[:, part].T), config.acc_bits)
        scaled = check("scaled", acc * c[:, g, None] * weights.m[:, g].astype(np.int64), config.scaled_bits)
        total += check("term", round_shift(scaled, -left[:, g, None]), config.term_bits)
    return total


def quantize_weights(
    config: LinearConfig,
    matrix: Array | Callable[[], Iterable[Array]],
    input_scale: float,
    output_scale: float,
    bias: Array | None = None,
    spreads: Sequence[Array] | None = None,
) -> LinearWeights:
    """Weights of a float matrix. Runs at model preparation, not in the pipeline.

    ``m = ceil(2**down * absmax / limit * input_scale / output_scale)`` per row and group, with the largest ``down`` at
    which all of m fit; then ``w = round(matrix / (m * 2**-down * output_scale / input_scale))``.

    Parameters
    ----------
    matrix : (outputs, inputs), or what gives its rows in blocks (asked for twice), so that it need not be in memory
    input_scale, output_scale : real values of 1 in x and y
    bias : (outputs,), optional
    spreads : of consecutive parts of the input, from :func:`spreads`, optional
        What rounding a column leaves is made up for in the columns of its part that come after it
        (:func:`_compensated`).
    """
    rows = matrix if callable(matrix) else lambda: (matrix,)

    def ratios(block: Array) -> NDArray[np.float64]:
        if block.shape[1] != config.inputs:
            raise ValueError(f"the matrix must have {config.inputs} columns, not {block.shape[1]}")
        starts = np.arange(0, config.inputs, config.group)
        absmax = np.maximum.reduceat(np.abs(block), starts, axis=1).astype(np.float64)
        return absmax / config.weight_limit * (input_scale / output_scale)

    top = (1 << config.multiplier_bits) - 1
    reach = max(float(ratios(block).max()) for block in rows())
    down = 0 if reach == 0 else int(np.floor(np.log2(top / reach)))
    while reach and np.ceil(np.ldexp(reach, down)) > top:
        down -= 1
    down = min(down, 62)  # from there on nothing is left of a product
    if down < -62:
        raise ValueError(f"weights that reach {reach * config.weight_limit:g} of the output's scale are too large")
    multipliers, weights, limit = [], [], config.weight_limit
    for block in rows():
        m = np.maximum(np.ceil(np.ldexp(ratios(block), down)), 1)
        step = np.ldexp(m * (output_scale / input_scale), -down).astype(np.float32)
        step = np.repeat(step, config.group, axis=1)[:, : config.inputs]
        w = np.rint(block / step) if spreads is None else _compensated(block, step, limit, spreads)
        weights.append(np.clip(w, -limit, limit).astype(np.int8))
        multipliers.append(m.astype(np.uint16))
    whole = None
    if bias is not None:
        whole = np.clip(np.rint(bias.astype(np.float64) / output_scale), *bounds(32)).astype(np.int32)
    return LinearWeights(config, np.concatenate(weights), np.concatenate(multipliers), down, whole)


def spread_of(moments: NDArray[np.floating]) -> list[Array]:
    """How a column's rounding error is spread over the columns after it.

    ``moments``, (parts, n, n), are the second moments x x^T of consecutive parts of a linear layer's input, summed over
    a calibration text. For each part: the upper Cholesky factor of its inverse (with a hundredth of the mean of the
    diagonal added to the diagonal first), each row over its diagonal element, which is 1 then.
    """
    found = []
    for part in moments:
        damped = part.astype(np.float64)
        damped[np.diag_indices_from(damped)] += 0.01 * max(float(np.trace(damped)) / len(damped), 1e-30)
        upper = np.linalg.cholesky(np.linalg.inv(damped)).T
        found.append((upper / np.diag(upper)[:, None]).astype(np.float32))
    return found


def _compensated(
    matrix: Array, step: Array, limit: int, spreads: Sequence[Array], outer: int = 256, inner: int = 32
) -> Array:
    """Round column by column; each column's error, as the inputs see it, is taken from those not yet rounded.

    The second-order rule of *GPTQ* (Frantar et al., 2023), without its ordering of columns. ``outer`` columns at a time
    are taken out and lie in memory as rows; within them, ``inner`` at a time are corrected one by one, the others by
    one product. The blocks change nothing but the speed.
    """
    rest, found, begin = matrix.astype(np.float32), np.empty_like(step), 0
    for spread in spreads:
        end = begin + len(spread)
        for first in range(begin, end, outer):
            last = min(first + outer, end)
            own = spread[first - begin : last - begin, first - begin : last - begin]
            columns, steps = rest[:, first:last].T.copy(), step[:, first:last].T.copy()
            w, errors = np.empty_like(columns), np.empty_like(columns)
            for low in range(0, last - first, inner):
                high = min(low + inner, last - first)
                for j in range(low, high):
                    w[j] = np.clip(np.rint(columns[j] / steps[j]), -limit, limit)
                    errors[j] = columns[j] - w[j] * steps[j]
                    columns[j + 1 : high] -= own[j, j + 1 : high, None] * errors[j]
                columns[high:] -= own[low:high, high:].T @ errors[low:high]
            found[:, first:last] = w.T
            rest[:, last:end] -= errors.T @ spread[first - begin : last - begin, last - begin :]
        begin = end
    return found


def dequantize_weights(weights: LinearWeights, input_scale: float, output_scale: float) -> NDArray[np.float32]:
    """The real matrix that the integers stand for, for studies and tests."""
    step = np.ldexp(weights.m * (output_scale / input_scale), -weights.down)
    spread = np.repeat(step, weights.config.group, axis=1)[:, : weights.config.inputs]
    return (weights.w * spread).astype(np.float32)
