"""Defaults for the omitted keys of a configuration, and what `plan` tries where `train` would run it.

Both are chosen from the graph and public numbers alone, with reasons.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coowned import codec
from coowned.accounting.choices import Choice, Plan
from coowned.accounting.planning import DEFAULT_SELECTORS, budget_for, default_bounds, plan, training_sizes
from coowned.accounting.signal_to_noise import GOOD, felt_parameters
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.splits import train_graph
from coowned.errors import ConfigError, CoownedError, InputError
from coowned.mechanism.registry import mechanism_class, training_kind_for
from coowned.models.model import num_parameters, num_scores
from coowned.progress import Progress, counted
from coowned.runs.config import TrainConfig
from coowned.runs.inputs import Select, choose
from coowned.runs.settings import USUAL_OPTIMIZER
from coowned.selection.registry import needs_bound_alone, selector_class
from coowned.selection.selector import Schedule, Selection

CLIP_NORM = 0.25
DECAY = "cosine"
_USUAL_CLIP_NORM = 1.0
_TRAVEL = 3.0  # of a linear model's coefficient: learning rate times the root of the number of steps
_LONGEST_STEP = 1.0  # of all parameters of another model together


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The size of a model: public numbers.

    Attributes:
      num_parameters: without frozen ones.
      num_scores: that a linear model gives an example; 0 for any other model.
    """

    num_parameters: int
    num_scores: int

    @property
    def is_linear(self) -> bool:
        return self.num_scores > 0

    @property
    def felt_parameters(self) -> int:
        return felt_parameters(self.num_parameters, self.num_scores)


def completed(
    config: TrainConfig,
    graph: AttributionGraph,
    sizes: Callable[[], ModelSizes],
    select: Callable[[TrainConfig], Selection | Schedule],
    progress: Progress | None = None,
) -> TrainConfig:
    """Returns the configuration with a value for every omitted key, and the reasons as comments.

    Guarantees:
      - What is given is kept; a configuration that leaves nothing out is returned as it is.   (test_given_values_stay)
      - The same graph, sizes and given values have the same defaults, whatever the content is.
        (test_defaults_follow_from_the_graph_alone)

    Args:
      config: as it was given.
      graph: of the train split, which S is chosen from.
      sizes: gives the model's, when they are needed.
      select: chooses the S of a configuration that says how.
    """
    if not config.left_out:
        return config
    choosing = _Choosing(config=config, graph=graph, sizes=sizes(), select=select, progress=progress)
    chosen, reasons = choosing.everything()
    return config.with_keys(chosen, reasons)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choosing:
    """The choice of all omitted keys; its fields are the arguments of `completed`."""

    config: TrainConfig
    graph: AttributionGraph
    sizes: ModelSizes
    select: Callable[[TrainConfig], Selection | Schedule]
    progress: Progress | None

    def everything(self) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Returns the chosen values by section and key, and the reasons."""
        left_out = self.config.left_out
        chosen: dict[str, dict[str, Any]] = {}
        reasons = []
        kind, batch_size, iterations = self._kind(), self.config.mechanism.batch_size, self.config.mechanism.iterations
        if "kind" in left_out.get("mechanism", ()):
            chosen["mechanism"] = {"kind": kind}
            reasons.append(f'[mechanism] kind = "{kind}": it suits the selector, and any model.')
        if "selection" in left_out:
            best, tried = self._best(kind)
            chosen["selection"] = {"selector": best.selector, "contribution_bound": best.contribution_bound}
            batch_size, iterations = best.target.batch_size, best.target.iterations
            reasons.append(_why_selected(best, tried))
        elif batch_size is None or iterations is None:
            size = self._size(kind)
            given = {"batch_size": batch_size, "iterations": iterations}
            batch_size, iterations = training_sizes(size, budget=self._budget, **given)
        shape = {"batch_size": batch_size, "iterations": iterations}
        if keys := [key for key in shape if key in left_out.get("mechanism", ())]:
            chosen.setdefault("mechanism", {}).update({key: shape[key] for key in keys})
            reasons.append(self._why_so_large({key: shape[key] for key in keys}))
        if "clip_norm" in left_out.get("mechanism", ()):
            clip_norm, why = _USUAL_CLIP_NORM, "as usual beside a learning rate of one's own."
            if "optimizer" in left_out:
                clip_norm, why = CLIP_NORM, "the noise grows with it, and longer gradients count by their direction."
            chosen.setdefault("mechanism", {})["clip_norm"] = clip_norm
            reasons.append(f"[mechanism] clip_norm = {clip_norm}: {why}")
        if "optimizer" in left_out:
            chosen["optimizer"], reason = self._optimizer(iterations)
            reasons.append(reason)
        return chosen, reasons

    @property
    def _budget(self) -> int:
        return budget_for(self.sizes.num_parameters, is_linear=self.sizes.is_linear)

    def _kind(self) -> str:
        if self.config.mechanism.kind is not None:
            return self.config.mechanism.kind
        word = self.config.selection.selector
        fields = () if word is None else {field.name for field in dataclasses.fields(selector_class(word))}
        return training_kind_for(schedules="min_separation" in fields, groups="num_groups" in fields)

    def _best(self, kind: str) -> tuple[Choice, int]:
        """Returns the best choice of a plan, and how many it tried."""
        privacy, sizes, word = self.config.privacy, self.config.mechanism, self.config.selection.selector
        if not privacy.is_private or not isinstance(privacy.epsilon, float | int) or kind != "dp-sgd":
            raise ConfigError(
                "[selection] needs a selector and its settings: they are chosen only for one given epsilon and "
                '[mechanism] kind = "dp-sgd"'
            )
        assert privacy.delta is not None
        assert privacy.adjacency is not None
        found = plan(
            self.graph,
            epsilon=privacy.epsilon,
            delta=privacy.delta,
            adjacency=privacy.adjacency,
            batch_size=sizes.batch_size,
            iterations=sizes.iterations,
            progress=self.progress,
            mechanism=mechanism_class(kind).kind,
            selectors=DEFAULT_SELECTORS if word is None else (word,),
            num_parameters=self.sizes.felt_parameters,
            allow_large_delta=privacy.allow_large_delta,
            seed=self.config.selection.seed,
            user_bounds=self.config.user_bounds,
            budget=self._budget,
        )
        for choice in found.choices:
            if choice.best:
                return choice, len(found.choices)
        raise ConfigError(f"[selection] nothing that could be trained on was found: {' '.join(found.notes())}")

    def _size(self, kind: str) -> int:
        """Returns the size of S for the selector that the configuration names."""
        if kind != "dp-sgd":
            missing = "batch_size" if self.config.mechanism.batch_size is None else "iterations"
            raise ConfigError(f'[mechanism] needs the key {missing!r}: it is chosen for kind = "dp-sgd" only')
        selected = self.select(self.config)
        assert isinstance(selected, Selection)
        return selected.size

    def _why_so_large(self, shape: dict[str, Any]) -> str:
        words = ", ".join(f"{key} = {value}" for key, value in shape.items())
        return (
            f"[mechanism] {words}: the more copies in a batch, the less noise beside their mean gradient; at most half "
            f"of S in a batch, and {counted(self._budget, 'copy', 'copies')} in all batches together."
        )

    def _optimizer(self, iterations: int | None) -> tuple[dict[str, Any], str]:
        assert iterations is not None
        rate = _TRAVEL / math.sqrt(iterations)
        why = f"{_TRAVEL:g} over the root of the number of steps, so that noise moves a score by about that at most"
        if not self.sizes.is_linear:
            rate = min(rate, _LONGEST_STEP / math.sqrt(self.sizes.num_parameters))
            why = (
                f"a step moves all {self.sizes.num_parameters:,} parameters together by about {_LONGEST_STEP:g} at most"
            )
        rounded = float(f"{rate:.2g}")
        chosen = {"name": USUAL_OPTIMIZER, "learning_rate": rounded, "decay": DECAY, "average": "none"}
        chosen = {key: value for key, value in chosen.items() if key in self.config.left_out["optimizer"]}
        words = ", ".join(filter(None, codec.encode_toml({"optimizer": chosen}).splitlines()[1:]))
        return chosen, f"[optimizer] {words}: {why}; it falls to 0, so that noise matters less towards the end."


def _why_selected(best: Choice, tried: int) -> str:
    signal = best.signal_to_noise
    assert signal is not None  # as of every choice that can be used
    hopeless = f" A signal-to-noise below {GOOD:g} is hopeless: more data or a larger epsilon is needed."
    return (
        f'[selection] selector = "{best.selector}", contribution_bound = {best.contribution_bound}: of '
        f"{counted(tried, 'choice')} it has the largest predicted signal-to-noise, {signal:.3g}, with "
        f"{counted(best.size, 'copy', 'copies')} of {counted(best.num_distinct, 'example')} and noise multiplier "
        f"{best.noise_multiplier:.3g}.{hopeless if signal < GOOD else ''}"
    )


def completed_for(
    config: TrainConfig,
    examples: AttributedExamples,
    graph: AttributionGraph,
    select: Select | None = None,
    progress: Progress | None = None,
) -> TrainConfig:
    """Returns the configuration with omitted keys chosen for these examples, whose content is not read.

    Args:
      graph: of their train split.
    """
    if not config.left_out:
        return config

    def sizes() -> ModelSizes:
        model, *_ = config.task(examples.schema).read_nothing(examples)
        return ModelSizes(num_parameters=num_parameters(model), num_scores=num_scores(model) or 0)

    def selected(config: TrainConfig) -> Selection | Schedule:
        return choose(config, graph) if select is None else select(graph)

    return completed(config, graph, sizes, selected, progress)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempted:
    """The inputs of a plan, all of them public.

    Attributes:
      graph: the one S would be selected from.
      settings: keywords of `plan`.
      config: the configuration that is planned for.
    """

    graph: AttributionGraph
    settings: Mapping[str, Any]
    config: TrainConfig | None = None

    def plan(self, progress: Progress | None = None) -> Plan:
        """Runs `coowned.plan`."""
        return plan(self.graph, **self.settings, progress=progress)


def attempts_for(
    config: TrainConfig,
    examples: AttributedExamples,
    given: Mapping[str, Any],
    *,
    complete: bool,
    progress: Progress | None = None,
) -> Attempted:
    """Returns the inputs of a plan for a configuration, on its train split; no content is read.

    Args:
      given: keywords of `plan` that are given; they replace those of the configuration.
      complete: choose what the configuration leaves out, and try that alone.
    """
    graph = examples.graph
    graph = train_graph(graph, config.splits)
    settings = {**plan_settings(config), **given}
    if complete:
        config = completed_for(config, examples, graph, progress=progress)
        # The plan's table is of what is written.
        settings |= plan_settings(config)
        settings["contribution_bounds"] = [config.selection.settings["contribution_bound"]]
        settings["mechanism"] = mechanism_class(config.mechanism.sizes[0]).kind
    elif bound := config.selection.settings.get("contribution_bound"):
        settings.setdefault("contribution_bounds", sorted({bound, *default_bounds(graph)}))
    if "num_parameters" not in settings and (parameters := _parameters_of(config, examples)):
        settings["num_parameters"] = parameters
    return Attempted(graph=graph, settings=settings, config=config)


def plan_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the keywords of `plan` that a configuration sets."""
    selection, privacy, sizes = config.selection, config.privacy, config.mechanism
    if isinstance(privacy.epsilon, dict):
        raise InputError("[privacy] epsilon: a plan compares choices at one epsilon, not at one for each tier")
    settings: dict[str, Any] = {
        "epsilon": None if isinstance(privacy.epsilon, str) else privacy.epsilon,
        "delta": privacy.delta,
        "adjacency": privacy.adjacency,
        "allow_large_delta": privacy.allow_large_delta,
        "batch_size": sizes.batch_size,
        "iterations": sizes.iterations,
        "selectors": [selection.selector] if needs_bound_alone(selection.selector) else None,
        "seed": selection.seed,
        "user_bounds": config.user_bounds,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _parameters_of(config: TrainConfig, examples: AttributedExamples) -> int | None:
    """Returns the number of parameters that get noise; None if the model cannot be built yet.

    Its columns, files or packages may be missing.
    """
    no_rows = {"train": np.empty(0, np.int64)}
    try:
        model = config.task(examples.schema).load(examples, no_rows).model
        return felt_parameters(num_parameters(model), num_scores(model))
    except CoownedError:
        return None
