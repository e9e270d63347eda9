"""Algorithm 1: clip each copy's gradient, sum, divide by the public batch size, add correlated noise, step."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from coowned import interrupts, validate
from coowned.content.data import TrainingData, with_norms
from coowned.errors import InputError, require
from coowned.exact.noise import NoiseStream
from coowned.files import keep_compiled_programs
from coowned.models.model import Model, digest_arrays, num_parameters, num_scores
from coowned.progress import Progress, counted
from coowned.selection.shards import shards_of
from coowned.training.optimizers import Rates, Rule, compiled_scales
from coowned.training.plan import Checkpoint, Keeper, TrainingPlan
from coowned.training.progress import NOT_COVERED, OnMetrics, Report, StepMetrics, metrics_table, parquet_bytes
from coowned.training.step import Feeder, Step, StepInput, compiled_loss, compiled_total_loss, gathered
from coowned.training.workers import ALONE, Share, Workers, agree, mean_loss, send

if TYPE_CHECKING:
    import polars as pl

_NAMED = {  # what an error calls the parts of a run that workers must agree in
    "plan": "graph, selection, mechanism, noise, clip norm or optimizer",
    "data": "data set (features, labels or attribution)",
    "initial": "set of initial parameters",
    "devices": "number of devices",
    "key": "run key",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A trained model, with what may be claimed about it.

    Attributes:
      parameters: arrays as the loop has them; `arrays` as a model file has them.
      metrics: step, loss on the batch before the step, share of copies clipped, copies drawn: NOT covered.
    """

    model: Model
    parameters: dict[str, npt.NDArray[np.float32]]
    plan: TrainingPlan
    metrics: "pl.DataFrame" = dataclasses.field(repr=False)

    @property
    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        return self.model.to_arrays(self.parameters)

    def statement(self) -> str:
        return self.plan.statement(self.model.describe())


class LoopOptions(TypedDict, total=False):
    """Keywords of `train` and `sweep` that have a default.

    initial: parameters to start from, made without these people's data (or composed with this run).
    configuration_digest: of a configuration file the run must agree with when it is resumed.
    checkpoint_every: steps between two checkpoints (default: a twentieth of the run).
    devices: among which a batch is split.
    """

    initial: Mapping[str, npt.NDArray[np.float32]] | None
    configuration_digest: str
    checkpoint_every: int | None
    devices: int


def train(
    plan: TrainingPlan,
    model: Model,
    data: TrainingData,
    *,
    folder: Keeper | None = None,
    progress: Progress | None = None,
    on_metrics: OnMetrics | None = None,
    at_end: Callable[["TrainedModel"], None] | None = None,
    **options: Unpack[LoopOptions],
) -> TrainedModel:
    """Trains one model under its plan, or resumes the run that a folder holds: a sweep of one.

    Guarantees:
      - Every step is Algorithm 1's: per-copy clip, sum, over the public batch size, plus a row of C^-1 z
        times clip_norm·sigma/batch_size.   (test_equals_plain_numpy)
      - Graph and selection are recounted before the first step.   (test_mismatches_are_refused)
      - A run that was killed anywhere ends in the same bits.   (test_killed_run_is_bit_identical)
      - Two devices give what one gives.   (test_two_devices_equal_one)
      - A key that has served another run in this process is refused.   (test_a_key_serves_one_run)
      - An average of the iterates is kept from step to step, and is what is evaluated and stored.
        (test_the_average_is_released)
    Cost: memory of a few batches, the parameters, once more for an average, and num_bands rows of noise, whatever
    `iterations` is.

    Args:
      plan: what runs and what is claimed; without a guarantee the same loop adds no noise.
      model: where to start and how to differentiate.
      data: content for the graph that `plan.selected` was chosen from.
      folder: where checkpoints, metrics and the model go; None keeps all in memory.
      progress: called now and then.
      on_metrics: called with each row of `TrainedModel.metrics` as it is computed; NOT covered by the guarantee.
      at_end: called with the model before the folder is closed for good; a kill before that calls it again.
      options: initial, configuration_digest, checkpoint_every, devices: as `LoopOptions` says.

    Example:
      >>> from coowned import AttributionGraph, Greedy, LogisticRegression, PoissonSampling, certify
      >>> from coowned.exact.keys import RunKey
      >>> from coowned.synthetic.logistic_data import LogisticData
      >>> from coowned.synthetic.logistic_data import WorldData
      >>> graph = AttributionGraph.from_users_per_example([[user] for user in range(200)])
      >>> data = WorldData.part(LogisticData(num_features=3).attach(graph, seed=0))
      >>> selection = Greedy(contribution_bound=1).select(graph)
      >>> certificate = certify(graph, selection)
      >>> mechanism = PoissonSampling.from_certificate(certificate, batch_size=50, iterations=5)
      >>> plan = TrainingPlan(certificate=certificate, selected=selection, mechanism=mechanism, guarantee=None,
      ...                     clip_norm=1.0, learning_rate=0.1, run_key=RunKey.from_seed(0))
      >>> train(plan, LogisticRegression(num_features=3), data).statement()
      'No guarantee: this model was trained without privacy and may reveal its training examples.'
    """
    if progress is not None:
        progress(0.0, "compiling")  # nothing is known of the time left before the second step
    parameters, metrics = run_plans(
        [plan], model, data, folder=folder, report=Report(plan, progress), on_metrics=on_metrics, **options
    )
    parameters = {name: array[0] for name, array in parameters.items()}
    trained = TrainedModel(model=model, parameters=parameters, plan=plan, metrics=metrics)
    if at_end is not None:
        at_end(trained)
    if folder is not None:
        metadata = {
            "format": "pt",  # what transformers asks for
            "statement": trained.statement(),
            "plan": plan.digest,
            "model": json.dumps(model.describe()),
        }
        curves = parquet_bytes(metrics, NOT_COVERED)
        folder.finish({"model.safetensors": (trained.arrays, metadata)}, {"metrics.parquet": curves})
    return trained


def train_without_privacy(
    plan: TrainingPlan,
    model: Model,
    data: TrainingData,
    *,
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None,
) -> dict[str, npt.NDArray[np.float32]]:
    """Trains the same model on the same batches without clipping and noise, for comparison.

    No guarantee covers them or any number made from them: they must not leave the machine. Nothing is stored.

    Guarantees:
      - They are those of a run without a guarantee whose batches are the same.   (test_baseline_is_the_plain_run)
    """
    plain = dataclasses.replace(plan, guarantee=None, clip_norm=None)
    parameters = Trainer([plain], model).train(data, _check_initial(model, initial))
    return {name: array[0] for name, array in parameters.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    """`LoopOptions` with their defaults, checked."""

    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    configuration_digest: str = ""
    checkpoint_every: int | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        validate.positive(devices=self.devices)
        if self.checkpoint_every is not None:
            validate.positive(checkpoint_every=self.checkpoint_every)


def run_plans(
    plans: Sequence[TrainingPlan],
    model: Model,
    data: TrainingData,
    *,
    folder: Keeper | None,
    report: Callable[[int], None],
    on_metrics: OnMetrics | None = None,
    **options: Unpack[LoopOptions],
) -> tuple[dict[str, npt.NDArray[np.float32]], "pl.DataFrame"]:
    """Checks and trains the members of a sweep, one model or many; `train` and `sweep` explain the arguments.

    Returns:
      The parameters, each (num_models, *shape), and the metrics, which a sweep of several has none of.
    """
    require("train", "training")
    plan, settings = plans[0], _Settings(**options)
    keep_compiled_programs()
    model.check_data(data.shapes())
    plan.check(data.graph)
    initial = _check_initial(model, settings.initial)
    workers: Workers = ALONE if folder is None else folder.workers
    if workers.count > 1:
        _check_clipped(plans)
    run: dict[str, Any] | None = None
    with contextlib.ExitStack() as held:
        if folder is not None or not plan.run_key.is_test_run:  # a digest reads all of the data
            run = _described(plans, model, data.digest, digest_arrays(initial), settings)
            bound = [run[name] for name in ("plan", "model", "data", "initial", "devices")]
            named = json.dumps(bound, sort_keys=True)
            held.enter_context(plan.run_key.serving(named, sent=workers.rank > 0))
            agree(workers, {_NAMED.get(name, name): json.dumps(value, sort_keys=True) for name, value in run.items()})
        trainer = Trainer(plans, model, devices=settings.devices, workers=workers)
        state, rows, start = trainer.initial_state(initial), [], 0
        if folder is not None and run is not None:
            stored = trainer.sent(folder.begin(run), state)
            if stored is not None:
                state, rows, start = trainer.restore(state, stored)
        every = settings.checkpoint_every or max(1, plan.iterations // 20)

        def after(step: int, current: Any, log: list[StepMetrics]) -> None:
            report(step + 1)
            if on_metrics is not None and log and log[-1].step == step:
                on_metrics(log[-1].row())
            if folder is not None and (step + 1) % every == 0:
                folder.save(step + 1, trainer.tensors(current, log))

        read = data if plan.clip_norm is None else with_norms(data)
        state = trainer.run(read, state, rows, start=start, after=after)
        released = trainer.released(state)
        if workers.count > 1:
            agree(workers, {"model at the end": digest_arrays(released)})
        return released, metrics_table(rows)


def _check_clipped(plans: Sequence[TrainingPlan]) -> None:
    if not any(plan.clip_norm is not None and plan.clip_norm < math.inf for plan in plans):
        raise InputError(
            "several processes need a clip_norm: without one, sums are of floating-point numbers and depend on the "
            "number of processes; set clip_norm, or train in one process"
        )


def _described(
    plans: Sequence[TrainingPlan], model: Model, data: str, initial: str, settings: _Settings
) -> dict[str, Any]:
    """Returns what identifies a run: a folder and a key serve one run only, and all workers must agree on it."""
    plan = plans[0]
    return {
        "plan": plan.describe() if len(plans) == 1 else {"sweep": [member.digest for member in plans]},
        "model": model.describe(),
        "data": data,
        "configuration": settings.configuration_digest,
        "initial": initial,
        "devices": settings.devices,
        "key": plan.run_key.fingerprint,
        "run_id": None if plan.guarantee is None else plan.guarantee.run_id,
        "iterations": plan.iterations,
        "num_parameters": num_parameters(model),
        "num_scores": num_scores(model),
        "members": len(plans),
    }


class Trainer:
    """The training loop of one or more members of a sweep; `train` and `sweep` are its entry points.

    Every array of the state has a leading axis for the members.
    """

    def __init__(
        self,
        plans: Sequence[TrainingPlan],
        model: Model,
        *,
        devices: int = 1,
        workers: Workers = ALONE,
    ):
        import jax

        if devices > 1 and not model.runs_in_jax:
            raise InputError("a PyTorch model is trained on one device; remove devices")
        check_devices(devices)
        if plans[0].scale_gradients and (model.many_models or len(plans[0].coefficients) > 1):
            raise InputError(
                "scale_gradients needs gradients computed by JAX and independent noise in every step; remove it for "
                "linear models and for dp-mf"
            )
        self._plans, self._model, self._workers = tuple(plans), model, workers
        plan = self._plans[0]
        self._clips = plan.clip_norm is not None and plan.clip_norm < math.inf
        self._split, self._replicated = _shardings(devices)
        self._step = Step(
            model,
            Rule.of(plan.optimizer, plans, clips=self._clips),
            Rates.of(
                [(p.learning_rate, p.iterations, p) for p in plans],
                noise=[p.noise_multiplier * (p.clip_norm or 0.0) / p.batch_size if p.guarantee else 0.0 for p in plans],
            ),
            plan.batch_size,
            tuple(model.grid(p.clip_norm or math.inf) for p in plans) if self._clips else None,
            tuple(jax.local_devices()[:devices]) if devices > 1 else (),
            workers,
        )
        self._log_every = max(10, plan.iterations // 200)  # a loss reads the batch once more
        self._batches = plan.batches(multiple_of=8 * devices)

    def initial_state(self, parameters: Mapping[str, npt.NDArray[np.float32]]) -> tuple[Any, Any]:
        """Returns the state of `Rule.initial`, repeated for every member."""
        import jax
        import jax.numpy as jnp

        arrays = {name: jnp.array(array) for name, array in parameters.items()}
        state = self._step.rule.initial(arrays)
        # On the host: each operation by itself would be compiled before the first step.
        return jax.tree.map(lambda leaf: jnp.array(np.repeat(np.asarray(leaf)[None], len(self._plans), axis=0)), state)

    def scales(self, state: Any) -> dict[str, Any] | None:
        """Returns the factors by which the next step scales gradients before clipping; None if there are none."""
        return compiled_scales(self._step.rule)(state)

    def train(
        self, data: TrainingData, initial: Mapping[str, npt.NDArray[np.float32]]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Runs all steps, without a folder and without checks; returns the parameters, each (num_models, *shape)."""
        state = self.run(data, self.initial_state(initial), [], start=0, after=lambda step, state, rows: None)
        return self.released(state)

    def released(self, state: Any) -> dict[str, npt.NDArray[np.float32]]:
        """Returns the parameters that are evaluated and stored, each (num_models, *shape)."""
        return {name: np.asarray(array) for name, array in self._step.rule.released(state).items()}

    def run(
        self,
        data: TrainingData,
        state: Any,
        rows: list[StepMetrics],
        *,
        start: int,
        after: Callable[[int, Any, list[StepMetrics]], None],
    ) -> Any:
        """Runs all steps from `start` on; appends the metrics of a single model to `rows`."""
        import jax

        plan, single, workers = self._plans[0], len(self._plans) == 1, self._workers
        if self._replicated is not None:
            state = jax.device_put(state, self._replicated)
        waiting: tuple[StepInput, Any] | None = None
        inputs = Feeder(
            data,
            self._batches,
            self._noise(start),
            run_key=plan.run_key,
            start=start,
            stop=plan.iterations,
            in_place=self._clips,
            share=None if workers.count == 1 else Share(shards_of(data.graph), workers.rank, workers.count),
        )
        for step_input in inputs:
            interrupts.check()
            batch, mask = step_input.batch, step_input.mask
            if self._split is not None and not self._clips:
                batch, mask = jax.device_put((batch, mask), self._split)
            logged = single and (step_input.step % self._log_every == 0 or step_input.step == plan.iterations - 1)
            loss = self._loss(state[0], gathered(batch), mask) if logged else None
            drawn = () if workers.count == 1 else (step_input.copies,)
            state, clipped = self._step(state, batch, mask, step_input.noise, *drawn)
            if waiting is not None:  # the step before has read its batch once it has a result
                _wait(waiting[1])
                inputs.release(waiting[0])
            waiting = (step_input, (clipped, loss))  # both read the batch
            if logged:
                rows.append(StepMetrics(step_input.step, loss, clipped, step_input.copies))
            after(step_input.step, state, rows)
        jax.block_until_ready(state)
        return state

    def _loss(self, parameters: Any, batch: Mapping[str, Any], mask: Any) -> Any:
        if self._workers.count == 1:
            return compiled_loss(self._model)(parameters, batch, mask)
        return mean_loss(self._workers, *compiled_total_loss(self._model)(parameters, batch, mask))

    def _noise(self, start: int) -> NoiseStream | None:
        if self._step.grids is None or not any(p.noise_multiplier for p in self._plans):
            return None
        plan = self._plans[0]
        return NoiseStream(
            plan.run_key,
            deviations=[
                grid.noise_deviation(p.noise_multiplier) for grid, p in zip(self._step.grids, self._plans, strict=True)
            ],
            coefficients=plan.coefficients,
            shapes=self._model.shapes(),
            iterations=plan.iterations,
            configurations=[p.configuration for p in self._plans],
            start=start,
        )

    def tensors(self, state: Any, rows: list[StepMetrics]) -> dict[str, npt.NDArray[Any]]:
        """Returns a state as named arrays, for a checkpoint."""
        named = {name: np.asarray(leaf) for name, leaf in _named_leaves(state).items()}
        numbers = [(step, float(loss), float(clipped), copies) for step, loss, clipped, copies in rows]
        named["metrics"] = np.array(numbers, np.float64).reshape(-1, len(StepMetrics._fields))
        return named

    def restore(self, like: Any, stored: Checkpoint) -> tuple[Any, list[StepMetrics], int]:
        """Returns the state, metrics and step of a checkpoint."""
        import jax
        import jax.numpy as jnp

        leaves = []
        for name, leaf in _named_leaves(like).items():
            found = stored.tensors.get(name)
            if found is None or found.shape != leaf.shape or found.dtype != leaf.dtype:
                raise InputError(f"the checkpoint's {name} does not match the model and optimizer; use another folder")
            leaves.append(jnp.array(found))
        metrics = stored.tensors["metrics"].tolist()
        rows = [StepMetrics(int(step), loss, clipped, int(copies)) for step, loss, clipped, copies in metrics]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), rows, stored.step

    def sent(self, stored: Checkpoint | None, like: Any) -> Checkpoint | None:
        """Sends worker 0's checkpoint to every worker; metrics are not sent."""
        workers = self._workers
        if workers.count == 1:
            return stored
        step = int(workers.sum(np.array([0 if stored is None else stored.step], np.int64))[0])
        if step == 0:
            return None
        tensors = {"metrics": np.zeros((0, len(StepMetrics._fields)))} if stored is None else dict(stored.tensors)
        for name, leaf in _named_leaves(like).items():
            found = np.frombuffer(send(workers, None if stored is None else tensors[name].tobytes()), leaf.dtype)
            tensors[name] = found.reshape(leaf.shape)
        return Checkpoint(step, tensors)


def _named_leaves(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state by their names in a checkpoint, in the order of `jax.tree.leaves`."""
    import jax

    parameters, optimizer = state
    named = {f"parameters/{name}": parameters[name] for name in sorted(parameters)}
    return named | {f"optimizer/{number}": leaf for number, leaf in enumerate(jax.tree.leaves(optimizer))}


def _wait(results: tuple[Any, ...]) -> None:
    """Waits for device results; arrays of the host are ready already."""
    for result in results:
        if hasattr(result, "block_until_ready"):  # jax's function of this name looks through a tree for it
            result.block_until_ready()


def check_devices(devices: int) -> None:
    """Raises an error for more devices than there are; for one device, JAX is not started to find out."""
    if devices > 1:
        import jax

        if devices > len(jax.local_devices()):
            there = counted(len(jax.local_devices()), "device")
            raise InputError(f"devices: this machine has {there}, not {devices}; use fewer")


def _shardings(devices: int) -> tuple[Any, Any]:
    """Returns (how a batch is split among devices, how a state is replicated); None for one device."""
    if devices == 1:
        return None, None
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.local_devices()[:devices]), ("batch",))
    return NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())


def _check_initial(
    model: Model, initial: Mapping[str, npt.NDArray[np.float32]] | None
) -> dict[str, npt.NDArray[np.float32]]:
    if initial is None:
        return model.initial()
    found = {name: np.shape(array) for name, array in initial.items()}
    if found != model.shapes():
        raise InputError(f"initial parameters must have the shapes {model.shapes()}, not {found}")
    return {name: np.asarray(array, np.float32) for name, array in initial.items()}
