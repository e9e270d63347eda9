"""Judges a claim by its effect: a number with an interval, compared with a threshold that was stated in advance."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

from scipy import stats

HOLDS, FAILS, UNRESOLVED, OPEN = "holds", "does not hold", "not resolved", "not run yet"
LEVEL = 0.05  # one minus the coverage of an interval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim, judged from stored rows.

    Attributes:
      claim: the paper's statement in short.
      verdict: holds, does not hold, not resolved, or not run yet.
      found: the numbers that decide it.
      why: what explains them, or what limits the judgement.
      seeds: those that decide it; empty where nothing is random.
      num_examples: of the rows that decide it; None: all rows do.
      smaller: in what way the rows are smaller than the paper's; empty where they are not.
    """

    claim: str
    verdict: Literal["holds", "does not hold", "not resolved", "not run yet"]
    found: str
    why: str = ""
    seeds: str = ""
    num_examples: int | None = None
    smaller: str = ""


@dataclasses.dataclass(frozen=True)
class Effect:
    """An estimate with its standard error and degrees of freedom, or with the 95% interval itself; exact by default."""

    estimate: float
    error: float = 0.0
    freedom: float = math.inf
    bounds: tuple[float, float] | None = None

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Student's, unless it was given; the estimate itself where it is exact."""
        if self.bounds is not None or not self.error:
            return self.bounds or (self.estimate, self.estimate)
        half = float(stats.t.ppf(1 - level / 2, self.freedom)) * self.error
        return self.estimate - half, self.estimate + half


def combine(parts: Sequence[tuple[float, Sequence[float]]]) -> Effect:
    """The sum of weight times mean over independent samples, with Welch's standard error and degrees of freedom.

    Each sample has at least two values: one seed has no standard error.
    """
    variances = [weight**2 * statistics.variance(sample) / len(sample) for weight, sample in parts]
    estimate = sum(weight * statistics.fmean(sample) for weight, sample in parts)
    total = sum(variances)
    terms = sum(v**2 / (len(sample) - 1) for v, (_, sample) in zip(variances, parts, strict=True))
    return Effect(estimate, math.sqrt(total), total**2 / terms if terms else math.inf)


def judge(
    claim: str,
    effects: Sequence[Effect],
    found: str,
    *,
    above: float | None = None,
    below: float | None = None,
    in_some: bool = False,
    cases: int | None = None,
    **about: Any,
) -> Verdict:
    """Whether the effect is at least `above`, or at most `below`: in all cases, or `in_some`.

    One case decides by its 95% interval. Of several, a claim on all holds where every interval is on the claimed side,
    and does not where one is on the other side; a claim on some is the reverse. The interval of a case that decides
    alone is corrected for the number of `cases` that were named in advance (Bonferroni), by default those given. Where
    some of them are missing, only such a case can decide. `about` is what else a `Verdict` has.
    """
    threshold, sign = (above, 1) if above is not None else (below, -1)
    assert threshold is not None
    total = cases or len(effects)

    def on_side(effect: Effect, side: int, level: float) -> bool:
        ends = [side * (end - threshold) for end in effect.interval(level)]
        return min(ends) > 0 or (side == sign and ends == [0, 0])  # what is exactly at the threshold holds

    claimed, other = (HOLDS, FAILS) if in_some else (FAILS, HOLDS)
    deciding_side = sign if in_some else -sign
    if not effects:
        verdict = OPEN
    elif any(on_side(effect, deciding_side, LEVEL / total) for effect in effects):
        verdict = claimed
    elif len(effects) == total and all(on_side(effect, -deciding_side, LEVEL) for effect in effects):
        verdict = other
    else:
        verdict = UNRESOLVED
    return Verdict(claim=claim, verdict=verdict, found=found, **about)


def judge_cases(claim: str, holding: int, cases: int, found: str, why: str = "") -> Verdict:
    """A claim about cases that are not random, named in advance: it holds where it does in all of them."""
    verdict = OPEN if not cases else HOLDS if holding == cases else FAILS
    return Verdict(claim=claim, verdict=verdict, found=found, why=why)


def unrun(claims: Sequence[str]) -> list[Verdict]:
    """No verdict yet."""
    return [Verdict(claim=claim, verdict=OPEN, found="") for claim in claims]


def with_interval(effect: Effect, level: float = LEVEL, *, scale: float = 100, digits: int = 2) -> str:
    """An effect, by default in percentage points, with its interval: +0.24 [+0.10, +0.38]."""
    low, high = (f"{scale * end:+.{digits}f}" for end in effect.interval(level))
    return f"{scale * effect.estimate:+.{digits}f} [{low}, {high}]"
