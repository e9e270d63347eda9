"""A configured run, from the data to a model: read, split, select, certify, account, train, evaluate."""

import dataclasses
import functools
import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from coowned import codec
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import heavy_users_advice
from coowned.attribution.tables import types_are_inferred
from coowned.certificate import ContributionCertificate, certify
from coowned.content.data import TrainingData
from coowned.content.splits import graphs_of_splits, split_examples
from coowned.errors import InputError, require
from coowned.exact.keys import RunKey
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_class
from coowned.models.model import Content, Model, Task, num_parameters, num_scores
from coowned.progress import Progress
from coowned.runs import records
from coowned.runs.config import TrainConfig
from coowned.runs.inputs import Select, choose, kept_arrays, read_examples, select_for, summary_of, with_shape
from coowned.runs.records import COVERED
from coowned.runs.run_folder import RunFolder, code_digest, machine
from coowned.runs.stored_run import StoredRun
from coowned.selection.selection_files import encode_selection
from coowned.selection.selector import Schedule, Selection
from coowned.training import evaluate as evaluation
from coowned.training.loop import TrainedModel, check_devices, train, train_without_privacy
from coowned.training.plan import TrainingPlan
from coowned.training.progress import OnMetrics, claim, parquet_bytes
from coowned.training.workers import Workers, agree, send

if TYPE_CHECKING:
    from coowned.training.covered import CoveredFigures

_LOG = logging.getLogger(__name__)
PRIVATE_LOG = (
    "Not covered by the guarantee: counts computed from the content of selected and held-out examples. "
    "Never release them."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """Inputs that the caller has prepared already, and that the configuration does not contain.

    Attributes:
      select: chooses S from the train split's graph, where the configuration says that it is given.
      guarantee: of the tuning that the run is of; its noise is used.
    """

    select: Select | None = None
    guarantee: PrivacyGuarantee | None = None


_NOTHING = Given()


def run_configuration(
    config: TrainConfig,
    folder: RunFolder,
    *,
    examples: AttributedExamples | None = None,
    given: Given = _NOTHING,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
    announce: Callable[[str], None] = lambda text: None,
    advise: Callable[[str], object] = lambda text: None,
) -> TrainedModel:
    """Runs a configuration in a folder, from the start or from where an earlier process was interrupted.

    S and the guarantee are made once and stored before the first step; a resumed run reads them back. Whatever fails
    before that leaves nothing in the folder.
    Validation and test are evaluated once, at the end, into files of their own.

    Guarantees:
      - S is chosen from the train split's graph alone.   (test_selection_sees_the_train_split_alone)
      - No content is read before S is chosen, certified and accounted for.   (test_content_is_read_after_selection)
      - A run that is interrupted and resumed is the run that was not.   (test_interrupted_and_resumed)
      - A covered evaluation is of the certified held-out part, and the same bits when a run is resumed.
        (test_covered_evaluation_of_a_run, test_killed_covered_run_is_resumed)
      - One that ended before its record was written leaves nothing, and begins anew with a new key.
        (test_ended_before_the_record, test_corrected_configuration_in_a_folder_that_was_there)

    Args:
      config: the configuration; `config.toml` is the file as it was written.
      folder: an open `RunFolder`.
      examples: data in memory, in place of those that the configuration names.
      given: S and guarantee, where they are made elsewhere.
      progress, on_metrics: as for `train`.
      announce: called with each stage; before training with the claim, and then with what the noise means.
      advise: called with advice if a few users keep most examples out of S, if S is not like the data, or if labels may
        be others than the default classes.
    """

    log, tell = _logging(given, announce)
    require("train", "training")
    _check_first(config, folder)
    run_key = folder.run_key(config.run.seed)
    if examples is None:
        tell("reading")
        examples = read_examples(config)
    task = config.task(examples.schema)
    splits = split_examples(examples.graph, config.splits)
    graphs = graphs_of_splits(examples.graph, splits)
    graph, test_graph = graphs["train"], graphs["test"]
    resumed = folder.is_begun
    tell("recounting the selection" if resumed else "selecting")  # `train` recounts and compares everything
    begun = _resumed if resumed else _begun
    config, plan, held_out = begun(config, folder, examples, (graph, test_graph), run_key, given)
    unlike, advices = ("", []) if resumed else _summarize(config, folder, graph, plan)
    for advice in (*advices, *([] if resumed else _label_advice(config, examples.schema))):
        log(advice)
        advise(advice)
    tell("reading content")
    content = task.load(examples, splits, plan.selected.copies, kept=kept_arrays(config, task))
    digest = _digest(config, content)
    if not resumed:
        _prepare_files(plan, folder, graph, config.text, content.private_log)
        whole = {"public": plan.public, "data_digest": examples.graph.digest}
        folder.prepare_claim(plan.certificate, plan.guarantee, plan.mechanism, **whole)
        if held_out is not None:
            _prepare_held_out(folder, test_graph, held_out)
    tell(f"training: {claim(plan)}{_expected(plan, content.model)}{unlike}")
    return train(
        plan,
        content.model,
        content.parts["train"],
        folder=folder,
        initial=task.initial,
        configuration_digest=digest,
        checkpoint_every=config.run.checkpoint_every,
        devices=config.run.devices,
        progress=progress,
        on_metrics=on_metrics,
        at_end=functools.partial(_evaluate, _Begun(config, plan, held_out), folder, task, content, tell),
    )


def _summarize(
    config: TrainConfig, folder: RunFolder, graph: AttributionGraph, plan: TrainingPlan
) -> tuple[str, list[str]]:
    """Prepares the counts of the graph; returns what an S unlike the data means for the outlook, and all advice."""
    advices = []
    if config.data.shards is None and (found := heavy_users_advice(graph, plan.certificate.contribution_bound)):
        advices.append(found)
    summary = summary_of(config, graph, plan.selected, plan.certificate)
    if summary is not None:
        folder.prepare(records.GRAPH_FILE, summary.to_json().encode())
        if found := summary.warning():
            return " This is about noise alone: S is not like the data.", [*advices, found]
    return "", advices


def _label_advice(config: TrainConfig, schema: pa.Schema) -> list[str]:
    """Returns what to know where labels may be texts and nobody said so: only the finished run would show it."""
    label, classes = (getattr(config.model, name, None) for name in ("label", "classes"))
    if label is None or classes != (0, 1) or not types_are_inferred(schema, label):
        return []
    return [
        f"The classes are 0 and 1, the default, and the data do not say what column {label!r} holds. If "
        "its labels are others, stop and declare the classes: otherwise, all rows are unusable."
    ]


def _logging(given: Given, announce: Callable[[str], None]) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Returns functions that log a text, and that log and announce it; a tuning's runs log nothing."""

    def log(text: str) -> None:
        if given.guarantee is None:
            _LOG.info(text)

    def tell(text: str) -> None:
        log(text)
        announce(text)

    return log, tell


def _digest(config: TrainConfig, content: Content) -> str:
    """Returns a digest of what a resumed run must share besides plan, model and data."""
    if not config.evaluation:
        return config.digest
    from coowned.training.covered import check_covered

    check_covered(config.evaluation, content.model)
    # The same noise must not be added to the counts of other examples.
    return codec.checksum([config.digest, content.parts["test"].digest])


def _expected(plan: TrainingPlan, model: Model) -> str:
    noise = plan.signal_to_noise(num_parameters(model), num_scores(model))
    return f"\n{noise.verdict()} {noise.outlook(plan.certificate.num_distinct).sentence}" if noise else ""


class _Begun(NamedTuple):
    """A run before its first step."""

    config: TrainConfig  # with what was left out
    plan: TrainingPlan
    held_out: Selection | None  # what a covered evaluation counts on


def _check_first(config: TrainConfig, folder: RunFolder) -> None:
    """Raises errors that would otherwise occur later, since selection may take long."""
    if folder.workers.count > 1:
        named = {"version of the code or of coowned, jax, numpy, numba or optax": code_digest()}
        named |= {"kind of device or processor, or XLA_FLAGS,": machine(), "configuration": config.digest}
        agree(folder.workers, named)
    folder.refuse_if_finished()
    check_devices(config.run.devices)
    config.model.check_files(config.folder)


def _resumed(
    config: TrainConfig,
    folder: RunFolder,
    examples: AttributedExamples,
    graphs: tuple[AttributionGraph, AttributionGraph],
    run_key: RunKey,
    given: Given,
) -> _Begun:
    """Reads back the start of an interrupted run."""
    del examples, given
    graph, test_graph = graphs
    run = StoredRun.open(folder.path, finished=False)
    _run_id(folder.workers, run)
    config = config.completed_as(run.config(config.folder))
    plan = _plan(config, run.certificate, run.selection(graph), run.mechanism, run.guarantee, run_key)
    return _Begun(config, plan, run.held_out(test_graph) if config.evaluation else None)


def _begun(
    config: TrainConfig,
    folder: RunFolder,
    examples: AttributedExamples,
    graphs: tuple[AttributionGraph, AttributionGraph],
    run_key: RunKey,
    given: Given,
) -> _Begun:
    """Selects, certifies and accounts for a new run, from the graphs of its train and test split."""
    graph, test_graph = graphs
    run_id = _run_id(folder.workers, None)
    if (select := select_for(config, examples.graph)) is not None:
        selected = select(graph)
        config, given = with_shape(config, selected), dataclasses.replace(given, select=lambda graph: selected)
    if config.left_out:
        from coowned.runs.defaults import completed_for

        config = completed_for(config, examples, graph, given.select)
    selected = choose(config, graph) if given.select is None else given.select(graph)
    held_out = held_out_of(config, test_graph, selected) if config.evaluation else None
    part = held_out and certify(test_graph, held_out)
    given = dataclasses.replace(given, select=lambda graph: selected)
    return _Begun(config, make_plan(config, graph, run_key, given, held_out=part, run_id=run_id), held_out)


def _evaluate(
    begun: _Begun,
    folder: RunFolder,
    task: Task,
    content: Content,
    tell: Callable[[str], None],
    trained: TrainedModel,
) -> None:
    """Evaluates a finished model and writes the results; with several workers the first does."""
    config, plan, held_out = begun
    if folder.workers.rank:
        return
    baseline = None
    if config.run.baseline:
        tell("training without privacy, for comparison")
        baseline = train_without_privacy(plan, content.model, content.parts["train"], initial=task.initial)
    for name in ("validation", "test"):
        found = evaluation.evaluate(
            content.model, trained.parameters, content.parts[name], split=name, baseline=baseline
        )
        folder.write(f"{name}.parquet", parquet_bytes(found, evaluation.NOT_COVERED))
    for name, file in task.files.items():
        folder.write(name, file, mode=0o644)
    if held_out is not None:
        figures = _evaluate_covered(config, plan, trained, content.parts["test"], held_out)
        folder.write(COVERED, (figures.to_json() + "\n").encode(), mode=0o644)


def _evaluate_covered(
    config: TrainConfig, plan: TrainingPlan, trained: TrainedModel, data: TrainingData, held_out: Selection
) -> "CoveredFigures":
    from coowned.training.covered import evaluate_covered

    assert config.evaluation
    assert plan.guarantee
    assert plan.guarantee.evaluation
    return evaluate_covered(
        trained.model,
        trained.parameters,
        data,
        held_out,
        settings=config.evaluation,
        release=plan.guarantee.evaluation,
        run_key=plan.run_key,
        run_id=plan.guarantee.run_id,
    )


def make_plan(
    config: TrainConfig,
    graph: AttributionGraph,
    run_key: RunKey,
    given: Given = _NOTHING,
    *,
    held_out: ContributionCertificate | None = None,
    run_id: str | None = None,
) -> TrainingPlan:
    """Selects from the graph, certifies and accounts for what the configuration asks.

    Args:
      held_out: of the part that a covered evaluation counts on.
      run_id: what the guarantee calls the run; made up at random by default.
    """
    selected = choose(config, graph) if given.select is None else given.select(graph)
    certificate = certify(graph, selected)
    if certificate.tiers is not None and certificate.tiers.num_unknown_keys:
        _LOG.warning(certificate.tiers.unknown_keys_advice())
    mechanism = mechanism_of(config, certificate)
    privacy, claimed = config.privacy, given.guarantee
    if privacy.is_private and claimed is None:
        assert not isinstance(privacy.epsilon, str)
        assert privacy.delta is not None
        assert privacy.adjacency is not None
        claimed = guarantee(
            certificate,
            mechanism,
            epsilon=privacy.epsilon,
            noise_multiplier=privacy.noise_multiplier,
            delta=privacy.delta,
            adjacency=privacy.adjacency,
            simulated_batch_size=privacy.simulated_batch_size,
            allow_large_delta=privacy.allow_large_delta,
            test_run=run_key.is_test_run,
            held_out=held_out,
            epsilon_share=config.evaluation.epsilon_share if config.evaluation else 0.0,
            run_id=run_id,
        )
    return _plan(config, certificate, selected, mechanism, claimed, run_key)


def _run_id(workers: Workers, run: StoredRun | None) -> str | None:
    """Returns worker 0's id for the run if there are several workers; otherwise None, and the guarantee makes one."""
    if workers.count == 1:
        return None
    known = None if run is None or run.guarantee is None else run.guarantee.run_id
    return send(workers, (known or secrets.token_hex(8)).encode() if workers.rank == 0 else None).decode()


def _plan(
    config: TrainConfig,
    certificate: ContributionCertificate,
    selected: Selection | Schedule,
    mechanism: Mechanism,
    claimed: PrivacyGuarantee | None,
    run_key: RunKey,
) -> TrainingPlan:
    clip_norm, optimizer = config.mechanism.clip_norm, config.optimizer
    assert optimizer.name is not None
    assert optimizer.learning_rate is not None
    return TrainingPlan(
        certificate=certificate,
        selected=selected,
        mechanism=mechanism,
        guarantee=claimed,
        clip_norm=math.inf if clip_norm is None else clip_norm,
        learning_rate=optimizer.learning_rate,
        optimizer=optimizer.name,
        **optimizer.options(),
        run_key=run_key,
        public=config.privacy.public,
    )


def held_out_of(config: TrainConfig, graph: AttributionGraph, selected: Selection | Schedule) -> Selection:
    """Selects what a covered evaluation counts on, under the individual bounds of S, from the test split's graph."""
    from coowned.content.splits import select_held_out

    assert config.evaluation is not None
    bound = config.evaluation.contribution_bound
    own = selected.user_bounds if isinstance(selected, Selection) else None
    return select_held_out(graph, contribution_bound=bound, user_bounds=own, seed=config.selection.seed)


def mechanism_of(config: TrainConfig, certificate: ContributionCertificate) -> Mechanism:
    settings = config.mechanism
    word, batch_size, iterations = settings.sizes
    try:
        return mechanism_class(word).from_certificate(
            certificate,
            batch_size=batch_size,
            iterations=iterations,
            num_bands=settings.min_separation if settings.num_bands is None else settings.num_bands,
            protects=config.privacy.is_private,
        )
    except InputError as error:
        if batch_size <= certificate.size:
            raise
        raise InputError(f"{error}. S is selected from the train split, {config.splits[0]:.0%} of the data") from None


def _prepare_files(
    plan: TrainingPlan, folder: RunFolder, graph: AttributionGraph, text: str, private_log: Mapping[str, int]
) -> None:
    folder.prepare("S.parquet", encode_selection(graph, plan.selected))
    folder.prepare("config.toml", text.encode(), mode=0o644)
    log = {"covered_by_guarantee": False, "note": PRIVATE_LOG, **private_log}
    folder.prepare("private-log.json", (json.dumps(log, indent=2) + "\n").encode())


def _prepare_held_out(folder: RunFolder, graph: AttributionGraph, held_out: Selection) -> None:
    folder.prepare("held-out.parquet", encode_selection(graph, held_out))
    folder.prepare("held-out-certificate.json", (certify(graph, held_out).to_json() + "\n").encode())
