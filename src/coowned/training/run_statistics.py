"""What a selection kept and lost, and what other bounds would have kept: statistics of the graph alone."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate
from coowned.errors import InputError
from coowned.selection.priced import Priced
from coowned.selection.registry import CLASSES, selector_class
from coowned.selection.selection_cache import select_once
from coowned.selection.selector import Schedule, Selection

FORMAT = "coowned-run-statistics-1"
FILE = "statistics.json"
OTHER_BOUNDS = (1, 2, 3, 5, 8)
_CHEAP = ("greedy", "greedy-with-duplicates")
_SLOW = ("integer-program", "min-separation-program")  # tried at the bound of the run alone
_SECONDS_FOR_THE_BOUND = 20.0


def run_statistics(
    graph: AttributionGraph, selected: Selection | Schedule, certificate: ContributionCertificate
) -> dict[str, Any]:
    """What `statistics.json` of a run holds; no content, no user keys and no example ids are in it.

    Guarantees:
      - Every count equals a plain recount.   (test_counts_equal_a_plain_recount_of_the_run)
      - Exactly one row of the trade-off is the run's own, with the certificate's counts.   (test_one_row_is_chosen)
      - Nothing in it depends on ids or keys.   (test_no_ids_and_no_keys)

    Cost: two greedy selections for each of a few bounds, and `Priced` once where no bound is proven yet.

    Args:
      graph: what was selected from, the train split's.
      selected, certificate: what was selected, and its recount.

    Returns:
      format, graph_digest, selector, num_examples, num_users, num_users_left (with any example in S), size,
      num_distinct, num_duplicated (copies beyond the first), upper_bound (of the size, proven; null for a schedule),
      upper_bound_from, mean_users_per_example and mean_users_per_copy, users_per_example and examples_per_user (rows
      of from, to, before, after), and trade_off (rows of selector, contribution_bound,
      recounted_bound, size, num_distinct, mean_users_per_copy, chosen).

    Example:
      >>> from coowned import Greedy, certify
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1], [1, 2], [2]])
      >>> selection = Greedy(contribution_bound=1).select(graph)
      >>> found = run_statistics(graph, selection, certify(graph, selection))
      >>> found["size"], found["upper_bound"], found["num_users_left"], found["mean_users_per_example"]
      (2, 2, 2, 1.5)
    """
    copies = np.asarray(selected.copies, dtype=np.int64)  # (num_examples,)
    per_user = _per_user(graph, copies)
    upper_bound, origin = _upper_bound(graph, certificate)
    return {
        "format": FORMAT,
        "graph_digest": certificate.graph_digest,
        "selector": certificate.selector.get("name", "given"),
        "num_examples": graph.num_examples,
        "num_users": graph.num_users,
        "num_users_left": int(np.count_nonzero(per_user)),
        "size": certificate.size,
        "num_distinct": certificate.num_distinct,
        "num_duplicated": certificate.size - certificate.num_distinct,
        "upper_bound": upper_bound,
        "upper_bound_from": origin,
        "mean_users_per_example": graph.num_pairs / max(1, graph.num_examples),
        "mean_users_per_copy": _mean_users(graph, copies),
        "users_per_example": _classes(graph.users_per_example, np.repeat(graph.users_per_example, copies)),
        "examples_per_user": _classes(graph.examples_per_user, per_user),
        "trade_off": _trade_off(graph, copies, certificate),
    }


def read_statistics(path: Path, certificate: ContributionCertificate) -> dict[str, Any]:
    """Reads a `statistics.json`; refuses, with InputError, one of another format or another graph."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not JSON ({error}); remove it, and it is made anew where the data are") from None
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise InputError(f"{path}: not of the format {FORMAT!r}; remove it, and it is made anew where the data are")
    agree = ("graph_digest", "size", "num_distinct")
    if any(stored.get(name) != getattr(certificate, name) for name in agree):
        raise InputError(f"{path}: of another graph or selection than certificate.json; remove it")
    return stored


def _per_user(graph: AttributionGraph, copies: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(num_users,) copies that each user is in."""
    weight = np.repeat(copies, graph.users_per_example)  # (num_pairs,)
    return np.bincount(graph.users, weights=weight, minlength=graph.num_users).astype(np.int64)


def _mean_users(graph: AttributionGraph, copies: npt.NDArray[np.int64]) -> float:
    return float(copies @ graph.users_per_example.astype(np.int64)) / max(1, int(copies.sum()))


def _upper_bound(graph: AttributionGraph, certificate: ContributionCertificate) -> tuple[int | None, str | None]:
    """A proven bound on the size of any S under the same rules, and what proved it."""
    if certificate.upper_bound is not None:
        return certificate.upper_bound, certificate.selector.get("name", "given")
    if certificate.min_separation is not None or certificate.contribution_bound == 0:
        return None, None
    prover = Priced(
        contribution_bound=certificate.contribution_bound,
        allow_duplicates=certificate.size > certificate.num_distinct,
        unattributed="keep" if certificate.num_copies_without_users else "drop",
        time_limit=_SECONDS_FOR_THE_BOUND,
    )
    return select_once(graph, prover).upper_bound, Priced.name


def _classes(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> list[dict[str, int | None]]:
    """Both in the same classes 0, 1, 2, 3, 4, 5-8, 9-16, ..."""
    largest = max(int(before.max(initial=0)), int(after.max(initial=0)))
    begins = [0, 1, 2, 3, 4, 5]
    while begins[-1] <= largest:
        begins.append(2 * begins[-1] - 1)
    edges = np.array([*begins, np.iinfo(np.int64).max])
    counts = [np.histogram(values, bins=edges)[0].tolist() for values in (before, after)]
    rows = [
        {"from": begin, "to": end - 1, "before": int(old), "after": int(new)}
        for begin, end, old, new in zip(begins[:-1], begins[1:], *(count[:-1] for count in counts), strict=True)
    ]
    while len(rows) > 1 and rows[-1]["before"] == rows[-1]["after"] == 0:
        rows.pop()
    return rows


def _trade_off(
    graph: AttributionGraph, copies: npt.NDArray[np.int64], certificate: ContributionCertificate
) -> list[dict[str, Any]]:
    own = certificate.selector.get("name", "given")
    asked = certificate.selector.get("contribution_bound", certificate.contribution_bound)
    rows = [_choice(graph, own, asked, copies, certificate.contribution_bound, chosen=True)]
    words = [*_CHEAP, *([own] if own in CLASSES and own not in (*_CHEAP, *_SLOW) else [])]
    for word in words:
        fields = {field.name for field in dataclasses.fields(selector_class(word))}
        if "contribution_bound" not in fields or "min_separation" in fields:
            continue
        settings = {name: value for name, value in certificate.selector.items() if name in fields}
        if word != own:  # only what means the same everywhere
            settings = {name: value for name, value in settings.items() if name in ("ties", "unattributed")}
        for bound in sorted({*OTHER_BOUNDS, asked}):
            if (word, bound) == (own, asked):
                continue
            selector: Any = selector_class(word)
            found = select_once(
                graph, selector(**{**settings, "contribution_bound": bound}), seed=certificate.seed or 0
            )
            others = np.asarray(found.copies, dtype=np.int64)
            most = int(_per_user(graph, others).max(initial=0))
            rows.append(_choice(graph, word, bound, others, most, chosen=False))
    return sorted(rows, key=lambda row: (row["selector"], row["contribution_bound"]))


def _choice(
    graph: AttributionGraph, word: str, bound: int, copies: npt.NDArray[np.int64], recounted: int, *, chosen: bool
) -> dict[str, Any]:
    return {
        "selector": word,
        "contribution_bound": bound,
        "recounted_bound": recounted,
        "size": int(copies.sum()),
        "num_distinct": int(np.count_nonzero(copies)),
        "mean_users_per_copy": _mean_users(graph, copies),
        "chosen": chosen,
    }
