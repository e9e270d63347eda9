"""One configuration, from the data to a model: read, split, select, certify, account, train, evaluate."""

import dataclasses
import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping

import numpy as np

from coowned import codec
from coowned.accounting.guarantee import PrivacyGuarantee, guarantee
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.sources import resolve_path
from coowned.attribution.statistics import heavy_users_advice
from coowned.certificate import ContributionCertificate, certify
from coowned.content.data import TrainingData
from coowned.content.splits import split_examples
from coowned.errors import ConfigError, InputError
from coowned.exact.keys import RunKey
from coowned.extras import require
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_class
from coowned.models.model import num_parameters, num_scores
from coowned.progress import Progress
from coowned.runs import graph_summary
from coowned.runs.config import GIVEN, TrainConfig
from coowned.runs.defaults import ModelSizes, completed
from coowned.runs.run_folder import RunFolder, code_digest, machine
from coowned.runs.stored_run import StoredRun
from coowned.selection.held_out import select_held_out
from coowned.selection.selection_files import encode_selection
from coowned.selection.selector import Schedule, Selection
from coowned.training import covered
from coowned.training import evaluate as evaluation
from coowned.training.loop import TrainedModel, check_devices, train, train_without_privacy
from coowned.training.plan import TrainingPlan
from coowned.training.progress import OnMetrics, claim, parquet_bytes
from coowned.training.workers import Workers, agree, send

_LOG = logging.getLogger(__name__)
Select = Callable[[AttributionGraph], Selection | Schedule]
PRIVATE_LOG = (
    "Not covered by the guarantee: counts computed from the content of selected and held-out examples. "
    "Never release them."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What a caller has made already, where the configuration does not say all.

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
      announce: told what is being done; before training the claim, and in a second line what the noise means.
      advise: told what would help where a few users keep most examples out of S.
    """

    def tell(text: str) -> None:
        _LOG.info(text)
        announce(text)

    require("train", "training")
    workers = folder.workers
    if workers.count > 1:
        named = {"version of the code or of coowned, jax, numpy, numba or optax": code_digest()}
        named |= {"kind of device or processor, or XLA_FLAGS,": machine(), "configuration": config.digest}
        agree(workers, named)
    folder.refuse_if_finished()
    check_devices(config.run.devices)  # selecting may take long
    config.model.check_files(config.folder)
    run_key = folder.run_key(config.run.seed)
    if examples is None:
        tell("reading")
        examples = config.source().read()
    task = config.task(examples.payload.schema)
    splits = split_examples(examples.graph, config.splits)
    graph, test_graph = (examples.graph.subgraph(splits[name]) for name in ("train", "test"))
    resumed = folder.is_begun
    run = StoredRun.open(folder.path, finished=False) if resumed else None
    run_id = _run_id(workers, run)
    if run is not None:
        tell("recounting the selection")  # `train` recounts and compares everything that matters
        config = config.completed_as(run.config(config.folder))
        plan = _plan(config, run.certificate, run.selection(graph), run.mechanism, run.guarantee, run_key)
        held_out = run.held_out(test_graph) if config.evaluation else None
    else:
        tell("selecting")
        held_out = held_out_of(config, test_graph) if config.evaluation else None
        config = completed_for(config, examples, graph, given.select)
        part = held_out and certify(test_graph, held_out)
        plan = make_plan(config, graph, run_key, given, held_out=part, run_id=run_id)
        if advice := heavy_users_advice(graph, plan.certificate.contribution_bound):
            _LOG.info(advice)
            advise(advice)
    tell("reading content")
    content = task.load(examples, splits, plan.selected.copies)
    digest = config.digest
    if config.evaluation:
        covered.check_covered(config.evaluation, content.model)
        # The same noise must not be added to the counts of other examples.
        digest = codec.checksum([digest, content.parts["test"].digest])
    if not resumed:
        _prepare_files(plan, folder, graph, config.text, content.private_log)
        if held_out is not None:
            folder.prepare("held-out.parquet", encode_selection(test_graph, held_out))
            folder.prepare("held-out-certificate.json", (certify(test_graph, held_out).to_json() + "\n").encode())

    def at_end(trained: TrainedModel) -> None:
        baseline = None
        if workers.rank:
            return
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
            folder.write(covered.NAME, (figures.to_json() + "\n").encode(), mode=0o644)

    noise = plan.signal_to_noise(num_parameters(content.model), num_scores(content.model))
    expected = f"\n{noise.verdict()} {noise.outlook(plan.certificate.num_distinct).sentence}" if noise else ""
    tell(f"training: {claim(plan)}{expected}")
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
        at_end=at_end,
    )


def _evaluate_covered(
    config: TrainConfig, plan: TrainingPlan, trained: TrainedModel, data: TrainingData, held_out: Selection
) -> covered.CoveredFigures:
    assert config.evaluation
    assert plan.guarantee
    assert plan.guarantee.evaluation
    return covered.evaluate_covered(
        trained.model,
        trained.parameters,
        data,
        held_out,
        settings=config.evaluation,
        release=plan.guarantee.evaluation,
        run_key=plan.run_key,
        run_id=plan.guarantee.run_id,
    )


def completed_for(
    config: TrainConfig,
    examples: AttributedExamples,
    graph: AttributionGraph,
    select: Select | None = None,
    progress: Progress | None = None,
) -> TrainConfig:
    """Returns the configuration with what it leaves out chosen for these examples, whose content is not read.

    Args:
      graph: of their train split.
    """

    def sizes() -> ModelSizes:
        schema = examples.payload.schema
        nobody = examples.graph.subgraph(np.empty(0, np.int64))
        model, *_ = config.task(schema).read(dataclasses.replace(examples, graph=nobody, payload=schema.empty_table()))
        return ModelSizes(num_parameters=num_parameters(model), num_scores=num_scores(model) or 0)

    def selected(config: TrainConfig) -> Selection | Schedule:
        return choose(config, graph) if select is None else select(graph)

    return completed(config, graph, sizes, selected, progress)


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
    """The name that worker 0 gives the run, where there are several workers; else the guarantee has its own."""
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


def choose(config: TrainConfig, graph: AttributionGraph) -> Selection | Schedule:
    from coowned.selection.greedy_min_separation import max_min_separation
    from coowned.selection.registry import selector_class

    if config.selection.selector == GIVEN:
        raise ConfigError(
            "[selection] selector is 'given': S was passed to `fit` and is not in the configuration; call `fit` "
            "again with it, or choose a selector"
        )
    assert config.selection.selector is not None
    kind, chosen = selector_class(config.selection.selector), config.selection
    settings = dict(chosen.settings)
    fields = {field.name for field in dataclasses.fields(kind)}
    schedules = "min_separation" in fields
    word = config.mechanism.kind or "dp-sgd"  # which is chosen for selectors that make no schedule
    mechanism = mechanism_class(word)
    if schedules != mechanism.needs_schedule or (mechanism.needs_groups and "num_groups" not in fields):
        wanted = "greedy-min-separation" if mechanism.needs_schedule else "greedy"
        wanted = "cyclic-groups" if mechanism.needs_groups else wanted
        raise ConfigError(
            f"[selection] selector {chosen.selector!r} does not work with [mechanism] kind {word!r}; use {wanted!r}"
        )
    if schedules:
        _, batch_size, iterations = config.mechanism.sizes
        separation = config.mechanism.min_separation
        if separation is None and "contribution_bound" in fields:
            raise ConfigError(f"[mechanism] min_separation is needed with [selection] selector {chosen.selector!r}")
        if separation is None:
            alike = {key: settings[key] for key in ("ties", "unattributed") if key in settings}
            separation = max_min_separation(
                graph, batch_size=batch_size, iterations=iterations, seed=chosen.seed, **alike
            )
        settings |= {"batch_size": batch_size, "iterations": iterations, "min_separation": separation}
    if isinstance(bounds := settings.get("contribution_bounds"), str):
        settings["contribution_bounds"] = resolve_path(config.folder, bounds)
    return kind(**settings).select(graph, seed=chosen.seed)


def held_out_of(config: TrainConfig, graph: AttributionGraph) -> Selection:
    assert config.evaluation is not None
    bound = config.evaluation.contribution_bound
    return select_held_out(graph, contribution_bound=bound, seed=config.selection.seed)


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
    folder.prepare(graph_summary.NAME, graph_summary.GraphSummary.of(graph, plan.selected).to_json().encode())
    folder.prepare("config.toml", text.encode(), mode=0o644)
    folder.prepare_claim(plan.certificate, plan.guarantee, plan.mechanism, public=plan.public)
    log = {"covered_by_guarantee": False, "note": PRIVATE_LOG, **private_log}
    folder.prepare("private-log.json", (json.dumps(log, indent=2) + "\n").encode())
