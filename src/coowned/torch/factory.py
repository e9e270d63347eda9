"""`[model] kind = "torch"`: a PyTorch model that a function in a file of one's own makes."""

import dataclasses
from typing import Any, ClassVar

from coowned.torch.module_model import linear_stand_in
from coowned.training.model import Model
from coowned.training.models.python_model import PythonModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFactory(PythonModel):
    """Names a function that gives a `TorchModel`; everything else is as `PythonModel` says."""

    kind: ClassVar[str] = "torch"
    gives: ClassVar[str] = "coowned.torch.TorchModel"

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """A stand-in for audits, with the same parameters and microbatch, that takes the same steps in PyTorch."""
        shapes = {name: tuple(shape) for name, shape in described["parameters"].items()}
        return linear_stand_in(shapes, described["microbatch"])
