"""A finished run on one screen: what is promised, how good the model is, what was chosen, and what to try next."""

import html
import textwrap
from typing import NamedTuple

from coowned.report.next_steps import next_steps
from coowned.report.verdict import qualities
from coowned.runs.stored_run import StoredRun

_WIDTH = 100


class Part(NamedTuple):
    """One heading and what stands under it."""

    heading: str
    sentences: tuple[str, ...]


def summary(run: StoredRun) -> list[Part]:
    """The parts of what `print(run)` and a notebook show.

    Guarantees:
      - The claim stands with its unit, bound, delta and adjacency, or there is none.   (test_summary_of_every_kind)
      - Figures are said to be covered or not.   (test_summary_of_every_kind)
      - What was chosen because nobody said it stands with its reasons.   (test_what_was_chosen_is_said)
    """
    plain = [] if not run.claims else [_sentence(run.claim.statement_parts().plain[run.claim.adjacency])]
    parts = [Part("What is promised", (_sentence(run.headline) + ".", *plain))]
    parts += [Part(found.heading, (found.sentence,)) for found in qualities(run)]
    if run.reasons:
        parts.append(Part("Chosen from the graph and public numbers alone", run.reasons))
    if steps := next_steps(run):
        parts.append(Part("What to try next", tuple(steps)))
    return parts


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def as_text(parts: list[Part]) -> str:
    """The parts for a terminal."""
    wrapped = [
        "\n".join([part.heading, *(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="    ",
                                               break_on_hyphens=False) for text in part.sentences)])
        for part in parts
    ]  # fmt: skip
    return "\n".join(wrapped)


def as_html(parts: list[Part]) -> str:
    """The parts for a notebook; no text can become markup."""
    rows = [
        f"<dt><strong>{html.escape(part.heading)}</strong></dt>"
        + "".join(f"<dd>{html.escape(text)}</dd>" for text in part.sentences)
        for part in parts
    ]
    return f"<dl>{''.join(rows)}</dl>"
