"""Mechanisms with one part exchanged for a wrong one, what each is tried on, and the test that must catch it.

Every bug here is one that somebody could write, and that leaves the training loop running and the model learning.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import erfinv

from coowned import CyclicPoisson, MinSeparation, PoissonSampling
from coowned.attribution.graph import AttributionGraph
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.mechanism_audit import audit_mechanism
from coowned.audit.noise_law import audit_noise_tail
from coowned.audit.participation import audit_participation
from coowned.audit.release import audit_release
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.batching import Drawn, PoissonBatches
from coowned.mechanism.fused_clipping import RowsInPlace
from coowned.mechanism.keys import Purpose, RunKey, random_words
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Selection
from coowned.training.models.logistic_regression import LogisticRegression

# What is claimed. Many steps for the sampler's faults.
POISSON = PoissonSampling(contribution_bound=3, sampling_probability=0.05, iterations=40, batch_size=6)
CROWD = PoissonSampling(contribution_bound=2, sampling_probability=0.25, iterations=2, batch_size=4)
SCHEDULE = MinSeparation(contribution_bound=4, min_separation=4, num_bands=4, iterations=18, batch_size=4)
CYCLIC = CyclicPoisson(
    contribution_bound=2, iterations=24, num_groups=4, num_bands=4, group_probabilities=(0.25,) * 4, batch_size=4
)
# A first group with fewer copies than a batch would hold: all of it is drawn in each of its rounds.
SMALL_GROUP = CyclicPoisson(
    contribution_bound=2, iterations=6, num_groups=3, num_bands=3, group_probabilities=(1.0, 0.5, 0.5), batch_size=8
)


# ---- the bugs --------------------------------------------------------------------------------------------------------


class TooLittleNoise(AuditedParts):
    """Noise that is 10% too small."""

    def noise_scale(self, **settings):
        return super().noise_scale(**settings) / 1.1


class HalfTheNoise(AuditedParts):
    """For the quick suite: seen in few trials."""

    def noise_scale(self, **settings):
        return super().noise_scale(**settings) / 2


class OneMoreThanTheBound(AuditedParts):
    """`<=` where `<` was meant: a user is in one copy more than was counted."""

    def select(self, graph, *, contribution_bound):
        return Greedy(contribution_bound=contribution_bound + 1).select(graph)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JointBatches(PoissonBatches):
    """One coin for every three copies in a row: a user's copies are drawn together."""

    def _draw(self, step):
        examples, numbers = self._copies
        drawn = self.coins.draw(self.run_key.derive(Purpose.COINS, step=step), len(examples) // 3)
        places = (drawn[:, None] * 3 + np.arange(3)).ravel()
        return Drawn(examples, numbers, places)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TruncatedBatches(PoissonBatches):
    """What is above the batch size is dropped."""

    def _draw(self, step):
        drawn = super()._draw(step)
        return drawn._replace(places=drawn.places[: self.batch_size])


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShuffledBatches(PoissonBatches):
    """S is shuffled and cut into batches, anew in each epoch."""

    def _draw(self, step):
        examples, numbers = self._copies
        size = max(1, round(len(examples) * self.sampling_probability))
        epoch, place = divmod(step, len(examples) // size)
        order = self._order(epoch)[place * size : (place + 1) * size]
        return Drawn(examples, numbers, order)

    def _order(self, epoch):
        words = random_words(self.run_key.derive(Purpose.COINS, step=epoch), len(self._copies[0]))
        return np.argsort(words)


def with_sampler(kind: type[PoissonBatches]) -> type[AuditedParts]:
    """The parts with this sampler."""

    class Exchanged(AuditedParts):
        def batches(self, selected, mechanism, *, batch_size, iterations, run_key):
            assert isinstance(selected, Selection)
            assert isinstance(mechanism, PoissonSampling)
            return kind(
                selection=selected,
                sampling_probability=mechanism.sampling_probability,
                batch_size=batch_size,
                iterations=iterations,
                run_key=run_key,
            )

    return Exchanged


class OtherCorrelation(AuditedParts):
    """Noise of a strategy with twice the bands: its columns are as short, but a user's overlap."""

    def noise(self, run_key, *, coefficients, iterations, **settings):
        bands = min(iterations, 2 * len(coefficients))
        other = BandedStrategy(num_bands=bands, iterations=iterations).coefficients
        return super().noise(run_key, coefficients=other, iterations=iterations, **settings)


class ReusedNoise(AuditedParts):
    """The step is missing from the key of the noise: every step gets the same row."""

    def noise(self, run_key, *, coefficients, iterations, trials, configuration):
        settings = {"coefficients": coefficients, "trials": trials, "configuration": configuration}
        for _ in range(iterations):
            yield next(super().noise(run_key, iterations=iterations, **settings))


class DividedByTheDrawn(AuditedParts):
    """The mean over what was drawn, in place of the public batch size."""

    def divisor(self, *, batch_size, num_copies):
        return max(1, num_copies)


class LeakyModel(LogisticRegression):
    """Clips at 1.05 times the clip norm."""

    def gradient_sum(self, parameters, batch, mask, clip_norm, **more):
        return super().gradient_sum(parameters, batch, mask, 1.05 * clip_norm, **more)


class LeakyClip(AuditedParts):
    """A clip that lets 5% through."""

    def model(self, num_features=1):
        return LeakyModel(num_features=num_features)


class LeakyHostModel(LogisticRegression):
    """Clips at 1.05 times the clip norm, where the host sums."""

    def gradient_sum(self, parameters, batch, mask, clip_norm, **more):
        leak = 1.05 if isinstance(parameters["coefficients"], np.ndarray) else 1.0
        return super().gradient_sum(parameters, batch, mask, leak * clip_norm, **more)


class LeakyOnHost(AuditedParts):
    """A clip that lets 5% through in the step of large batches alone."""

    def model(self, num_features=1):
        return LeakyHostModel(num_features=num_features)


class ShakenModel(LogisticRegression):
    """Clips all copies a little more where one of them is not finite or too large to be squared: 3e-6, what one way to
    bound the rounding of a norm differs from another."""

    def gradient_sum(self, parameters, batch, mask, clip_norm, **more):
        import jax
        import jax.numpy as jnp

        summed, clipped = super().gradient_sum(parameters, batch, mask, clip_norm, **more)
        features = batch["features"]
        features = features.gathered() if isinstance(features, RowsInPlace) else features
        usual = jnp.isfinite(jnp.square(features)).all()
        return jax.tree.map(lambda total: jnp.where(usual, total, total * (1 - 3e-6)), summed), clipped


class OthersAreChanged(AuditedParts):
    """One example changes what all others of its batch add."""

    def model(self, num_features=1):
        return ShakenModel(num_features=num_features)


class TwoGroups(AuditedParts):
    """Each user is in two groups, in each with as many copies as the bound of a group."""

    def select(self, graph, *, contribution_bound):
        return Greedy(contribution_bound=2 * contribution_bound).select(graph)

    def group(self, graph, selection, *, group):
        # A user's examples are next to each other: every other one goes to the next group.
        chosen = np.flatnonzero(selection.copies)
        groups = np.full(len(selection.copies), -1)
        groups[chosen] = group + np.arange(len(chosen)) % 2
        return Selection.from_copies(graph, selection.copies, groups)


class ShortTail(AuditedParts):
    """Normals from a uniform number that is a float32, as common generators make them: they end at 5.42."""

    def normals(self, words, more):
        words = np.asarray(words, np.uint64)
        tail = (words & np.uint64(2**63 - 1)).astype(np.float64) * 2.0**-64
        below_one = np.nextafter(np.float32(1), np.float32(0))
        uniform = np.minimum((1 - 2 * tail).astype(np.float32), below_one)
        sign = np.where(words >> np.uint64(63), 1.0, -1.0)
        return sign * math.sqrt(2) * erfinv(uniform.astype(np.float64))


# ---- how each is caught ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planted:
    """A bug, and the test that must catch it: `run(seed)` gives something that `holds` or not."""

    name: str
    parts: type[AuditedParts]
    caught_by: str
    audit: Callable[..., Any]  # (parts, seed, alpha, trials)
    trials: int

    def run(self, seed: int, *, alpha: float = 1e-3, trials: int | None = None) -> Any:
        return self.audit(self.parts(), seed, alpha, self.trials if trials is None else trials)


def by_curve(mechanism, noise_multiplier, adjacency, trials, **settings):
    def audit(parts: AuditedParts, seed: int, alpha: float, trials: int):
        return audit_mechanism(
            mechanism,
            noise_multiplier=noise_multiplier,
            adjacency=adjacency,
            trials=trials,
            alpha=alpha,
            run_key=RunKey.from_seed(seed),
            parts=parts,
            **settings,
        )

    return {"caught_by": "curve", "audit": audit, "trials": trials}


def by_participation(steps):
    def audit(parts: AuditedParts, seed: int, alpha: float, trials: int):
        _, selection = small_world()
        mechanism = PoissonSampling(contribution_bound=3, sampling_probability=0.05, iterations=trials, batch_size=15)
        batches = parts.batches(selection, mechanism, batch_size=15, iterations=trials, run_key=RunKey.from_seed(seed))
        return audit_participation(batches, selection, probability=0.05, alpha=alpha)

    return {"caught_by": "participation", "audit": audit, "trials": steps}


def by_noise_tail():
    return {
        "caught_by": "noise tail",
        "audit": lambda parts, seed, alpha, trials: audit_noise_tail(parts=parts, alpha=alpha),
        "trials": 0,
    }


def by_release():
    return {
        "caught_by": "release",
        "audit": lambda parts, seed, alpha, trials: audit_release(
            noise_multiplier=1.0, copies=2, batch_size=4, parts=parts, alpha=alpha
        ),
        "trials": 0,
    }


@functools.cache
def small_world() -> tuple[AttributionGraph, Selection]:
    """300 copies of 100 users, three in a row of each."""
    graph = AttributionGraph.from_users_per_example([[i // 3] for i in range(300)])
    return graph, Selection.from_copies(graph, np.ones(300, int))


PLANTED = [
    Planted(name="10% too little noise", parts=TooLittleNoise, **by_curve(POISSON, 1.0, "zero-out", 100_000)),
    Planted(name="bound off by one", parts=OneMoreThanTheBound, **by_curve(POISSON, 1.0, "zero-out", 40_000)),
    Planted(
        name="copies sampled jointly", parts=with_sampler(JointBatches), **by_curve(POISSON, 1.0, "zero-out", 20_000)
    ),
    Planted(name="noise correlated otherwise", parts=OtherCorrelation, **by_curve(SCHEDULE, 2.0, "zero-out", 100_000)),
    Planted(
        name="divided by the drawn size",
        parts=DividedByTheDrawn,
        **by_curve(SMALL_GROUP, 4.0, "zero-out", 2_000, users_at_once=1),
    ),
    Planted(name="clip lets 5% through", parts=LeakyClip, **by_curve(SCHEDULE, 2.0, "replace", 500_000)),
    Planted(name="noise reused between steps", parts=ReusedNoise, **by_curve(POISSON, 1.0, "replace", 5_000)),
    Planted(name="truncated batches", parts=with_sampler(TruncatedBatches), **by_participation(1000)),
    Planted(name="float32 noise tail", parts=ShortTail, **by_noise_tail()),
    Planted(name="shuffling", parts=with_sampler(ShuffledBatches), **by_participation(1000)),
    Planted(name="one user in two groups", parts=TwoGroups, **by_curve(CYCLIC, 1.5, "zero-out", 20_000)),
    Planted(name="one example changes what others add", parts=OthersAreChanged, **by_release()),
]

# The honest mechanism, tried as the bugs are.
HONEST = [
    Planted(name="Poisson, zero-out", parts=AuditedParts, **by_curve(POISSON, 1.0, "zero-out", 100_000)),
    Planted(name="Poisson, replace", parts=AuditedParts, **by_curve(POISSON, 1.0, "replace", 40_000)),
    Planted(name="Poisson in a crowd", parts=AuditedParts, **by_curve(CROWD, 1.0, "zero-out", 4_000, users_at_once=1)),
    Planted(name="min separation, zero-out", parts=AuditedParts, **by_curve(SCHEDULE, 2.0, "zero-out", 100_000)),
    Planted(name="min separation, replace", parts=AuditedParts, **by_curve(SCHEDULE, 2.0, "replace", 500_000)),
    Planted(name="cyclic, zero-out", parts=AuditedParts, **by_curve(CYCLIC, 1.5, "zero-out", 40_000)),
    Planted(name="cyclic, replace", parts=AuditedParts, **by_curve(CYCLIC, 1.5, "replace", 40_000)),
    Planted(
        name="small group in a crowd",
        parts=AuditedParts,
        **by_curve(SMALL_GROUP, 4.0, "zero-out", 2_000, users_at_once=1),
    ),
    Planted(name="participation", parts=AuditedParts, **by_participation(1000)),
    Planted(name="noise tail", parts=AuditedParts, **by_noise_tail()),
    Planted(name="release", parts=AuditedParts, **by_release()),
]
