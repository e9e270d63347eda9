"""Optimizers of noisy mean gradients: those of optax, with schedules, averaging and gradient scaling.

All of it is computed from what the mechanism has released, and costs no privacy. `scale_gradients` alone acts before
the noise: its scales follow from earlier releases, and what a copy adds is clipped after it was scaled.
"""

import dataclasses
import difflib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from coowned import validate
from coowned.errors import InputError

if TYPE_CHECKING:
    import optax

_MEMORY = 0.99  # of the mean squares of rows
LEARNING_RATES = (2.0**-126, (2 - 2.0**-23) * 2.0**127)  # the normal numbers of float32, in which training computes
_NO_OPTIMIZERS = (
    "lbfgs",  # its line search asks for the loss again and again
    "noisy_sgd",  # noise of its own, from a fixed key
    "optimistic_adam",  # deprecated for optimistic_adam_v2
    "scale_by_learning_rate", "scale_by_rprop",  # parts of optimizers
    "sm3",  # no parameter without an axis, such as an intercept
)  # fmt: skip
DECAYS = ("constant", "linear", "cosine")
AVERAGES = ("none", "exponential", "tail")

Arrays = dict[str, Any]
State = tuple[Arrays, Any]
"""(parameters, state of the optimizer and the average), every array with a leading axis for the models."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options around an optimizer; fractions refer to the number of steps, so that they suit a run of any length.

    Guarantees:
      - Every option but scale_gradients changes only what follows the noise.   (test_options_see_noisy_gradients_alone)
      - With scale_gradients no copy adds more than the clip norm.   (test_scales_cannot_lengthen_a_copy)

    Attributes:
      momentum: of sgd; other optimizers have their own.
      warmup: fraction of the steps in which the learning rate rises linearly.
      decay: how the learning rate falls afterwards: "constant", "linear" or "cosine".
      final_rate: where it falls to, as a fraction of the learning rate.
      weight_decay: decoupled, as in AdamW: a step multiplies the parameters by 1 - rate * weight_decay.
      average: what is evaluated and released: "none" the last iterate, "tail" the mean of the last iterates,
        "exponential" an exponential moving average with bias correction.
      average_window: fraction of the steps that are averaged. An exponential average over n steps has the decay
        (n - 1) / (n + 1), so that its iterates are as old on average as those of a tail.
      scale_gradients: scale every copy's gradient, before it is clipped, by what earlier steps released of the size of
        each row of the parameters, and undo it after the noise ("scale-then-privatize", `Rule.scales`). Only for models
        whose gradients JAX computes, and for independent noise.
    """

    momentum: float = 0.0
    warmup: float = 0.0
    decay: str = "constant"
    final_rate: float = 0.0
    weight_decay: float = 0.0
    average: str = "none"
    average_window: float = 0.25
    scale_gradients: bool = False

    def check_options(self, optimizer: str, learning_rate: float) -> None:
        """Raises InputError for meaningless options, alone or with this optimizer and learning rate."""
        check_optimizer(optimizer)
        validate.in_range(*LEARNING_RATES, learning_rate=learning_rate)
        validate.one_of(DECAYS, decay=self.decay)
        validate.one_of(AVERAGES, average=self.average)
        validate.in_range(0, 1, open_high=True, momentum=self.momentum)
        validate.in_range(0, 1, warmup=self.warmup, final_rate=self.final_rate)
        validate.in_range(0, 1, open_low=True, average_window=self.average_window)
        validate.in_range(0, math.inf, open_high=True, weight_decay=self.weight_decay)
        if self.momentum and optimizer != "sgd":
            raise InputError(f"momentum is an option of sgd, not of {optimizer}; remove it, or use sgd")

    def options(self) -> dict[str, Any]:
        """Returns the options that are not the default, as plain values."""
        return {name: getattr(self, name) for name, usual in OPTION_DEFAULTS.items() if getattr(self, name) != usual}


OPTION_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(OptimizerOptions)}


class Rates(NamedTuple):
    """Rates and options as numbers: (num_models,) float32 each, so that members of a sweep may differ in them."""

    learning_rate: Any
    iterations: Any
    warmup: Any
    decay: Any  # index in DECAYS
    final_rate: Any
    weight_decay: Any
    average: Any  # index in AVERAGES
    average_window: Any
    noise: Any  # standard deviation of the noise in the mean gradient

    @classmethod
    def of(cls, members: Sequence[tuple[float, int, OptimizerOptions]], noise: Sequence[float] = (0.0,)) -> "Rates":
        """Builds rates from every member's (learning rate, iterations, options), and the noise if gradients scale."""
        rows = []
        for (rate, iterations, options), deviation in zip(members, itertools.cycle(noise)):
            given = {"learning_rate": rate, "iterations": iterations, "noise": deviation}
            given |= {"decay": DECAYS.index(options.decay), "average": AVERAGES.index(options.average)}
            rows.append([given[name] if name in given else getattr(options, name) for name in cls._fields])
        return cls(*np.array(rows, np.float32).T.copy())


@dataclasses.dataclass(frozen=True)
class Rule:
    """The form of an update, shared by all models of a run.

    Attributes:
      counts: whether steps are counted, for anything that is not the same in all of them.
      averages: whether an average is kept beside the parameters: memory of the parameters once more.
      scales: whether gradients are scaled before they are clipped.
    """

    optimizer: str
    momentum: float = 0.0
    counts: bool = False
    averages: bool = False
    scales: bool = False

    @classmethod
    def of(cls, optimizer: str, members: Sequence[OptimizerOptions], *, clips: bool = True) -> "Rule":
        """Returns the rule for all members together; gradients that are not clipped are not scaled either."""
        averages = any(options.average != "none" for options in members)
        decays = any(options.decay != "constant" or options.warmup or options.weight_decay for options in members)
        scales = clips and members[0].scale_gradients
        return cls(optimizer, members[0].momentum, decays or averages or scales, averages, scales)

    def make(self, learning_rate: Any) -> "optax.GradientTransformation":
        return make_optimizer(self.optimizer, learning_rate, momentum=self.momentum)

    def initial(self, parameters: Arrays) -> State:
        """Returns the state of one model before the first step."""
        state: dict[str, Any] = {"optimizer": self.make(1.0).init(parameters)}
        if self.counts:
            state["count"] = np.int32(0)
        if self.averages:
            state["average"] = parameters
        if self.scales:
            for kept in ("squares", "noise"):
                state[kept] = {name: np.zeros(_row_shape(array), np.float32) for name, array in parameters.items()}
        return parameters, state

    def released(self, state: State) -> Arrays:
        """Returns the parameters that are evaluated and stored."""
        return state[1]["average"] if self.averages else state[0]

    def move(self, rates: Rates, gradients: Arrays, state: State, scales: Arrays | None = None) -> State:
        """Applies one step to one model, to be compiled; `scales` are those of `row_scales` for this step, if any."""
        import jax
        import optax

        parameters, kept = state
        squares: dict[str, Any] = {}
        if scales is not None:
            gradients = {name: array / scales[name] for name, array in gradients.items()}
            squares = mean_squares(kept, scales, gradients, rates.noise)
        rate = learning_rate_at(rates, kept["count"]) if self.counts else rates.learning_rate
        updates, optimizer = self.make(rate).update(gradients, kept["optimizer"], parameters)
        after: dict[str, Any] = {"optimizer": optimizer, **squares}
        if self.counts:
            after["count"] = kept["count"] + 1
            shrink = 1 - rate * rates.weight_decay
            parameters = jax.tree.map(lambda array: array * shrink, parameters)
        parameters = optax.apply_updates(parameters, updates)
        if self.averages:
            weight = average_weight_at(rates, kept["count"])
            after["average"] = jax.tree.map(
                lambda average, array: (1 - weight) * average + weight * array, kept["average"], parameters
            )
        return parameters, after  # pyright: ignore[reportReturnType]


def _row_shape(array: Any) -> tuple[int, ...]:
    return (*array.shape[:-1], 1) if array.shape else ()


def mean_squares(kept: Mapping[str, Any], scales: Arrays, gradients: Arrays, noise: Any) -> dict[str, Arrays]:
    """Updates the running mean squares for `row_scales`: of the rows' noisy gradients, and of their noise.

    Before the step it was `kept`; `gradients` are released and unscaled; `noise` is the standard deviation in the
    scaled mean gradient.
    """
    import jax.numpy as jnp

    squares = {
        name: jnp.mean(array**2, -1, keepdims=True) if array.ndim else array**2 for name, array in gradients.items()
    }
    noises = {name: (noise / scale) ** 2 for name, scale in scales.items()}
    return {
        which: {name: _MEMORY * kept[which][name] + (1 - _MEMORY) * array for name, array in new.items()}
        for which, new in {"squares": squares, "noise": noises}.items()
    }


def row_scales(kept: Mapping[str, Any], parameters: Arrays) -> Arrays:
    """Returns the factor by which each row's gradient is multiplied before clipping; 1 in the first step.

    A row is all numbers along the last axis. Its scale is 1 / sqrt(v + mean of v), v the mean square of what earlier
    steps released of its gradient, less that of the noise, which is known; so large rows become alike, and rows that
    noise hides are left as they are. Scales are such that the whole gradient stays as long as it was, by these
    estimates: a clip norm keeps its meaning.

    Guarantees:
      - They are a function of released gradients and public numbers.   (test_scales_follow_from_what_was_released)
    """
    import jax.numpy as jnp

    seen = jnp.maximum(1 - _MEMORY ** kept["count"], 1 - _MEMORY)  # bias correction
    excess = {name: (array - kept["noise"][name]) / seen for name, array in kept["squares"].items()}
    size = sum(array.size for array in parameters.values())

    def total(by_row: Arrays) -> Any:
        return sum(array.sum() * (parameters[name].size / array.size) for name, array in by_row.items())

    mean = total(excess) / size
    squares = {name: jnp.maximum(0.0, array) for name, array in excess.items()}
    inverse = {name: 1 / (array + mean) for name, array in squares.items()}  # of the squared scales
    after = total({name: array * inverse[name] for name, array in squares.items()})
    known = (mean > 0) & (after > 0)
    return {name: jnp.where(known, jnp.sqrt(array * total(squares) / after), 1.0) for name, array in inverse.items()}


def learning_rate_at(rates: Rates, count: Any) -> Any:
    """Returns the learning rate of the step after `count` others.

    It is above 0 in every step: a rise ends at, and a fall begins with, the learning rate itself.

    Guarantees:
      - It is that of the formulas in plain numbers.   (test_learning_rates)
    """
    import jax.numpy as jnp

    rising = jnp.round(rates.warmup * rates.iterations)
    rise = jnp.minimum(1.0, (count + 1) / jnp.maximum(1.0, rising))
    done = jnp.maximum(0.0, count - rising) / jnp.maximum(1.0, rates.iterations - rising)
    left = jnp.where(rates.decay == 1, 1 - done, jnp.cos(jnp.pi / 2 * done) ** 2)
    left = jnp.where(rates.decay == 0, 1.0, rates.final_rate + (1 - rates.final_rate) * left)
    return rates.learning_rate * rise * left


def average_weight_at(rates: Rates, count: Any) -> Any:
    """Returns the weight of the iterate after `count` + 1 steps in the running average.

    Guarantees:
      - The averages are those of all iterates with plain weights.   (test_averages)
    """
    import jax.numpy as jnp

    window = jnp.maximum(1.0, jnp.round(rates.average_window * rates.iterations))
    since = jnp.maximum(0.0, count - (rates.iterations - window))
    decay = (window - 1) / (window + 1)
    exponential = (1 - decay) / (1 - decay ** (count + 1))
    return jnp.where(rates.average == 0, 1.0, jnp.where(rates.average == 1, exponential, 1 / (since + 1)))


@functools.lru_cache(maxsize=32)
def compiled_scales(rule: Rule) -> Callable[[State], Arrays | None]:
    """Compiles: state -> the scales of the next step's gradients, with a leading axis for the models."""
    import jax

    if not rule.scales:
        return lambda state: None
    return jax.jit(jax.vmap(lambda state: row_scales(state[1], state[0])))


@functools.lru_cache(maxsize=32)
def compiled_update(rule: Rule) -> Callable[..., State]:
    """Compiles: (state, gradients, rates, scales or None) -> the state after one step."""
    import jax

    def update(state: State, gradients: Arrays, rates: Rates, scales: Arrays | None = None) -> State:
        return jax.vmap(rule.move)(rates, gradients, state, scales)

    return jax.jit(update, donate_argnums=0)


@functools.cache
def optimizer_names() -> tuple[str, ...]:
    """Returns the names of optax's optimizers that need no more than a learning rate and a gradient.

    Guarantees:
      - Each of them takes compiled steps on a number and on a vector, and its state can be stored.
        (test_every_optimizer_takes_steps)
    """
    import optax

    names = []
    for name in dir(optax):
        function = getattr(optax, name)
        if not inspect.isfunction(function) or name.startswith("_") or name in _NO_OPTIMIZERS:
            continue
        parameters = inspect.signature(function).parameters
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = {p.name for p in parameters.values() if p.default is p.empty and p.kind not in variable}
        if "learning_rate" in parameters and needed <= {"learning_rate"}:
            names.append(name)
    return tuple(names)


def check_optimizer(name: str) -> None:
    """Raises InputError for a name that optax does not have."""
    if name == "adam":
        return
    if name not in optimizer_names():
        near = difflib.get_close_matches(str(name), optimizer_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; adam and sgd are among them"
        raise InputError(f"optax has no optimizer {name!r} that needs only a learning rate{hint}")


def make_optimizer(name: str, learning_rate: Any, *, momentum: float = 0.0) -> "optax.GradientTransformation":
    """Returns the optax optimizer of this name; momentum applies to sgd.

    >>> make_optimizer("sgd", 0.1).init({})
    (EmptyState(), EmptyState())
    """
    import optax

    check_optimizer(name)
    return optax.sgd(learning_rate, momentum) if momentum else getattr(optax, name)(learning_rate)
