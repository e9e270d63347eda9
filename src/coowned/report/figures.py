"""A figure of a page: a chart, the table behind it, a caption, and how the guarantee relates to its numbers."""

import dataclasses
import enum
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

Row = dict[str, Any]
Columns = tuple[tuple[str, str], ...]  # key and heading of every column


class Mark(enum.Enum):
    """How a figure relates to the guarantee; every figure has exactly one mark."""

    COVERED = "covered by the guarantee"
    GRAPH = "graph statistic"
    PRIVATE = "computed from private content, not covered"

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    Mark.COVERED: "follows from what the guarantee covers; showing it costs no privacy.",
    Mark.GRAPH: "counted from the attribution graph, which a fixed-graph guarantee does not hide. Publish it only if "
    "the graph may be known.",
    Mark.PRIVATE: "computed from content without noise. Show it only to people who may see the data.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart whose table has one row per mark.

    Attributes:
      name: unique on the page.
      columns: key and heading of every column of the table, and of the tooltip.
      rows: what is drawn; values of the table columns are shown by `shown`.
      reading: one or two sentences on what the chart shows, also its description for those who cannot see it.
      chart: a Vega-Lite specification.
    """

    name: str
    title: str
    mark: Mark
    columns: Columns
    rows: list[Row]
    reading: str
    chart: dict[str, Any]

    @classmethod
    def drawn(
        cls, chart: Callable[..., dict[str, Any]], *, name: str, title: str, mark: Mark, columns: Columns,
        rows: list[Row], reading: str, **options: Any,
    ) -> "Figure":  # fmt: skip
        """Builds a figure from rows; `chart` is a function of `charts`, `options` are its arguments."""
        return cls(
            name=name, title=title, mark=mark, columns=columns, rows=rows, reading=reading,
            chart=chart(rows, columns, **options),
        )  # fmt: skip


def charts_json(figures: Iterable[Figure]) -> str:
    """Returns all charts of a page by figure name, safe inside a script element."""
    text = json.dumps({figure.name: figure.chart for figure in figures}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def shown(value: Any) -> str:
    """Returns the text of a table cell.

    >>> shown(12345), shown(0.123456), shown(None), shown(True), shown("8 or more")
    ('12,345', '0.1235', '–', 'yes', '8 or more')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(part: float, whole: float) -> str:
    """Returns a share in percent; a share above zero is never shown as zero.

    >>> percent(1, 3), percent(0, 3), percent(1, 100_000)
    ('33.3%', '0%', '<0.1%')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<0.1%"
    return f"{share:.1f}".removesuffix(".0") + "%"


def percent_up(share: float) -> str:
    """Returns a share in percent, rounded up: a bound is never shown smaller than what was proven.

    >>> percent_up(0.12301), percent_up(1.0)
    ('12.4%', '100.0%')
    """
    return f"{min(100.0, math.ceil(share * 1000 - 1e-9) / 10):.1f}%"
