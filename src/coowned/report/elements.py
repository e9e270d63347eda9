"""HTML without a template language: text is escaped unless it is already HTML."""

import html
from typing import Any

_VOID = ("br", "hr", "img", "link", "meta")


class Html(str):
    """Text that is HTML and is not escaped again."""

    __slots__ = ()


def element(tag: str, *children: Any, **attributes: Any) -> Html:
    """One element; children are text, HTML, None (left out) or lists of them.

    An attribute's underscores are hyphens and a trailing one is dropped; None and False leave it out, True is a bare
    name.

    Guarantees:
      - Text from a file cannot become markup.   (test_text_is_escaped)

    Example:
      >>> element("p", "a < b ", element("b", 7), class_="note", hidden=True)
      '<p class="note" hidden>a &lt; b <b>7</b></p>'
    """
    words = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.removesuffix("_").replace("_", "-")
        words.append(name if value is True else f'{name}="{html.escape(str(value), quote=True)}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if tag in _VOID else f"{opening}{join(*children)}</{tag}>")


def join(*children: Any) -> Html:
    """Children one after the other."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(join(*child))
        else:
            parts.append(html.escape(str(child), quote=False))
    return Html("".join(parts))


def table(head: list[str], rows: list[list[Any]], *, caption: str, first_is_head: bool = True) -> Html:
    """A table with a caption for whoever cannot see what is around it; it scrolls by itself where it is too wide."""
    lines = []
    for row in rows:
        cells = [
            element("th", cell, scope="row") if number == 0 and first_is_head else element("td", cell)
            for number, cell in enumerate(row)
        ]
        lines.append(element("tr", cells))
    names = [element("th", name, scope="col") if name else element("td") for name in head]  # no heading without words
    top = element("thead", element("tr", names)) if any(head) else None
    made = element("table", element("caption", caption), top, element("tbody", lines))
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)
