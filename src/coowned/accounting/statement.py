"""A guarantee in plain numbered sentences, with what "How to DP-fy ML" (arXiv 2303.00654) asks to be reported."""

import decimal
from typing import TYPE_CHECKING

from coowned.certificate import ContributionCertificate

if TYPE_CHECKING:
    from coowned.accounting.guarantee import PrivacyGuarantee

_OTHER_WORLD = {
    "zero-out": "as if every text she is part of had been blank",
    "replace": "as if every text she is part of had been replaced by completely different text",
}


def write_statement(made: "PrivacyGuarantee", *, graph_statistics: bool) -> str:
    """The statement of one guarantee.

    Guarantees:
      - Every number in it is read from the guarantee or its certificate.   (test_numbers_are_the_guarantees)
      - "completely different text" stands beside the replace epsilon only.   (test_sentence_matches_adjacency)
      - A test run has "no guarantee" where its epsilon would be.   (test_test_run_has_no_epsilon)
      - Counts of users by level are there only when asked for, marked as graph statistics.
        (test_graph_statistics_are_marked)
      - Numbers are rounded on the private side.   (test_rounding_is_on_the_private_side)
    """
    sentences = [
        *_headline(made),
        _unit(made),
        *_other_worlds(made),
        _mechanism(made),
        _bound(made),
        _example_level(made),
        _released(),
        _accountant(made),
        *(_levels(made) if graph_statistics else []),
        *unprotected_sentences(made.certificate),
        "Not covered for any user: validation and test examples, and every number or choice made from them "
        "(learning rate, early stopping, printed accuracies); other training runs on the same people, such as tuning "
        "runs, "
        "which must be composed with this one.",
        _seed(made),
        "Not promised: hiding that a user exists or who is attributed to what (node privacy); what is said about a "
        "user in examples "
        "she is not attributed to; two users together, who may be in more copies than one.",
        f"Certificate: graph {made.certificate.graph_digest}, selection {made.certificate.selection_digest}; "
        f"ids and attribution were made from {', '.join(made.certificate.columns_read) or 'arrays given in memory'}.",
    ]
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, start=1))


def _headline(made: "PrivacyGuarantee") -> list[str]:
    if made.test_run:
        return [
            "No guarantee: noise and coins of this run come from a given seed and are therefore known. "
            "It is a test run; train again without a seed for a guarantee."
        ]
    lines = []
    if made.simulated_epsilon is not None:
        lines.append(
            f"Simulated epsilon {rounded_up(made.simulated_epsilon)}: the noise was calibrated for a hypothetical "
            "batch size of "
            f"{made.simulated_batch_size:,}, which is not what runs. The true epsilon of what runs follows."
        )
    lines.append(
        f"Training is ({rounded_up(made.epsilon)}, {made.delta:.12g})-differentially private for every protected user "
        f"(unit: {made.unit}; contribution bound {made.contribution_bound:,}; adjacency: {made.adjacency})."
    )
    return lines


def _unit(made: "PrivacyGuarantee") -> str:
    return (
        "The unit is one person with every example she is part of, in whatever role; the attribution graph, who is "
        "part of what, is "
        "the same in both worlds that are compared. The curator sees the data and is trusted with them (central model)."
    )


def _other_worlds(made: "PrivacyGuarantee") -> list[str]:
    if made.test_run:
        return []
    other = "replace" if made.adjacency == "zero-out" else "zero-out"
    epsilons = {made.adjacency: made.epsilon, other: made.other_epsilon}
    return [
        f"Under {name} adjacency, epsilon {rounded_up(epsilons[name])}: someone with the model learns nearly the "
        f"same {_OTHER_WORLD[name]}."
        for name in ("zero-out", "replace")
    ]


def _mechanism(made: "PrivacyGuarantee") -> str:
    mechanism = made.mechanism
    noise = f"noise multiplier {rounded_down(made.noise_multiplier)} in units of one example's clip norm"
    return (
        f"Mechanism: {mechanism.describe()}; {noise}, {mechanism.iterations:,} steps. Gradients are clipped per copy "
        "and divided by the public batch size."
    )


def _bound(made: "PrivacyGuarantee") -> str:
    certificate = made.certificate
    return (
        f"The training set has {certificate.size:,} copies of {certificate.num_distinct:,} examples, chosen without "
        "looking at content; "
        f"a recount found nobody in more than {certificate.contribution_bound:,} copies."
    )


def _example_level(made: "PrivacyGuarantee") -> str:
    if made.test_run:
        return "For one example alone there is no guarantee either, for the same reason."
    return (
        f"For one example alone (edge-data, example-level privacy) epsilon is {rounded_up(made.example_epsilon)} at "
        "the same delta and adjacency; "
        "it is not what protects a person."
    )


def _released() -> str:
    return (
        "Released: the model, and if wanted every noisy gradient on the way. Not released: training curves, drawn "
        "batch sizes, "
        "gradient norms, coins and keys; they are functions of content or secrets."
    )


def _accountant(made: "PrivacyGuarantee") -> str:
    if made.grid_spacing == 0:
        how = "the Gaussian mechanism in closed form (Balle and Wang 2018)"
    else:
        how = (
            "numerical composition of the dominating pair of Gaussian mixtures (connect-the-dots discretization with "
            "a grid of "
            f"{made.grid_spacing:.3g}, exponentially tilted Fourier transform); discretization is pessimistic, and "
            "rounding and truncation, "
            f"{made.error_share:.2g} of delta, are counted in delta"
        )
    return f"Accountant: coowned {made.version}, {how}. Arithmetic of the training itself is floating point."


def _levels(made: "PrivacyGuarantee") -> list[str]:
    if made.test_run:
        return []
    levels = made.by_copies()
    total = max(1, int(levels["users"].sum()))
    parts = []
    for row in levels.iter_rows(named=True):
        if not row["users"]:
            continue
        what = (
            "no part in training"
            if row["copies"] == 0
            else f"epsilon {rounded_up(row['epsilon'])} in {row['copies']:,} copies"
        )
        parts.append(f"{100 * row['users'] / total:.1f}% of users: {what}")
    return [f"Graph statistic, not protected by this guarantee: {'; '.join(parts)}{_median(levels, total)}."]


def _median(levels, total: int) -> str:
    """The level that half of all users have or better."""
    reached = 0
    for row in levels.sort("epsilon", nulls_last=False).iter_rows(named=True):
        reached += row["users"]
        if 2 * reached >= total:
            return (
                "; half of all users have no part in training"
                if row["epsilon"] is None
                else f"; half of all users: epsilon {rounded_up(row['epsilon'])} or better"
            )
    return ""


def unprotected_sentences(certificate: ContributionCertificate) -> list[str]:
    """How many users, and copies, nothing is promised for; empty where there are none."""
    sentences = []
    if certificate.num_unprotected_users:
        sentences.append(
            f"{certificate.num_unprotected_users:,} users were taken out of the attribution: this guarantee does not "
            "hold for them."
        )
    if certificate.num_unprotected_users or certificate.num_copies_without_users:
        sentences.append(
            f"{certificate.num_copies_without_users:,} copies in the training set have no protected user: their "
            "content is not protected for anybody."
        )
    return sentences


def _seed(made: "PrivacyGuarantee") -> str:
    if made.test_run:
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
