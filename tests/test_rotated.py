"""golden.rotated against float64, exact rationals and the paper's own figures."""

from __future__ import annotations

from itertools import pairwise
from math import erf, exp, pi, sqrt

import numpy as np
import pytest

from golden.fixedpoint import bounds
from golden.float16 import parts
from golden.rotated import signs as sign_patterns
from golden.rotated.axelram import Axelram, AxelramConfig
from golden.rotated.fwht import FwhtConfig, fwht
from golden.rotated.lloyd_max import LloydMaxConfig, codebook, quantize, solve
from golden.rotated.read_path import ReadPathConfig, read_path
from golden.rotated.signs import SignsConfig, flip, from_word, layer_seed, pattern, word
from golden.rotated.value_path import ValuePathConfig, value_path
from golden.rotated.write_path import WritePathConfig, write_path

#: The paper's codebook at d = 128: positive centroids and thresholds of unit vectors.
PAPER_CODEBOOKS = {
    1: ([0.070523697943], []),
    2: ([0.040020479109, 0.133503316673], [0.086761897891]),
    3: (
        [0.021663469493, 0.066822057614, 0.118785920510, 0.190206925047],
        [0.044242763554, 0.092803989062, 0.154496422778],
    ),
    4: (
        [
            *(0.011348624373, 0.034298947526, 0.058049852539, 0.083291914897),
            *(0.111036198672, 0.143016445284, 0.182877012738, 0.241529075945),
        ],
        [
            *(0.022823785949, 0.046174400032, 0.070670883718, 0.097164056784),
            *(0.127026321978, 0.162946729011, 0.212203044341),
        ],
    ),
}


def reals(norm: np.ndarray) -> np.ndarray:
    """Values of binary16 patterns."""
    mantissa, biased = parts(norm)
    return mantissa * 2.0 ** (biased - 25)


# -- transform ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256])
def test_fwht_is_its_own_inverse_and_keeps_products(size: int) -> None:
    generator = np.random.default_rng(size)
    config = FwhtConfig(size=size, in_bits=16)
    q, k = generator.integers(*bounds(16), (2, 20, size), endpoint=True)
    turned = fwht(config, q)
    assert np.array_equal(fwht(config.replace(in_bits=config.out_bits), turned), size * q)
    assert np.array_equal((turned * fwht(config, k)).sum(axis=1), size * (q * k).sum(axis=1))


@pytest.mark.parametrize("size", [2, 8, 128])
def test_fwht_in_the_wiring_of_the_folded_form(size: int) -> None:
    """Neighbours to both halves, as many times as there are stages, is the natural order."""
    x = np.random.default_rng(1).integers(-100, 100, size)
    y = x
    for _ in range(size.bit_length() - 1):
        y = np.concatenate((y[::2] + y[1::2], y[::2] - y[1::2]))
    assert np.array_equal(y, fwht(FwhtConfig(size=size, in_bits=8), x))


def test_fwht_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="size must be a power of two, not 80"):
        FwhtConfig(size=80)
    with pytest.raises(ValueError, match="butterflies must be at most size / 2 = 4, not 8"):
        FwhtConfig(size=8, butterflies=8)
    with pytest.raises(OverflowError, match="x holds 8, which does not fit signed"):
        fwht(FwhtConfig(size=2, in_bits=4), [8, 0])


# -- signs -------------------------------------------------------------------------------------------------------------


def test_the_papers_sign_patterns() -> None:
    expected = {
        42: "656b5fe7ff4abaf601ab7c173fd74222",
        1042: "9659c2e2ce96393ab942ddd60734cd62",
        500042: "735a4d2d7acccee38e8aa6560d3dfdeb",
        1: "7e07f07b72d970cf65c9bf1f112269f3",
        10: "d78e049b01416d1896ba17d893209b6b",
        420041: "27f4b2e6da217e46efd95d609eca9de5",
    }
    assert {seed: f"{word(pattern(seed, 128)):032x}" for seed in expected} == expected
    assert layer_seed(42, 1) == 1042 and layer_seed(42, 0, values=True) == 500042
    assert np.array_equal(from_word(word(pattern(7, 64)), 64), pattern(7, 64))


def test_flip_treats_the_most_negative_value_as_the_negative_of_the_largest() -> None:
    assert flip([-8, -8, 7, 0], [1, -1, -1, -1], 4).tolist() == [-7, 7, -7, 0]
    with pytest.raises(ValueError, match="signs must be -1 or"):
        flip([1, 2], [0, 1], 4)
    with pytest.raises(ValueError, match="there must be 3 signs"):
        flip([1, 2, 3], [1, 1], 4)


def test_sign_rom() -> None:
    config = SignsConfig(size=16, in_bits=8, form="seeded", patterns=5, seed=42)
    x = np.arange(32).reshape(2, 16)
    y = sign_patterns.signs(config, x, config.rom, [4, 1])
    assert np.array_equal(y[0], x[0] * pattern(42 + 2000, 16))
    assert np.array_equal(y[1], x[1] * pattern(42 + 500_000, 16))
    with pytest.raises(ValueError, match=r"select must lie in 0\.\.4, not 5\.\.5"):
        sign_patterns.signs(config, x[0], config.rom, 5)


# -- quantizer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebook_is_the_papers(bits: int) -> None:
    centroids, thresholds = PAPER_CODEBOOKS[bits]
    found = solve(bits)
    # The paper's solver stops after 500 iterations, which at 4 bits is 1e-9 short of the fixed point.
    limit = 1e-11 if bits < 4 else 2e-9
    assert np.abs(found.centroids / sqrt(128) - centroids).max() < limit
    assert not thresholds or np.abs(found.thresholds / sqrt(128) - thresholds).max() < limit


@pytest.mark.parametrize("bits", range(1, 7))
def test_codebook_is_a_fixed_point_of_lloyd_and_max(bits: int) -> None:
    """Thresholds half-way between centroids, centroids the means of their cells, by closed forms."""
    found = solve(bits)
    edges = [0.0, *found.thresholds.tolist(), 8.0]
    for (low, high), c in zip(pairwise(edges), found.centroids.tolist(), strict=True):
        mass = (erf(high / sqrt(2)) - erf(low / sqrt(2))) / 2
        moment = (exp(-low * low / 2) - exp(-high * high / 2)) / sqrt(2 * pi)
        assert abs(moment / mass - c) < 1e-9
    middle = (found.centroids[1:] + found.centroids[:-1]) / 2
    assert np.abs(np.asarray(found.thresholds) - middle).max(initial=0.0) < 1e-12


@pytest.mark.parametrize("dimension", [4, 8, 64, 256])
def test_codebook_of_a_sphere(dimension: int) -> None:
    """Its error on random directions is no larger than the normal codebook's, and it tends to that one."""
    generator = np.random.default_rng(dimension)
    x = generator.standard_normal((40_000, dimension))
    y = x[:, 0] * sqrt(dimension) / np.linalg.norm(x, axis=1)

    def error(book: object) -> float:
        centroids = np.asarray(book.centroids)  # type: ignore[attr-defined]
        both = np.concatenate((-centroids[::-1], centroids))
        return float(np.square(y[:, None] - both).min(axis=1).mean())

    assert error(solve(3, dimension)) < error(solve(3)) * (1.0 if dimension <= 8 else 1.01)
    assert np.abs(solve(3, 256).centroids - solve(3).centroids).max() < 0.03


def test_codebook_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"bits must lie in 1\.\.6, not 7"):
        solve(7)
    with pytest.raises(ValueError, match="at least 4, not 3"):
        solve(3, 3)
    with pytest.raises(ValueError, match=r"dimension must be 0 or lie in 4\.\.256, not 2"):
        LloydMaxConfig(dimension=2)


def count_below(config: LloydMaxConfig, y: int, norm: int, thresholds: tuple[int, ...]) -> int:
    """The definition, one integer at a time."""
    scale = 1 << config.fraction_bits if config.form == "scaled" else 1
    positive = [t * norm for t in config.positive] if config.form == "scaled" else list(thresholds or config.positive)
    if config.form == "scaled" and norm == 0:
        positive = [10**9] * config.count
    every = [-t for t in positive] + [0] + positive
    if config.ties == "lower":
        return sum(t < y * scale for t in every)
    return sum(t <= y * scale for t in every)


@pytest.mark.parametrize("ties", ["lower", "upper"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_quantizer_counts_the_thresholds_below(bits: int, ties: str) -> None:
    y = np.arange(-512, 512)
    for norm in (0, 1, 2, 64, 100, 255):
        config = LloydMaxConfig(bits=bits, in_bits=10, norm_bits=8, fraction_bits=6, ties=ties)
        wanted = [count_below(config, int(v), norm, ()) for v in y]
        assert quantize(config, y, norm).tolist() == wanted
    config = LloydMaxConfig(bits=bits, in_bits=10, form="frozen", fraction_bits=6, ties=ties)
    assert quantize(config, y).tolist() == [count_below(config, int(v), 0, ()) for v in y]
    thresholds = tuple(range(3, 3 + 70 * config.count, 70))
    config = config.replace(form="programmable")
    assert quantize(config, y, 0, thresholds).tolist() == [count_below(config, int(v), 0, thresholds) for v in y]


def test_quantizer_refuses_what_it_cannot_do() -> None:
    config = LloydMaxConfig(form="programmable")
    with pytest.raises(ValueError, match="there must be 3 thresholds in ascending order"):
        quantize(config, [1], 0, [5, 4, 9])
    with pytest.raises(ValueError, match="in_bits must hold the largest threshold 7160"):
        LloydMaxConfig(form="frozen", in_bits=12)


# -- write path --------------------------------------------------------------------------------------------------------


def reference_write(x: np.ndarray, s: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The paper's code in float64: (index, norm)."""
    size = x.shape[1]
    norm = np.linalg.norm(x, axis=1)
    unit = x / np.maximum(norm, 1e-8)[:, None]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]]))
    y = (unit * s) @ matrix / sqrt(size)
    book = solve(bits)
    edges = np.concatenate((-np.asarray(book.thresholds)[::-1], [0.0], book.thresholds)) / sqrt(size)
    return np.searchsorted(edges, y, side="left"), norm


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_write_path_against_the_papers_float_code(bits: int) -> None:
    """Indices differ on fewer than 2e-4 of the coordinates (4e-4 at 4 bits), norms by half a unit of binary16."""
    generator = np.random.default_rng(3)
    x = np.rint(generator.standard_normal((3000, 128)) * 8000).astype(np.int64)
    x = np.clip(x, -32767, 32767)
    s = pattern(42, 128)
    indices, norm = write_path(WritePathConfig(bits=bits), x, s, -10)
    wanted, real = reference_write(x.astype(np.float64), s, bits)
    assert (indices != wanted).mean() < (2e-4 if bits <= 3 else 4e-4)
    assert np.abs(reals(norm) / (real * 2.0**-10) - 1).max() < 2.0**-11 + 1e-5


def test_write_path_of_a_zero_vector_and_of_tiny_ones() -> None:
    config = WritePathConfig(lanes=8, size=8, in_bits=6)
    assert write_path(config, np.zeros(8, np.int64), pattern(1, 8)).indices.tolist() == [3] * 8
    assert write_path(config, np.zeros(8, np.int64), pattern(1, 8)).norm == 0
    one = np.eye(8, dtype=np.int64)[0]
    # All of y is +-1 at a norm of 1: beyond 0.5005 and not beyond 1.04996 of it... which is 1, below.
    assert set(write_path(config, one, pattern(1, 8)).indices.tolist()) <= {2, 5}


def test_write_path_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="lanes must be at most size = 8, not 16"):
        WritePathConfig(size=8, lanes=16)
    with pytest.raises(ValueError, match="size must be a power of two, not 96"):
        WritePathConfig(size=96)
    with pytest.raises(OverflowError, match="x holds 40000"):
        write_path(WritePathConfig(), np.full(128, 40_000), pattern(1, 128))


def test_a_vector_takes_the_papers_bytes() -> None:
    assert [WritePathConfig(bits=b).vector_bits // 8 for b in (2, 3, 4)] == [34, 50, 66]


# -- read path ---------------------------------------------------------------------------------------------------------


def stored(bits: int, count: int, size: int = 128) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    x = np.clip(np.rint(generator.standard_normal((count, size)) * 8000), -32767, 32767).astype(np.int64)
    s = pattern(42, size)
    return (s, *write_path(WritePathConfig(lanes=size, size=size, bits=bits), x, s, -16))


def dequantized(bits: int, s: np.ndarray, indices: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """The stored vectors in float64, turned back."""
    book = solve(bits)
    both = np.concatenate((-np.asarray(book.centroids)[::-1], book.centroids))
    size = indices.shape[1]
    matrix = fwht(FwhtConfig(size=size, in_bits=2), np.eye(size, dtype=np.int64)).astype(np.float64)
    return reals(norm)[:, None] * s * (both[indices] @ matrix) / size


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("form", ["integer", "binary16"])
def test_scores_are_those_of_the_dequantized_vectors(bits: int, form: str) -> None:
    """Nothing but rounding lies between table lookup and dequantization: a relative error below 1e-3."""
    s, indices, norm = stored(bits, 300)
    query = np.random.default_rng(6).integers(-32768, 32768, 128)
    config = ReadPathConfig(bits=bits, form=form)
    shift = 0 if form == "integer" else 16
    score = read_path(config, query, s, indices, norm, shift)
    wanted = dequantized(bits, s, indices, norm) @ np.maximum(query, -32767)
    if form == "integer":
        found = score * 2.0 ** (shift + config.table_drop + 5 - 7 - 12)
    else:
        found = score.astype(np.uint16).view(np.float16).astype(np.float64) * 2.0 ** (shift - 7)
    spread = np.sqrt(np.square(wanted).mean())
    limit = 1e-3 if form == "integer" else 4e-3
    assert np.sqrt(np.square(found - wanted).mean()) < limit * spread
    assert np.abs(found - wanted).max() < 4 * limit * spread


def test_integer_score_error_beyond_quantization() -> None:
    """The figure of the documents: relative error of the integer scores at 3 bits."""
    s, indices, norm = stored(3, 4096)
    query = np.random.default_rng(7).integers(-32768, 32768, 128)
    config = ReadPathConfig()
    found = read_path(config, query, s, indices, norm) * 2.0 ** (config.table_drop + 5 - 7 - 12)
    wanted = dequantized(3, s, indices, norm) @ np.maximum(query, -32767)
    assert np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()) < 1e-4


def test_binary16_scores_by_scalar_operations() -> None:
    """The order of operations that the docstring fixes, one NumPy float16 at a time."""
    s, indices, norm = stored(3, 5, 8)
    query = np.array([-9000, 3, 20_000, 100, -1, 0, 32_767, -32_768])
    config = ReadPathConfig(size=8, form="binary16", build_lanes=2)
    score = read_path(config, query, s, indices, norm, 9)
    turned = fwht(config.transform, flip(query, s, 16))
    centroids = [np.float16(c / 4096) for c in codebook(3).centroids]
    for t in range(5):
        row = []
        for i in range(8):
            k = int(indices[t, i])
            value = np.float16(turned[i] / 512) * centroids[k - 4 if k >= 4 else 3 - k]
            row.append(value if k >= 4 else -value)
        while len(row) > 1:
            row = [a + b for a, b in zip(row[::2], row[1::2], strict=True)]
        wanted = row[0] * norm[t : t + 1].astype(np.uint16).view(np.float16)[0]
        assert int(score[t]) == int(np.array([wanted]).view(np.uint16)[0])


def test_programmable_centroids_carry_a_constant() -> None:
    s, indices, norm = stored(3, 50)
    query = np.random.default_rng(8).integers(-32768, 32768, 128)
    plain = read_path(ReadPathConfig(), query, s, indices, norm, 12)
    config = ReadPathConfig(codebook="programmable", centroid_bits=16, table_bits=26)
    times = read_path(config, query, s, indices, norm, 12, [4 * c for c in codebook(3).centroids])
    assert np.abs(times - 4 * plain * 2.0 ** (13 - config.table_drop)).max() <= 16
    with pytest.raises(ValueError, match="there must be 4 centroids"):
        read_path(config, query, s, indices, norm, 12, [1, 2])


def test_read_path_refuses_what_it_cannot_do() -> None:
    for settings, message in (
        ({"size": 48}, "size must be a power of two, not 48"),
        ({"size": 8, "build_lanes": 16}, "build_lanes must be at most size = 8"),
        ({"table_bits": 14}, "table_bits must be above the centroids' 14, not 14"),
        ({"form": "binary16", "codebook": "programmable"}, "codebook must be frozen for the binary16 form"),
    ):
        with pytest.raises(ValueError, match=message):
            ReadPathConfig(**settings)


# -- value path --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_value_path_is_the_weighted_sum_of_the_dequantized_vectors(bits: int) -> None:
    s, indices, norm = stored(bits, 200)
    generator = np.random.default_rng(9)
    p = generator.random((3, 200)) ** 6
    p = np.minimum(np.rint(p / p.sum(axis=1, keepdims=True) * 65_536), 65_535).astype(np.int64)
    top = parts(norm)[1].max() * np.ones(3, np.int64)
    y = value_path(ValuePathConfig(bits=bits), indices, norm, p, top, s) * 2.0**-16
    wanted = p / 65_536 @ dequantized(bits, s, indices, norm)
    assert np.abs(y - wanted).max() < 1e-4 * np.sqrt(np.square(wanted).mean()) + 2.0**-15


def test_value_path_does_not_saturate_below_a_sum_of_one() -> None:
    """One vector of the largest norm: the result is still exact to rounding."""
    s = pattern(3, 128)
    y = value_path(ValuePathConfig(), np.full((1, 128), 7), [0x7BFF], [65_535], 30, s)
    config = ValuePathConfig()
    z = (config.centroids[-1] * ((65_535 * 2047 + 4) >> 3) + (1 << (config.z_drop - 1))) >> config.z_drop
    assert z < 1 << (config.z_bits - 1)
    assert y[0] == s[0] * min(128 * z, (1 << 31) - 1)
    assert not y[1:].any()


def test_value_path_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="top must be the largest exponent"):
        value_path(ValuePathConfig(), np.zeros((1, 128), np.int64), [0x7BFF], [5], 29, pattern(3, 128))
    with pytest.raises(ValueError, match="must leave a shift of 30"):
        ValuePathConfig(fraction_bits=24)
    with pytest.raises(ValueError, match="z_bits must be at most"):
        ValuePathConfig(weight_bits=10)


# -- macro -------------------------------------------------------------------------------------------------------------


def test_macro_reads_what_was_written() -> None:
    config = AxelramConfig(size=8, capacity=4, build_lanes=2)
    macro, s = Axelram(config), pattern(5, 8)
    x = np.random.default_rng(1).integers(-30_000, 30_000, (4, 8))
    macro.write([2, 0, 1], x[:3], s, [-3, 0, 2])
    with pytest.raises(ValueError, match="address 3 was never written"):
        macro.read(x[0], 3, s)
    indices, norm = write_path(config.write, x[[1, 2, 0]], s, [0, 2, -3])
    assert np.array_equal(macro.read(x[3], 2, s, 20), read_path(config.read, x[3], s, indices, norm, 20))
    with pytest.raises(ValueError, match=r"addresses must lie in 0\.\.3, not 4\.\.4"):
        macro.write(4, x[0], s)
