"""The sections of a run's page, in the order a privacy officer asks for them."""

import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from typing import Any

from coowned.accounting.statement import rounded_down, rounded_up, unprotected_sentences
from coowned.report import graph_figures, run_figures
from coowned.report.contents import Mark, RunContents, releasable_config
from coowned.report.elements import Html, element, join, table
from coowned.report.figures import Figure, chip, percent, shown

_PACKAGES = ("coowned", "jax", "numpy", "numba", "optax", "polars", "scipy")
_PLAIN_WORLD = {
    "zero-out": "as if every text that person is part of had been blank",
    "replace": "as if every text that person is part of had said something completely different",
}
_NOT_PROMISED = re.compile(r"(?:^|(?<=\. ))(?:Not covered|Not promised|Not released)\b.*")

_NO_GRAPH = (
    "statistics of the graph are not hidden by a fixed-graph guarantee, and are left out of what is released unless "
    "they are asked for"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """One section of a page; its figures are drawn by the page's script."""

    name: str
    title: str
    body: Html
    short: str = ""  # for the list of sections
    figures: tuple[Figure, ...] = ()


def make_sections(
    run: RunContents, also: Sequence[RunContents], *, release: bool, with_graph: bool = True
) -> list[Section]:
    """All sections; what cannot be shown is replaced by a sentence that says why."""
    if not with_graph:
        run = dataclasses.replace(run, statistics=None, left_out=_NO_GRAPH)
    return [
        _promise(run, with_graph=with_graph),
        _cost(run),
        _trade_off(run),
        _utility(run, also, release=release),
        _attacks(run, release=release),
        _reproduce(run, release=release),
    ]


def hero(run: RunContents) -> Html:
    """The first screen: the claim, what it means, and the numbers it is never shown without."""
    if not run.claims:
        return element(
            "div",
            element("p", "No guarantee", class_="claim-big"),
            element("p", run.statement.split("\n")[0].removeprefix("1. "), class_="lead"),
            element(
                "p",
                "No number on this page is a promise to anybody. What is shown is for those who may see the data.",
            ),
            class_="hero hero-none",
        )
    made = run.claim
    caught = run_figures.calculators.true_positive_rate_bound(
        made.mechanism,
        noise_multiplier=made.noise_multiplier,
        adjacency=made.adjacency,
        false_positive_rate=0.01,
    )
    simulated = None
    if made.simulated_epsilon is not None:
        simulated = element(
            "p",
            element("strong", f"Simulated epsilon {rounded_up(made.simulated_epsilon)}."),
            " The noise was calibrated for a hypothetical batch size of "
            f"{made.simulated_batch_size:,}, which is not what ran. The epsilon above is the true one of what ran.",
            class_="warning",
        )
    claim = element(
        "div",
        element(
            "p",
            element("span", "epsilon ", class_="claim-word"),
            rounded_up(made.epsilon),
            class_="claim-big",
        ),
        element("p", f"for every protected user ({made.terms()})", class_="claim-terms"),
        simulated,
        element(
            "p",
            f"Someone who has this model learns nearly the same about any person {_PLAIN_WORLD[made.adjacency]}.",
            class_="lead",
        ),
    )
    return element(
        "div",
        claim,
        element(
            "ul",
            element(
                "li",
                "Whoever tries to tell from the model whether a person’s texts were used, and wrongly accuses 1 in "
                f"100, finds at most {run_figures.share_up(caught)} of those who were.",
            ),
            element(
                "li",
                f"Nobody is in more than {made.contribution_bound:,} of the {run.certificate.size:,} copies that were "
                "trained on: they were chosen without reading a text, and recounted.",
            ),
            element(
                "li",
                f"If texts could be replaced instead of blanked out: {_epsilon_under(run, 'replace')}."
                if made.adjacency == "zero-out"
                else f"If texts could only be blanked out: {_epsilon_under(run, 'zero-out')}.",
            ),
            class_="plain",
        ),
        class_="hero hero-columns",
    )


def _epsilon_under(run: RunContents, adjacency: str) -> str:
    made = run.claim
    value = made.epsilon if made.adjacency == adjacency else made.other_epsilon
    return f"epsilon {rounded_up(value)} (adjacency: {adjacency}; same unit, bound and delta)"


def tiles(run: RunContents, *, with_graph: bool = True) -> Html | None:
    """A few counts under the claim, each with its mark."""
    certificate = run.certificate
    left = certificate.num_users - (certificate.copies_per_user[0] if certificate.copies_per_user else 0)
    noise = (
        ("noise multiplier", rounded_down(run.claim.noise_multiplier), Mark.COVERED)
        if run.claims
        else ("copies in the training set", shown(certificate.size), Mark.GRAPH)
    )
    facts = [
        ("people in the data", shown(certificate.num_users), Mark.GRAPH),
        ("of them in the training set", percent(left, certificate.num_users), Mark.GRAPH),
        ("people taken out of protection", shown(certificate.num_unprotected_users), Mark.GRAPH),
        noise,
    ]
    made = [
        element("div", element("dt", name, " ", chip(mark)), element("dd", value), class_="tile")
        for name, value, mark in facts
        if with_graph or mark is not Mark.GRAPH
    ]
    return element("dl", made, class_="tiles") if made else None


def _promise(run: RunContents, *, with_graph: bool) -> Section:
    sentences = [re.sub(r"^\d+\. ", "", line) for line in run.statement.split("\n")]
    refused = _not_promised(run, sentences)
    figure = graph_figures.levels(run) if with_graph and run.certificate.copies_per_user else None
    adjacencies = None
    if run.claims:
        made = run.claim
        adjacencies = table(
            ["what may differ about one person", "adjacency", "epsilon"],
            [
                ["all her texts are blank", *_adjacency_cells(run, "zero-out")],
                ["all her texts say something else", *_adjacency_cells(run, "replace")],
                ["one example alone differs", made.adjacency, rounded_up(made.example_epsilon)],
            ],
            caption=f"Epsilon under both adjacencies (contribution bound {made.contribution_bound:,}, "
            f"delta {made.delta:.12g})",
        )
    certificate = run.certificate
    digests = table(
        ["", ""],
        [
            ["graph", element("code", certificate.graph_digest)],
            ["selection", element("code", certificate.selection_digest)],
            ["read for ids and attribution", ", ".join(certificate.columns_read) or "arrays given in memory"],
            ["certified by", f"coowned {certificate.version}"],
        ],
        caption="Certificate: what the promise is bound to",
    )
    body = join(
        element(
            "p",
            "This is the whole statement. Every number in it was read from the run’s guarantee, which was computed "
            "anew when this page was written."
            if run.guarantee is not None
            else "This is the whole statement of the run.",
        ),
        element(
            "div",
            element(
                "div",
                element("ol", [element("li", line) for line in sentences], class_="statement"),
                element("p", chip(Mark.COVERED)) if run.claims else None,
            ),
            element(
                "div",
                element("h3", "What is not promised") if refused else None,
                element("ul", [element("li", line) for line in refused], class_="refused") if refused else None,
                adjacencies,
                digests,
                class_="beside",
            ),
            class_="columns",
        ),
        figure.html() if figure else None,
    )
    return Section(
        name="promise",
        short="Promise",
        title="What is promised, and what is not",
        body=body,
        figures=(figure,) if figure else (),
    )


def _not_promised(run: RunContents, sentences: Sequence[str]) -> list[str]:
    """What the statement says is not covered, promised or released, and for whom it does not hold."""
    found = [_NOT_PROMISED.search(line) for line in sentences]
    if run.guarantee is None:
        return [match[0] for match in found if match]
    return [*(match[0] for match in found if match), *unprotected_sentences(run.certificate)]


def _adjacency_cells(run: RunContents, adjacency: str) -> list[Any]:
    made = run.claim
    value = made.epsilon if made.adjacency == adjacency else made.other_epsilon
    return [f"{adjacency} (claimed)" if made.adjacency == adjacency else adjacency, rounded_up(value)]


def _cost(run: RunContents) -> Section:
    title = "What the bound cost"
    found = run.statistics
    if found is None:
        return Section(
            name="cost", short="Cost", title=title, body=_left_out(f"The comparison before and after: {run.left_out}.")
        )
    size = graph_figures.size_against_bound(run, found)
    figures = [*graph_figures.before_and_after(run, found), *([size] if size else [])]
    distinct, left = found["num_distinct"], found["num_users_left"]
    facts = table(
        ["", "number", "share"],
        [
            ["examples to choose from (train split)", shown(found["num_examples"]), "100%"],
            ["distinct examples selected", shown(distinct), percent(distinct, found["num_examples"])],
            ["further copies of them", shown(found["num_duplicated"]), "–"],
            ["users of the train split", shown(found["num_users"]), "100%"],
            ["users with any example left", shown(left), percent(left, found["num_users"])],
            ["users per example, before", f"{found['mean_users_per_example']:.2f}", "–"],
            ["users per copy, after", f"{found['mean_users_per_copy']:.2f}", "–"],
        ],
        caption="What was kept",
    )  # fmt: skip
    body = join(
        element(
            "p",
            "To promise the same to everybody, nobody may be in more than "
            f"{run.certificate.contribution_bound:,} selected copies. That leaves examples out, and not at random.",
        ),
        element(
            "div",
            element("div", facts, chip(Mark.GRAPH), class_="facts"),
            size.html() if size else None,
            class_="figures",
        ),
        _grid(figures[:2]),
    )
    return Section(name="cost", short="Cost", title=title, body=body, figures=tuple(figures))


def _trade_off(run: RunContents) -> Section:
    title = "The trade-off"
    found = run.statistics
    if found is None:
        return Section(
            name="trade-off", short="Trade-off", title=title, body=_left_out(f"Other bounds: {run.left_out}.")
        )
    rows = graph_figures.trade_off_rows(run, found)
    if run.claims:
        made = run.claim
        target = (
            f"for epsilon {rounded_up(made.epsilon)} (unit: {made.unit}; the bound on the axis; delta "
            f"{made.delta:.12g}; adjacency: {made.adjacency})"
        )
    else:
        target = f"for what the noise of this run was made for, though it has no guarantee ({run.reason})"
    figures = graph_figures.trade_off(
        rows,
        chosen="chosen",
        population_mean=found["mean_users_per_example"],
        noise_title=run_figures.titled(run, "Bound and noise"),
    )
    body = join(
        element(
            "p",
            "What other contribution bounds and selectors would have given on the same graph: a plan, not a promise. "
            f"Noise is what is needed {target}; for another bound, by Poisson sampling with the same batch size and "
            "steps.",
        ),
        _grid(figures, three=True),
    )
    return Section(name="trade-off", short="Trade-off", title=title, body=body, figures=tuple(figures))


def _utility(run: RunContents, also: Sequence[RunContents], *, release: bool) -> Section:
    title = "How well it learned"
    if release or run.private is None:
        text = (
            "Training curves, clipped shares, drawn batch sizes, validation and test metrics are computed from private "
            "content without noise and are left out of what is released."
        )
        return Section(name="utility", short="Utility", title=title, body=_left_out(text))
    private = run.private
    curves = run_figures.training_curves(run, private.metrics) if private.metrics is not None else []
    figures = [run_figures.utility_by_users(run, private.splits), run_figures.utility_by_epsilon(run, also), *curves]
    kept = [figure for figure in figures if figure is not None]
    if not also:
        hint = element(
            "p", "Accuracy against epsilon: name other runs with ", element("code", "--compare RUN"), " to see it here."
        )
    else:
        hint = None
    body = join(
        element(
            "p",
            "None of these numbers is covered by the guarantee: they are computed from content without noise. Keep "
            "this section to those who may see the data; ",
            element("code", "coowned report --release"),
            " leaves it out.",
            class_="warning",
        ),
        _grid(kept[: -len(curves)] if curves else kept),
        _grid(curves, three=True),
        hint,
    )
    return Section(name="utility", short="Utility", title=title, body=body, figures=tuple(kept))


def _attacks(run: RunContents, *, release: bool) -> Section:
    title = "What an attacker could do"
    figures: list[Figure] = []
    notes = []
    if run.claims:
        found = run_figures.membership_rows(run)
        figures += [run_figures.membership(run, found), run_figures.delta_curve(run)]
    else:
        notes.append(_left_out(f"There is no curve to show: no guarantee ({run.reason})."))
    tried = [] if run.audit is None else [run_figures.audit(run, run.audit, canaries=False)]
    if run.private is not None and run.private.canaries is not None:
        tried.append(run_figures.audit(run, run.private.canaries, canaries=True))
    figures += [figure for figure in tried if figure is not None]
    if run.claims and not tried:
        command = element("code", f"coowned audit {run.path.name}")
        notes.append(element("p", "This run was not audited; ", command, " tries to break its claim."))
    if release:
        notes.append(_left_out("Audits that trained on the data, where there are any."))
    intro = (
        element(
            "p",
            "Epsilon and delta bound every test that somebody could make with the model, however clever, and whatever "
            "else she knows.",
        )
        if run.claims
        else None
    )
    return Section(
        name="attacks", short="Attacks", title=title, body=join(intro, _grid(figures), notes), figures=tuple(figures)
    )


def _reproduce(run: RunContents, *, release: bool) -> Section:
    record = run.record
    rows = [
        ["run", element("code", str(record.get("run_id") or "without a guarantee"))],
        ["code", element("code", str(record.get("code", "unknown")))],
        ["devices", shown(record.get("devices"))],
        ["page written by", _versions()],
    ]
    if run.guarantee is not None:
        rows.insert(1, ["accounted by", f"coowned {run.guarantee.version}"])
    command = "coowned train config.toml -o RUN\ncoowned report RUN" + (" --release" if release else "")
    seed = (
        "Selection, certificate and guarantee come out the same; noise and coins come from the operating system, so "
        "the model itself does not."
        if run.claims
        else "With the same versions every number comes out the same."
        if run.guarantee is not None
        else "Coins come from the operating system unless a seed was given, so the model may differ."
    )
    config = releasable_config(run.config_text) if release else run.config_text.rstrip("\n")
    body = join(
        element("p", "Put the data where the configuration says, and give the same commands. ", seed),
        element("pre", element("code", command), tabindex=0, role="region", aria_label="Commands"),
        element("h3", "Configuration"),
        element("p", "Without comments and folders.") if release else None,
        element("p", f"What it asks for is not what is promised: no guarantee ({run.reason}).")
        if run.guarantee is not None and not run.claims
        else None,
        element("pre", element("code", config), tabindex=0, role="region", aria_label="Configuration"),
        table(["", ""], rows, caption="Versions and digests"),
    )
    return Section(name="reproduce", short="Reproduce", title="How to reproduce", body=body)


def _versions() -> str:
    parts = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    return ", ".join([*parts, f"Python {sys.version_info.major}.{sys.version_info.minor}"])


def _grid(figures: Sequence[Figure], *, three: bool = False) -> Html | None:
    if not figures:
        return None
    return element("div", [figure.html() for figure in figures], class_="figures three" if three else "figures")


def _left_out(text: str) -> Html:
    return element("p", element("strong", "Left out. "), text, class_="left-out")
