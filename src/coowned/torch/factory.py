"""`[model] kind = "torch"`: a PyTorch model that a function in a file of one's own makes."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from coowned.extras import require
from coowned.torch.module_model import linear_stand_in
from coowned.training.model import Model
from coowned.training.models.example_specification import ExampleSpecification
from coowned.training.models.python_model import PythonModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFactory(PythonModel):
    """Names a function that gives a `TorchModel`; everything else is as `PythonModel` says."""

    kind: ClassVar[str] = "torch"
    returns: ClassVar[str] = "coowned.torch.TorchModel"

    def load(self, folder: Path) -> tuple[ExampleSpecification, bytes]:
        require("torch", "a model of kind 'torch'")
        return super().load(folder)

    def usage(self) -> str:
        return (
            "`model.safetensors` holds the trained parameters under the names that the module's `state_dict()` has; "
            "what was frozen is not in it:\n\n"
            "```python\n"
            "from safetensors.torch import load_file\n\n"
            'parameters = load_file("model.safetensors")  # module.load_state_dict(parameters, strict=False)\n'
            "print({name: tuple(tensor.shape) for name, tensor in parameters.items()})\n"
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """A stand-in for audits, with the same parameters and microbatch, that takes the same steps in PyTorch."""
        require("torch", "the audit of a PyTorch model")
        shapes = {name: tuple(shape) for name, shape in described["parameters"].items()}
        return linear_stand_in(shapes, described["microbatch"])
