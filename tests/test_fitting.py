"""Training in one call, and what a run says of new data."""

import contextlib
import dataclasses
import gc
import math
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from polars.testing import assert_frame_equal
from safetensors.numpy import load_file
from tests.runs.test_configured_run import sealed_examples

import coowned as co
from coowned.audit.run_audit import audit_run, plan_of
from coowned.cli import main
from coowned.content.splits import split_examples
from coowned.exact.keys import RunKey
from coowned.models.python_model import PythonModel
from coowned.report import summary
from coowned.runs import configured_run
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import run_configuration
from coowned.runs.ledger import NAME
from coowned.runs.run_folder import RunFolder
from coowned.runs.stored_run import read_claim

MODEL = co.LogisticRegression(features=["x1", "x2"], label="y")
CONFIGURATION = """
[data]
path = "data.parquet"
example_id = "id"
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8.0
delta = 1e-6
adjacency = "zero-out"
[mechanism]
kind = "dp-sgd"
batch_size = 40
iterations = 30
clip_norm = 1.0
[model]
kind = "logistic-regression"
features = ["x1", "x2"]
label = "y"
[optimizer]
learning_rate = 0.1
[run]
seed = 3
"""


def rows(count=400, seed=0):
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, 2))
    labels = (features @ [2.0, -1.0] + 0.3 * random.normal(size=count) > 0).astype(int)
    users = [[f"u{i % 150}"] if i % 2 else [f"u{i % 150}", f"u{i * 7 % 150}"] for i in range(count)]
    ids = [f"m{i}" for i in range(count)]
    return pl.DataFrame({"id": ids, "users": users, "x1": features[:, 0], "x2": features[:, 1], "y": labels})


def fit(examples=None, model=MODEL, **changes):
    settings = {
        "epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out", "selector": co.Greedy(contribution_bound=2),
        "batch_size": 40, "iterations": 30, "learning_rate": 0.1,
    } | changes  # fmt: skip
    return co.fit(co.from_table(rows(), example_id="id") if examples is None else examples, model, **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("runs") / "RUN")


def test_metrics_and_messages_are_handed_over(caplog, tmp_path):
    seen = []
    with caplog.at_level("INFO", logger="coowned"):
        trained = fit(folder=tmp_path / "RUN", on_metrics=seen.append)
    stored = trained.metrics().drop("covered_by_guarantee")
    assert seen == stored.to_dicts()
    assert {record.name.split(".")[0] for record in caplog.records} == {"coowned"}
    # On a slow machine lines of progress follow, which begin alike.
    assert list(dict.fromkeys(message.partition(":")[0] for message in caplog.messages)) == [
        "selecting", "reading content", "training", "How good it is (NOT covered by a guarantee)",
    ]  # fmt: skip


def test_fit_is_what_train_does(tmp_path):
    rows().write_parquet(tmp_path / "data.parquet")
    (tmp_path / "run.toml").write_text(CONFIGURATION, encoding="utf-8")
    assert main.run(["train", str(tmp_path / "run.toml"), "-o", str(tmp_path / "train")]) == 0
    examples = co.read_parquet(tmp_path / "data.parquet", example_id="id")
    ours = fit(examples, folder=tmp_path / "fit", seed=3)
    for name, array in load_file(tmp_path / "train" / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(tmp_path / "fit" / "model.safetensors")[name])
    theirs = co.open_run(tmp_path / "train")
    assert ours.record.data == theirs.record.data
    assert ours.plan == theirs.plan
    plans = [run.record.plan | {"claim": None} for run in (ours, theirs)]  # but for the run's own name
    assert plans[0] == plans[1]
    assert "No guarantee" in ours.statement()
    for name in ("validation", "test"):
        assert_frame_equal(*(pl.read_parquet(tmp_path / folder / f"{name}.parquet") for folder in ("fit", "train")))


TIERS = [{"user": f"u{i}", "bound": 1, "tier": "careful"} for i in range(40)]
TIERS += [{"user": "u41", "bound": 0, "tier": "out"}]
TARGETS = {"bound 2": 8.0, "careful": 3.0}


def test_fit_and_train_with_bounds_of_single_users(tmp_path, caplog):
    rows().write_parquet(tmp_path / "data.parquet")
    pl.DataFrame(TIERS).write_csv(tmp_path / "tiers.csv")
    text = CONFIGURATION.replace("contribution_bound = 2", 'contribution_bound = 2\ncontribution_bounds = "tiers.csv"')
    text = text.replace("epsilon = 8.0", 'epsilon = {"bound 2" = 8.0, careful = 3.0}')
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    assert main.run(["train", str(tmp_path / "run.toml"), "-o", str(tmp_path / "train")]) == 0
    examples = co.read_parquet(tmp_path / "data.parquet", example_id="id")
    caplog.clear()
    selector = co.Greedy(
        contribution_bound=2, contribution_bounds=[*TIERS, {"user": "u41x", "bound": 0, "tier": "out"}]
    )
    fit(examples, folder=tmp_path / "mistyped", seed=3, selector=selector, epsilon=TARGETS)
    assert "1 key with a bound is of nobody in the data" in caplog.text
    caplog.clear()
    selector = co.Greedy(contribution_bound=2, contribution_bounds=TIERS)
    ours = fit(examples, folder=tmp_path / "fit", seed=3, selector=selector, epsilon=TARGETS)
    theirs = co.open_run(tmp_path / "train")
    for name, array in load_file(tmp_path / "train" / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(tmp_path / "fit" / "model.safetensors")[name])
    assert "of nobody" not in caplog.text
    assert ours.certificate.tiers == theirs.certificate.tiers
    assert ours.guarantee is not None
    found = dict(ours.guarantee.by_tier().select("tier", "epsilon").iter_rows())
    assert all(found[tier] <= target for tier, target in TARGETS.items())
    assert found["out"] is None
    config = (tmp_path / "fit" / "config.toml").read_text(encoding="utf-8")
    assert "u41" not in config
    assert "digest" in config
    certify = ["certify", str(tmp_path / "data.parquet"), str(tmp_path / "fit" / "S.parquet"), "--example-id", "id"]
    assert main.run(certify) == 0


def test_killed_fit_with_a_rule_is_resumed(tmp_path, monkeypatch):
    def stop(self, step, tensors):
        save(self, step, tensors)
        raise KeyboardInterrupt

    def rule(key):
        return 1 if key in {"u1", "u2", "u3"} else 2

    save = RunFolder.save
    arguments = {"seed": 5, "run": co.RunSettings(checkpoint_every=10), "folder": tmp_path / "RUN"}
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            fit(selector=co.Greedy(contribution_bound=2, contribution_bounds=rule), **arguments)
    with pytest.raises(co.CertificateMismatchError, match="started with a different configuration"):
        fit(selector=co.Greedy(contribution_bound=2, contribution_bounds=lambda key: 1), **arguments)
    with pytest.raises(co.InputError, match="call `fit` again"):
        configured_run.make_plan(
            TrainConfig.read(tmp_path / "RUN" / "config.toml"),
            co.from_table(rows(), example_id="id").graph,
            RunKey.from_seed(5),
        )
    resumed = fit(selector=co.Greedy(contribution_bound=2, contribution_bounds=rule), **arguments)
    assert resumed.certificate.tiers.users == (147, 3)


def test_predictions_are_those_of_the_formula(run):
    table = rows(100, seed=1)
    found = run.predict(table, example_id="id")
    assert found.columns == ["id", "prediction", "probability"]
    assert found["id"].to_list() == table["id"].to_list()
    arrays = load_file(run.folder / "model.safetensors")
    logits = table.select("x1", "x2").to_numpy() @ arrays["weights"] + arrays["intercept"]
    assert found["prediction"].to_list() == (logits > 0).astype(int).tolist()
    np.testing.assert_allclose(found["probability"], 1 / (1 + np.exp(-np.abs(logits))), rtol=1e-5)
    assert (found["prediction"] == table["y"]).mean() > 0.8


def test_new_data_need_neither_users_nor_labels(run):
    table = rows(20, seed=1).select("x1", "x2")
    expected = run.predict(co.from_table(rows(20, seed=1)))
    dictionary = table.to_dict(as_series=False)
    for kind in (table, table.lazy(), table.to_arrow(), dictionary, table.to_dicts(), table.to_arrow().to_batches()[0]):
        assert_frame_equal(run.predict(kind), expected)
    assert run.predict(table)["id"].to_list() == list(range(20))
    assert run.predict(table.clear()).height == 0


def test_unusable_rows_have_no_prediction(run):
    table = rows(6, seed=1).select("x1", "x2")
    spoiled = table.with_columns(x1=pl.Series([None, math.nan, math.inf, *table["x1"][3:]]))
    found = run.predict(spoiled)
    assert found["prediction"].null_count() == found["probability"].null_count() == 3
    assert_frame_equal(found[3:], run.predict(table)[3:])
    assert run.predict({"x1": pa.nulls(2, pa.float32()), "x2": [1.0, 2.0]})["prediction"].to_list() == [None, None]


def test_labels_are_spelled_as_in_the_data(tmp_path):
    spelled = rows().with_columns(y=pl.col("y").replace_strict({0: "ham", 1: "spam"}))
    model = co.LogisticRegression(features=["x1", "x2"], label="y", classes=["ham", "spam"])
    run = fit(co.from_table(spelled, example_id="id"), model, folder=tmp_path / "RUN", seed=0)
    numbers = fit(seed=0)
    table = rows(50, seed=1)
    found, expected = run.predict(table), numbers.predict(table)
    assert found["prediction"].to_list() == [("ham", "spam")[number] for number in expected["prediction"]]
    assert found["probability"].to_list() == expected["probability"].to_list()
    assert_frame_equal(co.open_run(tmp_path / "RUN").predict(table), found)


def test_list_columns_are_as_long_as_those_trained_on():
    table = rows().with_columns(x=pl.concat_list("x1", "x2"))
    run = fit(co.from_table(table), co.LogisticRegression(features="x", label="y", num_features=2))
    found = run.predict({"x": [[1.0, 2.0, 3.0], None, [5.0, 1.0]]})
    assert found["prediction"].to_list() == [None, None, 1]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"x1": [1.0]}, "no column 'x2'"),
        ({"x1": ["a"], "x2": [1.0]}, "column 'x1' must contain numbers"),
        (3, "int is not a table"),
    ],
)
def test_bad_tables(run, table, says):
    with pytest.raises(co.InputError, match=says):
        run.predict(table)


def test_open_run_gives_the_same(run):
    again = co.open_run(run.folder)
    table = rows(50, seed=2)
    assert_frame_equal(again.predict(table), run.predict(table))
    assert again.guarantee == run.guarantee
    assert again.plan == run.plan
    assert again.statement() == run.statement() == run.guarantee.statement()
    given = co.open_run(run.folder, model=MODEL)
    assert_frame_equal(given.predict(table), run.predict(table))


def test_evaluation_is_that_of_the_run(run):
    """The rows of the test split, given again, have the figures that the run wrote down."""
    examples = co.from_table(rows(), example_id="id")
    part = co.from_table(rows()[split_examples(examples.graph)["test"]], example_id="id")
    assert_frame_equal(run.evaluate(part, split="test"), pl.read_parquet(run.folder / "test.parquet"))
    alone = run.evaluate(rows()[split_examples(examples.graph)["test"]].drop("users"), split="test")
    assert_frame_equal(alone, pl.read_parquet(run.folder / "test.parquet").head(1))
    with pytest.raises(co.InputError, match="no column 'y'"):
        run.evaluate(rows().drop("y"))


def test_a_temporary_folder_lives_as_long_as_the_run():
    run = fit()
    folder = run.folder
    assert folder.stat().st_mode & 0o077 == 0
    assert run.guarantee is not None
    assert run.guarantee.epsilon <= 8
    del run
    gc.collect()
    assert not folder.exists()


@pytest.mark.full
def test_verbs_work_on_the_folder(run, tmp_path, capsys):
    assert audit_run(run.folder, trials=1000, seed=0).holds
    assert read_claim(run.folder).guarantee == run.guarantee
    page = run.report(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "were in memory" in page
    assert (run.export(tmp_path / "exported") / "model.safetensors").exists()
    config = tomllib.loads((run.folder / "config.toml").read_text(encoding="utf-8"))
    assert "path" not in config["data"]
    assert main.run(["train", str(run.folder / "config.toml"), "-o", str(tmp_path / "again")]) == 2
    assert "were in memory; set it to a file" in capsys.readouterr().err


def test_content_is_read_after_selection_by_fit(monkeypatch):
    examples = sealed_examples()
    account = configured_run.guarantee

    def accounted(*given, **named):
        made = account(*given, **named)
        examples.payload.open = True
        return made

    monkeypatch.setattr(configured_run, "guarantee", accounted)
    run = fit(examples, co.LogisticRegression(features=["x"], label="y"), batch_size=8, iterations=3)
    splits = split_examples(examples.graph)
    selected = splits["train"][run.selection(examples.graph.subgraph(splits["train"])).copies > 0]
    [taken] = examples.payload.taken
    assert sorted(taken) == sorted([*selected, *splits["validation"], *splits["test"]])


def test_killed_fit_is_resumed(tmp_path, monkeypatch):
    whole = fit(folder=tmp_path / "whole", seed=5)
    save = RunFolder.save

    def save_and_stop(self, step, tensors):
        save(self, step, tensors)
        if step > 10:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            fit(folder=tmp_path / "killed", seed=5)
    with pytest.raises(co.CertificateMismatchError, match="started with a different selection, mechanism"):
        fit(folder=tmp_path / "killed", seed=5, learning_rate=0.2)
    resumed = fit(folder=tmp_path / "killed", seed=5)
    for name, array in load_file(whole.folder / "model.safetensors").items():
        np.testing.assert_array_equal(array, load_file(resumed.folder / "model.safetensors")[name])
    with pytest.raises(co.InputError, match="this run is finished"):
        fit(folder=tmp_path / "killed", seed=5)


@pytest.mark.full
def test_fit_in_two_processes():
    seen = []
    run = fit(processes=2, on_metrics=seen.append, seed=5)
    arrays, alone = run.arrays(), fit(seed=5).arrays()
    assert seen
    assert all(np.array_equal(arrays[name].view(np.uint32), alone[name].view(np.uint32)) for name in alone)


def test_what_cannot_be_sent_is_refused():
    parameters = {"w": np.zeros(2, np.float32)}
    model = co.JaxModel(loss=lambda parameters, example, key: parameters["w"].sum(), parameters=parameters)
    with pytest.raises(co.errors.InputError, match="cannot be sent to other processes"):
        fit(model=model, processes=2)


@pytest.mark.parametrize(
    ("selector", "kind"),
    [
        (co.Priced(contribution_bound=2), "dp-sgd"),
        (co.CyclicGroups(num_groups=2, contribution_bound=2), "cyclic-dp-mf"),
        (co.GreedyMinSeparation(batch_size=8, iterations=12, min_separation=3), "dp-mf"),
    ],
)
def test_the_mechanism_follows_from_the_selector(selector, kind):
    shape = {"batch_size": None, "iterations": None} if kind == "dp-mf" else {"batch_size": 8, "iterations": 12}
    run = fit(selector=selector, **shape)
    assert run.mechanism.training_kind == kind
    assert run.guarantee is not None
    assert run.guarantee.epsilon <= 8
    assert run.predict(rows(3))["prediction"].null_count() == 0


def test_one_group_is_dp_sgd_to_the_bit(tmp_path):
    sgd = fit(folder=tmp_path / "sgd", seed=5)
    groups = co.CyclicGroups(num_groups=1, contribution_bound=2)
    one = fit(folder=tmp_path / "one", seed=5, selector=groups, mechanism="cyclic-dp-mf")
    assert one.mechanism.training_kind == "cyclic-dp-mf"
    models = [
        {name: array.tobytes() for name, array in load_file(run.folder / "model.safetensors").items()}
        for run in (sgd, one)
    ]
    assert models[0] == models[1]
    claims = [run.guarantee for run in (sgd, one)]
    for name in ("epsilon", "other_epsilon", "example_epsilon", "noise_multiplier", "contribution_bound"):
        assert getattr(claims[0], name) == getattr(claims[1], name)
    graph = co.from_table(rows(), example_id="id").graph
    graph = graph.subgraph(split_examples(graph)["train"])
    coins = [run.mechanism.batches(run.selection(graph), run_key=RunKey.from_seed(5)) for run in (sgd, one)]
    for drawn, also_drawn in zip(*coins, strict=True):
        np.testing.assert_array_equal(drawn.examples[drawn.mask], also_drawn.examples[also_drawn.mask])


def test_options_of_the_optimizer_reach_the_run(tmp_path):
    """They are in the plan of a run, and what its guarantee is made from is not changed by them."""
    options = {"warmup": 0.2, "decay": "cosine", "weight_decay": 0.01, "average": "tail", "average_window": 0.5}
    run, plain = fit(folder=tmp_path / "RUN", seed=3, optimizer=co.Optimizer(**options)), fit(seed=3)
    assert (run.plan.optimizer, run.plan.learning_rate, run.plan.options()) == ("adam", 0.1, options)
    assert run.guarantee.epsilon == plain.guarantee.epsilon
    assert run.guarantee.noise_multiplier == plain.guarantee.noise_multiplier
    assert plan_of(run).options() == options
    assert tomllib.loads((tmp_path / "RUN" / "config.toml").read_text())["optimizer"]["decay"] == "cosine"
    models = [load_file(of.folder / "model.safetensors")["weights"] for of in (run, plain)]
    assert not np.array_equal(*models)


def test_progress_says_what_is_being_done():
    heard = []
    fit(progress=lambda done, message: heard.append((done, message)))
    assert [message for _, message in heard[:2]] == ["selecting", "reading content"]
    assert heard[-1][0] == 1


NOTHING = {"epsilon": None, "delta": None, "adjacency": None}


def test_without_a_guarantee():
    assert "without privacy" in fit(epsilon="none", delta=None, adjacency=None).statement()
    assert "declared public" in fit(**NOTHING, privacy=co.PrivacySettings(public=True), clip_norm=None).statement()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"examples": rows()}, "create them with from_table"),
        ({"model": 3}, "model must be a specification"),
        ({"model": co.LogisticRegression(features=["z"], label="y")}, "no column 'z'"),
        ({"selector": "greedy"}, "selector must be a selector such as Greedy"),
        ({"adjacency": None}, "adjacency is required: 'zero-out' or 'replace'"),
        ({"delta": None}, r"fit: \[privacy\] needs delta"),
        ({"epsilon": None}, "exactly one of epsilon and noise_multiplier"),
        ({"epsilon": "small"}, "epsilon must be a number"),
        ({"optimizer": "none such"}, "optax has no optimizer"),
        ({"optimizer": 3}, r"optimizer must be Optimizer\(...\) or a word, not 3"),
        ({"run": "slowly"}, r"run must be RunSettings\(...\), not 'slowly'"),
        ({"optimizer": co.Optimizer(scale_gradients=True)}, "scale_gradients needs gradients computed by JAX"),
        ({"splits": [0.5, 0.5]}, "splits must be three numbers"),
        ({"mechanism": "dp-mf"}, "does not work with"),
        (
            {"selector": co.GreedyMinSeparation(batch_size=8, iterations=30, min_separation=3)},
            "batch_size is 40, but the selector's is 8",
        ),
    ],
)
def test_wrong_arguments(changes, says, tmp_path):
    with pytest.raises(co.InputError, match=says):
        fit(**changes, folder=tmp_path / "RUN")
    assert not (tmp_path / "RUN").exists()


def test_groups_and_short_forms_are_the_same(tmp_path):
    """The same run, whichever way it is written: by short forms, by groups, or by both."""
    asked = {"epsilon": 8.0, "delta": 1e-6, "adjacency": "zero-out"}
    groups = {
        "privacy": co.PrivacySettings(**asked),
        "mechanism": co.MechanismSettings(kind="dp-sgd", batch_size=40, iterations=30, clip_norm=1.0),
        "optimizer": co.Optimizer(name="adam", learning_rate=0.1),
        "run": co.RunSettings(seed=5),
    }
    examples, selector = co.from_table(rows(), example_id="id"), co.Greedy(contribution_bound=2)
    written = {
        "short": fit(folder=tmp_path / "short", seed=5),
        "groups": co.fit(examples, MODEL, selector=selector, folder=tmp_path / "groups", **groups),
        "both": fit(
            folder=tmp_path / "both", mechanism=co.MechanismSettings(clip_norm=1.0), run=co.RunSettings(seed=5)
        ),
    }
    assert len({run.record.configuration for run in written.values()}) == 1
    assert len({run.arrays()["weights"].tobytes() for run in written.values()}) == 1


def test_what_is_given_twice_is_refused():
    with pytest.raises(co.InputError, match=r"batch_size is 40, but mechanism=MechanismSettings\(...\) has 8"):
        fit(mechanism=co.MechanismSettings(batch_size=8))
    with pytest.raises(co.InputError, match=r"epsilon is 8.0, but privacy=PrivacySettings\(...\) has 2.0"):
        fit(privacy=co.PrivacySettings(epsilon=2.0, delta=1e-6, adjacency="zero-out"))


def test_moved_keywords_warn(tmp_path):
    """Keywords of earlier releases mean what they meant, and the warning names their new place and the caller."""
    with pytest.warns(DeprecationWarning, match=r"fit\(decay=.*write optimizer=co.Optimizer\(decay=\.\.\.\)") as heard:
        old = fit(seed=5, decay="cosine", folder=tmp_path / "old")
    assert [warning.filename for warning in heard] == [__file__]
    new = fit(seed=5, optimizer=co.Optimizer(decay="cosine"), folder=tmp_path / "new")
    assert old.record.configuration == new.record.configuration
    for keyword in ({"noise_multiplier": 1.0, "epsilon": None}, {"baseline": True}, {"num_bands": None}):
        with pytest.warns(DeprecationWarning, match=next(iter(keyword))):
            fit(**keyword)


def test_unknown_keywords():
    with pytest.raises(TypeError, match="unexpected keyword argument 'batchsize'; did you mean 'batch_size'"):
        fit(batchsize=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(co.Greedy):
    """A selector of one's own."""


class Plain:
    """One that knows nothing of this package's."""

    def __init__(self, schedules=None):
        if schedules:
            self.batch_size, self.iterations, self.min_separation = schedules

    def select(self, graph, *, seed=0):
        if hasattr(self, "min_separation"):
            batches = co.GreedyMinSeparation(batch_size=8, iterations=12, min_separation=3).select(graph).batches
            return co.Schedule.from_batches(graph, batches)
        return co.Selection.from_copies(graph, co.Greedy(contribution_bound=2).select(graph, seed=seed).copies)


@pytest.mark.parametrize("selector", [Mine(contribution_bound=2), Plain()])
def test_a_selector_of_ones_own(selector, tmp_path):
    usual, own = fit(seed=5), fit(selector=selector, seed=5, folder=tmp_path / "RUN")
    assert own.certificate.selection_digest == usual.certificate.selection_digest
    np.testing.assert_array_equal(*(load_file(one.folder / "model.safetensors")["weights"] for one in (usual, own)))
    assert co.open_run(tmp_path / "RUN").predict(rows(3)).equals(own.predict(rows(3)))


def test_a_schedule_of_ones_own():
    found = fit(selector=Plain((8, 12, 3)), batch_size=None, iterations=None)
    assert found.plan.mechanism.training_kind == "dp-mf"
    assert (found.plan.batch_size, found.plan.iterations) == (8, 12)


def test_a_ready_selection():
    """S from all examples: those of the train split are what is left of it, recounted."""
    examples = co.from_table(rows(), example_id="id")
    selection = co.Greedy(contribution_bound=2).select(examples.graph)
    train = split_examples(examples.graph)["train"]
    found = fit(examples, selector=selection)
    assert found.certificate.size == selection.copies[train].sum()
    assert found.guarantee.contribution_bound <= 2
    part = co.Greedy(contribution_bound=2).select(examples.graph.subgraph(train))
    assert fit(examples, selector=part).certificate.size == part.size
    other = co.Greedy(contribution_bound=2).select(co.from_table(rows(200), example_id="id").graph)
    with pytest.raises(co.InputError, match="S was selected from another graph"):
        fit(examples, selector=other)


def test_a_run_with_a_ready_selection_is_not_trained_from_its_file(tmp_path):
    selection = co.Greedy(contribution_bound=2).select(co.from_table(rows(), example_id="id").graph)
    found = fit(selector=selection)
    config = TrainConfig.from_toml(found.config_text)
    assert config.selection.selector == "given"
    with RunFolder.open(tmp_path / "RUN") as folder, pytest.raises(co.ConfigError, match="S was passed to `fit`"):
        run_configuration(dataclasses.replace(config, model=MODEL), folder, examples=co.from_table(rows()))


def test_a_plan_has_types(run):
    plan = run.plan
    assert (plan.batch_size, plan.iterations, plan.clip_norm, plan.optimizer) == (40, 30, 1.0, "adam")
    assert plan.noise_multiplier == run.guarantee.noise_multiplier
    assert plan.certificate.selection_digest == run.guarantee.certificate.selection_digest


def loss(parameters, example, key):
    return jnp.logaddexp(0.0, (1 - 2 * example["y"]) * (example["x1"] * parameters["w"] + parameters["b"]))


def probability(parameters, example):
    return jax.nn.sigmoid(example["x1"] * parameters["w"] + parameters["b"])


def test_functions_from_memory(tmp_path):
    """Their run is a whole one; only what needs the functions asks for them."""
    start = {"w": np.zeros((), np.float32), "b": np.zeros((), np.float32)}
    model = co.JaxModel(loss=loss, parameters=start, predict=probability, label="y", classes=2)
    run = fit(model=model, folder=tmp_path / "RUN")
    found = run.predict({"x1": [3.0, -3.0, None]})
    assert found["prediction"].to_list() == [1, 0, None]
    again = co.open_run(tmp_path / "RUN")
    assert again.statement() == run.statement()
    with pytest.raises(co.InputError, match=r"passed in memory .* open_run\(folder, model=...\)"):
        again.predict({"x1": [3.0]})
    assert_frame_equal(co.open_run(tmp_path / "RUN", model=model).predict({"x1": [3.0, -3.0, None]}), found)
    assert run.report(tmp_path / "page.html").exists()
    assert "safetensors" in (run.export(tmp_path / "model") / "README.md").read_text(encoding="utf-8")


def test_a_model_in_a_file(tmp_path, monkeypatch):
    """Kind "python": the file is kept with the run, and its factory is imported from there."""
    source = """
import jax, jax.numpy as jnp, numpy as np
import coowned as co

def loss(parameters, example, key):
    return (example["x1"] * parameters["w"] - example["y"]) ** 2

def make_model():
    return co.JaxModel(loss=loss, parameters={"w": np.zeros((), np.float32)}, predict=lambda p, e: e["x1"] * p["w"])
"""
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    run = fit(model=PythonModel(factory="mine:make_model"), folder=tmp_path / "RUN")
    (tmp_path / "mine.py").unlink()
    found = co.open_run("RUN").predict({"x1": [1.0, 2.0, None]})
    one, two, missing = found["prediction"].to_list()
    assert two == pytest.approx(2 * one)
    assert missing is None
    assert found["probability"].null_count() == 3
    assert_frame_equal(run.predict({"x1": [1.0, 2.0, None]}), found)


TEXT = "Shall we meet on Thursday?"


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (MODEL, {"x1": [0.0], "x2": [0.0]}, "the columns x1, x2"),
        (co.LogisticRegression(features=["x1", "x2"], label="y", classes=[0, 1, 2]), {"x1": [0.0], "x2": [0.0]}, ""),
        (
            co.LinearRegression(features="both", num_features=2, target="y", target_bound=2.0),
            {"both": [[0.0, 0.0]]},
            "column both",
        ),
        (co.TextClassifier(num_features=256, label="y"), {"text": [TEXT]}, "hash_texts"),
        (
            co.TextClassifier(num_features=256, label="y", text=["subject", "text"]),
            {"subject": [None], "text": [TEXT]},
            "A text is subject and text, with a new line between them.",
        ),
    ],
    ids=["logistic", "softmax", "linear", "text", "subject and text"],
)
def test_an_export_says_how_to_use_it(model, example, says, tmp_path, monkeypatch, capsys):
    """The code in the README of an exported model gives what `predict` gives."""
    table = rows().with_columns(both=pl.concat_list("x1", "x2"), text=pl.lit(TEXT), subject=pl.lit("Meeting"))
    trained = fit(co.from_table(table, example_id="id"), model, iterations=3)
    readme = (trained.export(tmp_path / "model") / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert says in code
    monkeypatch.chdir(tmp_path / "model")
    exec(code, {})
    printed = float(capsys.readouterr().out.strip("[]\n "))
    (found,) = trained.predict(example).to_dicts()
    if len(model.classes or ()) == 2:  # of the second class
        found["prediction"] = found["probability"] if found["prediction"] else 1 - found["probability"]
    assert printed == pytest.approx(found["prediction"], abs=1e-4)


def test_default_classes_of_texts_are_said_before_training(caplog, tmp_path):
    """CSV declares no types: that the labels are no numbers would be seen once the guarantee is spent."""
    table = rows().with_columns(pl.col("y").cast(pl.String).replace({"0": "work", "1": "home"}))
    table.select(pl.exclude("users"), pl.col("users").list.join(";")).write_csv(tmp_path / "d.csv")
    said = {}
    for classes in (2, ["work", "home"]):
        caplog.clear()
        model = co.LogisticRegression(features=["x1", "x2"], label="y", classes=classes)
        examples = co.read_csv(tmp_path / "d.csv", separator=";", example_id="id")
        with caplog.at_level("INFO", logger="coowned"), contextlib.suppress(co.InputError):
            fit(examples, model)
        said[str(classes)] = [text.split(":")[0] for text in caplog.messages]
    advice = [i for i, text in enumerate(said["2"]) if text.startswith("The classes are 0 and 1")]
    training = [i for i, text in enumerate(said["2"]) if text.startswith("training")]
    assert advice[0] < training[0]
    assert not any(text.startswith("The classes are") for text in said["['work', 'home']"])
    caplog.clear()
    with caplog.at_level("INFO", logger="coowned"):
        fit(co.from_table(rows(), example_id="id"), co.LogisticRegression(features=["x1", "x2"], label="y"))
    assert not any("The classes are 0 and 1" in text for text in caplog.messages)  # the column's type is declared


def test_the_outlook_knows_that_s_is_unlike_the_data(caplog):
    """Half of the people are alone on a message; all others write to one list, who may be in two copies."""
    table = rows().with_columns(users=pl.Series([[f"u{i}"] if i % 2 else [f"u{i}", "list"] for i in range(400)]))
    for given, unlike in ((rows(), False), (table, True)):
        caplog.clear()
        with caplog.at_level("INFO", logger="coowned"):
            fit(co.from_table(given, example_id="id"))
        (before,) = (text for text in caplog.messages if text.startswith("training: epsilon") and "Outlook" in text)
        assert before.endswith("This is about noise alone: S is not like the data.") == unlike


def test_classes_that_match_no_label(tmp_path):
    """Said once the run is finished: the run is the one that labels of these classes would make, to the last file."""
    labels = pl.Series("y", ["work", "home"] * 200)
    model = co.LogisticRegression(features=["x1", "x2"], label="y", classes=["Work", "Home"])
    with pytest.raises(co.InputError, match="has a label among the classes 'Work', 'Home': this run is finished"):
        fit(co.from_table(rows().with_columns(labels), example_id="id"), model, folder=tmp_path / "RUN")
    finished = co.open_run(tmp_path / "RUN")
    assert finished.guarantee.epsilon <= 8
    assert finished.claim.run_id in (tmp_path / NAME).read_text()  # before the error, so that it counts
    assert "labels are not among the classes 'Work' or 'Home'" in str(summary.sentences(finished.evaluations(), None))
