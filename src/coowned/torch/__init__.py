"""Training PyTorch modules with a guarantee for every user; needs the extra `coowned[torch]`.

Guarantees:
  - Without PyTorch every name here raises `MissingExtraError`, which says what to install.
    (test_without_torch_it_says_what_to_install)
"""

import importlib
from typing import TYPE_CHECKING, Any

from coowned.errors import require

if TYPE_CHECKING:
    from coowned.torch.model import TorchModel as TorchModel
    from coowned.torch.runs import batches as batches
    from coowned.torch.runs import fit as fit
    from coowned.torch.runs import load_trained as load_trained
    from coowned.torch.runs import train as train

__all__ = ["TorchModel", "batches", "fit", "load_trained", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'coowned.torch' has no attribute {name!r}")
    require("torch", "coowned.torch")
    module = importlib.import_module("coowned.torch.model" if name == "TorchModel" else "coowned.torch.runs")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
