"""The page of a run, and of a plan: what is in it and what is not."""

import dataclasses
import datetime
import html
import json
import os
import re
from pathlib import Path

import polars as pl
import pytest
from tests.runs.run_folders import reseal, write_run

from coowned import (
    AttributionGraph,
    Greedy,
    InputError,
    PoissonSampling,
    PrivacyGuarantee,
    Selection,
    certify,
    guarantee,
    plan,
)
from coowned.accounting import planning
from coowned.accounting.statement import rounded_down, rounded_up
from coowned.audit.bob import Measured, MeasuredLeak
from coowned.report import figures
from coowned.report.figures import Mark
from coowned.report.page import write_plan, write_report
from coowned.runs.stored_run import StoredRun
from coowned.selection.selector import Selector

SECRETS = (
    "0.7352", "73519264", "73,516", "73516", "0.3827", "38274651", "61.7%", "61739485", "64.8%", "64827193", "0.5928",
    "91,736", "4.713", "4.7130591",
)  # fmt: skip


def read(place: Path) -> str:
    """The page without the chart library, which is the same for everybody."""
    text = place.read_text(encoding="utf-8")
    assert figures.bundle() in text
    return text.replace(figures.bundle(), "")


def without_names(text: str) -> str:
    """Without digests and the run's random name: 16 such digits may hold, by chance, those of a short secret."""
    return re.sub(r"(?<![.\w])(?=\d*[a-f])[\da-f]{16,}(?!\w)", "", text)


def seen(text: str) -> str:
    """What a person reads: no style, no scripts, no configuration, no tags."""
    body = re.sub(r"(?s)<style>.*?</style>|<script.*?</script>|<pre.*?</pre>", " ", text)
    return html.unescape(re.sub(r"<[^>]+>", " ", body))


def specs(text: str) -> dict:
    found = re.search(r'(?s)<script type="application/json" id="charts">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def rows_of(spec: dict) -> list:
    """The data of the layer that has one mark a row."""
    layers = spec.get("layer", [spec])
    (layer,) = [layer for layer in layers if layer.get("name", spec.get("name")) == "rows"]
    return layer.get("data", spec.get("data"))["values"]


def check_figures(text: str) -> list[str]:
    """Every figure has a chart, a table of as many rows, and exactly one mark; gives the names."""
    drawn = specs(text)
    figures = re.findall(r'(?s)<figure[^>]*data-name="([^"]+)"[^>]*>(.*?)</figure>', text)
    assert sorted(drawn) == sorted(name for name, _ in figures)
    for name, body in figures:
        assert sum(f">{mark.value}</span>" in body for mark in Mark) == 1
        table = re.search(r"(?s)<tbody>(.*?)</tbody>", body)
        assert table
        assert table[1].count("<tr>") == len(rows_of(drawn[name])) > 0
        assert f'id="chart-{name}"' in body
    return [name for name, _ in figures]


@pytest.fixture(scope="module")
def real(runs, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("page") / "real.html"
    return write_report(runs["simulated"], output, also=[runs["none"], runs["scheduled"], runs["seeded"]])


def test_self_contained(real: Path):
    text = read(real)
    assert real.stat().st_size < 3_000_000
    assert not re.search(r"""(?i)(src|href)\s*=\s*["']?(?!#)[^"'#]|url\(|@import|https?://""", text)
    assert len(re.findall(r"<script>", text)) == 1
    assert "default-src 'none'" in html.unescape(text)


def test_every_figure_has_a_mark(real: Path):
    names = check_figures(read(real))
    assert set(names) == {
        "levels", "users-per-example", "examples-per-user", "size", "utility-by-users", "utility-by-epsilon",
        "training-loss", "training-clipped-share", "training-copies", "membership", "delta-curve",
    }  # fmt: skip


def test_statement_and_digests(real: Path, runs):
    made = StoredRun.open(runs["simulated"]).guarantee
    text = " ".join(seen(read(real)).split())
    for line in made.statement().split("\n"):
        assert " ".join(line.split(". ", 1)[1].split()) in text
    assert made.certificate.graph_digest in text
    assert made.certificate.selection_digest in text
    assert rounded_up(made.other_epsilon) in text
    for row in made.by_copies().iter_rows(named=True):
        assert row["epsilon"] is None or rounded_up(row["epsilon"]) in text


def test_what_is_not_promised(real: Path, runs):
    """The box beside the statement."""
    claim = StoredRun.open(runs["simulated"]).claim
    box = re.search(r'(?s)<ul class="refused">(.*?)</ul>', read(real))
    assert box
    shown = [html.unescape(line) for line in re.findall(r"<li>(.*?)</li>", box[1])]
    assert shown == list(claim.statement_parts().not_promised)
    assert len(shown) >= 3


def test_noise_is_rounded_one_way(real: Path, runs):
    made = StoredRun.open(runs["simulated"]).guarantee
    assert f">{rounded_down(made.noise_multiplier)}</dd>" in read(real)


def test_both_adjacencies_are_as_large(runs, tmp_path: Path):
    """The epsilon asked for, with the proven one beside it, and that of the other adjacency in the same size."""
    claim = StoredRun.open(runs["scheduled"]).claim
    text = read(write_report(runs["scheduled"], tmp_path / "page.html", release=True))
    large = re.findall(r'<p class="claim-big"><span class="claim-word">epsilon </span>([^<]*)</p>', text)
    assert large == ["8", rounded_up(claim.other_epsilon)]
    assert "adjacency: replace; same unit, bound and delta" in " ".join(seen(text).split())


def claim_of(epsilon: float, *, copies: int = 10, delta: float = 1e-6) -> PrivacyGuarantee:
    graph = AttributionGraph.from_users_per_example([[i % 100] for i in range(100 * copies)])
    certificate = certify(graph, Greedy(contribution_bound=copies).select(graph))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=128, iterations=100)
    return guarantee(certificate, mechanism, epsilon=epsilon, delta=delta, adjacency="zero-out")


def test_epsilon_is_shown_as_asked(tmp_path: Path):
    """With the proven value beside it."""
    claim = claim_of(64.0)
    proven = rounded_up(claim.epsilon)
    assert proven != "64"
    text = read(write_report(write_run(tmp_path, claim), release=True))
    assert "epsilon </span>64</p>" in text
    assert f"Requested: epsilon 64; proven: {proven}." in text


def test_plain_sentences_and_warnings_are_the_statements(tmp_path: Path):
    """At a large epsilon the page does not say that nothing is learned, and a large delta is warned of."""
    claim = claim_of(64.0, delta=0.02)
    parts = claim.statement_parts()
    text = html.unescape(read(write_report(write_run(tmp_path, claim), release=True)))
    assert "hero-weak" in text
    assert "learns nearly the same" not in text
    hero = text[text.index('class="hero') : text.index('id="promise"')]
    assert parts.warnings
    for sentence in (
        *(plain[0].upper() + plain[1:] for plain in parts.plain.values()),
        *parts.warnings,
        parts.headline,
    ):
        assert sentence in hero


def test_other_runs_are_labelled(real: Path):
    rows = rows_of(specs(read(real))["utility-by-epsilon"])
    labels = {row["run"]: row["epsilon"] for row in rows}
    assert labels["none"] == labels["seeded"] == "no guarantee"
    assert re.fullmatch(r"[\d.]+ \(simulated 2\)", labels["simulated"])
    assert all("contribution bound" in row["claim"] or "no guarantee" in row["claim"] for row in rows)


def test_loss_is_drawn_where_it_tells_more(copy):
    """As for a masked model: the loss against word frequencies, not an accuracy of one percent."""
    folder = copy("scheduled")
    for name in ("validation", "test"):
        found = pl.read_parquet(folder / f"{name}.parquet").with_columns(
            measure=pl.lit("loss"), trivial=pl.lit("word frequencies alone"), trivial_loss=pl.lit(6.51234),
            loss=pl.lit(6.21), loss_low=pl.lit(6.12), loss_high=pl.lit(6.33), baseline_loss=pl.lit(5.98765),
            accuracy=pl.lit(0.0123),
        )  # fmt: skip
        found.write_parquet(folder / f"{name}.parquet")
    text = read(write_report(reseal(folder)))
    rows = rows_of(specs(text)["utility-by-users"])
    assert {(row["value"], row["low"], row["trivial"], row["baseline"]) for row in rows} == {
        (6.21, 6.12, 6.51234, 5.98765)
    }
    words = seen(text)
    assert "Loss by users per example" in words
    assert "Test loss 6.21 (95% interval 6.12 to 6.33); word frequencies alone: 6.512; the same model without" in words
    assert "A line: word frequencies alone, counted on the same examples." in words
    assert "0.0123" not in text
    assert not re.search(r"\b1\.2%", words)
    released = read(write_report(folder, release=True))
    for secret in ("6.51234", "5.98765"):
        assert secret in text  # the test can fail
        assert secret not in released
    assert "word frequencies" not in released


def test_release_leaks_nothing(audited: Path):
    whole = write_report(audited)
    released = write_report(audited, release=True)
    assert (whole.name, released.name) == ("report.html", "report-release.html")
    text, public = read(whole), read(released)
    for secret in SECRETS:
        assert secret in text, secret  # the test can fail
        assert secret not in without_names(public), secret
    names = check_figures(public)
    assert not [name for name in names if name.startswith(("training", "utility", "audit-canaries"))]
    assert "audit" in names
    assert Mark.PRIVATE.value not in public
    assert "Left out." in public


def first_screen(page: str) -> str:
    return page[page.index('id="short"') : page.index('id="promise"')]


def test_quality_stands_beside_epsilon(runs, audited: Path):
    """Marked as not covered, as plainly where the model is of little use, and never in a release."""
    good = first_screen(read(write_report(audited)))
    assert "Test accuracy 64.8%" in good
    assert Mark.PRIVATE.value in good
    public = read(write_report(audited, release=True))
    assert "Test accuracy" not in public
    assert "What to try next" not in public
    table = pl.read_parquet(audited / "test.parquet").with_columns(trivial_accuracy=pl.lit(0.9))
    table.write_parquet(audited / "test.parquet")
    assert "the model is of little use" in first_screen(read(write_report(reseal(audited))))
    assert "Test accuracy" in first_screen(read(write_report(runs["none"], audited.parent / "none.html")))


def test_release_has_no_figures_of_the_graph(audited: Path):
    public = read(write_report(audited, release=True))
    asked = read(write_report(audited, release=True, graph_statistics=True))
    graph = {"levels", "users-per-example", "examples-per-user"}
    assert graph <= set(check_figures(asked))  # the test can fail
    assert set(check_figures(public)) == set(check_figures(asked)) - graph == {"audit", "membership", "delta-curve"}
    for part in ("people in the data", "What was kept", "users per copy"):
        assert part in asked
        assert part not in public
    assert "a release has only those that the claim rests on" in public
    for secret in SECRETS:
        assert secret not in without_names(asked)


def test_release_names_the_counts_it_shows(tmp_path: Path):
    """Every count of the certificate that can be read on the page is named there, and marked as a graph statistic."""
    lists = [[i % 613] if i % 2 else [] for i in range(4211)]
    graph = dataclasses.replace(AttributionGraph.from_users_per_example(lists), num_unprotected_users=97)
    certificate = certify(graph, Selection.from_copies(graph, [2 if i == 1 else int(i < 2500) for i in range(4211)]))
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=128, iterations=100)
    claim = guarantee(certificate, mechanism, epsilon=8.0, delta=1e-6, adjacency="zero-out")
    named = {
        "size": "the numbers of copies", "num_distinct": "and examples in the training set",
        "num_unprotected_users": "of users excluded from protection",
        "num_copies_without_users": "of copies without a protected user", "graph_digest": "the digests of the graph",
        "selection_digest": "and the selection",
    }  # fmt: skip
    public = read(write_report(write_run(tmp_path, claim), release=True))
    (note,) = re.findall(rf"<p>([^<]*) <span[^>]*>{Mark.GRAPH.value}</span></p>", public)
    words = seen(public)
    large = {name: f"{value:,}" for name, value in vars(certificate).items() if isinstance(value, int) and value > 9}
    digests = {name: value for name, value in vars(certificate).items() if name.endswith("digest")}
    assert {"num_users", "num_examples"} <= set(large)  # neither is part of the claim
    shown = {name for name, value in (large | digests).items() if re.search(rf"(?<!\w){value}(?!\w)", words)}
    assert shown == set(named)
    for phrase in named.values():
        assert phrase in note


@pytest.mark.parametrize("release", [False, True])
def test_what_each_tier_is_promised(tiered_claim: PrivacyGuarantee, tmp_path: Path, release: bool):
    text = read(write_report(write_run(tmp_path, tiered_claim), release=release))
    names = check_figures(text)
    assert "tiers" in names
    assert ("levels" in names) == (not release)
    rows = rows_of(specs(text)["tiers"])
    promised = tiered_claim.by_tier().filter(pl.col("contribution_bound") > 0)
    assert [row["label"] for row in rows] == ["bound 3 (3 copies)", "careful (1 copy)"]
    assert [row["epsilon"] for row in rows] == promised["epsilon"].to_list()
    assert [row["other_text"] for row in rows] == [rounded_up(value) for value in promised["other_epsilon"]]
    assert all("users" not in row for row in rows)  # a statistic of the graph
    words = " ".join(seen(text).split())
    assert "17 users opted out (bound 0): no example that they are part of" in words
    if release:
        tiers = tiered_claim.certificate.tiers
        assert not {f"{count:,}" for count in (*tiers.users[:2], tiers.num_examples_opted_out)} & set(words.split())
        assert "of users excluded from protection, of users who opted out and of copies" in words


def test_no_tile_is_alone(runs, tmp_path: Path):
    for name in ("scheduled", "none"):
        for release in (False, True):
            text = read(write_report(runs[name], tmp_path / "page.html", release=release))
            assert text.count('<div class="tile">') in ((0,) if release and name == "none" else (3, 4))


def test_audit_stands_beside_the_claim(audited: Path):
    found = specs(read(write_report(audited)))
    made = StoredRun.open(audited).guarantee
    assert [row["epsilon"] for row in rows_of(found["audit"])] == [2.5173946, made.epsilon]
    assert [row["epsilon"] for row in rows_of(found["audit-canaries"])] == [4.7130591, made.epsilon]


@pytest.mark.parametrize("name", ["seeded", "none", "public"])
def test_no_guarantee_shows_no_epsilon(runs, tmp_path: Path, name: str):
    text = read(write_report(runs[name], tmp_path / "page.html"))
    assert "No guarantee" in text
    words = seen(text)
    assert not re.search(r"epsilon\s*(is|of|:)?\s*\d", words)
    assert "no guarantee" in words
    stored = json.loads((runs[name] / "guarantee.json").read_text(encoding="utf-8"))
    if name == "seeded":
        without = re.sub(r"(?s)<pre.*?</pre>", "", text)
        for value in (stored["epsilon"], stored["other_epsilon"], stored["example_epsilon"]):
            assert repr(value) not in without
        titles = re.findall(r'id="title-(levels|training-loss|utility-by-users)">([^<]*)<', text)
        assert len(titles) == 3
        assert all("no guarantee" in title for _, title in titles)
    assert not {"delta-curve", "membership"} & set(check_figures(text))


def test_simulated_epsilon_is_labelled(real: Path, runs):
    text = seen(read(real))
    made = StoredRun.open(runs["simulated"]).guarantee
    assert "Simulated epsilon 2." in text
    assert f"true epsilon {rounded_up(made.epsilon)} (unit" in text


def test_schedule(runs, tmp_path: Path):
    text = read(write_report(runs["scheduled"], tmp_path / "page.html"))
    assert "size" not in check_figures(text)  # a schedule's size is given: there is nothing to prove


def test_a_report_only_reads(copy, monkeypatch):
    """Neither the data nor a selection nor a plan is needed: everything is in the run's folder."""
    folder = copy("scheduled")
    (folder.parent / "papers.parquet").unlink()
    monkeypatch.setattr(Selector, "select", None)
    monkeypatch.setattr(planning, "plan", None)
    assert "What was kept" in read(write_report(folder))


def test_missing_statistics_are_named(copy):
    """As in the folder of a run that version 0.1.0 wrote."""
    folder = copy("scheduled")
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    del record["files"]["graph.json"]
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    text = read(write_report(folder))
    assert "What was kept" not in text
    assert text.count("stored no counts of the graph") == 1


def test_text_is_escaped(copy):
    folder = copy("none")
    name = "<script>alert(1)</script>"
    config = folder / "config.toml"
    config.write_text(f"# {name} & co\n" + config.read_text(encoding="utf-8"), encoding="utf-8")
    text = read(write_report(reseal(folder).rename(folder.with_name("<b>run"))))
    assert "alert" in text  # the test can fail
    assert name not in text
    assert html.escape(name, quote=False) in text
    assert "&amp; co" in text
    assert "<b>run" not in text


@pytest.mark.parametrize("release", [False, True])
def test_name_purpose_owner_and_date(copy, release: bool):
    folder = copy("scheduled")
    config = folder / "config.toml"
    words = 'name = "Mail & <b>folders</b>"\npurpose = "sorts mail / spam"\nowner = "mail team"'
    text = config.read_text(encoding="utf-8")
    config.write_text(f"{text[: text.index('[report]')]}[report]\n{words}\n", encoding="utf-8")
    page = read(write_report(reseal(folder), release=release))
    assert "<dt>Model</dt><dd>Mail &amp; &lt;b&gt;folders&lt;/b&gt;</dd>" in page
    assert "<dt>Purpose</dt><dd>sorts mail / spam</dd>" in page
    assert "<dt>Owner</dt><dd>mail team</dd>" in page
    assert f"<dt>Date</dt><dd>{datetime.date.today().isoformat()}</dd>" in page
    assert "<title>Privacy report of Mail &amp;" in page


def test_whole_or_none(copy, monkeypatch):
    folder = copy("seeded")
    mask = os.umask(0o022)
    try:
        assert write_report(folder).stat().st_mode & 0o077 == 0
        assert write_report(folder, release=True).stat().st_mode & 0o044
    finally:
        os.umask(mask)
    before = (folder / "report.html").read_bytes()

    def broken() -> str:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("coowned.report.page.bundle", broken)
    with pytest.raises(OSError, match="no space"):
        write_report(folder)
    assert (folder / "report.html").read_bytes() == before
    assert not [file for file in folder.iterdir() if file.name.startswith(".")]


def test_release_compares_nothing(runs):
    with pytest.raises(InputError, match="a release leaves out"):
        write_report(runs["scheduled"], release=True, also=[runs["none"]])


def measured(attribution: str, found: float) -> Measured:
    leak = MeasuredLeak(
        epsilon_lower_bound=found, true_positive_rate=0.9, false_positive_rate=0.1, trials=8, alpha=1e-3, delta=1e-5
    )
    return Measured(
        attribution=attribution,
        epsilon=0.99987,
        target_epsilon=1.0,
        delta=1e-5,
        contribution_bound=1,
        size=100,
        copies_with_bob=20 if attribution == "sender" else 1,
        leak=leak,
        scores_with=(0.1, 0.2, 0.3, 0.4),
        scores_without=(1.1, 1.2, 1.3, 1.4),
    )


def test_bob(runs, tmp_path: Path):
    """One mark per model; both claims stand beside what was measured; a failed attack proves nothing."""
    text = read(
        write_report(runs["none"], tmp_path / "a.html", bob=[measured("sender", 2.1), measured("everyone", 0.0)])
    )
    assert {"bob-sender", "bob-everyone"} <= set(check_figures(text))
    assert len(rows_of(specs(text)["bob-sender"])) == 8
    section = re.search(r'(?s)<section id="bob">(.*?)</section>', text)
    assert section
    assert ">2.1<" in section[1]
    assert section[1].count(">not true for Bob<") == section[1].count(">not refuted<") == 1
    assert section[1].count(">1 (proven: 0.9999)<") == 2
    assert section[1].count("unit: user, fixed graph; contribution bound 1; delta 1e-05; adjacency: zero-out") >= 3
    assert "holds" not in section[1]


def test_plan_page(tmp_path: Path):
    graph = AttributionGraph.from_users_per_example([[i % 40, (i * 3) % 37] for i in range(300)])
    target = {"epsilon": 4.0, "delta": 1e-6, "batch_size": 10, "iterations": 20, "adjacency": "zero-out"}
    made = plan(graph, contribution_bounds=(1, 3, 200), selectors=("greedy", "priced"), mechanism="poisson", **target)
    text = read(write_plan(made, tmp_path / "plan.html"))
    assert set(check_figures(text)) == {"trade-off-size", "trade-off-noise", "trade-off-bias"}
    rows = rows_of(specs(text)["trade-off-size"])
    assert [(row["selector"], row["size"]) for row in rows] == [(one.selector, one.size) for one in made.choices]
    assert [row["chosen"] for row in rows] == [one.best for one in made.choices]
    assert Mark.PRIVATE.value not in text
    assert "A plan is not a guarantee" in text
    for one in made.choices:
        if one.noise_multiplier is not None:
            assert f">{rounded_down(one.noise_multiplier)}<" in text
            assert f">{rounded_up(one.noise.other_epsilon)}<" in text


@pytest.mark.parametrize("copies", [10, 100])
def test_a_curve_that_cannot_be_certified_is_not_fatal(tmp_path: Path, copies: int):
    """At epsilon 64 delta is all but 1 at small epsilons under replace."""
    claim = claim_of(64.0, copies=copies)
    text = read(write_report(write_run(tmp_path, claim), tmp_path / "page.html"))
    assert {"delta-curve", "membership"} <= set(check_figures(text))
    assert all(0 < row["delta"] < 1 for row in rows_of(specs(text)["delta-curve"]))


@pytest.mark.parametrize("change", [("label", "folder"), ("papers.parquet", "mail.parquet")])
def test_runs_of_different_tasks_are_not_compared(copy, runs, tmp_path: Path, change: tuple[str, str]):
    other = copy("none")
    config = other / "config.toml"
    text = config.read_text(encoding="utf-8")
    assert f'"{change[0]}"' in text
    config.write_text(text.replace(f'"{change[0]}"', f'"{change[1]}"'), encoding="utf-8")
    with pytest.raises(InputError, match=rf"none: a different task from .*scheduled \(.*{change[1]}"):
        write_report(runs["scheduled"], tmp_path / "page.html", also=[reseal(other)])
