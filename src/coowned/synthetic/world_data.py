"""Serves a synthetic world as training data: features and labels are generated with each batch."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.content.data import Draw, FeatureTable, RowTable, row_order
from coowned.exact.linear_kernels import fill_norms
from coowned.synthetic.logistic_data import LogisticWorld


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorldData(RowTable):
    """A `LogisticWorld`'s examples, or a part of them; features, and norms if asked for, are made with a batch.

    Guarantees:
      - A part gives the same content as the whole.   (test_world_part_equals_the_whole)

    Example:
      >>> from coowned import AttributionGraph
      >>> from coowned.synthetic.logistic_data import LogisticData
      >>> graph = AttributionGraph.from_users_per_example([[0], [0, 1]])
      >>> WorldData.part(LogisticData(num_features=4).attach(graph, seed=0), [1]).graph.num_examples
      1
    """

    world: LogisticWorld
    norms: bool = False

    @classmethod
    def part(cls, world: LogisticWorld, examples: Any = None) -> "WorldData | FeatureTable":
        """Returns all examples of a world, or those given by their indices in its graph; a table of those in memory."""
        rows = None if examples is None else np.asarray(examples, np.int64)
        graph = world.graph if rows is None else world.graph.subgraph(rows)
        if world.stored is None:
            return cls(graph=graph, world=world, rows=rows)
        features, labels = world.stored
        return FeatureTable(graph=graph, features=features, labels=labels, rows=rows)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"features": (self.world.data.num_features,), "labels": (), **({"norms": ()} if self.norms else {})}

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        return dict.fromkeys(self.shapes(), np.dtype(np.float32))

    def fill(self, examples: npt.NDArray[np.int64], out: dict[str, npt.NDArray[Any]], draw: Draw | None = None) -> None:
        rows = self._rows_of(examples)
        out["features"][: rows.size], out["labels"][: rows.size] = self.world.batch(rows)
        if self.norms:
            fill_norms(out["features"], np.arange(rows.size), out["norms"])

    def with_norms(self) -> "WorldData":
        """Features together with their rows' norms."""
        return dataclasses.replace(self, norms=True)

    @property
    def digest(self) -> str:
        world = self.world
        about = dataclasses.asdict(world.data), world.seed, world.graph.digest
        return self._digest(*about, arrays=row_order(world.graph))
