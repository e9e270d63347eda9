"""The graphs of the experiments: the paper's synthetic ones, and the real data where they are at hand."""

import functools
import os
from pathlib import Path

import coowned as co
from coowned.synthetic.regular_graph import RegularGraph
from coowned.synthetic.skewed_graph import SkewedGraph

KINDS = {"regular": RegularGraph, "skewed": SkewedGraph}
FILES = {
    "arXiv": "arxiv_hypergraph.parquet",
    "ACL": "acl_anthology_abstracts.parquet",
    "mailing list": "git_mailing_list.parquet",
}


def data_folder() -> Path:
    """`shared/data` beside the repository, else the folder that COOWNED_DATA names."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    return beside if beside.is_dir() else Path(os.environ.get("COOWNED_DATA", beside))


@functools.lru_cache(maxsize=1)  # one graph at a time in memory
def synthetic_graph(kind: str, num_examples: int, examples_per_user: int, seed: int = 0) -> co.AttributionGraph:
    """The paper's regular or skewed graph with 2 users an example on average."""
    world = KINDS[kind](num_examples=num_examples, mean_examples_per_user=examples_per_user)
    return world.generate(seed=seed)


@functools.lru_cache(maxsize=1)
def real_graph(name: str) -> co.AttributionGraph:
    """A graph of `FILES`; "made up" is a small regular one that needs no file."""
    if name == "made up":
        return RegularGraph(num_examples=500).generate(seed=0)
    return co.read_parquet(data_folder() / FILES[name], users="users", example_id="example_id").graph
