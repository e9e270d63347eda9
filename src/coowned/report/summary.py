"""A finished run on one screen: its guarantee, its quality with a verdict, automatic choices, and what to try next."""

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned.accounting import calculators
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.signal_to_noise import SignalToNoise
from coowned.accounting.statement import rounded_up
from coowned.errors import CoownedError
from coowned.progress import one_of
from coowned.runs.stored_run import StoredRun

if TYPE_CHECKING:
    import polars as pl


_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # shares of clipped copies
_FEW = 5  # classes that are named


class Quality(NamedTuple):
    """A model's quality in words, and who may read them.

    Attributes:
      sentence: the figure, its interval, the trivial answer, and whether the model is of any use.
      covered: whether the guarantee covers the figure, so that it may be published.
      is_useful: whether it is clearly better than the trivial answer; None where nothing can be said.
    """

    sentence: str
    covered: bool
    is_useful: bool | None

    @property
    def heading(self) -> str:
        return f"How good it is ({'covered by the guarantee' if self.covered else 'NOT covered by a guarantee'})"


def qualities(run: "StoredRun", *, release: bool = False) -> list[Quality]:
    """Returns the sentences shown beside epsilon everywhere: on the screen, in a notebook, first on a page.

    Covered figures come first; for a release there are no others, and those that are not covered are not even opened.
    """
    released = run.covered if run.claims else None
    covered = [] if released is None else [Quality(f"Covered {released}.", covered=True, is_useful=None)]
    own = None if release else quality(run.evaluations())
    return covered if own is None else [*covered, own]


def quality(evaluations: "Mapping[str, pl.DataFrame]") -> Quality | None:
    """Returns the verdict on the test split, not covered; None without one.

    Guarantees:
      - It is useful only where its interval excludes the trivial answer.   (test_useful_is_clearly_better_than_trivial)
    """
    said = result(evaluations)
    return None if said is None else Quality(said, covered=False, is_useful=is_useful(evaluations))


def is_useful(evaluations: "Mapping[str, pl.DataFrame]", model: str = "") -> bool | None:
    """Returns whether the model (with "baseline_", the one without privacy) clearly beats the trivial answer.

    None where there is nothing to compare; False where no example could be used.
    """
    row = test_row(evaluations)
    measure = row.get("measure", "accuracy")
    if unusable(row):
        return False
    low, high, trivial = (
        row.get(key) for key in (f"{model}{measure}_low", f"{model}{measure}_high", f"trivial_{measure}")
    )
    if low is None or high is None or trivial is None:
        return None
    return low > trivial if measure == "accuracy" else high < trivial


def sentences(evaluations: "Mapping[str, pl.DataFrame]", metrics: "pl.DataFrame | None") -> list[str]:
    """Returns the test figure, and what clipping suggests.

    The first alone without metrics, where nothing was drawn, or where no example could be used.
    """
    row = test_row(evaluations)
    said = [result(evaluations), None if unusable(row) else clipping(metrics)]
    return [sentence for sentence in said if sentence is not None]


def result(evaluations: "Mapping[str, pl.DataFrame]") -> str | None:
    """Returns the test figure with its interval, beside the trivial answer and the model without privacy: not covered.

    Guarantees:
      - A model that is not clearly better than the trivial answer is said to be so.   (test_no_better_than_trivial)
      - Where no example could be used, that is said in place of figures.   (test_no_example_could_be_used)
      - A class that no test example has is named.   (test_unmatched_classes_are_named)
    """
    row = test_row(evaluations)
    measure = row.get("measure", "accuracy")
    if unusable(row):
        return (
            f"None of the {row['examples']:,} test examples could be used: their labels are not among the classes"
            f"{_named(row.get('classes'))}, or values are missing or not numbers; check the columns and classes of the "
            "model."
        )
    if row.get(measure) is None:
        return None
    show = "{:.1%}".format if measure == "accuracy" else "{:.4g}".format
    low, high, trivial = (row.get(key) for key in (f"{measure}_low", f"{measure}_high", f"trivial_{measure}"))
    parts = [f"Test {measure} {show(row[measure])}"]
    if low is not None:
        parts[0] += f" (95% interval {show(low)} to {show(high)})"
    if trivial is not None:
        parts.append(f"{row['trivial']}: {show(trivial)}")
    if row.get(f"baseline_{measure}") is not None:
        parts.append(f"the same model without privacy: {show(row[f'baseline_{measure}'])}")
    said = f"{'; '.join(parts)}."
    if unmatched := row.get("unmatched_classes"):
        said += f" No test example has the label{_named(unmatched)}: check how the data spell it."
    if is_useful(evaluations) is False:
        said += f" Not clearly better than {row['trivial']}: the model is of little use."
    return said


def _named(classes: Sequence[str] | None) -> str:
    """Returns a few names after a word; "" for none."""
    return "" if not classes else f" {one_of([*map(repr, classes[:_FEW]), *(['...'] if len(classes) > _FEW else [])])}"


def test_row(evaluations: "Mapping[str, pl.DataFrame]") -> dict[str, Any]:
    """Returns the figures of all test examples; empty without them."""
    table = evaluations.get("test")
    return {} if table is None or table.is_empty() else table.row(0, named=True)


def unusable(row: Mapping[str, Any]) -> bool:
    """Returns whether no test example has a label and values that the model can use."""
    return bool(row.get("examples")) and row.get("without_loss") == row["examples"]


def clipping(metrics: "pl.DataFrame | None") -> str | None:
    """Returns advice from the share of clipped copies: not covered.

    Guarantees:
      - Nearly all, hardly any and some each have words of their own.   (test_words_on_clipping)
    """
    if metrics is None or not (copies := int(metrics["copies"].sum())):
        return None
    share = float((metrics["clipped_share"] * metrics["copies"]).sum()) / copies
    said = "All" if share == 1 else "None" if share == 0 else _percent(share)
    verb = "was" if share == 0 else "were"
    if share >= _NEARLY_ALL:
        meaning = "a larger clip norm or a smaller learning rate may help"
    elif share <= _HARDLY_ANY:
        meaning = "the noise is larger than necessary; lower the clip norm"
    else:
        meaning = "the clip norm fits the gradients"
    return f"{said} of the copies {verb} clipped: {meaning}."


def _percent(share: float) -> str:
    return f"{share:.0%}" if 0.005 <= share < 0.995 else f"{share:.1%}"


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
