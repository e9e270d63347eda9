"""An experiment on what this package protects: a secret about Bob, in e-mails he received.

Attributed to senders, each of those e-mails belongs to someone else, many of them are selected, and the claimed epsilon
does not hold for Bob. Attributed to everyone in it, Bob is in at most `contribution_bound` of what is chosen, and it
does.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from coowned import validate
from coowned.accounting.guarantee import guarantee
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_up
from coowned.accounting.terms import UNIT
from coowned.attribution.tables import from_table
from coowned.audit.retraining import MeasuredLeak, measure_leak, retrain
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
