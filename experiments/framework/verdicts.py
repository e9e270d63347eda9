"""What became of a claim of the paper."""

import dataclasses
from typing import Literal

HOLDS, IN_PART, FAILS, OPEN = "holds", "holds in part", "does not hold", "not run yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One claim, judged from stored rows.

    Attributes:
      claim: the paper's statement in short.
      verdict: holds, holds in part, does not hold, or not run yet.
      found: the numbers that decide it.
      why: what explains them, or what limits the judgement.
    """

    claim: str
    verdict: Literal["holds", "holds in part", "does not hold", "not run yet"]
    found: str
    why: str = ""


def judge(claim: str, holding: int, cases: int, found: str, why: str = "") -> Verdict:
    """Holds where it does in all cases, in part where in some."""
    verdict = OPEN if not cases else HOLDS if holding == cases else IN_PART if holding else FAILS
    return Verdict(claim=claim, verdict=verdict, found=found, why=why)
