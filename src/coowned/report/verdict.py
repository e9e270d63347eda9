"""Whether a trained model is any good, in a few sentences that the screen and the page share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import polars as pl

_NEARLY_ALL, _HARDLY_ANY = 0.95, 0.05  # shares of clipped copies


def sentences(evaluations: "Mapping[str, pl.DataFrame]", metrics: "pl.DataFrame | None") -> list[str]:
    """The test figure, and what clipping suggests.

    The first alone without metrics, where nothing was drawn, or where no example could be used.
    """
    row = _test_row(evaluations)
    said = [result(evaluations), None if _is_unusable(row) else clipping(metrics)]
    return [sentence for sentence in said if sentence is not None]


def result(evaluations: "Mapping[str, pl.DataFrame]") -> str | None:
    """The test figure with its interval, beside the trivial answer and the model without privacy: not covered.

    Guarantees:
      - A model that is not clearly better than the trivial answer is said to be so.   (test_no_better_than_trivial)
      - Where no example could be used, that is said in place of figures.   (test_no_example_could_be_used)
    """
    row = _test_row(evaluations)
    measure = row.get("measure", "accuracy")
    if _is_unusable(row):
        return (
            f"None of the {row['examples']:,} test examples could be used: their labels are not among the classes, "
            "or values are missing or not numbers; check the columns and classes of the model."
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
    if trivial is None or low is None:
        return said
    beaten = low > trivial if measure == "accuracy" else high < trivial
    return said if beaten else f"{said} Not clearly better than {row['trivial']}: the model is of little use."


def _test_row(evaluations: "Mapping[str, pl.DataFrame]") -> dict[str, Any]:
    table = evaluations.get("test")
    return {} if table is None or table.is_empty() else table.row(0, named=True)


def _is_unusable(row: Mapping[str, Any]) -> bool:
    return bool(row.get("examples")) and row.get("without_loss") == row["examples"]


def clipping(metrics: "pl.DataFrame | None") -> str | None:
    """What the share of clipped copies suggests: not covered.

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
