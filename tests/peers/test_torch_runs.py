"""Runs of PyTorch modules: the run folder, resuming, audits, and batches for a loop of one's own."""

import dataclasses
import signal
import subprocess
import sys
import textwrap

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from safetensors.numpy import load_file
from scipy.stats import chi2

import coowned as co
from coowned.audit.run_audit import audit_plan, audit_run
from coowned.errors import BatchCoupledLossError
from coowned.exact.noise import NoiseStream
from coowned.models.registry import model_from_description
from coowned.runs.run_folder import RunFolder

made: dict = {}  # what FACTORY defines


@pytest.fixture(scope="module", autouse=True)
def _factory(torch):
    exec(FACTORY.replace("from coowned.torch import TorchModel", ""), made)


FACTORY = """
import torch
from coowned.torch import TorchModel


def loss(module, example):
    return torch.nn.functional.cross_entropy(module(example["x"]), example["label"])


def predict(module, example):
    return torch.softmax(module(example["x"]), -1)


def make_module(width=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))


def make_model(width=8):
    return TorchModel(module=make_module(width), loss=loss, predict=predict, columns=["x", "label"], microbatch=16)
"""
SETTINGS = {
    "epsilon": 8.0,
    "delta": 1e-6,
    "adjacency": "zero-out",
    "selector": co.Greedy(contribution_bound=2),
    "batch_size": 64,
    "iterations": 20,
    "learning_rate": 0.05,
}


def rows(count, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 2)).round(2)
    return {"users": [[f"u{i % 300}", f"u{7 * i % 300}"] for i in range(count)], "x": x, "label": x[:, 0] > 0}


def fit(**changes):
    from coowned.torch import fit

    settings = SETTINGS | {"module": made["make_module"](), "loss": made["loss"], "predict": made["predict"]} | changes
    return fit(co.from_table(rows(800)), settings.pop("module"), settings.pop("loss"), microbatch=16, **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fit(folder=tmp_path_factory.mktemp("torch") / "RUN")


@pytest.mark.peers
def test_fit_end_to_end(torch, run, tmp_path):
    from coowned.torch import load_trained

    module = made["make_module"]()
    assert run.guarantee.epsilon <= 8
    assert run.statement().startswith("1. Training is (8, 1e-06)-differentially private")
    found = run.predict({"x": [[3.0, 0.0], [-3.0, 0.0], [None, 0.0]]})
    assert found["prediction"].to_list() == [1, 0, None]
    assert run.evaluate(rows(200, seed=1))["accuracy"][0] > 0.8
    trained = load_file(run.folder / "model.safetensors")
    assert set(trained) == set(module.state_dict())
    assert all((run.specification.module.state_dict()[n] == t).all() for n, t in module.state_dict().items())
    load_trained(run, module)
    assert all((module.state_dict()[name].numpy() == array).all() for name, array in trained.items())
    with pytest.raises(co.InputError, match=r"no parameter '\d.(weight|bias)' of shape"):
        load_trained(run, made["make_module"](9))
    again = co.open_run(run.folder, model=run.specification)
    assert again.predict(rows(30)).equals(run.predict(rows(30)))
    assert run.report(tmp_path / "report.html").exists()
    exported = run.export(tmp_path / "model")
    code = (exported / "README.md").read_text().split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=exported, capture_output=True, text=True, check=True)
    assert "'0.weight': (8, 2)" in done.stdout
    with pytest.raises(co.InputError, match="passed in memory"):
        co.open_run(run.folder).predict(rows(3))


@pytest.mark.peers
def test_covered_evaluation(torch, tmp_path):
    """The claim is for both, the figure is near the uncovered one, and a killed run ends in the same counts."""
    settings = {"label": "label", "classes": [False, True], "seed": 3}
    settings["evaluation"] = co.CoveredEvaluation(epsilon_share=0.3, confusion=True)
    whole = fit(folder=tmp_path / "whole", **settings)
    assert whole.guarantee.evaluation.epsilon_share == 0.3
    assert whole.guarantee.epsilon <= 8
    assert whole.guarantee.noise_multiplier > fit(**settings | {"evaluation": None}).guarantee.noise_multiplier
    uncovered = whole.evaluations()["test"]["accuracy"][0]
    assert whole.covered.accuracy_low <= uncovered <= whole.covered.accuracy_high
    assert np.sum(whole.covered.confusion) == pytest.approx(1, abs=0.5)

    def stop(metrics):
        if metrics["step"] > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(folder=tmp_path / "killed", run=co.RunSettings(checkpoint_every=2), on_metrics=stop, **settings)
    resumed = fit(folder=tmp_path / "killed", run=co.RunSettings(checkpoint_every=2), **settings)
    assert resumed.covered.counts == whole.covered.counts


@pytest.mark.peers
def test_an_index_out_of_range_reaches_no_other_person(torch):
    """128 users with nothing to add; one of them looks up what lies in the tables of all others."""
    from coowned.torch import fit

    def of_table(module, example):
        return example["weight"] * torch.nn.functional.embedding(example["p"], module(example["x"][:, None])).sum()

    def of_own_table(module, example):
        return example["weight"] * torch.index_select(module(example["x"][:, None]), 0, example["p"]).sum()

    def trained(loss, indices):
        p, weight = np.zeros((128, 255), np.int64), np.zeros(128, np.float32)
        p[0], weight[0] = indices, 1e6
        columns = {"x": np.ones((128, 2), np.float32), "p": p}
        columns = {name: pa.FixedSizeListArray.from_arrays(a.ravel(), a.shape[1]) for name, a in columns.items()}
        data = pa.table({"users": [[f"u{i}"] for i in range(128)], "weight": weight, **columns})
        module = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.zeros_(module.bias)
        settings = {"selector": co.Greedy(contribution_bound=1), "batch_size": 128, "iterations": 1, "seed": 0}
        privacy = co.PrivacySettings(noise_multiplier=0.1, delta=1e-6, adjacency="zero-out")
        settings |= {"privacy": privacy, "splits": (1.0, 0.0, 0.0)}
        run = fit(co.from_table(data), module, loss, learning_rate=128.0, optimizer="sgd", **settings)
        return run.arrays()

    with pytest.raises(BatchCoupledLossError, match=r"use torch\.index_select"):
        trained(of_table, np.zeros(255))
    usual, odd = (trained(of_own_table, indices) for indices in (np.zeros(255), np.arange(-127, 128)))
    moved = np.sqrt(sum(np.square(usual[name] - odd[name]).sum() for name in usual))
    assert 0.9 < moved <= 1 + 1e-6  # clip norms: their own gradient, which there is none of then


@pytest.mark.peers
def test_without_privacy_it_is_sgd(torch):
    """Every copy in every step, and plain steps: the parameters are those that PyTorch's own optimizer gives."""
    from coowned.torch import load_trained

    changes = {"epsilon": "none", "delta": None, "adjacency": None, "clip_norm": None, "optimizer": "sgd"}
    selector, splits = co.RandomSubset(size=100), (1.0, 0.0, 0.0)
    run = fit(**changes, selector=selector, splits=splits, batch_size=100, iterations=3, seed=1)
    module = made["make_module"]()
    graph = co.from_table(rows(800))
    chosen = np.flatnonzero(co.RandomSubset(size=100).select(graph.graph, seed=0).copies)
    data = rows(800)
    x = torch.tensor(np.array(data["x"])[chosen], dtype=torch.float32)
    label = torch.tensor(np.array(data["label"])[chosen]).long()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), label).backward()
        optimizer.step()
    found = load_trained(run, made["make_module"]()).state_dict()
    for name, expected in module.state_dict().items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.peers
def test_interrupted_torch_run_is_resumed(tmp_path, monkeypatch):
    whole = fit(folder=tmp_path / "whole", seed=5)
    save = RunFolder.save

    def save_and_stop(self, step, tensors):
        save(self, step, tensors)
        if step > 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            fit(folder=tmp_path / "killed", seed=5)

    def doubled(module, example):
        return 2 * made["loss"](module, example)

    with pytest.raises(co.CertificateMismatchError, match="started with a different model"):
        fit(folder=tmp_path / "killed", seed=5, loss=doubled)
    resumed = fit(folder=tmp_path / "killed", seed=5)
    assert (whole.folder / "metrics.parquet").read_bytes() == (resumed.folder / "metrics.parquet").read_bytes()
    ours, theirs = (load_file(run.folder / "model.safetensors") for run in (whole, resumed))
    assert {name: array.tobytes() for name, array in ours.items()} == {n: a.tobytes() for n, a in theirs.items()}


CONFIGURATION = """
[data]
path = "data.parquet"
users = "users"
[selection]
selector = "greedy"
contribution_bound = 2
[privacy]
epsilon = 8
delta = 1e-6
[mechanism]
kind = "dp-sgd"
batch_size = 20
iterations = 6
clip_norm = 1.0
[model]
kind = "torch"
factory = "own_torch:make_model"
arguments = { width = 4 }
[optimizer]
learning_rate = 0.1
[run]
seed = 1
"""


KILLED = """
import os, signal, sys
import torch
from coowned.cli.main import run
from coowned.runs.run_folder import RunFolder

save = RunFolder.save

def save_and_die(self, step, tensors):
    save(self, step, tensors)
    os.kill(os.getpid(), signal.SIGKILL)

RunFolder.save = save_and_die
torch.set_num_threads(1)  # as here: their number is part of a run
run(sys.argv[1:])
"""


@pytest.mark.peers
def test_a_killed_torch_process_is_resumed(tmp_path):
    """SIGKILL after the first checkpoint: nothing is cleaned up, and the next process ends in the same bits."""
    from coowned.cli.main import run as command

    pl.DataFrame(rows(200)).write_parquet(tmp_path / "data.parquet")
    (tmp_path / "own_torch.py").write_text(FACTORY)
    (tmp_path / "run.toml").write_text(CONFIGURATION + "checkpoint_every = 2\n")
    train = ["train", str(tmp_path / "run.toml"), "-o"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *train, str(tmp_path / "KILLED")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "KILLED" / "model.safetensors").exists()
    assert [command([*train, str(tmp_path / name)]) for name in ("KILLED", "WHOLE")] == [0, 0]
    resumed, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("KILLED", "WHOLE"))
    assert {name: array.tobytes() for name, array in resumed.items()} == {n: a.tobytes() for n, a in whole.items()}


@pytest.mark.peers
def test_from_a_file(tmp_path):
    from coowned.cli.main import run as command

    pl.DataFrame(rows(200)).write_parquet(tmp_path / "data.parquet")
    (tmp_path / "own_torch.py").write_text(FACTORY)
    (tmp_path / "run.toml").write_text(CONFIGURATION)
    folder = tmp_path / "RUN"
    assert command(["train", str(tmp_path / "run.toml"), "-o", str(folder)]) == 0
    assert (folder / "model.py").read_text() == FACTORY
    (tmp_path / "own_torch.py").unlink()
    predicted = tmp_path / "P.parquet"
    assert command(["predict", str(folder), str(tmp_path / "data.parquet"), "-o", str(predicted)]) == 0
    assert pl.read_parquet(predicted)["prediction"].null_count() == 0
    (tmp_path / "wrong.py").write_text(textwrap.dedent("def make_model(width): return 3"))
    (tmp_path / "wrong.toml").write_text(CONFIGURATION.replace("own_torch", "wrong"))
    assert command(["train", str(tmp_path / "wrong.toml"), "-o", str(tmp_path / "WRONG")]) == 2


# ---- the audit -------------------------------------------------------------------------------------------------------


@pytest.mark.peers
def test_audit_of_a_torch_run(run):
    """Seeded: a false alarm, of probability 1e-3, would be one every time."""
    found = audit_run(run.folder, trials=2000, seed=1)
    assert found.holds, found.verdict()
    assert {"noise", "gradient", "contributions"} <= {law.law for law in found.laws}
    assert type(model_from_description(run.record.model)).__module__.startswith("coowned.torch")


@pytest.mark.peers
@pytest.mark.parametrize("honest", [True, False])
def test_canaries_in_torch(torch, honest, monkeypatch):
    """Seeded; 4000 features, which a linear module learns by heart where there is no noise."""
    from coowned.audit.canaries import audit_with_canaries
    from coowned.content.example_table import ExampleTable
    from coowned.exact.grid import Grid
    from coowned.torch import TorchModel

    if not honest:
        monkeypatch.setattr(Grid, "noise_deviation", lambda grid, sigma: 0.0)
    x = np.random.default_rng(0).normal(size=(150, 4000))
    graph = co.AttributionGraph.from_users_per_example([[user, (user + 1) % 150] for user in range(150)])
    data = ExampleTable(graph=graph, arrays={"x": x, "label": (x[:, 0] > 0).astype(np.int32)})
    settings = {"loss": made["loss"], "predict": made["predict"], "microbatch": 16}
    module = torch.nn.Linear(4000, 2, bias=False)
    torch.nn.init.zeros_(module.weight)
    own = TorchModel(module=module, **settings).for_table(data)
    model, content = own.with_canaries(200, 2, 1.0)

    def plan(graph):
        selection = co.Greedy(contribution_bound=2).select(graph)
        certificate = co.certify(graph, selection)
        mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=60, iterations=60)
        claim = co.guarantee(certificate, mechanism, epsilon=1.0, delta=1e-5, adjacency="zero-out", test_run=True)
        drawn = {"certificate": certificate, "selected": selection, "mechanism": mechanism, "guarantee": claim}
        steps = {"clip_norm": 1.0, "optimizer": "sgd", "learning_rate": 0.1}
        return co.TrainingPlan(**drawn, **steps, run_key=co.RunKey.from_seed(5))

    found = audit_with_canaries(model, data, plan, content, per_user=2, coins=co.RunKey.from_seed(0))
    assert found.claim_holds is honest


@pytest.mark.peers
def test_missing_noise_on_one_parameter_group_is_caught(run, monkeypatch):
    from coowned.audit.run_audit import plan_of

    honest = NoiseStream.next

    def without_one_group(self):
        row = honest(self)
        return {name: np.zeros_like(array) if name.endswith("bias") else array for name, array in row.items()}

    monkeypatch.setattr(NoiseStream, "next", without_one_group)
    model = model_from_description(run.record.model)
    found = audit_plan(plan_of(run), model, trials=2000, seed=1)
    assert not found.holds
    assert "noise" in found.alarms


@pytest.mark.peers
def test_a_clip_that_lets_more_through_is_caught(run, monkeypatch):
    from coowned.audit.run_audit import plan_of
    from coowned.torch.module_model import ModuleModel

    honest = ModuleModel.clipped_sum

    def longer(self, *given):
        sums, clipped = honest(self, *given)
        return {name: array + array // 20 for name, array in sums.items()}, clipped

    monkeypatch.setattr(ModuleModel, "clipped_sum", longer)
    model = model_from_description(run.record.model)
    found = audit_plan(plan_of(run), model, trials=2000, seed=1)
    assert "contributions" in found.alarms


def whole_curves(run, seed):
    """The whole-curve audit with the torch step: 64 users side by side at the coordinates of one parameter group."""
    from coowned.audit.curve import audit_curves
    from coowned.audit.run_audit import plan_of
    from coowned.torch.module_model import linear_stand_in

    keys = (co.RunKey.from_seed(seed + number) for number in range(10**6))
    model = linear_stand_in({"head.weight": (65,), "head.bias": (3,)}, 64)
    adjacencies = ("zero-out", "replace")
    return audit_curves(plan_of(run), keys.__next__, adjacencies=adjacencies, trials=2000, model=model)


@pytest.mark.peers
def test_whole_curve_of_the_torch_step(run):
    """Seeded: a false alarm, of probability 1e-3 for each curve, would be one every time."""
    curves, noise = whole_curves(run, seed=0)
    assert all(curve.holds for curve in curves)
    assert noise.holds
    assert [curve.trials for curve in curves] == [2000, 2000]


@pytest.mark.peers
def test_whole_curve_sees_a_parameter_group_without_noise(run, monkeypatch):
    honest = NoiseStream.next

    def without_one_group(self):
        return {name: np.zeros_like(a) if name.endswith("weight") else a for name, a in honest(self).items()}

    monkeypatch.setattr(NoiseStream, "next", without_one_group)
    curves, noise = whole_curves(run, seed=0)
    assert not any(curve.holds for curve in curves)
    assert not noise.holds


# ---- a plan of one's own ---------------------------------------------------------------------------------------------


def make_plan(examples=2000, batch_size=2, iterations=2000, run_key=None):
    graph = co.AttributionGraph.from_users_per_example([[i // 2] for i in range(examples)])
    selection = co.Greedy(contribution_bound=2).select(graph)
    certificate = co.certify(graph, selection)
    mechanism = co.PoissonSampling.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
    key = run_key or co.RunKey.from_seed(3)
    claim = co.guarantee(
        certificate, mechanism, noise_multiplier=1.0, delta=1e-6, adjacency="zero-out", test_run=key.is_test_run
    )
    return graph, co.TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=claim,
        clip_norm=1.0,
        learning_rate=0.1,
        run_key=key,
    )


@pytest.mark.peers
def test_batches_are_those_of_the_plan():
    from coowned.torch import batches

    _, plan = make_plan(iterations=200)
    drawn = plan.batches()
    found = list(batches(plan))
    assert len(found) == plan.iterations
    for step, batch in enumerate(found):
        expected = drawn.batch(step)
        assert sorted(batch) == sorted(expected.examples[expected.mask])
    assert any(batch.size == 0 for batch in found)
    assert max(batch.size for batch in found) > 2 * plan.batch_size


@pytest.mark.peers
def test_batches_are_poisson():
    """Sizes are binomial: mean, variance and empty batches within 5.5 standard errors (false alarms: below 1e-6)."""
    from coowned.torch import batches

    _, plan = make_plan()
    found = list(batches(plan))
    sizes = np.array([batch.size for batch in found])
    steps, mean = plan.iterations, 2000 * plan.mechanism.sampling_probability
    assert abs(sizes.mean() - mean) < 5.5 * np.sqrt(mean / steps)
    assert abs(sizes.var() - mean) < 5.5 * np.sqrt((mean + 2 * mean**2) / steps)
    empty = np.exp(-mean)
    assert abs((sizes == 0).mean() - empty) < 5.5 * np.sqrt(empty / steps)
    counts = np.bincount(np.concatenate(found), minlength=2000)
    statistic = ((counts - counts.mean()) ** 2).sum() / counts.mean()
    assert chi2.sf(statistic, 1999) > 1e-6
    assert all(np.unique(batch).size == batch.size for batch in found)  # one copy of each example is in S


@pytest.mark.peers
def test_batches_check_the_plan():
    from coowned.torch import batches

    graph, plan = make_plan(200, 8, 3, run_key=co.RunKey.from_operating_system())
    more = co.Selection.from_copies(graph, np.full(200, 2))
    with pytest.raises(co.CertificateMismatchError, match="a recount gives"):
        batches(dataclasses.replace(plan, selected=more))
    unbound = co.Selection.from_json(plan.selected.to_json())
    with pytest.raises(co.InputError, match=r"no graph to check it against; read it with from_json\(text, graph\)"):
        batches(dataclasses.replace(plan, selected=unbound))
    assert len(list(batches(plan))) == 3  # the key was not used up


@pytest.mark.peers
def test_several_devices_are_refused():
    from coowned.content.example_table import ExampleTable
    from coowned.torch import train

    graph, plan = make_plan(200, 8, 3)
    data = ExampleTable(graph=graph, arrays={"x": np.zeros((200, 2)), "label": np.zeros(200, int)})
    with pytest.raises(co.InputError, match="one device"):
        train(plan, made["make_module"](), made["loss"], data, microbatch=16, devices=2)


@pytest.mark.peers
def test_batches_take_the_key(torch):
    from coowned.content.example_table import ExampleTable
    from coowned.torch import batches, train

    graph, plan = make_plan(200, 8, 3, run_key=co.RunKey.from_operating_system())
    x = np.random.default_rng(0).normal(size=(200, 2))
    data = ExampleTable(graph=graph, arrays={"x": x, "label": (x[:, 0] > 0).astype(int)})
    trained = train(plan, made["make_module"](), made["loss"], data, microbatch=16)
    assert trained.statement().startswith("1. Training is (")
    assert set(trained.arrays) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with pytest.raises(co.InputError, match="this run key was used by another run"):
        batches(plan)


@pytest.mark.peers
def test_batches_hold_the_key(tmp_path, monkeypatch):
    """Until the last batch, or until nobody can ask for one any more."""
    from coowned.torch import batches

    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path))
    _, plan = make_plan(200, 8, 3, run_key=co.RunKey.from_operating_system())
    serve = (
        "import sys; from coowned import RunKey; key = RunKey.from_json(sys.argv[1])\n"
        f"with key.serving('batches of {plan.digest}'): print('held')"
    )

    def held_elsewhere():
        asked = [sys.executable, "-c", serve, plan.run_key.to_json()]
        return subprocess.run(asked, check=False, capture_output=True, text=True).stdout == "held\n"

    drawn = batches(plan)
    assert not held_elsewhere()
    assert len(list(drawn)) == 3
    assert held_elsewhere()
    drawn = batches(plan)
    assert not held_elsewhere()
    del drawn
    assert held_elsewhere()
