"""Pictures by altair: one colour a selector, one mark a row, colours that hold on white and on black.

Text and lines take the colour of the page around them ("currentColor"), so that one picture serves light, dark and
paper. In every chart the layer named "rows" has exactly one mark for each row of its data.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

SELECTOR_COLOURS = {
    "greedy": "#2f7fd6",
    "greedy-with-duplicates": "#d1661c",
    "priced": "#9c6ade",
    "greedy-min-separation": "#1d9a6c",
    "bias-mitigating": "#d0487f",
    "integer-program": "#a3831b",
    "min-separation-program": "#1593a8",
    "random-subset": "#77808c",
}
"""One colour a selector, everywhere; each has a contrast of at least 3 on both backgrounds of the page."""

NEUTRAL = "#808894"
ALARM = "#d8453e"
LIGHT_BACKGROUND, DARK_BACKGROUND = "#ffffff", "#15181d"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"
_INK = "currentColor"
_HEIGHT = 240


def colour_of(selector: str) -> str:
    """The colour of a selector, or a neutral one for a selection made by hand.

    >>> colour_of("greedy"), colour_of("given")
    ('#2f7fd6', '#808894')
    """
    return SELECTOR_COLOURS.get(selector, NEUTRAL)


def bars(
    rows: Sequence[Row], *, x: str, y: str, title_x: str, title_y: str, colour: str, tooltip: Sequence[tuple[str, str]],
    format_y: str = "%",
) -> Row:  # fmt: skip
    """One bar a row, x in the order of the rows."""
    import altair as alt

    made = (
        alt.Chart(_data(rows))
        .mark_bar(color=colour, cornerRadiusEnd=2)
        .encode(
            x=alt.X(f"{x}:N", title=title_x, sort=None, axis=_flat_axis(), scale=alt.Scale(paddingInner=0.45)),
            y=alt.Y(f"{y}:Q", title=title_y, axis=alt.Axis(format=format_y, tickCount=5)),
            tooltip=_tooltip(tooltip),
        )
    )
    return _finish(made.properties(name="rows"))


def level_bars(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    title_x: str,
    title_y: str | None,
    colours: Sequence[str],
    tooltip: Sequence[tuple[str, str]],
) -> Row:
    """One horizontal bar a row, for a few long names."""
    import altair as alt

    names = [row[y] for row in rows]
    made = (
        alt.Chart(_data(rows))
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            color=alt.Color(f"{y}:N", scale=alt.Scale(domain=names, range=list(colours)), legend=None),
            y=alt.Y(f"{y}:N", title=title_y, sort=None, axis=alt.Axis(labelLimit=240)),
            x=alt.X(f"{x}:Q", title=title_x, axis=alt.Axis(format="~s", tickCount=4)),
            tooltip=_tooltip(tooltip),
        )
    )
    return _finish(made.properties(name="rows"), height=max(90, 44 * len(rows)))


def paired_bars(
    rows: Sequence[Row], *, x: str, y: str, series: str, names: Sequence[str], colours: Sequence[str], title_x: str,
    title_y: str, tooltip: Sequence[tuple[str, str]],
) -> Row:  # fmt: skip
    """Bars side by side: one a row, grouped by x."""
    import altair as alt

    made = (
        alt.Chart(_data(rows))
        .mark_bar(cornerRadiusEnd=2)
        .encode(
            x=alt.X(f"{x}:N", title=title_x, sort=None, axis=_flat_axis()),
            xOffset=alt.XOffset(f"{series}:N", sort=list(names)),
            y=alt.Y(f"{y}:Q", title=title_y, axis=alt.Axis(format="%", tickCount=5)),
            color=_colours(series, names, colours),
            tooltip=_tooltip(tooltip),
        )
    )
    return _finish(made.properties(name="rows"))


def trade_off(rows: Sequence[Row], *, y: str, title_y: str, format_y: str, tooltip: Sequence[tuple[str, str]]) -> Row:
    """A point for each bound and selector, joined by selector; the chosen one has a ring."""
    import altair as alt

    names = list(dict.fromkeys(str(row["selector"]) for row in rows))
    base = alt.Chart(_data(rows)).encode(
        x=alt.X(
            "contribution_bound:Q",
            title="contribution bound",
            scale=alt.Scale(type="symlog", nice=False, padding=18),
            axis=alt.Axis(
                values=sorted({row["contribution_bound"] for row in rows}), format="d", grid=False, labelOverlap=True
            ),
        ),
        y=alt.Y(f"{y}:Q", title=title_y, scale=alt.Scale(zero=False), axis=alt.Axis(format=format_y, tickCount=5)),
        color=_colours("selector", names, [colour_of(name) for name in names]),
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.65)
    ring = base.mark_point(size=260, strokeWidth=2.5, filled=False).transform_filter("datum.chosen")
    points = base.mark_point(size=70, filled=True, opacity=1).encode(tooltip=_tooltip(tooltip)).properties(name="rows")
    return _finish(alt.layer(lines, ring, points))


def curve(
    rows: Sequence[Row], *, x: str, y: str, title_x: str, title_y: str, colour: str, tooltip: Sequence[tuple[str, str]],
    format_y: str = "~g", zero: bool = False,
) -> Row:  # fmt: skip
    """A line with a point for each row."""
    import altair as alt

    base = alt.Chart(_data(rows)).encode(
        x=alt.X(f"{x}:Q", title=title_x, axis=alt.Axis(grid=False, tickCount=6)),
        y=alt.Y(f"{y}:Q", title=title_y, scale=alt.Scale(zero=zero), axis=alt.Axis(format=format_y, tickCount=5)),
    )
    line = base.mark_line(strokeWidth=2, color=colour)
    points = base.mark_point(size=24, filled=True, color=colour, opacity=1).encode(tooltip=_tooltip(tooltip))
    return _finish(alt.layer(line, points.properties(name="rows")))


def curves(
    rows: Sequence[Row], *, x: str, y: str, series: str, names: Sequence[str], colours: Sequence[str], title_x: str,
    title_y: str, tooltip: Sequence[tuple[str, str]], log_x: bool = False, log_y: bool = False, format_x: str = "~g",
    format_y: str = "~g", ticks_x: Sequence[float] | None = None, points_at: tuple[float, float] | None = None,
) -> Row:  # fmt: skip
    """Several lines, told apart by colour and dashes, with a point for each row; `points_at` gets a ring."""
    import altair as alt

    axis_x = {"grid": False, "format": format_x, **({"values": list(ticks_x)} if ticks_x else {"tickCount": 6})}
    dashes = [[1, 0], [6, 4], [2, 3]]
    base = alt.Chart(_data(rows)).encode(
        x=alt.X(f"{x}:Q", title=title_x, scale=_scale(log_x), axis=alt.Axis(**axis_x)),
        y=alt.Y(f"{y}:Q", title=title_y, scale=_scale(log_y), axis=alt.Axis(format=format_y, tickCount=5)),
        color=_colours(series, names, colours),
        strokeDash=alt.StrokeDash(
            f"{series}:N", title=None, scale=alt.Scale(domain=list(names), range=dashes[: len(names)])
        ),
    )
    line = base.mark_line(strokeWidth=2)
    points = base.mark_point(size=26, filled=True, opacity=1).encode(
        tooltip=_tooltip(tooltip), strokeDash=alt.Undefined
    )
    layers = [line, points.properties(name="rows")]
    if points_at is not None:
        ring = alt.Chart(_data([{x: points_at[0], y: points_at[1]}]))
        layers.insert(
            0, ring.mark_point(size=300, strokeWidth=2.5, color=_INK).encode(x=alt.X(f"{x}:Q"), y=alt.Y(f"{y}:Q"))
        )
    return _finish(alt.layer(*layers))


def intervals(
    rows: Sequence[Row], *, x: str, y: str, low: str, high: str, series: str, names: Sequence[str],
    colours: Sequence[str], title_x: str, title_y: str, tooltip: Sequence[tuple[str, str]], format_y: str = "%",
    beside: str | None = None,
) -> Row:  # fmt: skip
    """A point with its interval for each row; where x is the same, `beside` (default: series) sets them apart."""
    import altair as alt

    base = alt.Chart(_data(rows)).encode(
        x=alt.X(f"{x}:N", title=title_x, sort=None, axis=_flat_axis()),
        xOffset=alt.XOffset(
            f"{beside or series}:N", sort=None if beside else list(names), scale=alt.Scale(paddingOuter=0.6)
        ),
        color=_colours(series, names, colours),
    )
    axis = alt.Axis(format=format_y, tickCount=5)
    span = base.mark_rule(strokeWidth=2, opacity=0.7).encode(
        y=alt.Y(f"{low}:Q", title=title_y, scale=alt.Scale(zero=False), axis=axis), y2=alt.Y2(f"{high}:Q")
    )
    points = base.mark_point(size=70, filled=True, opacity=1).encode(
        y=alt.Y(f"{y}:Q", title=title_y, scale=alt.Scale(zero=False), axis=axis), tooltip=_tooltip(tooltip)
    )
    return _finish(alt.layer(span, points.properties(name="rows")))


def ticks(
    rows: Sequence[Row], *, x: str, y: str, title_x: str, colours: dict[str, str], tooltip: Sequence[tuple[str, str]]
) -> Row:
    """One tick a row, one line of ticks for each name in `colours`."""
    import altair as alt

    made = (
        alt.Chart(_data(rows))
        .mark_tick(thickness=1.5, opacity=0.65)
        .encode(
            x=alt.X(f"{x}:Q", title=title_x, scale=alt.Scale(zero=False)),
            y=alt.Y(f"{y}:N", title=None, sort=list(colours), axis=alt.Axis(labelLimit=160, grid=False)),
            color=alt.Color(f"{y}:N", legend=None, scale=alt.Scale(domain=list(colours), range=list(colours.values()))),
            tooltip=_tooltip(tooltip),
        )
    )
    return _finish(made.properties(name="rows"), height=110)


@functools.cache
def bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script that needs no network."""
    import altair as alt
    import vl_convert

    wanted = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    return vl_convert.javascript_bundle(None, vl_version=wanted)  # pyright: ignore[reportArgumentType]


def _data(rows: Sequence[Row]) -> Any:
    import altair as alt

    return alt.InlineData(values=[dict(row) for row in rows])


def _tooltip(fields: Sequence[tuple[str, str]]) -> list[Any]:
    import altair as alt

    return [alt.Tooltip(f"{name}:N", title=title) for name, title in fields]


def _colours(series: str, names: Sequence[str], colours: Sequence[str]) -> Any:
    import altair as alt

    # Two columns where both fit into a narrow card.
    columns = 2 if sum(max(map(len, names[place::2]), default=0) for place in (0, 1)) <= 34 else 1
    return alt.Color(
        f"{series}:N",
        title=None,
        scale=alt.Scale(domain=list(names), range=list(colours)),
        legend=alt.Legend(orient="top", direction="horizontal", symbolType="circle", columns=columns, labelLimit=260),
    )


def _flat_axis() -> Any:
    import altair as alt

    return alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=8, grid=False)


def _scale(log: bool) -> Any:
    import altair as alt

    return alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False, nice=False)


def _finish(chart: Any, *, height: int = _HEIGHT) -> Row:
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
    made = chart.to_dict()
    made.pop("$schema", None)  # the page has one version of everything, and names no address
    tables = made.pop("datasets", {})  # altair puts data aside under names; here they stand where they are drawn
    for view in (made, *made.get("layer", ())):
        if "name" in view.get("data", {}):
            view["data"] = {"values": tables[view["data"]["name"]]}
    json.dumps(made, allow_nan=False)  # a chart is embedded as JSON, which has no nan
    return made
