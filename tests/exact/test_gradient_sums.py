"""Gradients of any model as integer vectors, added up exactly."""

import jax
import numpy as np
import pytest
from tests.arrays import same
from tests.exact.lengths import squared_radius

from coowned import threads
from coowned.errors import InputError
from coowned.exact.gradient_sums import (
    FirstRowsGradients,
    GradientSum,
    Microbatches,
    OuterGradients,
    Product,
    clipped_gradient_sums,
    scaled,
)
from coowned.exact.grid import Grid
from coowned.models import embedding_gradients
from coowned.models.embedding_gradients import EmbeddingGradients, LookupGradients

SHAPES = {"words": (53, 60), "types": (11, 5), "positions": (9, 4), "layer": (6, 8), "w": (7, 3), "b": ()}
GRID = Grid.for_gradients(0.7)


def gradients(copies: int, seed: int = 0, size: float = 1.0) -> dict:
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return (size * generator.standard_normal((copies, *shape))).astype(np.float32)

    words = EmbeddingGradients(
        normal(4, 53) / 10, normal(4, 60), generator.integers(0, 53, (copies, 9)).astype(np.int32), normal(9, 60)
    )
    types = LookupGradients(generator.integers(0, 11, (copies, 13)).astype(np.int32), normal(13, 5))
    positions, layer = FirstRowsGradients(normal(5, 4)), OuterGradients(normal(6), normal(8) / max(size, 1e-30))
    return {"words": words, "types": types, "positions": positions, "layer": layer, "w": normal(7, 3), "b": normal()}


def rows(given: dict, chosen) -> dict:
    return {
        name: type(array)(*(part[chosen] for part in array)) if isinstance(array, tuple) else array[chosen]
        for name, array in given.items()
    }


def built(words) -> np.ndarray:
    """(copies, words, width) in float64."""
    if isinstance(words, OuterGradients):
        return np.einsum("io,ij->ioj", np.float64(words.left), np.float64(words.right))
    if isinstance(words, FirstRowsGradients):
        return np.pad(np.float64(words.rows), ((0, 0), (0, 4), (0, 0)))
    if isinstance(words, EmbeddingGradients):
        found = np.einsum("imw,imh->iwh", np.float64(words.residuals), np.float64(words.projected))
    else:
        found = np.zeros((len(words.tokens), *SHAPES["types"]))
    for i, tokens in enumerate(words.tokens):
        np.add.at(found[i], tokens, np.float64(words.looked_up[i]))
    return found


def gradients_of(loss):
    """(parameters, rows) -> every row's gradient of loss(parameters, row), compiled."""
    return jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))


def integers(given, mask=None, grid=GRID):
    total = GradientSum(SHAPES, grid)
    total.add(given, np.ones(len(given["b"]), bool) if mask is None else mask)
    return total.integers()


def contributions(given, grid=GRID):
    return [integers(rows(given, slice(i, i + 1)), grid=grid) for i in range(len(given["b"]))]


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e10])
def test_is_close_to_the_reference(size):
    given = gradients(6, size=size)
    exact = {name: built(array) if isinstance(array, tuple) else np.float64(array) for name, array in given.items()}
    lengths = np.sqrt(sum((array.reshape(6, -1) ** 2).sum(axis=1) for array in exact.values()))
    factors = np.minimum(1, 0.7 / lengths)
    for name, found in integers(given).items():
        np.testing.assert_allclose(found * GRID.unit, np.tensordot(factors, exact[name], axes=1), atol=2e-5)
    assert (lengths > 0.7).all() or size < 1


@pytest.mark.parametrize("size", [1e-40, 1e-20, 1e-3, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("clip_norm", [1e-10, 0.9999, 1.0, 1e20])
def test_no_copy_adds_more(size, clip_norm):
    """The squared length of every copy's integers, in exact arithmetic."""
    grid = Grid.for_gradients(clip_norm)
    with np.errstate(over="ignore"):
        given = gradients(4, size=size)
    for own in contributions(given, grid):
        square = sum(int(value) ** 2 for array in own.values() for value in array.ravel())
        assert square <= squared_radius(grid)
        if 1e-3 < size < 1e15 and clip_norm <= 1:
            assert square > 0.999 * squared_radius(grid)


@pytest.mark.parametrize("share", [0.0, 1e-9, 0.3, 0.99])
def test_a_wrong_norm_is_found_out(monkeypatch, share):
    """The bug: squared norms come out too small. The integers are looked at: what is too long is taken out again."""
    given = gradients(5, size=100.0)
    honest = contributions(given)
    for kind in (Product, embedding_gradients.Lookup, embedding_gradients.Embedding):
        squares = kind.squares
        monkeypatch.setattr(kind, "squares", lambda self, squares=squares: share * squares(self))
    found = contributions(given)
    for own, wanted in zip(found, honest, strict=True):
        square = sum(int(value) ** 2 for array in own.values() for value in array.ravel())
        assert 0.999 * squared_radius(GRID) < square <= squared_radius(GRID)
        np.testing.assert_allclose(own["w"], wanted["w"], rtol=1e-3, atol=2)
    assert same(integers(given), {name: sum(own[name] for own in found) for name in SHAPES})


def test_what_cancels_is_clipped_soundly():
    """Two projections that cancel but for a last digit: the norm from products of rows is of rounding errors alone."""
    given = gradients(3, size=1e8)
    words = given["words"]
    words.residuals[:, 1:], words.looked_up[:] = 0, 0
    words.residuals[:, 1], words.projected[:, 1] = words.residuals[:, 0], -words.projected[:, 0]
    words.projected[:, 1, 3] = np.nextafter(words.projected[:, 1, 3], np.float32(np.inf))
    for own in contributions(given):
        assert sum(int(value) ** 2 for array in own.values() for value in array.ravel()) <= squared_radius(GRID)


def test_the_sum_is_that_of_the_copies():
    given = gradients(17)
    alone = contributions(given)
    assert same(integers(given), {name: sum(own[name] for own in alone) for name in SHAPES})


def large_small_numbers(copies: int) -> dict:
    """An embedding whose integers are odd and just below those that are no longer added in float32."""
    given = gradients(copies, size=0.0)
    given["words"].residuals[:, 0, 11] = 1
    given["words"].projected[:, 0, 5] = (2.0**18 - 3) * GRID.unit
    return given


def test_many_copies_are_added_exactly(monkeypatch):
    """More of them than float32 adds up exactly: in one sum, low bits are lost."""
    assert integers(large_small_numbers(130))["words"][11, 5] == 130 * (2**18 - 3)
    monkeypatch.setattr(embedding_gradients, "_SMALL_COPIES", 10**6)
    assert integers(large_small_numbers(130))["words"][11, 5] != 130 * (2**18 - 3)


def test_a_copy_adds_the_same_in_any_company():
    given = gradients(9)
    own = contributions(given)
    order = [4, 1, 8, 0, 2]
    assert same(integers(rows(given, order)), {name: sum(own[i][name] for i in order) for name in SHAPES})
    given["w"][3] = np.inf
    given["words"].looked_up[5] = np.nan
    given["b"][6] = 3e38
    others = [0, 1, 2, 4, 7, 8]
    found = integers(given)
    six = integers(rows(given, [6]))
    assert same(found, {name: sum(own[i][name] for i in others) + six[name] for name in SHAPES})
    assert six["b"].any()  # it is large, and finite


def test_threads_change_nothing(monkeypatch):
    given, found = gradients(11), []
    for cores in (1, 2, 7):
        monkeypatch.setattr(threads, "cores", lambda cores=cores: cores)
        found.append(integers(given))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_not_finite_adds_zero():
    for bad in (np.nan, np.inf, -np.inf):
        given = gradients(4)
        given["w"][0, 2, 1] = bad
        given["words"].residuals[1, 2, 50] = bad
        given["b"][2] = bad
        given["types"].looked_up[3, 7, 3] = bad
        assert not any(array.any() for array in integers(given).values())


def test_padding_adds_zero():
    given, mask = gradients(5), np.arange(5) < 3
    given["w"][3] = np.nan
    assert same(integers(given, mask), integers(rows(given, slice(0, 3))))


@pytest.mark.parametrize("microbatch", [1, 3, 64])
def test_padding_of_a_batch_changes_nothing(microbatch):
    """One shape of rows, whatever the batch: what is compiled is compiled once, and what it gives is added exactly."""
    generator = np.random.default_rng(0)
    batch = {"x": generator.standard_normal((10, 4)).astype(np.float32)}
    parameters = {"w": generator.standard_normal(4).astype(np.float32)}

    def loss(own, row):
        return (own["w"] @ row["x"]) ** 2

    compiled, shapes = gradients_of(loss), set()

    def watched(own, given):
        shapes.add(given["x"].shape)
        return compiled(own, given)

    def total(rows, mask):
        division = Microbatches(shapes={"w": (4,)}, microbatch=microbatch)
        return clipped_gradient_sums(watched, parameters, rows, mask, GRID, division)[0]["w"]

    expected = total(batch, np.ones(10, bool))
    assert expected.any()
    padded = {"x": np.concatenate([batch["x"], np.full((90, 4), np.nan, np.float32)])}
    assert np.array_equal(total(padded, np.arange(100) < 10), expected)
    scattered = {"x": np.full((40, 4), np.nan, np.float32)}
    scattered["x"][3::4] = batch["x"][::-1]
    assert np.array_equal(total(scattered, np.arange(40) % 4 == 3), expected)
    assert not total(batch, np.zeros(10, bool)).any()
    assert shapes == {(microbatch, 4)}


def test_too_many_are_refused():
    with pytest.raises(InputError, match="finer grid"):
        GradientSum({"w": (2**50,)}, GRID)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e6, 1e30])
def test_scales_cannot_lengthen_a_copy(size):
    """What is clipped is the scaled gradient, whatever made the scales."""
    shapes, grid = {"w": (4, 3)}, Grid.for_gradients(0.7)
    gradients = gradients_of(lambda own, row: (own["w"] * row["x"]).sum())
    batch = {"x": np.random.default_rng(0).standard_normal((1, 4, 3)).astype(np.float32)}
    scales = {"w": np.float32(size * np.arange(1, 5)[:, None])}
    own = {"w": np.zeros((4, 3), np.float32)}
    division = Microbatches(shapes=shapes, microbatch=2)
    found, _ = clipped_gradient_sums(gradients, own, batch, np.ones(1, bool), grid, division, scales=scales)
    assert sum(int(number) ** 2 for number in found["w"].ravel()) <= squared_radius(grid)
    expected = batch["x"][0] * scales["w"].astype(np.float64)
    expected *= min(1, 0.7 / np.linalg.norm(expected)) / grid.unit
    np.testing.assert_allclose(found["w"], expected, rtol=1e-4, atol=0.51)


def test_scaled_factors_are_the_scaled_gradient():
    given, generator = gradients(3), np.random.default_rng(1)
    scales = {name: generator.uniform(0.1, 10, (*shape[:-1], 1) if shape else ()) for name, shape in SHAPES.items()}
    found = scaled(given, {name: np.float32(scale) for name, scale in scales.items()})
    for name in ("words", "types"):
        np.testing.assert_allclose(built(found[name]), built(given[name]) * scales[name], rtol=1e-5, atol=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(found[name], given[name] * scales[name], rtol=1e-6)


def test_scaled_rows_and_products():
    generator = np.random.default_rng(0)
    scale = generator.uniform(0.1, 10, (5, 1))
    rows = FirstRowsGradients(generator.standard_normal((3, 2, 4)))
    np.testing.assert_allclose(rows.scaled(scale).rows, rows.rows * scale[:2])
    outer = OuterGradients(generator.standard_normal((3, 5)), generator.standard_normal((3, 4)))
    found = np.einsum("co,ci->coi", *outer.scaled(scale))
    np.testing.assert_allclose(found, np.einsum("co,ci->coi", *outer) * scale)
