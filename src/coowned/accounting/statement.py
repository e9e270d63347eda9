"""A guarantee in numbered sentences, covering what "How to DP-fy ML" (arXiv 2303.00654) asks to be reported."""

import dataclasses
import decimal
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from coowned.accounting.terms import ADJACENCIES, OTHER_ADJACENCY, UNIT
from coowned.accounting.tiers import opted_out_examples, tier_sentences
from coowned.certificate import ContributionCertificate
from coowned.progress import counted

if TYPE_CHECKING:
    from coowned.accounting.privacy_guarantee import PrivacyGuarantee

FALSE_ALARMS = 0.01  # of the attack that the plain sentences speak of
_STRONG, _MODERATE = 0.1, 0.5  # success of that attack, at most; beyond the second the guarantee hides little
_OTHER_WORLD = {
    "zero-out": "every text they are part of had been blank",
    "replace": "every text they are part of had been replaced by completely different text",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statement:
    """A run's privacy statement, in parts that a page can arrange."""

    headline: str  # the claim in one sentence, with everything an epsilon is never shown without; or that there is none
    sentences: tuple[str, ...]  # all of the statement, the headline among the first; `str()` numbers them
    # What is not covered, promised or released, and for whom nothing holds: each also in `sentences`.
    not_promised: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what is wrong with the claim, such as a large delta; each also in `sentences`
    # By adjacency, what it means for people who do not know what an epsilon is; each also in `sentences`.
    plain: dict[str, str] = dataclasses.field(default_factory=dict)
    # By adjacency, "strong", "moderate" or "little", which `plain` says in words.
    protection: dict[str, str] = dataclasses.field(default_factory=dict)
    # By adjacency, the success of any attack with 1% false alarms, at most.
    attack_bounds: dict[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(self.sentences, start=1))


_NOT_RELEASED = (
    "Not released: training curves, drawn batch sizes, gradient norms, coins and keys; they depend on content or "
    "secrets."
)
_OTHER_RUNS = "other training runs on the same people, such as tuning runs, which must be composed with this one."
_NOT_RELEASED_OF_TUNING = (
    "Not released: how many runs there were, and the models, scores and settings of all but the best. How long the "
    "tuning took tells about the number of runs and is not covered."
)
_NOT_COVERED = (
    "Not covered for any user: validation and test examples, and every number or choice made from them (learning rate, "
    f"early stopping, reported accuracies); {_OTHER_RUNS}"
)
_NOT_COVERED_ELSE = (
    "Not covered for any user: every other number or choice made from validation and test examples (learning rate, "
    f"early stopping, accuracies not marked as covered); {_OTHER_RUNS}"
)
_NOT_PROMISED = (
    "Not promised: hiding that a user exists or who is attributed to what (node privacy); what is said about a user "
    "in examples not attributed to them; two users together, who may be in more copies than either alone."
)

_WORLDS = (
    "The unit is one person with every example they are part of, in any role. The attribution graph (who is part "
    "of what) is the same in both worlds compared. The curator sees the data and is trusted with them (central "
    "model)."
)
_SHAPE = (
    "The shape of the model is public. coowned takes it from the configuration (columns, number of features, classes, "
    "sequence length), the declared types of columns, and files (vocabulary, architecture, checkpoint), never from the "
    "content of examples; of the code of a model from elsewhere this is assumed."
)


def encoder_sentences(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Describes the public encoder of a model, and what its user declared; empty for most models."""
    digest = model.get("encoder_sha256")
    if not digest:
        return ()
    declared = model.get("encoder_trained_on")
    said = (
        f'its user declares that it was trained on "{declared}"' if declared else "what it was trained on is not said"
    )
    return (
        f"Texts are embedded, each by itself, by an encoder that is assumed to be public (SHA-256 of its weights: "
        f"{digest}); {said}. For text that it was trained on an encoder is not public, and nothing is promised.",
    )


def make_statement(
    guarantee: "PrivacyGuarantee", *, graph_statistics: bool, model: Mapping[str, Any] | None = None
) -> Statement:
    """Returns the statement of one guarantee.

    Guarantees:
      - Every number in it is read from the guarantee or its certificate.   (test_numbers_are_the_guarantees)
      - What the model's shape was taken from is said.   (test_the_origin_of_the_shape_is_stated)
      - A public encoder is named by its digest, with what was declared of it.   (test_the_statement_names_the_encoder)
      - What is not promised is a list of its own, and all of it is said.   (test_not_promised_is_data)
      - "completely different text" stands beside the replace epsilon only.   (test_sentence_matches_adjacency)
      - The plain sentences follow the bound on attacks, which is in them.   (test_plain_sentence_follows_epsilon)
      - A large delta is warned of.   (test_large_delta_is_warned_of)
      - Users without protection are in the headline.   (test_unprotected_users_are_counted)
      - What was asked for is shown as it was asked for, what is proven beside it.   (test_target_is_shown_as_asked)
      - With a covered evaluation it says what is covered, what that cost training, and what is still not covered.
        (test_covered_evaluation_is_stated)
      - A tuning says what was drawn and from what, and what of it stays secret.   (test_tuning_is_stated)
      - A test run has "no guarantee" where its epsilon would be.   (test_test_run_has_no_epsilon)
      - Counts of users by level are there only when asked for, marked as graph statistics.
        (test_graph_statistics_are_marked)
      - Numbers are rounded on the private side.   (test_rounding_is_on_the_private_side)

    Args:
      model: its description, of which what is said of public parts enters the statement.
    """
    certificate = guarantee.certificate
    headline, unprotected = _headline(guarantee), unprotected_sentences(certificate)
    warnings = guarantee.warnings()
    bounds = {} if guarantee.test_run else {name: guarantee.attack_bound(name) for name in ADJACENCIES}
    protection = {name: _protection(bound) for name, bound in bounds.items()}
    plain = {name: _plain(guarantee, name, bound, protection[name]) for name, bound in bounds.items()}
    epsilons = {
        guarantee.adjacency: guarantee.shown_epsilon,
        OTHER_ADJACENCY[guarantee.adjacency]: rounded_up(guarantee.other_epsilon),
    }
    not_covered = _NOT_COVERED if guarantee.evaluation is None else _NOT_COVERED_ELSE
    sentences = [
        *_simulated(guarantee),
        headline,
        *warnings,
        _WORLDS,
        *(f"Under {name} adjacency, epsilon {epsilons[name]}: {plain[name]}" for name in plain),
        _mechanism(guarantee),
        f"The training set has {counted(certificate.size, 'copy', 'copies')} of "
        f"{counted(certificate.num_distinct, 'example')}; a recount found nobody in more than "
        f"{counted(certificate.contribution_bound, 'copy', 'copies')}. coowned's selectors never see content; a "
        "training set from elsewhere is assumed to be chosen without looking at content.",
        *_tiers(guarantee),
        _SHAPE,
        *encoder_sentences(model or {}),
        _example_level(guarantee),
        f"Released: the model, and optionally every noisy gradient{_released_counts(guarantee)}. {_NOT_RELEASED}",
        _accountant(guarantee),
        *(_levels(guarantee) if graph_statistics else []),
        *unprotected,
        *_covered(guarantee),
        *_tuning(guarantee),
        not_covered,
        _seed(guarantee),
        _NOT_PROMISED,
        f"Certificate: graph {certificate.graph_digest}, selection {certificate.selection_digest}; "
        f"ids and attribution were derived from {', '.join(certificate.columns_read) or 'arrays given in memory'}.",
    ]
    return Statement(
        headline=headline,
        sentences=tuple(sentences),
        not_promised=(
            _NOT_RELEASED,
            *([] if guarantee.tuning is None else [_NOT_RELEASED_OF_TUNING]),
            not_covered,
            _NOT_PROMISED,
            *unprotected,
        ),
        warnings=warnings,
        plain=plain,
        protection=protection,
        attack_bounds=bounds,
    )


def _protection(attack_bound: float) -> str:
    return "strong" if attack_bound <= _STRONG else "moderate" if attack_bound <= _MODERATE else "little"


def _mechanism(guarantee: "PrivacyGuarantee") -> str:
    return (
        f"Mechanism: {guarantee.mechanism.describe()}; noise multiplier {guarantee.shown_noise_multiplier} in units of "
        f"one example's clip norm, {counted(guarantee.mechanism.iterations, 'step')}. Gradients are clipped per copy "
        "and divided by the public batch size."
    )


def _headline(guarantee: "PrivacyGuarantee") -> str:
    if guarantee.test_run:
        return (
            "No guarantee: noise and coins of this run come from a given seed and are therefore known. "
            "It is a test run; train again without a seed for a guarantee."
        )
    other = OTHER_ADJACENCY[guarantee.adjacency]
    shown, proven = guarantee.shown_epsilon, rounded_up(guarantee.epsilon)
    excluded = guarantee.certificate.num_unprotected_users
    what = "Training is" if guarantee.evaluation is None else "Training with its covered evaluation is"
    if guarantee.tuning is not None:
        what = "The whole tuning, of which this is the best run, is"
    return (
        f"{what} ({shown}, {guarantee.delta:.12g})-differentially private for every protected user (unit: {UNIT}; "
        f"contribution bound {guarantee.contribution_bound:,}; adjacency: {guarantee.adjacency}), and "
        f"({rounded_up(guarantee.other_epsilon)}, {guarantee.delta:.12g})-differentially private under {other} "
        "adjacency."
        + ("" if shown == proven else f" Requested: epsilon {shown}; proven: {proven}.")
        + (f" Nothing is promised to {counted(excluded, 'user')} excluded from protection." if excluded else "")
    )


def _simulated(guarantee: "PrivacyGuarantee") -> list[str]:
    if guarantee.test_run or guarantee.simulated_epsilon is None:
        return []
    return [
        f"Simulated epsilon {rounded_up(guarantee.simulated_epsilon)}: the noise was calibrated for a hypothetical "
        f"batch size of {guarantee.simulated_batch_size:,}, which is not the actual one. The true epsilon follows."
    ]


def _released_counts(guarantee: "PrivacyGuarantee") -> str:
    return "" if guarantee.evaluation is None else ", and the noisy counts of the covered evaluation"


def _covered(guarantee: "PrivacyGuarantee") -> list[str]:
    """Describes the release of a covered evaluation, and its cost."""
    found = guarantee.evaluation
    if found is None or guarantee.test_run:
        return []
    without = found.unshared_noise_multiplier
    return [
        "Covered, as part of the claim above: the figures marked as covered, of the evaluation on "
        f"{counted(found.size, 'held-out copy', 'held-out copies')}. A recount found nobody in more than "
        f"{counted(found.contribution_bound, 'copy', 'copies')} of them, who may be in the training set, too. "
        "Released are counts with Gaussian noise, rounded and added as integers, of noise multiplier "
        f"{rounded_down(found.noise_multiplier)} in units of the longest vector that one copy adds. Intervals are "
        "normal (score) intervals at 95% that include sampling and this noise."
        + ("" if without is None else f" Without it, training would have had noise multiplier {rounded_down(without)}.")
        + f" Held-out part: graph {found.graph_digest}, selection {found.selection_digest}."
    ]


def _tuning(guarantee: "PrivacyGuarantee") -> list[str]:
    """Describes the tuning, the theorem that accounts for it, and what about it stays secret."""
    tuning = guarantee.tuning
    if tuning is None or guarantee.test_run:
        return []
    keys = ", ".join(tuning.grid)
    return [
        "Tuning: the best, by covered accuracy, of a random number of runs "
        f"({tuning.law.expected:.4g} expected, at most {tuning.law.largest:,}; geometric, cut there), each with "
        f"its own key and one of {counted(tuning.grid_size, 'setting')} of {keys}, drawn from a grid fixed in advance. "
        "Accounted for by the privacy curve of one run and the law of the number of runs (private selection: Papernot "
        "and Steinke 2022; Koskela, Redberg and Wang 2024; proof in docs/accounting.md). Without tuning, the first "
        f"setting would have had noise multiplier {rounded_down(tuning.untuned_noise_multiplier)}. The covered "
        "accuracy is the largest of several: it is too high on average, and its interval does not allow for that.",
        _NOT_RELEASED_OF_TUNING,
    ]


def _plain(guarantee: "PrivacyGuarantee", adjacency: str, attack_bound: float, protection: str) -> str:
    """Explains the guarantee under one adjacency in everyday terms; honest about a large epsilon."""
    person = "any protected person" if guarantee.certificate.num_unprotected_users else "any person"
    learned = {
        "strong": f"someone with the model learns nearly the same about {person} as if",
        "moderate": f"someone with the model learns a limited amount more about {person} than if",
        "little": "at this epsilon the guarantee hides little; someone with the model may learn much more about "
        f"{person} than if",
    }[protection]
    success = min(100.0, math.ceil(1000 * attack_bound) / 10)
    return (
        f"{learned} {_OTHER_WORLD[adjacency]}; an attack with {FALSE_ALARMS:.0%} false alarms succeeds in at most "
        f"{success:.1f}% of cases."
    )


def _example_level(guarantee: "PrivacyGuarantee") -> str:
    if guarantee.test_run:
        return "For one example alone there is no guarantee either, for the same reason."
    return (
        "For one example alone (edge-data, example-level privacy) epsilon is "
        f"{rounded_up(guarantee.example_epsilon)} at the same delta and adjacency; it does not protect a person."
    )


EXACT_RELEASE = (
    "coowned's training releases integers: clipped gradients and Gaussian noise are rounded to one public grid and "
    "added exactly; a loop of your own that adds noise in floating point does not. Assumed: ChaCha20's output is as "
    "good as random bits and, except for linear models, the computed gradient of a copy does not depend on the other "
    "copies of its batch, nor on its position among them (tested on examples, for models of your own before each "
    "training; not proven). Timing is not covered."
)


def _tiers(guarantee: "PrivacyGuarantee") -> list[str]:
    """Returns epsilon by tier, and who opted out; a test run promises nothing to any tier."""
    rows = [] if guarantee.test_run else guarantee.by_tier().to_dicts()
    return tier_sentences(guarantee.certificate, rows, rounded_up, guarantee.evaluation)


def _accountant(guarantee: "PrivacyGuarantee") -> str:
    if guarantee.grid_spacing == 0:
        how = "the Gaussian mechanism in closed form (Balle and Wang 2018)"
    else:
        how = (
            "numerical composition of the dominating pair of Gaussian mixtures (connect-the-dots discretization with "
            f"a grid of {guarantee.grid_spacing:.3g}, exponentially tilted Fourier transform); discretization is "
            f"pessimistic, and rounding and truncation, {guarantee.error_share:.2g} of delta, are counted in delta"
        )
    return f"Accountant: coowned {guarantee.version}, {how}. {EXACT_RELEASE}"


def _levels(guarantee: "PrivacyGuarantee") -> list[str]:
    if guarantee.test_run:
        return []
    levels = guarantee.by_copies()
    total = max(1, int(levels["users"].sum()))
    parts = []
    for copies, users, least, most in by_number_of_copies(levels).iter_rows():
        if not users:
            continue
        level = (
            "not in training"
            if copies == 0
            else f"epsilon {interval(least, most)} in {counted(copies, 'copy', 'copies')}"
        )
        parts.append(f"{100 * users / total:.1f}% of users: {level}")
    said = [f"Graph statistic, not protected by this guarantee: {'; '.join(parts)}{_median(levels, total)}."]
    if "group" in levels.columns:
        groups = guarantee.certificate.groups
        sizes = groups.sizes if groups else ()
        worst = levels.filter(pl.col("users") > 0, pl.col("copies") > 0).group_by("group").agg(pl.col("epsilon").max())
        epsilons, largest = worst["epsilon"], worst.sort("epsilon", "group")["group"][-1]
        said.append(
            f"Graph statistic, not protected by this guarantee: the {counted(len(sizes), 'group')} of users have "
            f"{min(sizes):,} to {max(sizes):,} copies; the worst-off user of a group has epsilon "
            f"{interval(epsilons.min(), epsilons.max())}, the largest in group {largest}."
        )
    return said + opted_out_examples(guarantee.certificate)


def by_number_of_copies(levels: pl.DataFrame) -> pl.DataFrame:
    """Returns columns copies, users, least and most: epsilon by the number of copies, over all groups."""
    inhabited = pl.when(pl.col("users") > 0).then(pl.col("epsilon"))
    return (
        levels.group_by("copies")
        .agg(pl.col("users").sum(), inhabited.min().alias("least"), inhabited.max().alias("most"))
        .sort("copies")
    )


def interval(least: Any, most: Any) -> str:
    """Formats both rounded up; a single number if they are the same."""
    low, high = rounded_up(least), rounded_up(most)
    return high if low == high else f"{low} to {high}"


def _median(levels: pl.DataFrame, total: int) -> str:
    """Returns the level that half of all users have or better."""
    reached = levels.sort("epsilon", nulls_last=False).filter(2 * pl.col("users").cum_sum() >= total)["epsilon"]
    if reached.is_empty():
        return ""
    if reached[0] is None:
        return "; half of all users are not in training"
    return f"; half of all users: epsilon {rounded_up(reached[0])} or better"


def unprotected_sentences(certificate: ContributionCertificate) -> list[str]:
    """Returns sentences on users and copies that nothing is promised for; none where there are none."""
    users, copies = certificate.num_unprotected_users, certificate.num_copies_without_users
    sentences = []
    if users:
        were = "was" if users == 1 else "were"
        sentences.append(
            f"{counted(users, 'user')} {were} excluded from the attribution: this guarantee does not cover them."
        )
    if users or copies:
        have, whose = ("has", "its") if copies == 1 else ("have", "their")
        sentences.append(
            f"{counted(copies, 'copy', 'copies')} in the training set {have} no protected user: {whose} content is "
            "not protected for anyone."
        )
    return sentences


def _seed(guarantee: "PrivacyGuarantee") -> str:
    if guarantee.test_run:
        return "Keys: derived from the given seed."
    return (
        "Keys for noise and coins come from the operating system and must stay secret; "
        "a run with a given seed has no guarantee."
    )


def rounded_up(value: float) -> str:
    """Four digits, never fewer than the value: an epsilon is not rounded to one that was not proven.

    >>> rounded_up(1.99952), rounded_up(2.0001), rounded_up(2.0), rounded_up(0.00123456)
    ('2', '2.001', '2', '0.001235')
    """
    return f"{float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).create_decimal_from_float(value)):.4g}"


def rounded_down(value: float) -> str:
    """Four digits, never more than the value: noise is not made out to be more than it is.

    >>> rounded_down(1.99999)
    '1.999'
    """
    return f"{float(decimal.Context(prec=4, rounding=decimal.ROUND_FLOOR).create_decimal_from_float(value)):.4g}"
