"""A figure: a picture, the table behind it, what to read from it, and how it stands to the guarantee."""

import dataclasses
import json
from typing import Any

from coowned.report.contents import Mark
from coowned.report.elements import Html, element, table

_SHAPES = {Mark.COVERED: "covered", Mark.GRAPH: "graph", Mark.PRIVATE: "private"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One picture with as many rows in its table as it has marks.

    Attributes:
      name: unique on the page.
      columns: key and heading of every column of the table.
      rows: what is drawn; strings in the table columns are shown as they are.
      reading: one or two sentences that say what the picture shows; also its description for who cannot see it.
    """

    name: str
    title: str
    mark: Mark
    chart: dict[str, Any]
    columns: tuple[tuple[str, str], ...]
    rows: list[dict[str, Any]]
    reading: str

    def html(self) -> Html:
        heading = element("h3", self.title, id=f"title-{self.name}")
        behind = table(
            [title for _, title in self.columns],
            [[shown(row.get(key)) for key, _ in self.columns] for row in self.rows],
            caption=self.title,
        )
        return element(
            "figure",
            element("div", heading, chip(self.mark), class_="figure-head"),
            element("div", class_="chart", id=f"chart-{self.name}", role="img", aria_label=self.title),
            element("figcaption", self.reading),
            element("details", element("summary", f"The {len(self.rows)} rows behind this picture"), behind),
            class_="figure",
            data_name=self.name,
            data_mark=_SHAPES[self.mark],
            aria_labelledby=f"title-{self.name}",
        )


def chip(mark: Mark) -> Html:
    """The mark in words, with a shape beside them for the eye."""
    return element("span", mark.value, class_=f"chip chip-{_SHAPES[mark]}")


def charts_json(figures: list[Figure]) -> str:
    """Every picture of a page by its name, safe inside a script element."""
    text = json.dumps({figure.name: figure.chart for figure in figures}, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def shown(value: Any) -> str:
    """A cell of a table.

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
    """A share in percent; a share that is not none is not shown as none.

    >>> percent(1, 3), percent(0, 3), percent(1, 100_000)
    ('33.3%', '0%', '<0.1%')
    """
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "<0.1%"
    return f"{share:.1f}".removesuffix(".0") + "%"
