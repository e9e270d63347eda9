"""A small data set and plans for it, shared by the tests of content, models, training and runs."""

import dataclasses

import numpy as np

from coowned import (
    AttributionGraph,
    CyclicPoisson,
    Greedy,
    GreedyMinSeparation,
    MinSeparation,
    PoissonSampling,
    RandomAllocation,
    Schedule,
    Selection,
    certify,
    guarantee,
)
from coowned.accounting.privacy_guarantee import MADE_HERE
from coowned.exact.keys import RunKey
from coowned.synthetic.logistic_data import LogisticData, LogisticWorld, WorldData
from coowned.training.plan import TrainingPlan

NUM_FEATURES = 6


@dataclasses.dataclass(frozen=True)
class Small:
    """300 examples of one or two of 120 users, with six features."""

    graph: AttributionGraph
    world: LogisticWorld
    data: WorldData

    def plan(self, kind: str = "dp-sgd", **changes) -> TrainingPlan:
        """A test-run plan of 12 steps; `changes` go to the plan or the mechanism."""
        noise_multiplier = changes.pop("noise_multiplier", 0.7)
        iterations = changes.pop("iterations", 12)
        batch_size = changes.pop("batch_size", 20)
        seed = changes.pop("seed", 3)
        selected: Selection | Schedule
        if kind == "dp-sgd":
            selected = Greedy(contribution_bound=2).select(self.graph)
            certificate = certify(self.graph, selected)
            mechanism = PoissonSampling.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
        elif kind == "dp-mf":
            chooser = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=3)
            selected = chooser.select(self.graph)
            certificate = certify(self.graph, selected)
            mechanism = MinSeparation.from_certificate(certificate, num_bands=changes.pop("num_bands", 3))
        elif kind == "random-allocation":
            alone = np.unique(self.graph.users[self.graph.indptr[:-1]], return_index=True)[1]
            alone = alone[self.graph.users_per_example[alone] == 1]
            copies, groups = np.zeros(self.graph.num_examples, int), np.full(self.graph.num_examples, -1)
            copies[alone], groups[alone] = 1, np.arange(len(alone)) % 3
            selected = Selection.from_copies(self.graph, copies, groups=groups)
            certificate = certify(self.graph, selected)
            mechanism = RandomAllocation.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
        else:
            users = np.array([self.graph.users[self.graph.indptr[i]] for i in range(self.graph.num_examples)])
            alone = self.graph.users_per_example == 1
            groups = np.where(alone, users % 4, -1).astype(np.int32)
            selected = Selection.from_copies(self.graph, alone.astype(np.int32), groups=groups)
            certificate = certify(self.graph, selected)
            mechanism = CyclicPoisson.from_certificate(certificate, batch_size=batch_size, iterations=iterations)
        made = changes.pop("guarantee", ...)
        if made is ...:
            made = guarantee(
                certificate,
                mechanism,
                noise_multiplier=noise_multiplier,
                delta=1e-5,
                adjacency="zero-out",
                test_run=True,
            )
        fields = {
            "certificate": certificate,
            "selected": selected,
            "mechanism": mechanism,
            "guarantee": made,
            "clip_norm": 0.3,
            "learning_rate": 0.05,
            "run_key": RunKey.from_seed(seed),
        }
        return TrainingPlan(**(fields | changes))


def part_of(table, examples):
    """These examples alone, as the splits of a run have them."""
    rows = np.asarray(examples) if table.rows is None else table.rows[examples]
    return dataclasses.replace(table, graph=table.graph.subgraph(examples), rows=rows)


def forged(made, **changes):
    """A guarantee that `guarantee` never made: what the trainer must refuse, or a real run for a test's sake."""
    return dataclasses.replace(made, maker=MADE_HERE, **changes)


def small_world() -> Small:
    rows = [[i % 120] if i % 3 else [i % 120, (7 * i + 1) % 120] for i in range(300)]
    graph = AttributionGraph.from_users_per_example(rows, num_users=120)
    world = LogisticData(num_features=NUM_FEATURES).attach(graph, seed=5)
    return Small(graph, world, WorldData.part(world))
