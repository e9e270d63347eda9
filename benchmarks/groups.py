"""`CyclicGroups` on 8 million examples: processor time and memory of the partition.

python -m benchmarks groups
"""

import time

from benchmarks import memory
from benchmarks.timing import Figure
from coowned.selection.cyclic_groups import CyclicGroups
from coowned.selection.greedy import Greedy
from coowned.synthetic.regular_graph import RegularGraph

BOUND, GROUPS = 3, 16
EXAMPLES = 8_000_000


def run() -> list[Figure]:
    graph = RegularGraph(num_examples=EXAMPLES, mean_users_per_example=2, mean_examples_per_user=4).generate(seed=0)
    CyclicGroups(num_groups=2, contribution_bound=1).select(
        RegularGraph(num_examples=1000).generate(seed=0)
    )  # compiles
    before = memory.peak()
    begin = time.process_time()
    greedy = Greedy(contribution_bound=BOUND).select(graph)
    alone = time.process_time() - begin
    begin, clock = time.process_time(), time.perf_counter()
    selection = CyclicGroups(num_groups=GROUPS, contribution_bound=BOUND).select(graph)
    seconds, clock = time.process_time() - begin, time.perf_counter() - clock
    name = f"{EXAMPLES / 1e6:.0f}M examples, {GROUPS} groups, bound {BOUND}, {selection.selector['partitioner']}"
    return [
        Figure(f"CyclicGroups, {name}: processor time", seconds, "s"),
        Figure(f"CyclicGroups, {name}: on a clock", clock, "s"),
        Figure(f"CyclicGroups / Greedy, {name}: processor time", seconds / alone, "ratio"),
        Figure(f"CyclicGroups, {name}: memory beyond the graph's peak", (memory.peak() - before) / 1e9, "GB"),
        Figure(f"CyclicGroups, {name}: share of greedy's S", selection.size / greedy.size, ""),
    ]
