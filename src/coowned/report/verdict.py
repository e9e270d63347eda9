"""A verdict on the quality of a trained model, in a few sentences shared by the screen and the page."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from coowned.progress import one_of

if TYPE_CHECKING:
    import polars as pl

    from coowned.runs.stored_run import StoredRun

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
