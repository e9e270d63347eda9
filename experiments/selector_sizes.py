"""How much of each real graph every selector keeps, at what cost and with what bias.

GRID says the points, run(point) gives a row, draw(rows) the table of docs/choosing-a-selector.md.
"""

import time
from pathlib import Path

import coowned as co

DATA = Path(__file__).parents[2] / "shared" / "data"
GRAPHS = {
    "arXiv": "arxiv_hypergraph.parquet",
    "ACL": "acl_anthology_abstracts.parquet",
    "mailing list": "git_mailing_list.parquet",
}
SELECTORS = ("greedy", "greedy-with-duplicates", "bias-mitigating", "priced", "priced, duplicates", "integer-program")

# The smallest point first: the tests run it, without any file.
GRID = [
    {"graph": "made up", "contribution_bound": 1, "selector": "greedy"},
    *(
        {"graph": graph, "contribution_bound": bound, "selector": selector}
        for graph in GRAPHS
        for bound in (1, 2, 3, 5, 10)
        for selector in SELECTORS
        if selector != "integer-program" or graph != "arXiv" or bound in (1, 3)  # minutes each there
    ),
]


def run(point: dict) -> dict:
    """One selection, certified."""
    graph = _graph(point["graph"])
    bound = point["contribution_bound"]
    selector = {
        "greedy": co.Greedy(contribution_bound=bound),
        "greedy-with-duplicates": co.GreedyWithDuplicates(contribution_bound=bound),
        "bias-mitigating": co.BiasMitigating(
            contribution_bound=bound, threshold=2, few_user_run=1, many_user_run=1, allow_duplicates=False
        ),
        "priced": co.Priced(contribution_bound=bound),
        "priced, duplicates": co.Priced(contribution_bound=bound, allow_duplicates=True, distinct_weight=0.5),
        "integer-program": co.IntegerProgram(contribution_bound=bound, time_limit=120),
    }[point["selector"]]
    started = time.perf_counter()
    selection = selector.select(graph)
    seconds = time.perf_counter() - started
    certificate = co.certify(graph, selection)
    weights = selection.copies / max(1, selection.size)
    return point | {
        "size": selection.size,
        "num_distinct": selection.num_distinct,
        "upper_bound": selection.upper_bound,
        "proven_optimal": selection.proven_optimal,
        "mean_users_per_example": round(float((weights * graph.users_per_example).sum()), 3),
        "seconds": round(seconds, 2),
        "recounted_bound": certificate.contribution_bound,
    }


def draw(rows: list[dict]) -> str:
    """A Markdown table: one line a graph, bound and selector."""
    lines = [
        "| graph | k | selector | copies | distinct | proven bound | users per copy | seconds |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        bound = "" if row["upper_bound"] is None else f"{row['upper_bound']:,}"
        lines.append(
            f"| {row['graph']} | {row['contribution_bound']} | {row['selector']} | {row['size']:,} | "
            f"{row['num_distinct']:,} "
            f"| {bound} | {row['mean_users_per_example']:.2f} | {row['seconds']:.1f} |"
        )
    return "\n".join(lines)


_graphs: dict[str, co.AttributionGraph] = {}


def _graph(name: str) -> co.AttributionGraph:
    if name == "made up":
        from coowned.synthetic.regular_graph import RegularGraph

        return RegularGraph(num_examples=500).generate(seed=0)
    if name not in _graphs:
        _graphs.clear()  # one graph at a time in memory
        _graphs[name] = co.read_parquet(DATA / GRAPHS[name], users="users", example_id="example_id").graph
    return _graphs[name]
