"""Helpers for the tests of models: parameters away from the start, and clipped sums as integers."""

import numpy as np

from coowned.content.example_table import KEY, USABLE
from coowned.exact.grid import Grid


def parameters(model, seed=1):
    """Returns parameters far from the initial ones, so that every gradient is of some size."""
    generator = np.random.default_rng(seed)
    return {
        name: array + np.float32(0.3) * generator.standard_normal(array.shape, np.float32)
        for name, array in model.initial().items()
    }


def integer_sum(model, own, batch, mask, clip_norm):
    """Returns ({name: integers}, number clipped, grid) of one model with these parameters."""
    grid = model.grid(clip_norm)
    sums, clipped = model.clipped_sum({name: array[None] for name, array in own.items()}, batch, mask, [grid])
    return {name: total[0] for name, total in sums.items()}, clipped, grid


def joined(arrays) -> np.ndarray:
    """Returns all numbers of the arrays in float64, in the order of their names."""
    return np.concatenate([np.float64(arrays[name]).ravel() for name in sorted(arrays)])


def make_batch(rows, seed=0, scale=3.0):
    """Returns examples of five numbers, x, with one of three labels."""
    generator = np.random.default_rng(seed)
    return {
        "x": (scale * generator.normal(size=(rows, 5))).astype(np.float32),
        "label": generator.integers(0, 3, rows).astype(np.int32),
        KEY: generator.integers(0, 2**32, (rows, 2), np.uint32),
        USABLE: np.ones(rows, bool),
    }


def sums(model, batch, mask=None, *, clip_norm=1.0, parameters=None, devices=(), scales=None):
    """Returns ({name: integers}, number clipped) of a batch made by `make_batch`."""
    own = {name: array[None] for name, array in (parameters or model.initial()).items()}
    mask = np.ones(len(batch[KEY]), bool) if mask is None else mask
    found, clipped = model.clipped_sum(own, batch, mask, [Grid.for_gradients(clip_norm)], devices, scales)
    return {name: array[0] for name, array in found.items()}, clipped
