"""What privacy costs on the synthetic task: accuracy rises with epsilon and nears that of no privacy."""

import dataclasses

import numpy as np
import pytest

from coowned import Greedy, PoissonSampling, certify, guarantee
from coowned.exact.keys import RunKey
from coowned.models.logistic_regression import LogisticRegression
from coowned.synthetic.logistic_data import LogisticData, WorldData
from coowned.synthetic.regular_graph import RegularGraph
from coowned.training.plan import TrainingPlan
from coowned.training.sweep import sweep

EPSILONS = (0.25, 2.0, 64.0)


@pytest.mark.full
def test_accuracy_rises_with_epsilon():
    """Fixed seeds. One sweep for all epsilons, three rates each; the best rate by validation, as one would tune."""
    world = LogisticData(num_features=20, bias_strength=0.0).attach(
        RegularGraph(num_examples=4000).generate(seed=0), seed=0
    )
    train, validation, test = (
        WorldData.part(world, world.examples_in(name)) for name in ("train", "validation", "test")
    )
    selection = Greedy(contribution_bound=2).select(train.graph)
    certificate = certify(train.graph, selection)
    mechanism = PoissonSampling.from_certificate(certificate, batch_size=256, iterations=80)
    first = TrainingPlan(
        certificate=certificate,
        selected=selection,
        mechanism=mechanism,
        guarantee=None,
        clip_norm=1.0,
        learning_rate=0.3,
        run_key=RunKey.from_seed(0),
    )
    plans = []
    for epsilon in EPSILONS:
        claim = {"epsilon": epsilon, "delta": 1e-6, "adjacency": "zero-out"}
        made = guarantee(certificate, mechanism, test_run=True, run_id="one sweep", **claim)
        for rate in (0.03, 0.1, 0.3):
            plans.append(
                dataclasses.replace(first, guarantee=made, learning_rate=rate, configuration=f"{epsilon} {rate}")
            )
    model = LogisticRegression(num_features=20)
    private = sweep(plans, model, train)
    free = sweep([first], model, train)
    tuned = (
        private.compare(validation, split="validation")["accuracy"].to_numpy().reshape(len(EPSILONS), 3).argmax(axis=1)
    )
    tested = private.compare(test, split="test")["accuracy"].to_numpy().reshape(len(EPSILONS), 3)
    accuracy = tested[np.arange(len(EPSILONS)), tuned]
    without = float(free.compare(test, split="test")["accuracy"][0])
    best = np.maximum(
        world.probabilities(world.examples_in("test")), 1 - world.probabilities(world.examples_in("test"))
    ).mean()
    assert accuracy[0] < accuracy[1] <= accuracy[2] + 0.02
    assert accuracy[2] > accuracy[0] + 0.1
    assert accuracy[2] > without - 0.03
    assert without > best - 0.06
