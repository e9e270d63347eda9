"""HTML elements."""

from coowned.report.elements import element, join, table


def test_text_is_escaped():
    nasty = '<script>alert("x")</script>&'
    assert "<script>" not in element("p", nasty)
    assert element("p", nasty, title=nasty).count("&lt;script&gt;") == 2
    assert '"x"' not in element("p", title=nasty)
    assert "<script>" not in table([nasty], [[nasty]], caption=nasty)
    assert join(nasty, element("b", "<")).endswith("&amp;<b>&lt;</b>")
