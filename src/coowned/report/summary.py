"""A finished run on one screen: the guarantee, the model's quality, the automatic choices, and what to try next."""

import html
import textwrap
from typing import NamedTuple

from coowned.accounting import calculators
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.signal_to_noise import SignalToNoise
from coowned.accounting.statement import rounded_up
from coowned.errors import CoownedError
from coowned.report.verdict import clipping, is_useful, qualities, test_row, unusable
from coowned.runs.stored_run import StoredRun

_WIDTH = 100


class Part(NamedTuple):
    """A heading with its content."""

    heading: str
    sentences: tuple[str, ...]


def summary(run: StoredRun) -> list[Part]:
    """Returns the parts that `print(run)` and a notebook show.

    Guarantees:
      - The claim stands with its unit, bound, delta and adjacency, or there is none.   (test_summary_of_every_kind)
      - Figures are said to be covered or not.   (test_summary_of_every_kind)
      - What was chosen because nobody said it stands with its reasons.   (test_what_was_chosen_is_said)
    """
    plain = [] if not run.claims else [_sentence(run.claim.statement_parts().plain[run.claim.adjacency])]
    parts = [Part("What is promised", (_sentence(run.headline) + ".", *plain))]
    parts += [Part(found.heading, (found.sentence,)) for found in qualities(run)]
    if run.reasons:
        parts.append(Part("Chosen from the graph and public numbers alone", run.reasons))
    if steps := next_steps(run):
        parts.append(Part("What to try next", tuple(steps)))
    return parts


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def as_text(parts: list[Part]) -> str:
    """Formats the parts for a terminal."""
    wrapped = [
        "\n".join([part.heading, *(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ",
                                               break_on_hyphens=False) for text in part.sentences)])
        for part in parts
    ]  # fmt: skip
    return "\n".join(wrapped)


def as_html(parts: list[Part]) -> str:
    """Formats the parts for a notebook; no text can become markup."""
    rows = [
        f"<dt><strong>{html.escape(part.heading)}</strong></dt>"
        + "".join(f"<dd>{html.escape(text)}</dd>" for text in part.sentences)
        for part in parts
    ]
    return f"<dl>{''.join(rows)}</dl>"


_GAIN = 1.1  # of the signal-to-noise ratio, that is worth a sentence
_MOST = 0.9  # share of the examples that a larger bound could not add much to


def next_steps(run: StoredRun) -> list[str]:
    """Returns sentences on what to try next, the most promising first; NOT covered: they follow from the evaluation.

    Guarantees:
      - Where the model without privacy is no better, less noise is not advised.   (test_noise_is_not_always_the_limit)
      - Where S is not like the data and the model is of little use, that is said.   (test_an_s_unlike_the_data_is_said)
      - Of a model that is of little use, a baseline comes before less noise.   (test_a_poor_model_is_compared_first)
      - Of a model that makes no mistake nothing is advised.   (test_nothing_is_advised_of_a_model_without_mistakes)
      - A ratio that is stated is that of the mechanism with the other batch size or epsilon.
        (test_ratios_are_those_of_the_changed_mechanism)
    """
    evaluations = run.evaluations()
    row = test_row(evaluations)
    if unusable(row):
        return ["Check the label column and the classes of the model, then train again: this model learned nothing."]
    if row.get("accuracy") == 1:
        return []
    clipped = clipping(run.metrics()) if run.guarantee else None
    advice = [clipped] if clipped and "fits the gradients" not in clipped else []
    if run.guarantee is None:
        return advice
    is_poor = is_useful(evaluations) is False
    first = _unlike_the_data(run) if is_poor else []
    measure = row.get("measure", "accuracy")
    without = row.get(f"baseline_{measure}")
    if without is None:
        (first if is_poor else advice).append(
            "Train with a baseline (run=RunSettings(baseline=True), [run] baseline = true) to see what privacy costs: "
            "the same model without it."
        )
    elif is_useful(evaluations, "baseline_") is False:
        return [
            *first,
            "Without privacy this model is not clearly better than the trivial answer either: try other columns, "
            "another model or more examples; less noise alone will not help.",
            *advice,
        ]
    elif _overlap(row, measure):
        return [*advice, "Without privacy this model is not clearly better: another model or more examples may help."]
    return [*first, *_less_noise(run), *_more_examples(run), *advice]


def _overlap(row: dict[str, float | None], measure: str) -> bool:
    """Returns whether the intervals of the model and of the one without privacy overlap."""
    ends = [row.get(f"{model}{measure}_{end}") for model in ("", "baseline_") for end in ("low", "high")]
    if any(end is None for end in ends):
        return False
    low, high, other_low, other_high = (float(end or 0) for end in ends)
    return low <= other_high and other_low <= high


class _Change(NamedTuple):
    what: str
    batch_size: int
    epsilon: float
    at: str


def _less_noise(run: StoredRun) -> list[str]:
    """Returns advice on a larger batch, a larger epsilon or fewer parameters, by their effect on the noise."""
    ratio, said = run.signal_to_noise, []
    if not run.claims or ratio is None or ratio.whole_training**2 > run.certificate.num_distinct:
        return []  # what so few examples leave unknown outweighs the noise, see SignalToNoise.with_examples
    claim, batch_size = run.claim, ratio.batch_size
    changes = [
        _Change(f"A batch size of {2 * batch_size:,}", 2 * batch_size, claim.epsilon, "the same epsilon"),
        _Change(f"Epsilon {rounded_up(2 * claim.epsilon)}", batch_size, 2 * claim.epsilon, "a weaker promise"),
    ]
    for change in changes:
        changed = _changed(run, claim, ratio, change)
        if changed is not None and changed.per_step >= _GAIN * ratio.per_step:
            said.append(
                f"{change.what} would raise a step's signal-to-noise ratio from {ratio.per_step:.2g} to "
                f"{changed.per_step:.2g}, at {change.at}."
            )
    if ratio.is_swamped and not ratio.num_scores:
        said.append(
            f"Train fewer parameters than {ratio.num_parameters:,} (a smaller model, or most of it frozen): a quarter "
            "of them doubles that ratio."
        )
    return said


def _changed(run: StoredRun, claim: PrivacyGuarantee, ratio: SignalToNoise, change: _Change) -> SignalToNoise | None:
    """Returns the ratio after a change; None if the mechanism would need another selection for it."""
    mechanism, certificate = run.mechanism, run.certificate
    if mechanism.needs_schedule or claim.evaluation is not None or change.batch_size > certificate.size:
        return None
    sizes = {"num_parameters": ratio.num_parameters, "num_scores": ratio.num_scores}
    try:
        changed = type(mechanism).from_certificate(
            certificate,
            batch_size=change.batch_size,
            iterations=mechanism.iterations,
            num_bands=getattr(mechanism, "num_bands", None),
        )
        noise = calculators.calibrate(changed, epsilon=change.epsilon, delta=claim.delta, adjacency=claim.adjacency)
        return SignalToNoise.of(changed, noise_multiplier=noise, **sizes)
    except CoownedError:
        return None


def _unlike_the_data(run: StoredRun) -> list[str]:
    """Returns a warning if S differs from the data."""
    try:
        warning = run.graph_summary().warning()
    except CoownedError:
        return []
    return [] if warning is None else [warning]


def _more_examples(run: StoredRun) -> list[str]:
    """Returns advice on how many examples a larger bound could add to S."""
    try:
        total = run.graph_summary().num_examples
    except CoownedError:
        return []
    certificate = run.certificate
    if not certificate.contribution_bound or certificate.num_distinct >= _MOST * total:
        return []
    return [
        f"The contribution bound of {certificate.contribution_bound:,} leaves {total - certificate.num_distinct:,} of "
        f"{total:,} examples out: `coowned plan` compares larger bounds, which cost more noise."
    ]
