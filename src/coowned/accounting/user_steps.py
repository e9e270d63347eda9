"""What one user's data goes through in a mechanism: the bridge from samplers to the accountant."""

import dataclasses

from coowned.accounting.numerical import Steps
from coowned.mechanism.sampling import Mechanism, MinSeparation, PoissonSampling

ADJACENCIES = ("zero-out", "replace")


def steps_of(mechanism: Mechanism, noise_multiplier: float) -> list[Steps]:
    """What one user's data goes through: one entry for every kind of user that could be the worst off.

    Groups of `CyclicPoisson` with no more copies, probability and rounds than another one are left out.
    """
    if isinstance(mechanism, PoissonSampling):
        return [
            Steps(
                copies=mechanism.contribution_bound,
                probability=mechanism.sampling_probability,
                noise_multiplier=noise_multiplier,
                repetitions=mechanism.iterations,
            )
        ]
    if isinstance(mechanism, MinSeparation):
        sensitivity = mechanism.sensitivity_of(mechanism.contribution_bound)
        return [Steps(copies=1, probability=1.0, noise_multiplier=noise_multiplier / sensitivity, repetitions=1)]
    kinds = {
        (mechanism.bound_of(group), mechanism.probability_of(group), mechanism.rounds_of(group))
        for group in range(mechanism.num_groups)
    }
    kinds = {kind for kind in kinds if min(kind) > 0}
    worst = [
        kind
        for kind in sorted(kinds)
        if not any(other != kind and all(a >= b for a, b in zip(other, kind, strict=True)) for other in kinds)
    ]
    return [
        Steps(copies=copies, probability=probability, noise_multiplier=noise_multiplier, repetitions=rounds)
        for copies, probability, rounds in worst
    ]


def with_noise(steps: Steps, noise_multiplier: float) -> Steps:
    """The same steps, where those given were made for noise multiplier 1, with another one."""
    return dataclasses.replace(steps, noise_multiplier=steps.noise_multiplier * noise_multiplier)
