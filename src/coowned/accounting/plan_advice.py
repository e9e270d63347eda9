"""What to say below a plan: what the noise of the best choice means, and what would lower it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coowned.accounting import calculators
from coowned.accounting.choices import TOO_SMALL, Choice
from coowned.accounting.signal_to_noise import GOOD, SignalToNoise
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.statistics import heavy_users_advice
from coowned.errors import UncertifiableError
from coowned.mechanism.poisson_sampling import PoissonSampling

_TRIED_FACTORS = (2, 4, 8, 16, 32, 64)  # for batch size and steps, where the noise is large


def advice_on_noise(choices: Sequence[Choice], target: dict[str, Any]) -> list[str]:
    """What the noise of the best choice means, and what to change where it is large."""
    best = next((choice for choice in choices if choice.best), None)
    if best is None:
        largest = max((choice.size for choice in choices if choice.note == TOO_SMALL), default=0)
        return [f"No choice can be used; a batch size of at most {largest:,} would fit."] if largest else []
    assert best.signal_to_noise is not None
    verdict = best.noise.verdict()
    if best.signal_to_noise >= GOOD:
        is_clear = best.noise.per_step >= 1
        cure = "" if is_clear else _cure(best, target, "batch_size", lambda ratio: ratio.per_step >= 1)
        return [f"With the best choice, {verdict[0].lower()}{verdict[1:]}{cure and f' Try {cure}.'}"]
    why = f"No choice is good (the best has a predicted signal-to-noise of {best.signal_to_noise:.2g}, below {GOOD:g})."
    if best.num_distinct < GOOD**2:
        return [f"{why} It has only {best.num_distinct:,} distinct examples: too few, whatever the noise."]
    distinct = best.num_distinct
    cures = [
        _cure(best, target, name, lambda ratio: ratio.with_examples(distinct) >= GOOD)
        for name in ("batch_size", "iterations")
    ]
    return [f"{why} {verdict} Try {' or '.join(filter(None, cures)) or 'more data or a larger epsilon'}."]


def _cure(best: Choice, target: dict[str, Any], name: str, is_enough: Callable[[SignalToNoise], bool]) -> str:
    """The smallest tried batch size, or number of steps, that is enough, as an option with what it does to the noise.

    Where no batch is enough, the largest that fits into S; "" where nothing helps.
    """
    if best.mechanism != PoissonSampling.kind:
        return ""
    found = ""
    for factor in _TRIED_FACTORS:
        setting = {"batch_size": best.batch_size, "iterations": best.iterations}
        setting[name] *= factor
        if setting["batch_size"] > best.size:
            break
        mechanism = PoissonSampling(
            contribution_bound=best.recounted_bound,
            sampling_probability=setting["batch_size"] / best.size,
            **setting,
        )
        try:
            noise = calculators.calibrate(mechanism, **target)
        except UncertifiableError:
            break
        ratio = SignalToNoise.of(mechanism, noise_multiplier=noise, num_parameters=best.num_parameters)
        lower = 1 - best.noise.whole_training / ratio.whole_training
        cure = (
            f"--{name.replace('_', '-')} {setting[name]} ({setting[name] // factor:,} -> {setting[name]:,} lowers the "
            f"noise in the mean gradient by {lower:.0%}; noise multiplier {best.noise_multiplier:.3g} -> {noise:.3g})"
        )
        if is_enough(ratio):
            return cure
        if name == "batch_size" and lower > 0.1:
            found = cure
    return found


def advice_on_graph(graph: AttributionGraph, bound: int) -> list[str]:
    heavy = heavy_users_advice(graph, bound)
    advice = [] if heavy is None else [heavy]
    if without := int(np.count_nonzero(graph.users_per_example == 0)):
        advice.append(
            f"{without:,} {'example has' if without == 1 else 'examples have'} no protected user and "
            f"{'is' if without == 1 else 'are'} left out; --unattributed keep would include "
            f"{'it' if without == 1 else 'them'} without protection."
        )
    return advice
