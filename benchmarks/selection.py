"""How the greedy selectors compare with bare loops over the same arrays: ratios within one run.

python -m benchmarks selection
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time

import numba
import numpy as np
import polars as pl

from benchmarks.plain_min_separation import plain_min_separation
from benchmarks.timing import Figure
from coowned.attribution.graph import AttributionGraph
from coowned.certificate import certify
from coowned.selection.bias_mitigating import BiasMitigating, pareto
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_min_separation import GreedyMinSeparation, max_min_separation
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.order import ordered_rows
from coowned.synthetic.regular_graph import RegularGraph

BOUND = 3
MILLION = 1_000_000
FIRST_CALL = """
import time
from coowned.attribution.graph import AttributionGraph
from coowned.selection.greedy import Greedy
graph = AttributionGraph.from_users_per_example([[0], [0, 1]])
begin = time.perf_counter()
Greedy(contribution_bound=1).select(graph)
print(time.perf_counter() - begin)
"""


@numba.njit(nogil=True)
def bare_loop(order, indptr, users, num_users, bound):
    """Algorithm 2 over an order that is already there."""
    count = np.zeros(num_users, np.uint8)
    copies = np.zeros(order.shape[0], np.int32)
    for example in order:
        fits = True
        for i in range(indptr[example], indptr[example + 1]):
            if count[users[i]] >= bound:
                fits = False
                break
        if fits:
            for i in range(indptr[example], indptr[example + 1]):
                count[users[i]] += 1
            copies[example] = 1
    return copies


def bare_greedy(graph):
    """A stable sort, in the narrow type in which numpy is fastest, and the bare loop."""
    order = np.argsort(graph.users_per_example.astype(np.uint8), kind="stable")
    return bare_loop(order, graph.indptr, graph.users, graph.num_users, BOUND)


def best(*works, runs=5):
    """The shortest time of each work, run in turn so that all meet the same weather, and the last results."""
    times, results = [float("inf")] * len(works), {}
    for _ in range(runs):
        for number, work in enumerate(works):
            begin = time.perf_counter()
            results[number] = work()
            times[number] = min(times[number], time.perf_counter() - begin)
    return times, list(results.values())


def regular_graph(num_examples):
    graph = RegularGraph(num_examples=num_examples, mean_users_per_example=2, mean_examples_per_user=8).generate(seed=0)
    assert graph.users_per_example.max() < 256
    return graph


def greedy_rows():
    small, large = regular_graph(MILLION), regular_graph(8 * MILLION)
    by_input, by_hash = Greedy(contribution_bound=BOUND, ties="input"), Greedy(contribution_bound=BOUND)
    for selector in (by_input, by_hash, GreedyWithDuplicates(contribution_bound=BOUND)):
        selector.select(small)  # compiled, or read from the cache
    bare_greedy(small)
    (bare, with_input, with_hash, duplicates, small_hash, small_bare), (expected, selection, *_) = best(
        lambda: bare_greedy(large),
        lambda: by_input.select(large).copies,
        lambda: by_hash.select(large).copies,
        lambda: GreedyWithDuplicates(contribution_bound=BOUND).select(large).copies,
        lambda: by_hash.select(small).copies,
        lambda: bare_greedy(small),
    )
    attributed = large.users_per_example > 0
    assert np.array_equal(selection[attributed], expected[attributed])  # the bare loop takes those without users
    return [
        Figure("bare sort and loop, 8M examples", bare, "s"),
        Figure("Greedy, ties by input, 8M examples", with_input, "s"),
        Figure("Greedy, ties by hash, 8M examples", with_hash, "s"),
        Figure("Greedy, ties by input / bare", with_input / bare, "ratio", "<= 1.5"),
        Figure("Greedy, ties by hash / bare", with_hash / bare, "ratio", "<= 3"),
        Figure("GreedyWithDuplicates / Greedy, 8M examples", duplicates / with_hash, "ratio", "<= 4"),
        Figure("Greedy, 8M / 1M examples", with_hash / small_hash, "ratio", "<= 10"),
        Figure("the bare loop itself, 8M / 1M examples", bare / small_bare, "ratio"),
    ]


def certify_rows(num_examples=4 * MILLION):
    """Counting S and hashing graph and S, beside choosing S; ids and keys are text, as mail has them."""
    bare = regular_graph(num_examples)
    graph = AttributionGraph.from_csr(
        bare.indptr,
        bare.users,
        num_users=bare.num_users,
        example_ids=pl.select(pl.format("message-{}@mail.example.org", pl.int_range(num_examples))).to_series(),
        user_keys=pl.select(pl.format("user{}@example.org", pl.int_range(bare.num_users))).to_series(),
    )
    selector = Greedy(contribution_bound=BOUND)
    selection = selector.select(graph)

    def certified():
        graph.__dict__.pop("digest", None)  # kept by the graph once it was asked for
        return certify(graph, selection)

    certified()  # compiled
    (greedy, counted), _ = best(lambda: selector.select(graph), certified, runs=3)
    return [
        Figure("certify, 4M examples with text ids", counted, "s"),
        Figure("certify / Greedy, 4M examples with text ids", counted / greedy, "ratio", "<= 2"),
    ]


def min_separation_rows(batch_size=2**11, iterations=5000, min_separation=16):
    graph = regular_graph(MILLION)
    selector = GreedyMinSeparation(batch_size=batch_size, iterations=iterations, min_separation=min_separation)
    (ours,), (schedule,) = best(lambda: selector.select(graph).batches, runs=3)
    order = ordered_rows(graph, seed=0, ties="hash", progress=lambda done, message: None)
    walk, users, indptr = order.attributed.tolist(), graph.users.tolist(), graph.indptr.tolist()
    users_of = [users[begin:end] for begin, end in itertools.pairwise(indptr)]
    settings = {"batch_size": batch_size, "iterations": iterations, "min_separation": min_separation}
    (plain,), (batches,) = best(lambda: plain_min_separation(walk, users_of, **settings), runs=1)
    assert schedule.tolist() == batches
    (sweep,), (largest,) = best(lambda: max_min_separation(graph, batch_size=batch_size, iterations=500), runs=1)
    return [
        Figure("GreedyMinSeparation, 1M examples, B = 2^11, T = 5000, b = 16", ours, "s"),
        Figure("plain Algorithm 4 / GreedyMinSeparation, same batches", plain / ours, "ratio", ">= 50"),
        Figure(f"max_min_separation, 1M examples, B = 2^11, T = 500 (found {largest})", sweep, "s"),
    ]


def other_rows():
    graph = regular_graph(MILLION)
    fair = BiasMitigating(contribution_bound=BOUND, threshold=2, few_user_run=1, many_user_run=1)
    (greedy, mitigating, grid), _ = best(
        lambda: GreedyWithDuplicates(contribution_bound=BOUND).select(graph),
        lambda: fair.select(graph),
        lambda: pareto(graph, contribution_bound=BOUND),
        runs=3,
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-c", FIRST_CALL]
        runs = [
            float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        ]
    return [
        Figure("BiasMitigating / GreedyWithDuplicates, 1M examples", mitigating / greedy, "ratio"),
        Figure("pareto, 80 settings / GreedyWithDuplicates, 1M examples", grid / greedy, "ratio", "<= 80"),
        Figure("first call of Greedy after install, compiling", runs[0], "s", "<= 30"),
        Figure("first call of Greedy in a new process, cached", runs[1], "s", "<= 1"),
    ]


def run() -> list[Figure]:
    return greedy_rows() + certify_rows() + min_separation_rows() + other_rows()
