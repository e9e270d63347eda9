"""Training in one call, on data in memory."""

import dataclasses
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.content.splits import split_examples
from coowned.errors import InputError
from coowned.finished_run import Run, check_model
from coowned.mechanism.registry import mechanisms
from coowned.models.tasks import Specification
from coowned.progress import Progress, reporting
from coowned.runs.config import GIVEN, TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.selection.registry import CLASSES
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.training.progress import OnMetrics

_SCHEDULE = ("batch_size", "iterations", "min_separation")  # of a selector that makes a schedule
_NOTE = "# Written by coowned.fit: the data were in memory.\n\n"


def fit(
    examples: AttributedExamples,
    model: Specification,
    *,
    selector: Selector[Any] | Selection | Schedule,
    batch_size: int | None = None,
    iterations: int | None = None,
    epsilon: float | str | None = None,
    noise_multiplier: float | None = None,
    delta: float | None = None,
    adjacency: str | None = None,
    allow_large_delta: bool = False,
    public: bool = False,
    mechanism: str | None = None,
    num_bands: int | None = None,
    clip_norm: float | None = 1.0,
    learning_rate: float = 0.01,
    optimizer: str = "adam",
    momentum: float | None = None,
    warmup: float | None = None,
    decay: str | None = None,
    final_rate: float | None = None,
    weight_decay: float | None = None,
    average: str | None = None,
    average_window: float | None = None,
    scale_gradients: bool | None = None,
    splits: Sequence[float] | None = None,
    selection_seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    checkpoint_every: int | None = None,
    devices: int = 1,
    baseline: bool = False,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
) -> Run:
    """Splits, selects, certifies, accounts, trains and evaluates: what `coowned train` does, on data in memory.

    Call it again with the same arguments and folder to resume a run that was interrupted.

    Guarantees:
      - It is the run that `coowned train` makes of the same data, settings and seed, bit for bit.
        (test_fit_is_what_train_does)
      - No content is read before S is chosen, certified and accounted for.   (test_content_is_read_after_selection)
      - A run that was killed and resumed ends in the same bits.   (test_killed_fit_is_resumed)

    Args:
      examples: from `from_table`, `read_parquet`, `read_mail`, ...
      model: `LogisticRegression(features=[...], label=...)`, say: which columns are read, and how large it is.
      selector: chooses S from the train split's graph: a selector of this package or of your own. Or S itself: a
        Selection from all examples, of which the train split's are used, or from the train split; a Schedule from the
        train split. A schedule has its own batch size and iterations. Anything that is not this package's must choose
        from the graph alone: the claim is void for an S that follows from content, and no recount can tell.
      batch_size, iterations: expected and public; number of steps.
      epsilon, noise_multiplier: exactly one of them; `epsilon="none"` for no guarantee.
      delta, adjacency: of the claim; they have no default.
      allow_large_delta: accept a delta of 0.1 or more.
      public: the data are public, and nothing is promised.
      mechanism: "dp-sgd", "dp-mf", "cyclic-dp-mf" or "random-allocation"; by default the one of the first three that
        fits the selector.
      num_bands: of the correlated noise.
      clip_norm: longest gradient of one copy; None only without a guarantee.
      learning_rate, optimizer: any optimizer of optax that needs only a learning rate.
      momentum, warmup, decay, final_rate, weight_decay, average, average_window, scale_gradients: what goes around the
        optimizer, as in `[optimizer]` of a configuration; None for the default.
      splits: shares of train, validation and test; by default the model's.
      selection_seed: public; breaks ties in the selector's order.
      folder: of the run; None: a private temporary folder that is removed when the `Run` is no longer used.
      seed: a test run: noise and coins are known, and nothing is promised.
      checkpoint_every: steps between two checkpoints.
      devices: among which a batch is split.
      baseline: also train without privacy on the same S, to compare with in evaluations and the report.
      progress: called now and then as progress(done, message): before the first step with what is being done, and with
        advice where a few users keep most examples out of S. The same is logged under the name "coowned".
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
    if not isinstance(examples, AttributedExamples):
        raise InputError(
            f"examples must be AttributedExamples, not {type(examples).__name__}; create them with from_table, "
            "read_parquet, read_mail, ..."
        )
    check_model(model)
    chosen = _selector_settings(selector)
    schedule = {name: chosen.pop(name) for name in _SCHEDULE if name in chosen}
    for name, value in (("batch_size", batch_size), ("iterations", iterations)):
        if value is not None and schedule.setdefault(name, value) != value:
            raise InputError(f"{name} is {value}, but the selector's is {schedule[name]}; omit one of them")
    groups = chosen.pop("groups", "num_groups" in chosen)
    if mechanism is None:
        mechanism = _mechanism_for(schedules="min_separation" in schedule, groups=groups)
    if adjacency is None and epsilon != "none" and not public:
        raise InputError("adjacency is required: 'zero-out' or 'replace'")
    sections = {
        "data": {"splits": splits},
        "selection": {"selector": chosen.pop("name"), "seed": selection_seed, **chosen},
        "privacy": {
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "delta": delta,
            "adjacency": adjacency,
            "public": public,
            "allow_large_delta": allow_large_delta,
        },
        "mechanism": {"kind": mechanism, "clip_norm": clip_norm, "num_bands": num_bands, **schedule},
        "model": model.settings(),
        "optimizer": {
            "name": optimizer,
            "learning_rate": learning_rate,
            "momentum": momentum,
            "warmup": warmup,
            "decay": decay,
            "final_rate": final_rate,
            "weight_decay": weight_decay,
            "average": average,
            "average_window": average_window,
            "scale_gradients": scale_gradients,
        },
        "run": {"seed": seed, "checkpoint_every": checkpoint_every, "devices": devices, "baseline": baseline},
    }
    config = TrainConfig.from_sections(sections, model=model, name="fit")
    config = dataclasses.replace(config, text=_NOTE + config.text)
    select = None
    if config.selection.selector == GIVEN:
        select = functools.partial(_given, selector, examples.graph, config)
    tell = functools.partial(reporting(progress), 0.0)
    # A temporary folder is readable by its owner alone.
    path = Path(tempfile.mkdtemp(prefix="coowned-") if folder is None else folder)
    try:
        with RunFolder.open(path) as opened:
            run_configuration(
                config,
                opened,
                examples=examples,
                select=select,
                progress=progress,
                on_metrics=on_metrics,
                announce=tell,
                advise=tell,
            )
        run = dataclasses.replace(Run.open(path), specification=model)
    except BaseException:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(run, shutil.rmtree, path, ignore_errors=True)
    return run


def _mechanism_for(*, schedules: bool, groups: bool) -> str:
    """The training kind that uses most of what the selector provides."""
    suitable = [kind for kind in mechanisms() if kind.needs_schedule == schedules and (groups or not kind.needs_groups)]
    return max(suitable, key=lambda kind: kind.needs_groups).training_kind


def _selector_settings(selector: Any) -> dict[str, Any]:
    """The name and settings of a selector of this package; of any other, and of S, what a mechanism must know."""
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
    """S for the train split's graph; `certify` recounts it like any other."""
    if not isinstance(selector, Selection | Schedule):
        selected = selector.select(graph, seed=config.selection.seed)
        if not isinstance(selected, Selection | Schedule):
            raise InputError(f"{type(selector).__name__}.select must return a Selection or a Schedule")
        return selected
    if selector.graph_digest == graph.digest:
        return selector
    if isinstance(selector, Schedule) or selector.graph_digest != everybody.digest:
        raise InputError(
            "S was selected from another graph; pass a Selection from all examples, or a Selection or Schedule from "
            "the train split"
        )
    train, groups = split_examples(everybody, config.splits)["train"], selector.groups
    return Selection.from_copies(graph, selector.copies[train], None if groups is None else groups[train])
