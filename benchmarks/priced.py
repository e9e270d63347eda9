"""How close `Priced` comes to its proven bound, and how many times slower than `Greedy` it is, in one run.

python -m benchmarks priced
"""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.timing import Figure, timed
from coowned.attribution.graph import AttributionGraph
from coowned.selection.greedy import Greedy
from coowned.selection.integer_program import IntegerProgram
from coowned.selection.priced import Priced
from coowned.synthetic.regular_graph import RegularGraph

BOUND = 3
MILLION = 1_000_000
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
REAL_GRAPHS = {"arXiv": "arxiv_hypergraph.parquet", "ACL": "acl_anthology_abstracts.parquet"}
NEAR = 0.999  # of the proven bound, on the real graphs
SOLVER_SECONDS = 60


def regular_graph(num_examples):
    settings = RegularGraph(num_examples=num_examples, mean_users_per_example=2, mean_examples_per_user=8)
    return settings.generate(seed=0)


def real_graph(file):
    users = pl.read_parquet(DATA / file, columns=["users"])
    pairs = users.with_row_index("example").explode("users").drop_nulls()
    label = pairs["users"].rank("dense").to_numpy().astype(np.int64) - 1
    return AttributionGraph.from_pairs(
        pairs["example"].to_numpy().astype(np.int64), label, num_examples=len(users), num_users=int(label.max()) + 1
    )


def regular_rows():
    """The regular graph: the share of the proven bound in 50 and 150 times the time of Greedy, growth, memory."""
    rows, seconds, processor = [], {}, {}
    compile_all()
    for millions in (1, 8):
        graph = regular_graph(millions * MILLION)
        size = f"regular {millions}M, k = {BOUND}"
        greedy, plain = timed(lambda graph=graph: Greedy(contribution_bound=BOUND).select(graph), runs=3)
        rows.append(Figure(f"{size}: Greedy", greedy, "s"))
        for times, share in ((50, 0.995), (150, 0.997)):
            # Time is looked at between two steps, so the limit is set a little below what is allowed.
            hurried = Priced(contribution_bound=BOUND, time_limit=0.9 * times * greedy)
            taken, selection = timed(lambda graph=graph, hurried=hurried: hurried.select(graph))
            reached = selection.size / selection.upper_bound
            rows.append(Figure(f"{size}: part of the bound, {times} x Greedy", reached, "", f">= {share}"))
            rows.append(Figure(f"{size}: time of that / Greedy", taken / greedy, "ratio", f"<= {times}"))
            if times == 50:
                rows.append(Figure(f"{size}: Greedy, part of that bound", plain.size / selection.upper_bound, ""))
        begin = time.process_time()
        seconds[millions], selection = timed(lambda graph=graph: Priced(contribution_bound=BOUND).select(graph))
        processor[millions] = time.process_time() - begin
        reached = selection.size / selection.upper_bound
        rows.append(Figure(f"{size}: part of the bound, no time limit", reached, "", ">= 0.999"))
        rows.append(Figure(f"{size}: time without limit / Greedy", seconds[millions] / greedy, "ratio", "<= 150"))
        rows.append(Figure(f"{size}: time without limit", seconds[millions], "s"))
    rows.append(Figure("Priced, 8M / 1M examples", seconds[8] / seconds[1], "ratio", "<= 10"))
    rows.append(Figure("Priced, 8M / 1M examples, processor time", processor[8] / processor[1], "ratio"))
    graph = regular_graph(MILLION)
    tracemalloc.start()
    Priced(contribution_bound=BOUND).select(graph)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = graph.indptr.nbytes + graph.users.nbytes
    rows.append(Figure("Priced, 1M examples: peak memory / graph arrays", peak / arrays, "ratio", "<= 10"))
    return rows


def real_rows():
    """arXiv and ACL, k from 1 to 10; where the bound is not near, what HiGHS finds is the measure."""
    rows = []
    for name, file in REAL_GRAPHS.items():
        if not (DATA / file).exists():
            continue
        graph = real_graph(file)
        for bound in range(1, 11):
            greedy, plain = timed(lambda graph=graph, bound=bound: Greedy(contribution_bound=bound).select(graph))
            priced = Priced(contribution_bound=bound)
            taken, selection = timed(lambda graph=graph, priced=priced: priced.select(graph))
            reached = selection.size / selection.upper_bound
            label = (
                f"{name}, k = {bound}: {selection.size:,} of at most {selection.upper_bound:,}, greedy {plain.size:,}"
            )
            rows.append(Figure(f"{label}; time / Greedy", taken / greedy, "ratio"))
            if reached >= NEAR:
                rows.append(Figure(f"{name}, k = {bound}: part of the bound", reached, "", f">= {NEAR}"))
                continue
            solver = IntegerProgram(contribution_bound=bound, time_limit=SOLVER_SECONDS).select(graph)
            what = f"{name}, k = {bound}: part of what HiGHS finds ({solver.size:,}, at most {solver.upper_bound:,})"
            rows.append(Figure(what, selection.size / solver.size, "", ">= 0.9995"))
    return rows


def compile_all():
    """Kernels are compiled, or read from the cache, before anything is timed."""
    small = regular_graph(20_000)
    Greedy(contribution_bound=BOUND).select(small)
    Priced(contribution_bound=BOUND).select(small)


def run() -> list[Figure]:
    return regular_rows() + real_rows()
