"""Figures of a page: a chart, the table behind it, a caption, and how the guarantee relates to it.

Charts are Altair's, with one colour per selector. Text and lines use the colour of the surrounding page
("currentColor"), so one chart serves light, dark and print. In every chart the layer named "rows" has exactly one mark
per row of its data.
"""

import dataclasses
import enum
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coowned.errors import LazyModule
from coowned.selection.registry import CLASSES

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


alt = LazyModule("altair", extra="train", purpose="a report")
vl_convert = LazyModule("vl_convert", extra="train", purpose="a report")

_COLOURS = (
    "#2f7fd6", "#d1661c", "#1d9a6c", "#d0487f", "#77808c", "#a3831b", "#1593a8", "#9c6ade", "#12807f", "#5f8f2f",
    "#b0653f", "#6f76d9",
)  # fmt: skip
SELECTOR_COLOURS = dict(zip(CLASSES, _COLOURS, strict=False))
"""Each has a contrast of at least 3 on both backgrounds of the page."""

NEUTRAL = "#808894"
ALARM = "#d8453e"
LIGHT_BACKGROUND, DARK_BACKGROUND = "#ffffff", "#15181d"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
NUMBER = ",.6~g"  # with an explicit precision: Vega would otherwise round 100 to one digit and write 1e+2
_INK = "currentColor"
_HEIGHT = 240  # pixels
_LEGEND_WIDTH = 34  # letters of two legend entries that fit side by side into a narrow card


def colour_of(selector: str) -> str:
    """Returns the colour of a selector, or a neutral one for a selection of the user's own.

    >>> colour_of("greedy"), colour_of("given")
    ('#2f7fd6', '#808894')
    """
    return SELECTOR_COLOURS.get(selector, NEUTRAL)


@dataclasses.dataclass(frozen=True)
class Axis:
    """The column, title and scale of an axis."""

    key: str  # of the rows
    title: str
    format: str = NUMBER
    log: bool = False
    zero: bool = False  # begins at zero
    ticks: Sequence[float] | None = None


def bars(
    rows: Sequence[Row], columns: Columns, *, x: Axis, y: Axis, colours: dict[str, str], series: str | None = None
) -> Row:
    """Draws vertical bars of shares, x in the order of the rows; with `series` one bar per series side by side."""
    offset = alt.Undefined if series is None else alt.XOffset(f"{series}:N", sort=list(colours))
    scale = alt.Scale(paddingInner=0.45) if series is None else alt.Undefined
    chart = _chart(rows).mark_bar(cornerRadiusEnd=2)
    chart = chart.encode(
        x=alt.X(f"{x.key}:N", title=x.title, sort=None, axis=_flat_axis(), scale=scale),
        xOffset=offset,
        y=alt.Y(f"{y.key}:Q", title=y.title, axis=alt.Axis(format="%", tickCount=5)),
        color=_colours(series, colours),
    )
    return _finish(_rows(chart, columns))


def horizontal_bars(rows: Sequence[Row], columns: Columns, *, x: Axis, y: str, colours: Sequence[str]) -> Row:
    """Draws one horizontal bar per row, for a few long names."""
    scale = alt.Scale(domain=[row[y] for row in rows], range=list(colours))
    chart = _chart(rows).mark_bar(cornerRadiusEnd=2)
    chart = chart.encode(
        color=alt.Color(f"{y}:N", scale=scale, legend=None),
        y=alt.Y(f"{y}:N", title=None, sort=None, axis=alt.Axis(labelLimit=240)),
        x=alt.X(f"{x.key}:Q", title=x.title, axis=alt.Axis(format=x.format, tickCount=4)),
    )
    return _finish(_rows(chart, columns), height=max(90, 44 * len(rows)))


def trade_off(rows: Sequence[Row], columns: Columns, *, y: Axis) -> Row:
    """Draws a point for each bound and selector, connected by selector; a ring marks rows with `chosen`."""
    names = dict.fromkeys(str(row["selector"]) for row in rows)
    bounds = sorted({row["contribution_bound"] for row in rows})
    base = _chart(rows).encode(
        x=alt.X(
            "contribution_bound:Q",
            title="contribution bound",
            scale=alt.Scale(type="symlog", nice=False, padding=18),
            axis=alt.Axis(values=bounds, format="d", grid=False, labelOverlap=True),
        ),
        y=alt.Y(f"{y.key}:Q", title=y.title, scale=alt.Scale(zero=False), axis=alt.Axis(format=y.format, tickCount=5)),
        color=_colours("selector", {name: colour_of(name) for name in names}),
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.65)
    ring = base.mark_point(size=260, strokeWidth=2.5, filled=False).transform_filter("datum.chosen")
    points = base.mark_point(size=70, filled=True, opacity=1)
    return _finish(alt.layer(lines, ring, _rows(points, columns)))


def curves(
    rows: Sequence[Row], columns: Columns, *, x: Axis, y: Axis, colours: dict[str, str], series: str | None = None,
    ring: tuple[float, float] | None = None,
) -> Row:  # fmt: skip
    """Draws lines with a point for each row: one, or one per series in colours and dashes; a ring at one position.

    An axis of shares that has its zero has its 100% too.
    """
    ticks: dict[str, Any] = {"values": list(x.ticks)} if x.ticks else {"tickCount": 6}
    vertical = alt.Scale(domain=[0, 1]) if y.zero and y.format == "%" else _scale(y)
    base = _chart(rows).encode(
        x=alt.X(f"{x.key}:Q", title=x.title, scale=_scale(x), axis=alt.Axis(grid=False, format=x.format, **ticks)),
        y=alt.Y(f"{y.key}:Q", title=y.title, scale=vertical, axis=alt.Axis(format=y.format, tickCount=5)),
        color=_colours(series, colours, symbol="stroke"),
    )
    lines = base.mark_line(strokeWidth=2)
    if series is not None:
        dashes = alt.Scale(domain=list(colours), range=[[1, 0], [6, 4], [2, 3]][: len(colours)])
        lines = lines.encode(strokeDash=alt.StrokeDash(f"{series}:N", title=None, scale=dashes))
    layers = [lines, _rows(base.mark_point(size=26, filled=True, opacity=1), columns)]
    if ring is not None:
        mark = _chart([{x.key: ring[0], y.key: ring[1]}]).mark_point(size=300, strokeWidth=2.5, color=_INK)
        layers.insert(0, mark.encode(x=alt.X(f"{x.key}:Q"), y=alt.Y(f"{y.key}:Q")))
    return _finish(alt.layer(*layers))


def intervals(
    rows: Sequence[Row], columns: Columns, *, x: Axis, y: Axis, series: str, colours: dict[str, str], beside: str
) -> Row:
    """Draws a point for each row, from `low` to `high`, with a line at `trivial` and a ring at `baseline`.

    Rows of the same x are drawn side by side, by `beside`. Missing values are not drawn.
    """
    base = _chart(rows).encode(
        x=alt.X(f"{x.key}:N", title=x.title, sort=None, axis=_flat_axis()),
        color=_colours(series, colours),
    )
    if len({row[x.key] for row in rows}) < len(rows):
        base = base.encode(xOffset=alt.XOffset(f"{beside}:N", sort=None, scale=alt.Scale(paddingOuter=0.6)))

    def height(key: str) -> Any:
        axis = alt.Axis(format=y.format, tickCount=5)
        return alt.Y(f"{key}:Q", title=y.title, scale=alt.Scale(zero=False), axis=axis)

    def at(key: str) -> Any:
        return base.transform_filter(f"isValid(datum.{key})").encode(y=height(key))

    layers = [base.mark_rule(strokeWidth=2, opacity=0.7).encode(y=height("low"), y2=alt.Y2("high:Q"))]
    if any(row["trivial"] is not None for row in rows):  # Vega complains of a layer without marks
        line = at("trivial").mark_tick(orient="horizontal", size=26, thickness=2, opacity=0.75)
        layers.append(line.encode(color=alt.value(_INK)))
    if any(row["baseline"] is not None for row in rows):
        layers.append(at("baseline").mark_point(size=110, strokeWidth=1.8, filled=False, opacity=0.9))
    points = base.mark_point(size=70, filled=True, opacity=1).encode(y=height(y.key))
    return _finish(alt.layer(*layers, _rows(points, columns)))


def ticks(rows: Sequence[Row], columns: Columns, *, x: Axis, y: str, colours: dict[str, str]) -> Row:
    """Draws one tick per row, and one line of ticks for each name in `colours`."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    chart = _chart(rows).mark_tick(thickness=1.5, opacity=0.65)
    chart = chart.encode(
        x=alt.X(f"{x.key}:Q", title=x.title, scale=alt.Scale(zero=False), axis=alt.Axis(format=x.format)),
        y=alt.Y(f"{y}:N", title=None, sort=list(colours), axis=alt.Axis(labelLimit=160, grid=False)),
        color=alt.Color(f"{y}:N", legend=None, scale=scale),
    )
    return _finish(_rows(chart, columns), height=110)


@functools.cache
def bundle() -> str:
    """Returns Vega, Vega-Lite and Vega-Embed as one script that needs no network."""
    wanted = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(None, vl_version=wanted)


def _chart(rows: Sequence[Row]) -> Any:
    return alt.Chart(alt.InlineData(values=[dict(row) for row in rows]))


def _rows(marks: Any, columns: Columns) -> Any:
    """Returns the layer with one mark per row, each with a tooltip of the table's columns."""
    tooltip = [alt.Tooltip(f"{key}:N", title=title) for key, title in columns]
    return marks.encode(tooltip=tooltip).properties(name="rows")


def _colours(series: str | None, colours: dict[str, str], *, symbol: str = "circle") -> Any:
    if series is None:
        return alt.value(next(iter(colours.values())))
    names = list(colours)
    two = sum(max(map(len, names[column::2]), default=0) for column in (0, 1)) <= _LEGEND_WIDTH
    return alt.Color(
        f"{series}:N",
        title=None,
        scale=alt.Scale(domain=names, range=list(colours.values())),
        legend=alt.Legend(
            orient="top", direction="horizontal", symbolType=symbol, columns=2 if two else 1, labelLimit=260
        ),
    )


def _flat_axis() -> Any:
    return alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=8, grid=False)


def _scale(axis: Axis) -> Any:
    return alt.Scale(type="log", nice=False) if axis.log else alt.Scale(zero=axis.zero, nice=axis.zero)


def _finish(chart: Any, *, height: int = _HEIGHT) -> Row:
    """Returns the specification of a chart in the style of the page."""
    chart = chart.properties(width="container", height=height, padding=4, background="transparent")
    chart = chart.configure(font=FONT, autosize={"type": "fit-x", "contains": "padding"})
    chart = chart.configure_view(stroke=None)
    chart = chart.configure_axis(
        labelColor=_INK, titleColor=_INK, tickColor=_INK, domainColor=_INK, gridColor=_INK, gridOpacity=0.13,
        tickOpacity=0.4, domainOpacity=0.4, labelFontSize=12, titleFontSize=12, titleFontWeight="normal",
        titlePadding=10, labelPadding=5,
    )  # fmt: skip
    chart = chart.configure_legend(
        labelColor=_INK, titleColor=_INK, labelFontSize=12, offset=8, symbolSize=80, symbolOpacity=1
    )
    spec = chart.to_dict()
    spec.pop("$schema", None)  # the page has one version of Vega-Lite and names no web address
    datasets = spec.pop("datasets", {})  # altair moves data aside under generated names; put them back inline
    for view in (spec, *spec.get("layer", ())):
        if "name" in view.get("data", {}):
            view["data"] = {"values": datasets[view["data"]["name"]]}
    json.dumps(spec, allow_nan=False)  # JSON has no NaN: refuse it here, where the chart is known
    return spec
