"""Training end to end against the same loop without privacy, a plain loop, and the rate of a matrix product.

Bars are for batches of 4096, as for the clipped gradient (benchmarks/mechanism.py). Batches of 1024 are measured too
and shown without a bar: there the fixed cost of a step (dispatch, keys, noise) weighs more, and ratios are lower.

python -m benchmarks training
"""

import dataclasses
import functools
import os
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from jax_privacy.clipping import clipped_grad

from benchmarks.timing import Figure, interleaved
from coowned import AttributionGraph, Greedy, PoissonSampling, certify, guarantee
from coowned.content.data import FeatureTable, with_norms
from coowned.exact.keys import RunKey
from coowned.models.logistic_regression import LogisticRegression
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan
from coowned.training.sweep import grid

BATCH, SMALL_BATCH = 4096, 1024
LARGE = {100: 4_000_000, 1000: 400_000}  # examples by number of features: 1.6 GB, more than any cache holds
READ = 500_000_000  # bytes of features that a run reads, at least: else the next one would find them in a cache
MEMBERS = 336
ROUNDS = 15


def run() -> list[Figure]:
    rows = []
    for batch in (BATCH, SMALL_BATCH):
        for num_features in (100, 1000):
            rows += end_to_end_rows(num_features, batch)
        rows += sweep_rows(batch)
    return [*rows, *memory_rows()]


def end_to_end_rows(num_features: int, batch: int) -> list[Figure]:
    steps = max(300_000, READ // (4 * num_features)) // batch
    data = make_data(num_features)
    plan = make_plan(data, steps, batch)
    plain = dataclasses.replace(plan, guarantee=None, clip_norm=None)
    seconds = interleaved(
        {
            "private": trainer_run(plan, data),
            "without clipping and noise": trainer_run(plain, data),
            "numpy gather + clipped_grad": plain_loop(plan, data),
        },
        rounds=ROUNDS,
    )
    against_free = seconds["without clipping and noise"] / seconds["private"]
    against_plain = seconds["numpy gather + clipped_grad"] / seconds["private"]
    at = f"d = {num_features}, batch {batch}"
    return [
        Figure(f"training end to end, {at}", batch * steps / seconds["private"], "examples/s"),
        barred(
            f"against the same loop, no clipping, no noise, {at}",
            against_free,
            {100: 0.65, 1000: 0.9}[num_features],
            batch,
        ),
        barred(f"against numpy gather + clipped_grad, {at}", against_plain, 1.5, batch),
    ]


def sweep_rows(batch: int) -> list[Figure]:
    num_features, steps = 100, 300_000 // batch
    data = make_data(num_features)
    plan = make_plan(data, steps, batch)
    members = grid(
        plan.certificate,
        plan.selected,
        plan.mechanism,
        learning_rates=[0.001 * 2**k for k in range(12)],
        clip_norms=[0.05 * 2**k for k in range(7)],
        noise_multipliers=[0.5, 1.0, 2.0, 4.0],
        delta=1e-6,
        adjacency="zero-out",
        run_key=plan.run_key,
    )
    assert len(members) == MEMBERS
    generator = np.random.default_rng(0)
    one, two = (jnp.asarray(generator.standard_normal((2048, 2048)), jnp.float32) for _ in range(2))
    multiply = jax.jit(lambda a, b: a @ b)
    seconds = interleaved(
        {
            "sweep": trainer_run(members, data),
            "alone": trainer_run(plan, data),
            "product": lambda: jax.block_until_ready(multiply(one, two)),
            "norms": lambda: with_norms(data),
        },
        rounds=ROUNDS,
    )
    together, alone = MEMBERS * batch * steps / seconds["sweep"], batch * steps / seconds["alone"]
    rate = 4 * num_features * together  # two products, a multiplication and an addition each
    peak = 2 * 2048**3 / seconds["product"]
    at = f"d = {num_features}, batch {batch}"
    return [
        Figure(f"sweep of {MEMBERS}, {at}", together, "examples/s"),
        barred(f"sweep of {MEMBERS} against one after another, {at}", together / alone, 15, batch),
        barred(f"sweep of {MEMBERS} against float32 products, {at}", rate / peak, 0.3, batch),
        Figure("float32 matrix product, 2048 x 2048", peak / 1e9, "GFLOP/s"),
        Figure(f"once a run: norms of {LARGE[num_features]:,} rows", 1e3 * seconds["norms"], "ms"),
    ]


def memory_rows() -> list[Figure]:
    """What a run of ten times the steps needs beyond what a short one does."""
    data = make_data(100)
    process, used = psutil.Process(), []
    for steps in (200, 2000):
        trainer_run(make_plan(data, steps, SMALL_BATCH), data)()
        used.append(process.memory_info().rss / 1e6)
    grown = used[1] - used[0]
    return [Figure("memory after 2000 steps beyond that after 200", grown, "MB", "<= 20")]


@functools.cache
def make_data(num_features: int) -> FeatureTable:
    count = LARGE[num_features]
    generator = np.random.default_rng(0)
    graph = AttributionGraph.from_csr(np.arange(count + 1), np.arange(count), num_users=count)
    features = generator.standard_normal((count, num_features), np.float32)
    return FeatureTable(graph=graph, features=features, labels=generator.random(count) < 0.5)


def make_plan(data: FeatureTable, iterations: int, batch: int) -> TrainingPlan:
    selection = Greedy(contribution_bound=1).select(data.graph)
    certificate = certify(data.graph, selection)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=batch, iterations=iterations)
    first = TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=None,
        clip_norm=1.0,
        learning_rate=0.01,
        run_key=RunKey.from_seed(0),
    )
    return dataclasses.replace(first, guarantee=with_noise(first, 1.0))


def with_noise(plan: TrainingPlan, sigma: float):
    return guarantee(
        plan.certificate, plan.mechanism, noise_multiplier=sigma, delta=1e-6, adjacency="zero-out", test_run=True
    )


def trainer_run(plans: TrainingPlan | list[TrainingPlan], data: FeatureTable) -> Callable[[], object]:
    """All steps of a run, as `train` and `sweep` do them, without what they do once: the recount, the norms."""
    plans = [plans] if isinstance(plans, TrainingPlan) else plans
    model = LogisticRegression(num_features=data.features.shape[1])
    trainer = Trainer(plans, model)
    read = data if plans[0].clip_norm is None else with_norms(data)
    return lambda: trainer.train(read, model.initial())


def plain_loop(plan: TrainingPlan, data: FeatureTable) -> Callable[[], object]:
    """What one writes first: numpy indexing, jax_privacy's clipped gradients, float32 normals, Adam."""

    def loss(parameters, x, y):
        logits = x @ parameters[0] + parameters[1]
        return jnp.sum(jnp.logaddexp(0, logits) - y * logits)

    optimizer = optax.adam(plan.learning_rate)
    clipped = clipped_grad(loss, l2_clip_norm=plan.clip_norm, batch_argnums=(1, 2), keep_batch_dim=False)

    @jax.jit
    def step(parameters, state, x, y, padding, key):
        summed = clipped(parameters, x, y, is_padding_example=padding)
        keys = jax.random.split(key)
        gradients = tuple(
            (g + plan.clip_norm * plan.noise_multiplier * jax.random.normal(k, g.shape)) / plan.batch_size
            for g, k in zip(summed, keys, strict=True)
        )
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    batches = plan.batches()

    def go():
        parameters = jnp.zeros(data.features.shape[1]), jnp.zeros(())
        state, key = optimizer.init(parameters), jax.random.key(0)
        for batch in batches:
            x, y = data.features[batch.examples], data.labels[batch.examples]
            parameters, state = step(parameters, state, x, y, ~batch.mask, jax.random.fold_in(key, batch.step))
        return jax.block_until_ready(parameters)

    return go


def barred(name: str, ratio: float, bar: float, batch: int) -> Figure:
    """A ratio with its bar, which holds for batches of 4096."""
    return Figure(name, ratio, "x", f">= {bar:g}") if batch == BATCH else Figure(name, ratio, "x")
