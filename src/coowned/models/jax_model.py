"""Custom models in JAX: a loss of one example, a tree of parameters, and a prediction function."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coowned.models.example_model import ExampleModel
from coowned.models.example_specification import ExampleSpecification
from coowned.models.parameter_trees import ParameterTree, Trainable


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class JaxModel(ExampleSpecification):
    """A custom model defined by `loss(parameters, example, key)` of ONE example, in JAX.

    `example` is a dictionary of arrays without a batch axis: float32, or int32 for integers. `key` is a key of
    `jax.random` for dropout and the like: new for every copy of every step, and fixed in evaluations. Gradients of
    every copy are clipped one by one, all trained parameters together; `ExampleModel` says what holds.

    Guarantees:
      - Only the schema and the parameters decide what an example looks like: no content is looked at.
        (test_lengths_follow_from_the_parameters)
      - A loss that mixes examples is refused before anything is read.   (test_refused_before_anything_is_read)

    Attributes:
      loss: (parameters, example, key) -> a float32 number.
      parameters: any tree, where training starts; leaves that are not arrays of floating-point numbers are not trained.
      predict: (parameters, example) -> the probabilities of the classes; of two also that of the second alone, with
        `classes`; or the one number of a regression.
      columns: the column of the data that each entry of an example is read from, or a list of columns; default: the
        columns of numbers that `loss` and `predict` ask for by name (all of them, if they copy the whole example).
      shapes: of entries whose lists may have any length; where it is left out and only one length goes with the
        parameters, it is that. CSV, JSONL, SQL and Python lists declare no types: an entry is then one number.
      integers: the entries that are integers, in data that declare no types; all others are floats there.
      trainable: which parameters are trained: patterns of paths such as ["layers/1/*"], a function of a path, or a
        tree of booleans.
      label: the entry that holds the class (default: "label", "labels" or "y"): accuracy is counted by it.
      classes: as the data spell them, or how many there are (0, 1, ...); default: as many as `predict` gives
        probabilities. A label that is none of them makes its row unusable.
      memory_limit: of a microbatch: "1GB", or bytes.
      microbatch: examples differentiated together; default: found from the memory limit.
      origin: plain values for the run's record that say where the functions come from.

    Example:
      >>> def loss(parameters, example, key):
      ...     return (example["x"] @ parameters["w"] - example["target"]) ** 2
      >>> model = JaxModel(loss=loss, parameters={"w": np.zeros(3)})
      >>> import pyarrow as pa
      >>> schema = pa.schema({"x": pa.list_(pa.float64()), "target": pa.float32(), "text": pa.string()})
      >>> [(entry.name, entry.shape) for entry in model.for_schema(schema).entries]
      [('x', (3,)), ('target', ())]
    """

    kind: ClassVar[str] = "python"
    softmax: ClassVar[str] = "jax.nn.softmax, or jax.nn.sigmoid for one of two classes"
    parameters: Any = dataclasses.field(repr=False)
    trainable: Trainable = None

    def parameter_tree(self) -> ParameterTree:
        return ParameterTree.of(self.parameters, self.trainable)

    def make_model(self, **settings: Any) -> ExampleModel:
        return ExampleModel(loss=self.loss, predictor=self.predict, **settings)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the parameter tree that `loss` and `predict` take, with the trained values from a model file."""
        tree = self.parameter_tree()
        return tree.whole(tree.read(arrays), tree.frozen)

    def zeros(self, shape: tuple[int, ...], whole: bool) -> Any:
        import jax.numpy as jnp

        return jnp.zeros(shape, jnp.int32 if whole else jnp.float32)

    def call(self, function: Callable[..., Any], tree: ParameterTree, example: Mapping[str, Any]) -> Any:
        """Traces the function without computing anything."""
        import jax

        def traced(trained: Any, frozen: Any) -> Any:
            more = [jax.random.key(0, impl="threefry2x32")] if function is self.loss else []
            return function(tree.whole(trained, frozen), example, *more)

        return jax.eval_shape(traced, tree.trained, tree.frozen)

    def probabilities(self, tree: ParameterTree, example: Mapping[str, npt.NDArray[Any]]) -> Any:
        assert self.predict is not None
        return np.asarray(self.predict(tree.whole(tree.trained, tree.frozen), example))
