"""From the specification of a model to what is trained: its content once S is chosen, and where training starts."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from coowned.attribution.examples import AttributedExamples
from coowned.content.data import TrainingData
from coowned.content.splits import USUAL_FRACTIONS
from coowned.models.model import Model


class Table(TrainingData, Protocol):
    """Training data in a dataclass, with the row of each example: any part of its graph can be cut out."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rows(self) -> npt.NDArray[np.int64] | None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """A model and what it is trained and evaluated on.

    Attributes:
      parts: the data of each split.
      private_log: counts of what the examples hold, for those who may see the data alone.
    """

    model: Model
    parts: Mapping[str, TrainingData]
    private_log: Mapping[str, int] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a specification trains, before any content is read.

    Attributes:
      read: makes a table of some examples, the model for it, and counts of what they hold.
      initial: where training starts; None for the model's own start.
      files: name and content of what belongs beside model.safetensors, so that others can open it.
    """

    read: Callable[[AttributedExamples], tuple[Model, Table, dict[str, int]]]
    initial: Mapping[str, npt.NDArray[np.float32]] | None = None
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def load(
        self,
        examples: AttributedExamples,
        splits: Mapping[str, npt.NDArray[np.int64]],
        copies: npt.NDArray[Any] | None = None,
    ) -> Content:
        """Reads the content of what was selected and of what is held out; no other row is looked at.

        Guarantees:
          - Content of examples of the train split that were not selected is not read.
            (test_content_is_read_after_selection, test_unselected_rows_are_not_read)
          - Held-out examples have the same rows whatever was selected, so that all models are compared on the same
            masks.   (test_held_out_rows_do_not_depend_on_the_selection)

        Args:
          examples: with the payload.
          splits: examples of "train" and of the held-out splits.
          copies: (examples of the train split,) how often each was selected; None reads them all.
        """
        train = splits["train"]
        used = train if copies is None else train[np.asarray(copies) > 0]
        wanted = np.concatenate([*(part for name, part in splits.items() if name != "train"), used])
        rows = np.full(examples.graph.num_examples, -1, np.int64)
        rows[wanted] = np.arange(wanted.size)
        payload = examples.payload.take(pa.array(wanted))
        few = dataclasses.replace(examples, graph=examples.graph.subgraph(wanted), payload=payload)
        model, table, counts = self.read(few)
        parts = {
            name: dataclasses.replace(table, graph=examples.graph.subgraph(part), rows=rows[part])
            for name, part in splits.items()
        }
        return Content(model=model, parts=parts, private_log=counts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Specification(abc.ABC):
    """Which columns a model reads and how large it is: what `[model]` of a configuration says and `co.fit` is given.

    A subclass is a frozen dataclass whose fields are the keys of `[model]`, with one line in `models/registry.py`.
    Where the trained model needs nothing more, it is the model too.
    """

    kind: ClassVar[str]
    splits: ClassVar[tuple[float, float, float]] = USUAL_FRACTIONS
    """Shares of train, validation and test, unless others are asked for."""

    def check_files(self, folder: Path) -> None:
        """Refuses, with InputError, files that are missing, and says where to get them; called before data are read."""
        del folder

    @abc.abstractmethod
    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        """What is trained on data of this schema; refuses, with InputError, what the schema or a file cannot give.

        Args:
          schema: of the payload; no content is read here, and none can refuse later.
          folder: what relative paths of the specification are relative to.
          is_private: refuse to start from weights that were made from private data. False only where the run claims
            nothing at all.
          labels: False to predict: the label column need not exist, and labels are NaN.
        """

    def from_run(self, folder: Path) -> Self:
        """The same with its files, if it needs any, taken from the folder of a finished run."""
        del folder
        return self

    def settings(self) -> dict[str, Any]:
        """What `[model]` of a configuration file says: `kind`, and the fields that have a value."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {"kind": self.kind, **{name: value for name, value in fields.items() if value is not None}}

    def usage(self) -> str:
        """How an exported model is used, as Markdown; its Python code runs in the folder of the model."""
        return (
            "`model.safetensors` holds the trained parameters by name:\n\n"
            "```python\n"
            "from safetensors.numpy import load_file\n\n"
            'parameters = load_file("model.safetensors")\n'
            "print({name: array.shape for name, array in parameters.items()})\n"
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """The model whose `describe` gave these values besides its kind."""
        return cls(**described)  # pyright: ignore[reportReturnType]
