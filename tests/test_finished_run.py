"""What a finished run says of itself."""

from tests.test_fitting import fit


def test_a_printed_run_says_how_good_it_is():
    run = fit()
    text, html = str(run), run._repr_html_()
    for shown in (text, html):
        for part in ("What is promised", "How good it is (NOT covered", "the most frequent class"):
            assert part in shown
        has_mistakes = run.evaluations()["test"]["accuracy"][0] < 1
        assert ("What to try next" in shown) == has_mistakes
    assert text.index("Epsilon") < text.index("Test accuracy")
    assert "\n" not in repr(run)
    assert "accuracy" not in repr(run)
