"""Certificates that the tests of claims share."""

import pytest

from coowned.attribution.graph import AttributionGraph
from coowned.certificate import ContributionCertificate, certify
from coowned.selection.selector import Schedule, Selection
from coowned.synthetic.regular_graph import RegularGraph


@pytest.fixture(scope="session")
def regular_graph() -> AttributionGraph:
    return RegularGraph(num_examples=2000).generate(seed=0)


@pytest.fixture(scope="session")
def greedy_certificate(regular_graph: AttributionGraph) -> ContributionCertificate:
    from coowned.selection.greedy import Greedy

    return certify(regular_graph, Greedy(contribution_bound=3).select(regular_graph))


@pytest.fixture(scope="session")
def schedule_certificate() -> ContributionCertificate:
    """Six batches of two; user 0 in batches 0 and 3, the others alone: separation 3, bound 2."""
    graph = AttributionGraph.from_users_per_example([[user] for user in range(12)])
    return certify(graph, Schedule.from_batches(graph, [[0, 1], [2, 3], [4, 5], [0, 6], [7, 8], [9, 10]]))


@pytest.fixture(scope="session")
def group_certificate() -> ContributionCertificate:
    """Two groups: {0, 1} with a user in two copies, {2} in one."""
    graph = AttributionGraph.from_users_per_example([[0], [0, 1], [2], [1]])
    return certify(graph, Selection.from_copies(graph, [1, 1, 1, 0], groups=[0, 0, 1, -1]))
