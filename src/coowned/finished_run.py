"""Finished runs: prediction, evaluation, reports and export."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coowned.attribution.examples import AttributedExamples
from coowned.attribution.tables import examples_without_users
from coowned.errors import InputError, require
from coowned.models.model import Model, Parameters, Specification, Table
from coowned.runs.stored_run import StoredRun
from coowned.training import evaluate as evaluation

if TYPE_CHECKING:
    import polars as pl


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run(StoredRun):
    """A finished run: its folder, read and checked, with predictions for new data.

    Predictions for new data are as private as the model: they cost no further privacy.

    Guarantees:
      - A run from `fit` and the same folder opened again predict the same.   (test_open_run_gives_the_same)
      - New data need neither users nor labels.   (test_new_data_need_neither_users_nor_labels)
      - Printed, it says what is promised and how good it is; its `repr` is one line with the claim alone.
        (test_a_printed_run_says_how_good_it_is)

    Attributes:
      specification: the model as it was given; None reads it from the run's configuration.
    """

    specification: Specification | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, {self.headline})"

    def __str__(self) -> str:
        """Returns the guarantee, the quality beside the trivial answer, the automatic choices, and what to try next."""
        from coowned.report.summary import as_text, summary

        return as_text(summary(self))

    def _repr_html_(self) -> str:
        from coowned.report.summary import as_html, summary

        return as_html(summary(self))

    @property
    def folder(self) -> Path:
        """The run's folder; a temporary one is removed together with this object."""
        return self.path

    def predict(self, table: Any, *, example_id: str | None = None, probabilities: bool = False) -> "pl.DataFrame":
        """Predicts every row: columns id, prediction and probability.

        Guarantees:
          - A row with a value that is missing or not finite has a null prediction; nothing it holds stops the others.
            (test_unusable_rows_have_no_prediction)

        Args:
          table: anything `from_table` reads, without users or label, or AttributedExamples.
          example_id: the column with the ids; the row number by default. Rows with one id are one example.
          probabilities: of all classes, a column `probability_<class>` each.

        Returns:
          id; prediction: the class as the labels were spelled, or the number of a regression; probability: of that
          class, null for a number.
        """
        import polars as pl

        examples, model, parameters, data = self._read(table, example_id, labels=False)
        found = evaluation.predictions(model, parameters, data, probabilities=probabilities)
        return found.insert_column(0, pl.Series("id", examples.ids))

    def evaluate(self, table: Any, *, example_id: str | None = None, split: str = "new data") -> "pl.DataFrame":
        """Computes loss and accuracy on examples with labels, as `co.evaluate` does; by users if these are known.

        What it computes is not covered by the guarantee if it is of the same people.

        Args:
          table, example_id: as for `predict`, with the label column.
          split: what to call the data in the result.
        """
        examples, model, parameters, data = self._read(table, example_id, labels=True)
        found = evaluation.evaluate(model, parameters, data, split=split)
        return found if examples.graph.num_users else found.head(1)

    def report(self, path: str | os.PathLike[str] | None = None, *, release: bool = False) -> Path:
        """Writes the page that `coowned report` writes, by default into the run's folder; returns its path."""
        from coowned.report.page import write_report

        return write_report(self.folder, path, release=release)

    def export(self, folder: str | os.PathLike[str]) -> Path:
        """Creates a folder with what the guarantee covers, as `coowned export-model` does; returns its path."""
        from coowned.report.export import export_model

        export_model(self.folder, folder)
        return Path(folder)

    def _read(
        self, table: Any, example_id: str | None, *, labels: bool
    ) -> tuple[AttributedExamples, Model, Parameters, Table]:
        if not isinstance(table, AttributedExamples):
            table = examples_without_users(table, example_id)
        elif example_id is not None:
            raise InputError("AttributedExamples have ids of their own; leave example_id out")
        require("train", "prediction")
        self.model_files()  # refuses what was changed, before any of it is used
        specification = self.specification or self.config(self.folder).model
        task = specification.from_run(self.folder).task(
            table.payload.schema, folder=self.folder, is_private=False, labels=labels
        )
        model, data, _ = task.read(table)
        return table, model, model.from_arrays(self.arrays()), data


def open_run(folder: str | os.PathLike[str], *, model: Specification | None = None) -> Run:
    """Opens a finished run of `fit` or `coowned train`; raises an error if the folder's parts do not agree.

    Args:
      folder: of the run.
      model: the specification it was trained with; needed only for a `JaxModel` that was created in memory.
    """
    if model is not None:
        check_model(model)
    return dataclasses.replace(Run.open(folder), specification=model)


def check_model(model: Any) -> None:
    """Raises InputError for anything but a specification."""
    if not isinstance(model, Specification):
        raise InputError(
            "model must be a specification such as LogisticRegression(features=[...], label=...), not "
            f"{type(model).__name__}"
        )
