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
    "math.AP": "arxiv_mathAP_text.parquet",
    "vocabulary": "vocab.txt",
}


class MissingDataError(FileNotFoundError):
    """An experiment needs real data that are not at hand."""


def data_folder() -> Path:
    """The folder that COOWNED_DATA names, else `shared/data` beside the repository."""
    return Path(os.environ.get("COOWNED_DATA") or Path(__file__).parents[3] / "shared" / "data")


def data_file(name: str) -> Path:
    """The file of one of `FILES`."""
    file = data_folder() / FILES[name]
    if not file.is_file():
        raise MissingDataError(
            f"{FILES[name]} is not in {data_folder()}: set COOWNED_DATA to the folder that has it "
            "(docs/results.md says which experiment needs which file)"
        )
    return file


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
    return co.read_parquet(data_file(name), users="users", example_id="example_id").graph
