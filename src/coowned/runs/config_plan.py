"""Plans for a configuration: what `plan` tries where `train` would run it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from coowned.accounting.choices import Plan
from coowned.accounting.planning import default_bounds, plan
from coowned.accounting.signal_to_noise import felt_parameters
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.splits import train_graph
from coowned.errors import CoownedError, InputError
from coowned.mechanism.registry import mechanism_class
from coowned.models.model import num_parameters, num_scores
from coowned.progress import Progress
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import completed_for
from coowned.selection.registry import needs_bound_alone


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
