"""How durations and unknown words are worded."""

import hypothesis.strategies as st
from hypothesis import given

from coowned.progress import duration, nearest


@given(st.floats(0, 1e7))
def test_durations_are_short_and_near(seconds):
    shown = duration(seconds)
    lengths = {"s": 1, "min": 60, "h": 3600, "d": 86_400}
    parts = shown.split()
    assert len(parts) <= 4
    told = sum(float(number) * lengths[unit] for number, unit in zip(parts[::2], parts[1::2], strict=True))
    assert abs(told - seconds) <= max(0.06 * seconds, 0.5 if seconds >= 9.95 else 0.051 * seconds)


def test_nearest():
    assert nearest("steam", ["local", "spark"]) == "; choose local or spark"
    assert nearest("x", []) == ""
