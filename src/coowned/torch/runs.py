"""Training a PyTorch module: in one call, under a plan, or in a custom loop."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from coowned import fitting
from coowned.accounting.covered import CoveredEvaluation
from coowned.attribution.examples import AttributedExamples
from coowned.content.example_table import ExampleTable
from coowned.errors import InputError
from coowned.finished_run import Run
from coowned.runs.settings import FitKeywords, MechanismSettings, Optimizer, PrivacySettings, RunSettings
from coowned.selection.selector import Schedule, Selection, Selector
from coowned.torch.model import TorchModel
from coowned.torch.pretrained import FREEZES, read_pretrained
from coowned.training import loop
from coowned.training.plan import TrainingPlan


class TorchKeywords(FitKeywords, total=False):
    """Keywords of `fit`: those of `TorchModel`, then those of `coowned.fit`."""

    predict: Callable[[Any, Any], Any] | None
    encode: Callable[[dict[str, Any]], Mapping[str, Any]] | None
    encode_columns: Sequence[str] | None
    columns: Mapping[str, str] | Sequence[str] | None
    shapes: Mapping[str, Sequence[int]] | None
    integers: Sequence[str]
    memory_limit: str | int
    microbatch: int | None

    epsilon: float | dict[str, float] | str | None
    delta: float | None
    adjacency: str | None
    selector: Selector[Any] | Selection | Schedule | None
    privacy: PrivacySettings | None
    mechanism: MechanismSettings | str | None
    optimizer: Optimizer | str | None
    evaluation: CoveredEvaluation | None
    run: RunSettings | None
    folder: str | os.PathLike[str] | None


_OF_MODEL = (
    "predict", "encode", "encode_columns", "columns", "shapes", "integers", "memory_limit", "microbatch",
)  # fmt: skip


def fit(
    examples: AttributedExamples,
    module: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    freeze: str | None = None,
    text: str | Sequence[str] = "text",
    sequence_length: int = 128,
    label: str | None = None,
    classes: int | Sequence[Any] | None = None,
    **settings: Unpack[TorchKeywords],
) -> Run:
    """Splits, selects, certifies, accounts, trains and evaluates, as `coowned.fit` does, with a PyTorch module.

    Guarantees:
      - It is `coowned.fit` with a `TorchModel`: same coins, noise, run folder and claim.   (test_fit_end_to_end)
      - A run that was interrupted and resumed ends in the same bits.   (test_interrupted_torch_run_is_resumed)
      - The module is not written to: a second run starts where the first did, not from what it learned.
        (test_fit_end_to_end)
      - A folder of transformers is fitted as its module is with the functions of `read_pretrained`.
        (test_a_folder_is_fitted_by_one_word)

    Args:
      examples: from `from_table`, `read_parquet`, `read_mail`, ...
      module: where training starts; parameters with `requires_grad` are trained. Or a folder of transformers, for a
        classifier of texts: `fit(examples, "FOLDER", freeze="lora", text="body", label="folder", classes=[...])`.
      loss: (module, example) -> one float32 number, of ONE example: a dictionary of tensors without a batch axis.
      freeze: of a folder: "all but the head", "lora" (small matrices and the head), or "none" for all parameters.
      text, sequence_length: of a folder: the column or columns, and how many tokens are read.
      label, classes: as `TorchModel` says; so do its predict, encode, encode_columns, columns, shapes, integers,
        memory_limit and microbatch among the settings.
      settings: those of `coowned.fit`: epsilon, delta, adjacency, selector, batch_size, iterations, folder, ...
    """
    given: dict[str, Any] = dict(settings)
    own = {name: given.pop(name) for name in _OF_MODEL if name in given}
    own = {name: value for name, value in own.items() if value is not None}
    if isinstance(module, str | os.PathLike):
        if freeze is None or label is None or classes is None:
            raise InputError(
                f"a model from a folder needs freeze ({', '.join(map(repr, FREEZES))}), label and classes; give them"
            )
        terms = {"text": text, "label": label, "classes": classes, "sequence_length": sequence_length}
        module, loss, *parts = read_pretrained(module, freeze=freeze, **terms)
        own |= dict(zip(("predict", "encode", "encode_columns"), parts, strict=True))
    elif freeze is not None:
        raise InputError("freeze is for a model from a folder; set requires_grad of your module's parameters")
    if loss is None:
        raise InputError("a module needs loss, a function (module, example) of one example")
    if "encode_columns" in own:
        own["encode_columns"] = tuple(own["encode_columns"])
    model = TorchModel(module=module, loss=loss, label=label, classes=classes, **own)
    return fitting.fit(examples, model, **given)


def train(
    plan: TrainingPlan,
    module: Any,
    loss: Callable[[Any, Any], Any],
    data: ExampleTable,
    *,
    microbatch: int | None = None,
    memory_limit: str | int = "1GB",
    **settings: Any,
) -> loop.TrainedModel:
    """Trains a module under a plan, as `coowned.train` does, or resumes the run that a folder holds.

    Args:
      plan: what runs and what is claimed.
      module, loss, microbatch, memory_limit: as for `fit`.
      data: arrays for the graph that `plan.selected` was chosen from.
      settings: those of `coowned.train`: folder, checkpoint_every, progress, ...
    """
    model = TorchModel(module=module, loss=loss, microbatch=microbatch, memory_limit=memory_limit)
    return loop.train(plan, model.for_table(data), data, **settings)


def batches(plan: TrainingPlan) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the examples of every step of a plan, for a custom loop; an example occurs as often as it was drawn.

    The claim holds for a loop that takes every batch whole, empty ones included, clips each copy's gradient to
    `plan.clip_norm`, adds noise of `plan.noise_multiplier * plan.clip_norm` to the sum, and divides by
    `plan.batch_size`, once: two loops over one plan are two releases with the same coins, which no sum of two claims
    covers. The batches are secret: published, they void the claim.

    The claim is for ideal noise. `train` and `fit` release exactly that, as integers. A loop that adds noise in
    floating point does not: which floats can come out depends on the sum that the noise is added to, and may reveal it.

    Guarantees:
      - What the claim rests on is recounted first, as `train` does; a selection without its graph is refused.
        (test_batches_check_the_plan)
      - They are the batches that `train` would draw: all `plan.iterations` of them, empty ones included, none cut.
        (test_batches_are_those_of_the_plan, test_batches_are_poisson)
      - A key serves one run: a plan whose key has trained a model is refused.   (test_batches_take_the_key)
      - While they are drawn, no other process of this machine uses the key.   (test_batches_hold_the_key)

    Yields:
      (copies,) indices of examples of the graph that `plan.selected` was chosen from.
    """
    graph = plan.selected.graph
    if graph is None:
        raise InputError("the plan's selection has no graph to check it against; read it with from_json(text, graph)")
    plan.check(graph)
    found = _batches(plan)
    next(found)
    return found


def _batches(plan: TrainingPlan) -> Iterator[npt.NDArray[np.int64]]:
    """Yields an empty batch once the key is held, which it is until the last batch, and then those of the plan."""
    with plan.run_key.serving(f"batches of {plan.digest}"):
        yield np.empty(0, np.int64)
        drawn = plan.batches(multiple_of=1)
        for step in range(plan.iterations):
            batch = drawn.batch(step)
            yield batch.examples[batch.mask].astype(np.int64)


def load_trained(run: Run, module: Any) -> Any:
    """Loads a run's trained parameters into a module of the same kind, and returns it."""
    import torch

    arrays = {name: torch.tensor(array) for name, array in run.arrays().items()}
    parameters = dict(module.named_parameters())
    for name, tensor in arrays.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise InputError(
                f"the module has no parameter {name!r} of shape {tuple(tensor.shape)}; use the run's module"
            )
    module.load_state_dict(arrays, strict=False)
    return module
