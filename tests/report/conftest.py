"""Small finished runs to write pages of, made once."""

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.runs.run_folders import reseal

from coowned import AttributionGraph, Greedy, PoissonSampling, PrivacyGuarantee, certify, guarantee
from coowned.runs.config import TrainConfig, example
from coowned.runs.configured_run import run_configuration
from coowned.runs.run_folder import RunFolder
from coowned.synthetic.logistic_data import LogisticData

SEEDED = ("# seed = 0  ", "seed = 0  ")
SIMULATED = (
    ("epsilon = 8.0 ", "epsilon = 2.0\nsimulated_batch_size = 16\n#"),
    ('selector = "greedy"', 'selector = "priced"'),
)
SCHEDULED = (
    ('kind = "dp-sgd"', 'kind = "dp-mf"'),
    ('selector = "greedy"', 'selector = "greedy-min-separation"'),
    ("contribution_bound = 2", "#"),
    ("batch_size = 32", "batch_size = 8"),
    ("# min_separation = 8", "min_separation = 3"),
)


@dataclasses.dataclass(frozen=True)
class Runs:
    """Finished runs on one small table of 400 examples; ask for a `copy` before changing one."""

    folder: Path

    def make(self, name: str, *changes: tuple[str, str]) -> Path:
        text = example().replace("batch_size = 256", "batch_size = 32").replace("iterations = 500", "iterations = 20")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        place = self.folder / name
        with RunFolder.open(place) as folder:
            run_configuration(TrainConfig.from_toml(text, folder=self.folder), folder)
        return place

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """scheduled and simulated have a guarantee, seeded is a test run, none and public are without privacy.

    A schedule is accounted for in closed form, so its page is written soonest: most tests use that run.
    """
    folder = tmp_path_factory.mktemp("runs")
    graph = AttributionGraph.from_users_per_example(
        [[i % 150] if i % 2 else [i % 150, (i * 7) % 150] for i in range(400)]
    )
    table = LogisticData(num_features=5).attach(graph, seed=1).to_table().drop_columns(["split"])
    pq.write_table(table, folder / "papers.parquet")
    made = Runs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COOWNED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        made.make("seeded", SEEDED)
        made.make("simulated", *SIMULATED)
        made.make("scheduled", *SCHEDULED)
        made.make("none", ("epsilon = 8.0 ", 'epsilon = "none" '))
        made.make("public", ("epsilon = 8.0 ", "public = true "))
    return made


@pytest.fixture(scope="session")
def tiered_claim() -> PrivacyGuarantee:
    bounds = [{"user": user, "bound": 1, "tier": "careful"} for user in range(300, 613)]
    bounds += [{"user": user, "bound": 0, "tier": "out"} for user in range(17)]
    graph = AttributionGraph.from_users_per_example([[i % 613] for i in range(4211)])
    selection = Greedy(contribution_bound=3, contribution_bounds=bounds).select(graph)
    certificate = certify(graph, selection)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=128, iterations=100)
    return guarantee(certificate, mechanism, epsilon=8.0, delta=1e-6, adjacency="zero-out")


@pytest.fixture
def copy(runs: Runs, tmp_path: Path):
    """Makes a copy of a run, with its data beside it, that a test may change."""

    def made(name: str) -> Path:
        shutil.copy(runs["papers.parquet"], tmp_path / "papers.parquet")
        return Path(shutil.copytree(runs[name], tmp_path / name))

    return made


AUDIT = {
    "format": "coowned-audit-2",
    "holds": True,
    "verdict": "Not broken.",
    "alpha": 0.05,
    "epsilon_lower_bound": 2.5173946,
    "canaries": {"epsilon_lower_bound": 4.7130591, "canaries": 43107},
}


@pytest.fixture
def audited(copy) -> Path:
    """A run whose private files hold numbers that stand nowhere else."""
    import polars as pl

    folder = copy("scheduled")
    metrics = pl.read_parquet(folder / "metrics.parquet").with_columns(
        loss=pl.lit(0.73519264), clipped_share=pl.lit(0.38274651), copies=pl.lit(73516)
    )
    metrics.write_parquet(folder / "metrics.parquet")
    for name, accuracy in (("validation", 0.61739485), ("test", 0.64827193)):
        found = pl.read_parquet(folder / f"{name}.parquet").with_columns(
            accuracy=pl.lit(accuracy), accuracy_low=accuracy - 0.03139172, accuracy_high=accuracy + 0.03139172,
            loss=pl.lit(0.59281736), examples=pl.lit(91736),
        )  # fmt: skip
        found.write_parquet(folder / f"{name}.parquet")
    (folder / "audit.json").write_text(json.dumps(AUDIT), encoding="utf-8")
    config = folder / "config.toml"
    config.write_text(
        config.read_text(encoding="utf-8").replace("[data]\n", "# validation reached 0.61739485\n[data]\n"),
        encoding="utf-8",
    )
    return reseal(folder)
