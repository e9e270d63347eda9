"""Training in one call, on data in memory."""

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from coowned import validate
from coowned.accounting.covered import CoveredEvaluation
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.errors import InputError
from coowned.finished_run import Run, check_model
from coowned.mechanism.registry import training_kind_for
from coowned.models.model import Specification
from coowned.progress import Progress, reporting
from coowned.progress_display import Announce, is_watched, to_stderr, training
from coowned.report.summary import qualities
from coowned.runs.config import GIVEN, TrainConfig
from coowned.runs.configured_run import Given, Select, run_configuration
from coowned.runs.inputs import of_train_split
from coowned.runs.launch import Told, train_in_processes
from coowned.runs.ledger import IN_MEMORY
from coowned.runs.ledger import NAME as LEDGER
from coowned.runs.run_folder import RunFolder
from coowned.runs.settings import FitKeywords, MechanismSettings, Optimizer, PrivacySettings, RunSettings, sections_of
from coowned.selection.registry import CLASSES
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.training.evaluate import check_labels
from coowned.training.workers import ALONE, Workers

_LOG = logging.getLogger(__name__)
_SCHEDULE = ("batch_size", "iterations", "min_separation")  # of a selector that makes a schedule
_NOTE = "# Written by coowned.fit: the data were in memory.\n\n"


def fit(
    examples: AttributedExamples,
    model: Specification,
    *,
    epsilon: float | dict[str, float] | str | None = None,
    delta: float | None = None,
    adjacency: str | None = None,
    selector: Selector[Any] | Selection | Schedule | None = None,
    privacy: PrivacySettings | None = None,
    mechanism: MechanismSettings | str | None = None,
    optimizer: Optimizer | str | None = None,
    evaluation: CoveredEvaluation | None = None,
    run: RunSettings | None = None,
    folder: str | os.PathLike[str] | None = None,
    **keywords: Unpack[FitKeywords],
) -> Run:
    """Splits, selects, certifies, accounts, trains and evaluates: what `coowned train` does, on data in memory.

    Call it again with the same arguments and folder to resume a run that was interrupted. What is not given is chosen
    from the graph and public numbers (`coowned.runs.defaults`); `run.plan` says why.

    Guarantees:
      - It is the run that `coowned train` makes of the same data, settings and seed, bit for bit.
        (test_fit_is_what_train_does)
      - It is the same run, bit for bit, in any number of processes.   (test_fit_in_two_processes)
      - No content is read before S is chosen, certified and accounted for.   (test_content_is_read_after_selection)
      - A run that was killed and resumed ends in the same bits.   (test_killed_fit_is_resumed)
      - A second run beside the first, on the same graph, is told what both promise before it trains.
        (test_fit_warns_of_others)
      - Where no held-out label is among the classes, that is an error, once the run is finished: the folder is the one
        that any other labels would leave.   (test_classes_that_match_no_label)

    Args:
      examples: from `from_table`, `read_parquet`, `read_mail`, ...
      model: `LogisticRegression(features=[...], label=...)`, say: which columns are read, and how large it is.
      selector: chooses S from the train split's graph: one of this package or of your own; by default the best that a
        plan finds. Or S itself (`co.read_selection`): a Selection from all examples, of which the train split's are
        used, or from the train split; a Schedule from the train split, with a batch size and iterations of its own.
        Anything that is not this package's must choose from the graph alone: the claim is void for an S that follows
        from content, and no recount can tell.
      epsilon, delta, adjacency: of the claim, without defaults; `epsilon="none"` for no guarantee, a dict for each tier
        where users have bounds of their own.
      privacy: in their place, for a noise multiplier or public data: `PrivacySettings(public=True)`.
      mechanism: how batches are drawn and noise is made, or its kind alone: "dp-sgd", "dp-mf", "cyclic-dp-mf" or
        "random-allocation"; by default the one of the first three that fits the selector.
      optimizer: `Optimizer(learning_rate=0.1, decay="cosine")`, or a name of optax alone.
      evaluation: `CoveredEvaluation(epsilon_share=0.1)`: also release an accuracy on the test split, as `run.covered`,
        that the guarantee covers; by default nothing but the model is.
      run: checkpoints, devices, and whether to train a baseline without privacy as well.
      folder: of the run; None: a private temporary folder that is removed when the `Run` is no longer used.
      batch_size, iterations, clip_norm: in short for those of `mechanism`: `batch_size=256`.
      learning_rate: in short for that of `optimizer`.
      splits: shares of train, validation and test; by default the model's.
      selection_seed: public; breaks ties in the selector's order.
      seed: in short for that of `run`, of a test run: noise and coins are known, and nothing is promised.
      processes: of this machine that train together; each gets all of the examples, the model and the selector.
      progress: called now and then as progress(done, message): before the first step with what is being done, and with
        advice where a few users keep most examples out of S. By default a bar on a terminal or in a notebook, with the
        time that is left, and then how good the model is; elsewhere the same is logged under the name "coowned".
      on_metrics: called at some steps as on_metrics({"step": ..., "loss": ..., "clipped_share": ..., "copies": ...});
        NOT covered by the guarantee.

    Example:
      >>> from coowned import Greedy, LogisticRegression, from_table
      >>> rows = [{"users": [f"u{i % 40}"], "x": (-1.0) ** i, "y": i % 2} for i in range(200)]
      >>> run = fit(from_table(rows), LogisticRegression(features=["x"], label="y"), epsilon=8.0, delta=1e-6,
      ...           adjacency="zero-out", selector=Greedy(contribution_bound=2), batch_size=40, iterations=30,
      ...           learning_rate=0.1)
      >>> run.predict([{"x": 1.0}, {"x": -1.0}, {"x": None}])["prediction"].to_list()
      [0, 1, None]
    """
    selector = selector_for(selector, examples)
    groups = {"privacy": privacy, "mechanism": mechanism, "optimizer": optimizer, "run": run}
    claim = {"epsilon": epsilon, "delta": delta, "adjacency": adjacency}
    sections = sections_of_fit(model, selector, evaluation, groups=groups, keywords={**claim, **keywords})
    progress = keywords.get("progress")
    # A temporary folder is readable by its owner alone.
    path = Path(tempfile.mkdtemp(prefix="coowned-") if folder is None else folder)
    asked_for = _Fit(examples, model, selector, sections, path, IN_MEMORY if folder is None else LEDGER)
    try:
        asked_for.config()  # refuses before any process is started
        processes = keywords.get("processes", 1)
        validate.positive(processes=processes)
        with shown_to(progress, log=_LOG.info) as (shown, announce):
            told = Told(shown, announce, say_above if progress is None else announce, keywords.get("on_metrics"))
            if processes == 1:
                asked_for.train(ALONE, told)
            else:
                train_in_processes(asked_for, processes, told)
        finished = dataclasses.replace(Run.open(path), specification=model)
    except BaseException:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(finished, shutil.rmtree, path, ignore_errors=True)
    say_result(finished, progress=progress)
    return finished


class _Fit(NamedTuple):
    """The inputs of a `fit` that every process gets."""

    examples: AttributedExamples
    model: Specification
    selector: Any
    sections: dict[str, Any]
    path: Path
    ledger: str | None

    def config(self) -> TrainConfig:
        config = TrainConfig.from_sections(self.sections, model=self.model, name="fit")
        return dataclasses.replace(config, text=_NOTE + config.text)

    def train(self, workers: Workers, told: Told) -> None:
        config = self.config()
        with RunFolder.open(self.path, workers=workers, ledger=self.ledger) as opened:
            run_configuration(
                config,
                opened,
                examples=self.examples,
                given=Given(select=given_selection(self.selector, self.examples, config)),
                progress=told.progress,
                on_metrics=told.on_metrics,
                announce=told.announce,
                advise=told.advise,
            )


def selector_for(selector: Any, examples: AttributedExamples) -> Any:
    """Returns the selector for these examples' users: a rule's answers have a digest, which a configuration names."""
    if not isinstance(examples, AttributedExamples):
        raise InputError(
            f"examples must be AttributedExamples, not {type(examples).__name__}; create them with from_table, "
            "read_parquet, read_mail, ..."
        )
    for_graph = getattr(selector, "for_graph", None)
    return selector if for_graph is None else for_graph(examples.graph)


def sections_of_fit(
    model: Specification,
    selector: Selector[Any] | Selection | Schedule | None,
    evaluation: CoveredEvaluation | None,
    *,
    groups: Mapping[str, Any],
    keywords: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the sections of a configuration that the arguments of `fit` describe, as plain values."""
    check_model(model)
    sections = sections_of(groups, keywords)
    asked = sections["privacy"]
    is_private = asked.get("epsilon") != "none" and not asked.get("public")
    if "adjacency" not in asked and is_private:
        raise InputError("adjacency is required: 'zero-out' or 'replace'")
    chosen = {} if selector is None else _selector_settings(selector)
    schedule = {name: chosen.pop(name) for name in _SCHEDULE if name in chosen}
    shape = sections["mechanism"]
    for name, value in schedule.items():
        if shape.setdefault(name, value) != value:
            raise InputError(f"{name} is {shape[name]}, but the selector's is {value}; omit one of them")
    has_groups = chosen.pop("groups", "num_groups" in chosen)
    if not is_private and "clip_norm" not in keywords:
        shape.setdefault("clip_norm", 1.0)
    if selector is not None:
        shape.setdefault("kind", training_kind_for(schedules="min_separation" in schedule, groups=has_groups))
    if evaluation is not None:
        if not isinstance(evaluation, CoveredEvaluation):
            raise InputError(f"evaluation must be CoveredEvaluation(...), not {evaluation!r}")
        sections["evaluation"] = dataclasses.asdict(evaluation)
    seed = keywords.get("selection_seed", 0)
    sections["selection"] = {"selector": chosen.pop("name", None), "seed": seed, **chosen}
    return {**sections, "model": model.settings()}


def given_selection(
    selector: Selector[Any] | Selection | Schedule | None, examples: AttributedExamples, config: TrainConfig
) -> Select | None:
    """Returns the function that chooses S if it is given and not configured; else None."""
    if config.selection.selector != GIVEN and getattr(selector, "contribution_bounds", None) is None:
        return None
    return functools.partial(_given, selector, examples.graph, config)


def shown_to(
    progress: Progress | None, *, log: Announce | None = None
) -> contextlib.AbstractContextManager[tuple[Progress | None, Announce]]:
    """Returns where progress and announcements go: the given callback, a bar, or lines of the log if it is read."""
    if progress is None and (is_watched() or (log is not None and _LOG.isEnabledFor(logging.INFO))):
        return training(log=log or to_stderr, above=say_above)
    return contextlib.nullcontext((progress, functools.partial(reporting(progress), 0.0)))


def say_above(text: str) -> None:
    """Prints above a bar what the log already has."""
    if is_watched():
        to_stderr(text)


def say_result(finished: Run, *, progress: Progress | None) -> None:
    """Prints how good a model is; InputError if no label is a class."""
    for found in qualities(finished) if progress is None else ():
        (to_stderr if is_watched() else _LOG.info)(f"{found.heading}: {found.sentence}")
    check_labels(finished.evaluations())


def _selector_settings(selector: Any) -> dict[str, Any]:
    """Returns the name and settings of a built-in selector; of any other, or of S, what a mechanism must know."""
    if isinstance(selector, Selection):
        return {"name": GIVEN, "groups": selector.groups is not None}
    if isinstance(selector, Schedule):
        iterations, batch_size = selector.batches.shape
        separation = selector.min_separation
        return {"name": GIVEN, "batch_size": batch_size, "iterations": iterations, "min_separation": separation}
    if isinstance(selector, type) or not callable(getattr(selector, "select", None)):
        raise InputError(
            "selector must be a selector such as Greedy(contribution_bound=2), a Selection or a "
            f"Schedule, not {selector!r}"
        )
    if CLASSES.get(getattr(selector, "name", "")) == f"{type(selector).__module__}.{type(selector).__name__}":
        return selector.settings()
    schedule = {name: getattr(selector, name) for name in _SCHEDULE if hasattr(selector, name)}
    return {"name": GIVEN, "groups": hasattr(selector, "num_groups"), **schedule}


def _given(
    selector: Any, everybody: AttributionGraph, config: TrainConfig, graph: AttributionGraph
) -> Selection | Schedule:
    """Returns S for the train split's graph; `certify` recounts it like any other."""
    if not isinstance(selector, Selection | Schedule):
        selected = selector.select(graph, seed=config.selection.seed)
        if not isinstance(selected, Selection | Schedule):
            raise InputError(f"{type(selector).__name__}.select must return a Selection or a Schedule")
        return selected
    return of_train_split(selector, everybody, config.splits, graph)
