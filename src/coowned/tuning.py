"""Tuning in one call: the best of a random number of runs over a grid, with one guarantee for all of it."""

import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from coowned.accounting.covered import CoveredEvaluation
from coowned.attribution.examples import AttributedExamples
from coowned.errors import InputError
from coowned.finished_run import Run, open_run
from coowned.fitting import given_selection, say_above, say_result, sections_of_fit, selector_for, shown_to
from coowned.models.model import Specification
from coowned.runs.ledger import IN_MEMORY
from coowned.runs.ledger import NAME as LEDGER
from coowned.runs.settings import GROUPS, FitKeywords, MechanismSettings, Optimizer, RunSettings
from coowned.runs.tuning_config import EXPECTED_RUNS, TuningConfig
from coowned.runs.tuning_run import run_tuning
from coowned.selection.selector import Schedule, Selection, Selector


class TuneKeywords(FitKeywords, total=False):
    """Keywords of `tune` that `fit` has too, with the same meaning; `on_metrics` is not allowed."""

    epsilon: float
    delta: float
    adjacency: str
    mechanism: MechanismSettings | str | None
    optimizer: Optimizer | str | None
    run: RunSettings | None


def tune(
    examples: AttributedExamples,
    model: Specification,
    *,
    grid: Mapping[str, Sequence[Any]],
    expected_runs: float = EXPECTED_RUNS,
    selector: Selector[Any] | Selection | Schedule | None = None,
    evaluation: CoveredEvaluation | None = None,
    folder: str | os.PathLike[str] | None = None,
    **keywords: Unpack[TuneKeywords],
) -> Run:
    """Trains a random number of runs with random settings of a grid, and returns the one with the best covered score.

    Its guarantee is that of the whole tuning, at the epsilon that was asked for: all runs have more noise than one run
    alone would need, so the defaults of `fit` are often better. The cost is reported, through `progress` and the log,
    before the first run. What is neither given nor in the grid is chosen as for `fit`, at the epsilon of the whole
    tuning. Call it again with the same arguments and folder to resume a tuning that was interrupted.

    Guarantees:
      - A tuning has the epsilon that was asked for, and its run is that of a grid's setting.   (test_tune)
      - What `coowned tune` makes of the same data, settings and seed, bit for bit.   (test_tune_is_what_the_verb_does)

    Args:
      examples, model: as for `fit`.
      grid: by key, the values to try: keys of the mechanism (`batch_size`, `iterations`, `clip_norm`, ...) and of the
        optimizer (`learning_rate`, ...), and `contribution_bound`. Finite, public, and chosen without looking at the
        data: a grid that was narrowed down by earlier runs costs what those runs cost.
      expected_runs: the mean of the number of runs, which is random and secret; at most four times as many. More runs
        find better settings, and need more noise.
      selector, mechanism, optimizer, run: as for `fit`, for all runs; the grid replaces what they say. Around a
        learning rate of the grid, clip norm and decay are those around a rate that `fit` chooses.
      evaluation: how the score is made; by default `CoveredEvaluation()`. Its accuracy is that of the best of several,
        and therefore too high on average.
      folder: of the tuning, in the end of the best run; None: a private temporary folder, as for `fit`.
      epsilon, delta, adjacency: of the whole tuning, without defaults.

    Example:
      >>> from coowned import Greedy, LogisticRegression, from_table
      >>> rows = [{"users": [f"u{i % 40}"], "x": (-1.0) ** i, "y": i % 2} for i in range(200)]
      >>> best = tune(from_table(rows), LogisticRegression(features=["x"], label="y"), grid={"learning_rate": [0.1, 1]},
      ...             expected_runs=2, epsilon=8.0, delta=1e-6, adjacency="zero-out",
      ...             selector=Greedy(contribution_bound=2), batch_size=40, iterations=30)
      >>> best.guarantee.target_epsilon, best.guarantee.tuning.grid
      (8.0, {'learning_rate': [0.1, 1]})

    References: Papernot & Steinke (2022), https://arxiv.org/abs/2110.03620
    """
    if keywords.pop("on_metrics", None) is not None:
        raise InputError("tune has no on_metrics: what it would say of runs that are not released must not be kept")
    selector = selector_for(selector, examples)
    if "contribution_bound" in grid and getattr(selector, "contribution_bounds", None) is not None:
        raise InputError("a grid over contribution_bound needs one bound for everybody; omit contribution_bounds")
    groups = {name: keywords.pop(name, None) for name in GROUPS}
    evaluation = CoveredEvaluation() if evaluation is None else evaluation
    sections = sections_of_fit(model, selector, evaluation, groups=groups, keywords=keywords)
    tuning = TuningConfig(sections=sections, grid=grid, expected_runs=expected_runs, model=model, name="tune")
    path = Path(tempfile.mkdtemp(prefix="coowned-") if folder is None else folder)
    progress = keywords.get("progress")
    shown = shown_to(progress)  # no lines of the log, which may be kept: they would tell the number of runs
    try:
        with shown as (report, announce):
            run_tuning(
                tuning,
                path,
                examples=examples,
                select=functools.partial(given_selection, selector, examples),
                progress=report,
                announce=announce,
                advise=say_above if progress is None else announce,
                ledger=IN_MEMORY if folder is None else LEDGER,
            )
        finished = open_run(path, model=model)
    except BaseException:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(finished, shutil.rmtree, path, ignore_errors=True)
    say_result(finished, progress=progress)
    return finished
