"""Colours and charts."""

import json

import pytest

from coowned.report import figures
from coowned.report.figures import Figure, Mark, charts_json
from coowned.selection.registry import CLASSES


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", [*figures.SELECTOR_COLOURS.values(), figures.NEUTRAL, figures.ALARM])
def test_colours_hold_on_both_backgrounds(colour: str):
    for background in (figures.LIGHT_BACKGROUND, figures.DARK_BACKGROUND):
        low, high = sorted([luminance(colour), luminance(background)])
        assert (high + 0.05) / (low + 0.05) >= 3


def test_one_colour_a_selector():
    assert set(figures.SELECTOR_COLOURS) >= set(CLASSES)
    assert len(set(figures.SELECTOR_COLOURS.values())) == len(figures.SELECTOR_COLOURS)


def test_the_same_colour_in_every_chart():
    rows = [
        {"selector": word, "contribution_bound": 1, "size": 5, "chosen": False}
        for word in ("priced", "greedy", "given")
    ]
    made = figures.trade_off(rows, (), y=figures.Axis("size", "", format="d"))
    scale = made["layer"][0]["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True)) == {
        word: figures.colour_of(word) for word in ("priced", "greedy", "given")
    }


def test_text_in_a_chart_cannot_end_the_script():
    rows = [{"what": "</script><script>", "copies": 1}]
    chart = figures.horizontal_bars(rows, (), x=figures.Axis("copies", ""), y="what", colours=["#000000"])
    figure = Figure(name="a", title="a", mark=Mark.GRAPH, chart=chart, columns=(("what", "w"),), rows=rows, reading="")
    text = charts_json([figure])
    assert "<" not in text
    assert json.loads(text)["a"]["data"]["values"] == rows


def test_no_number_that_json_lacks():
    x, y = figures.Axis("x", ""), figures.Axis("y", "")
    with pytest.raises(ValueError):
        figures.bars([{"x": "a", "y": float("nan")}], (), x=x, y=y, colours={"": "#000000"})


@pytest.mark.parametrize("largest", [2, 100, 4000])
def test_axes_read_plain_numbers(largest: int):
    import vl_convert

    rows = [{"what": name, "copies": number} for name, number in (("a", largest), ("b", largest // 2))]
    chart = figures.horizontal_bars(rows, (), x=figures.Axis("copies", ""), y="what", colours=["#000000"] * 2)
    drawn = vl_convert.vegalite_to_svg({**chart, "width": 300})
    assert f">{largest:,}<" in drawn
    assert "e+" not in drawn
