"""The data of a configuration: ids and users from the data or from shards, and the cache of derived arrays."""

import contextlib
import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from coowned import codec
from coowned.attribution.examples import AttributedExamples
from coowned.attribution.graph import AttributionGraph
from coowned.attribution.user_keys import UserKeyRules, UserMapping
from coowned.cache import cache_folder
from coowned.certificate import ContributionCertificate
from coowned.content.derived import KeptArrays
from coowned.errors import CertificateMismatchError
from coowned.models.model import Task
from coowned.models.python_model import PythonModel
from coowned.runs.config import TrainConfig
from coowned.runs.records import GraphSummary
from coowned.runs.run_folder import code_digest
from coowned.selection.selector import Schedule, Selection
from coowned.selection.shards import CERTIFICATE, SUMMARY, Manifest, check_splits, read_shards


def read_examples(config: TrainConfig) -> AttributedExamples:
    """Reads ids and users; content stays in its files where they are Parquet.

    Guarantees:
      - Shards give the run that the data give, bit for bit.   (test_shards_train_the_same_bits)
    """
    folder = shards_folder(config)
    if folder is None:
        return config.source().read(content=False)
    rows = read_shards(folder)
    check_splits(rows.manifest, config.splits)
    text = (folder / CERTIFICATE).read_bytes()
    certificate = ContributionCertificate.from_json(text, name=str(folder / CERTIFICATE))
    rows.manifest.check_certificate(certificate.graph_digest, certificate.selection_digest)
    about = {"columns_read": certificate.columns_read, "num_unprotected_users": certificate.num_unprotected_users}
    graph = dataclasses.replace(rows.graph, **about)
    keys = graph.user_keys
    assert keys is not None
    numbers = np.arange(len(keys) + 1)
    return AttributedExamples(
        graph=graph,
        payload=pa.table({}),
        user_mapping=UserMapping(keys, numbers, numbers[:-1], keys),
        key_rules=UserKeyRules(),
        content=rows.content,
    )


def shards_folder(config: TrainConfig) -> Path | None:
    """Returns the folder of shards to train on, if there is one."""
    return None if config.data.shards is None else config.folder / config.data.shards


def summary_of(
    config: TrainConfig,
    graph: AttributionGraph,
    selected: Selection | Schedule,
    certificate: ContributionCertificate,
) -> GraphSummary | None:
    """Returns counts of the whole graph, which shards bring along; None where they do not."""
    folder = shards_folder(config)
    if folder is None:
        return GraphSummary.of(graph, selected)
    with contextlib.suppress(FileNotFoundError):
        found = codec.decode_json(GraphSummary, (folder / SUMMARY).read_bytes(), name=str(folder / SUMMARY))
        if not found.agrees_with(certificate):
            raise CertificateMismatchError(
                f"{folder / SUMMARY}: counts of another S than that of the shards; remove it"
            )
        return found
    return None


def kept_arrays(config: TrainConfig, task: Task) -> KeptArrays | None:
    """Returns the cache of arrays derived from shards; None if caching is off, or for custom code."""
    folder, cache = shards_folder(config), cache_folder()
    if folder is None or cache is None or isinstance(config.model, PythonModel):
        return None
    files = {name: hashlib.sha256(content).hexdigest() for name, content in task.files.items()}
    made_from = [Manifest.read(folder).digest, config.model.settings(), files, code_digest()]
    return KeptArrays(cache / "derived", codec.checksum(made_from))
