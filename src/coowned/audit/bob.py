"""An experiment on what this package protects: a secret about Bob, in e-mails he received.

Attributed to senders, each of those e-mails belongs to someone else, many of them are selected, and the claimed epsilon
does not hold for Bob. Attributed to everyone in it, Bob is in at most `contribution_bound` of what is chosen, and it
does.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.accounting.terms import UNIT
from coowned.attribution.tables import from_table
from coowned.audit.checks import lower_bound, upper_bound
from coowned.certificate import certify
from coowned.content.data import FeatureTable, with_norms
from coowned.errors import InputError
from coowned.exact.keys import RunKey
from coowned.mechanism.poisson_sampling import PoissonSampling
from coowned.models.logistic_regression import LogisticRegression
from coowned.selection.greedy import Greedy
from coowned.synthetic.toy_emails import DOMAIN, EmailWorld, hashed_words
from coowned.training.loop import Trainer
from coowned.training.plan import TrainingPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLeak:
    """The lower bound on epsilon that an attack on one person proves."""

    # With probability at least 1 - alpha no (epsilon, delta) guarantee with a smaller epsilon holds for this person.
    epsilon_lower_bound: float
    true_positive_rate: float  # of the attack, on the half of the models its threshold was not chosen on
    false_positive_rate: float
    trials: int  # models trained, half of them with the person's content
    alpha: float  # probability that the bound is above the truth
    delta: float


def measure_leak(
    scores_with: npt.NDArray[np.float64], scores_without: npt.NDArray[np.float64], *, delta: float, alpha: float = 1e-3
) -> MeasuredLeak:
    """Returns a lower bound on epsilon from the scores of models trained with a person's content and without it.

    The threshold and the direction ("high means the person was in it", or out of it) are chosen on the first half of
    the scores; on the other half the attack's two rates have Clopper-Pearson bounds at alpha / 2 each. Since
    P(A) <= e^epsilon Q(A) + delta, epsilon >= log((lower(P) - delta) / upper(Q)).

    Guarantees:
      - Above the truth with probability at most alpha.   (test_bound_is_seldom_above_the_truth)
      - A plain leak is found.                            (test_a_plain_leak_is_found)

    Args:
      scores_with, scores_without: one for every model, in the order they were trained.
      delta: of the claim.
      alpha: probability that the bound is above the truth.

    Example:
      >>> leak = measure_leak(np.arange(100) + 1000.0, np.arange(100.0), delta=1e-6)
      >>> round(leak.epsilon_lower_bound, 2)
      1.81
    """
    validate.in_range(0, 1, open_low=True, open_high=True, delta=delta, alpha=alpha)
    inside, outside = np.asarray(scores_with, np.float64), np.asarray(scores_without, np.float64)
    if min(len(inside), len(outside)) < 4:
        raise InputError("a leak is measured on at least four models with a person's content and four without")
    if not (np.isfinite(inside).all() and np.isfinite(outside).all()):
        raise InputError("scores must be finite; check the models")
    half_in, half_out = len(inside) // 2, len(outside) // 2
    threshold, sign, complement = _choose(inside[:half_in], outside[:half_out], delta, alpha)
    # A is "guessed in" (P with, Q without), or its complement with the roles exchanged.
    hits = sign * inside[half_in:] > threshold
    false_alarms = sign * outside[half_out:] > threshold
    first, second = (~false_alarms, ~hits) if complement else (hits, false_alarms)
    bound = float(_epsilon(int(first.sum()), len(first), int(second.sum()), len(second), delta, alpha))
    return MeasuredLeak(
        epsilon_lower_bound=bound,
        true_positive_rate=float(hits.mean()),
        false_positive_rate=float(false_alarms.mean()),
        trials=len(inside) + len(outside),
        alpha=alpha,
        delta=delta,
    )


def retrain(
    train: Callable[[bool, int], float], *, trials: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns (scores with, scores without): `train(included, number)` returns the score of one freshly trained model.

    Models with and without alternate, so that drift cannot tell them apart.
    """
    validate.integer(at_least=8, trials=trials)
    scores = np.array([train(number % 2 == 0, number) for number in range(trials)])
    return scores[::2], scores[1::2]


def _choose(
    inside: npt.NDArray[np.float64], outside: npt.NDArray[np.float64], delta: float, alpha: float
) -> tuple[float, int, bool]:
    """Returns the threshold, direction and side for which the bound on this half would be largest."""
    best, chosen = -math.inf, (0.0, 1, False)
    for sign in (1, -1):
        ups, downs = np.sort(sign * inside), np.sort(sign * outside)
        edges = np.unique(np.concatenate([ups, downs]))
        thresholds = (edges[1:] + edges[:-1]) / 2
        hits = len(ups) - np.searchsorted(ups, thresholds, side="right")
        false_alarms = len(downs) - np.searchsorted(downs, thresholds, side="right")
        for complement in (False, True):
            if complement:
                bounds = _epsilon(len(downs) - false_alarms, len(downs), len(ups) - hits, len(ups), delta, alpha)
            else:
                bounds = _epsilon(hits, len(ups), false_alarms, len(downs), delta, alpha)
            if len(bounds) and bounds.max() > best:
                best, chosen = float(bounds.max()), (float(thresholds[bounds.argmax()]), sign, complement)
    return chosen


def _epsilon(
    first: npt.ArrayLike, of_first: int, second: npt.ArrayLike, of_second: int, delta: float, alpha: float
) -> npt.NDArray[np.float64]:
    """Computes lower bounds on epsilon from an event's counts on the likelier side and on the other."""
    low = lower_bound(first, of_first, alpha / 2)
    high = upper_bound(second, of_second, alpha / 2)
    return np.log(np.maximum(low - delta, high) / high)


class Attribution(NamedTuple):
    """The column of the world that e-mails are attributed by, and its name in figures."""

    column: str
    title: str


ATTRIBUTIONS = {
    "sender": Attribution("sender", "attributed to the sender"),
    "everyone": Attribution("users", "attributed to everyone in it"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The claim under one attribution, and the measurement with Bob as the unit."""

    attribution: str  # "sender" or "everyone"
    # Proven, for every user of that attribution (fixed graph, zero-out) at `delta` and `contribution_bound`.
    epsilon: float
    target_epsilon: float  # as requested
    delta: float
    contribution_bound: int
    size: int
    copies_with_bob: int  # entries of S in which Bob is a sender or recipient
    leak: MeasuredLeak  # the measured lower bound
    scores_with: tuple[float, ...] = dataclasses.field(repr=False)  # what the attacker saw, one number a model
    scores_without: tuple[float, ...] = dataclasses.field(repr=False)

    @property
    def title(self) -> str:
        """The name of the attribution in a figure."""
        return ATTRIBUTIONS[self.attribution].title

    @property
    def claim_holds(self) -> bool:
        """False if the measured lower bound is above the claim, which is then untrue for Bob."""
        return self.leak.epsilon_lower_bound <= self.epsilon

    @property
    def shown_epsilon(self) -> str:
        """The requested epsilon, with what was proven."""
        return f"{self.target_epsilon:.12g} (proven: {rounded_up(self.epsilon)})"

    @property
    def terms(self) -> str:
        """Everything the epsilon depends on."""
        bound, delta = f"{self.contribution_bound:,}", f"{self.delta:.12g}"
        return f"unit: {UNIT}; contribution bound {bound}; delta {delta}; adjacency: zero-out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BobTest:
    """Trains a classifier of e-mails many times, with and without Bob's e-mails, and lets an attacker guess which.

    The attacker asks each model one question: how private does it find the sentence with the secret? Which answers
    mean "Bob was in it" is learned from half of the models and tried on the others.

    Guarantees:
      - Attributed to senders, the claim is broken with Bob as the unit; attributed to everyone it is not.
        (test_sender_only_breaks_the_claim, test_everyone_keeps_the_claim)
      - Both attributions claim the same epsilon, delta and bound.   (test_both_claim_the_same)
    Cost: about a tenth of a second a model; `trials` models for each attribution.

    Example:
      >>> claim = BobTest(num_people=60, num_emails=200, num_secret_emails=20, batch_size=4).claim("everyone")
      >>> claim.epsilon <= 1.0, claim.contribution_bound
      (True, 1)
    """

    epsilon: float = 1.0
    delta: float = 1e-5
    contribution_bound: int = 1
    num_people: int = 600
    num_emails: int = 2500
    num_secret_emails: int = 300
    batch_size: int = 64
    iterations: int = 24
    learning_rate: float = 0.5
    num_features: int = 64
    trials: int = 400
    alpha: float = 1e-3
    seed: int | None = None

    def __post_init__(self) -> None:
        validate.integer(at_least=8, trials=self.trials)
        if self.seed is not None:
            validate.integer(at_least=0, at_most=2**62, seed=self.seed)  # every model has its own seed above it

    def claim(self, attribution: str) -> PrivacyGuarantee:
        """Returns the guarantee for the users that e-mails are attributed to."""
        return self._prepare(attribution)[0].guarantee  # type: ignore[return-value]

    def measure(self, attribution: str) -> Measured:
        """Trains all models of one attribution and measures what they reveal about Bob."""
        plan, table, bobs, question = self._prepare(attribution)
        model = LogisticRegression(num_features=self.num_features)
        # Zero-out with Bob as the unit: all e-mails he is in add nothing, and the graph is what it was.
        silent = table.features.copy()
        silent[bobs] = np.nan
        contents = {True: with_norms(table), False: with_norms(dataclasses.replace(table, features=silent))}
        start = model.initial()

        def score(included: bool, number: int) -> float:
            trainer = Trainer([dataclasses.replace(plan, run_key=self._key(number))], model)
            coefficients = trainer.train(contents[included], start)["coefficients"][0].astype(np.float64)
            return float(question @ coefficients[:-1] + coefficients[-1])

        inside, outside = retrain(score, trials=self.trials)
        assert plan.guarantee is not None
        return Measured(
            attribution=attribution,
            epsilon=plan.guarantee.epsilon,
            target_epsilon=self.epsilon,
            delta=self.delta,
            contribution_bound=plan.guarantee.certificate.contribution_bound,
            size=plan.certificate.size,
            copies_with_bob=int(plan.selected.copies[bobs].sum()),
            leak=measure_leak(inside, outside, delta=self.delta, alpha=self.alpha),
            scores_with=tuple(inside.tolist()),
            scores_without=tuple(outside.tolist()),
        )

    def _key(self, number: int) -> RunKey:
        # A key for every model, so that their coins and noise are independent.
        return RunKey.from_operating_system() if self.seed is None else RunKey.from_seed(self.seed + number)

    def _prepare(self, attribution: str) -> tuple[TrainingPlan, FeatureTable, Any, Any]:
        """Returns (plan, content, (emails,) whether Bob is in each, the attacker's question)."""
        if attribution not in ATTRIBUTIONS:
            raise InputError(f"attribution must be one of {', '.join(ATTRIBUTIONS)}, not {attribution!r}")
        world = EmailWorld(
            num_people=self.num_people, num_emails=self.num_emails, num_secret_emails=self.num_secret_emails
        )
        emails = world.generate(seed=0)
        graph = from_table(emails, users=ATTRIBUTIONS[attribution].column, example_id="message_id").graph
        selection = Greedy(contribution_bound=self.contribution_bound).select(graph)
        certificate = certify(graph, selection)
        mechanism = PoissonSampling.from_certificate(
            certificate, batch_size=self.batch_size, iterations=self.iterations
        )
        claim = guarantee(
            certificate,
            mechanism,
            epsilon=self.epsilon,
            delta=self.delta,
            adjacency="zero-out",
            test_run=self.seed is not None,
        )
        features = hashed_words(emails["text"].to_pylist(), self.num_features)
        table = FeatureTable(graph=graph, features=features, labels=emails["label"].to_numpy())
        plan = TrainingPlan(
            certificate=certificate,
            selected=selection,
            mechanism=mechanism,
            guarantee=claim,
            clip_norm=0.5,
            optimizer="sgd",
            learning_rate=self.learning_rate,
            run_key=self._key(0),
        )
        bob = f"{world.secret_about}@{DOMAIN}"
        bobs = np.array([bob in users for users in emails["users"].to_pylist()])
        sentence = f"I hope you are well again after the {world.secret}."
        return plan, table, bobs, hashed_words([sentence], self.num_features)[0].astype(np.float64)
