"""`[model] kind = "python"`: a model made by a function in the user's own file."""

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import pyarrow as pa

from coowned.errors import ConfigError, InputError
from coowned.models.example_model import linear_stand_in
from coowned.models.example_specification import ExampleSpecification
from coowned.models.model import Model, Specification, Task

STORED_SOURCE = "model.py"  # the factory's file in the folder of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonModel(Specification):
    """A reference to a function that returns a `JaxModel`: "module:function", beside the configuration or installed.

    The file it is in is kept in the run's folder, and its digest in the run's record.

    Guarantees:
      - A run is not resumed with another file, arguments or program.   (test_changed_file_is_not_resumed)
      - A finished run predicts with the file it was trained with, wherever the folder is.   (test_run_keeps_its_file,
        test_moved_run_predicts)
      - A file that was changed in the run's folder is refused before it runs.   (test_changed_code_is_refused)
    What it is not: for files of strangers. Training, predicting and evaluating run the code in them.

    Attributes:
      factory: "module:function", or "path/to/file.py:function"; None in the folder of a run whose functions were given
        in memory.
      arguments: that the function is called with, by name.
    """

    kind: ClassVar[str] = "python"
    returns: ClassVar[str] = "coowned.JaxModel"
    factory: str | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        module, _, function = (self.factory or "module:function").rpartition(":")
        if not module or not function.isidentifier():
            raise InputError(f'factory must be "module:function", not {self.factory!r}')

    def task(self, schema: pa.Schema, *, folder: Path, is_private: bool, labels: bool = True) -> Task:
        specification, source = self.load(folder)
        task = specification.task(schema, folder=folder, is_private=is_private, labels=labels)
        return dataclasses.replace(task, files={**task.files, STORED_SOURCE: source})

    def load(self, folder: Path) -> tuple[ExampleSpecification, bytes]:
        """Returns (the function's result, the content of its file)."""
        if self.factory is None:
            raise InputError(
                "the functions of this model were passed in memory and are not in the run's folder; pass the model "
                'again, open_run(folder, model=...), or train from a file: factory = "module:function"'
            )
        name, _, function = self.factory.rpartition(":")
        with _importing_from(folder):
            module, file = _module(name, folder)
            source = file.read_bytes()
            make = getattr(module, function, None)
            if not callable(make):
                raise ConfigError(
                    f"{file}: has no function {function!r}; [model] factory must name one that returns a {self.returns}"
                )
            specification = make(**self.arguments)
        if not isinstance(specification, ExampleSpecification) or specification.kind != self.kind:
            raise ConfigError(f"{file}: {function}() must return a {self.returns}, not {type(specification).__name__}")
        origin = {"factory": function, "arguments": self.arguments, "source": hashlib.sha256(source).hexdigest()}
        return dataclasses.replace(specification, origin=origin), source

    def from_run(self, folder: Path) -> Self:
        if self.factory is None:
            return self
        _, _, function = self.factory.rpartition(":")
        return dataclasses.replace(self, factory=f"{folder.absolute() / STORED_SOURCE}:{function}")

    def usage(self) -> str:
        if self.factory is None:
            return super().usage()
        _, _, function = self.factory.rpartition(":")
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        return (
            f"`{STORED_SOURCE}` is the file that made the model, as it was when the model was trained; what it imports "
            "must be installed or beside it. `model.predict(parameters, example)` is what it says of one example, a "
            "dictionary of arrays.\n\n"
            "```python\n"
            "import jax\n"
            f"from {Path(STORED_SOURCE).stem} import {function}\n"
            "from safetensors.numpy import load_file\n\n"
            f"model = {function}({arguments})\n"
            'parameters = model.with_arrays(load_file("model.safetensors"))\n'
            'print(jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), parameters))\n'
            "```\n"
        )

    @classmethod
    def from_description(cls, **described: Any) -> Model:
        """Returns a stand-in for audits, with the same parameters and microbatch: descriptions contain no functions."""
        return linear_stand_in(described["parameters"], described["microbatch"])


@contextlib.contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Puts the folder first on the module search path while the context lasts."""
    entry = str(folder.absolute())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _module(name: str, folder: Path) -> tuple[ModuleType, Path]:
    """Returns the module and its file: a file by its path or beside the configuration, else an installed module."""
    file = folder / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")
    if not file.is_file():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"[model] factory: {file} is not a file, and {name!r} cannot be imported ({error})"
            ) from error
        if not getattr(module, "__file__", None):
            raise ConfigError(f"[model] factory: {name!r} is not one file; give the module that contains the function")
        return module, Path(str(module.__file__))
    # Another name for every content: two runs in one process may have files of one name.
    module_name = f"coowned_factory_{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # as dataclasses and others look it up while it runs
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ConfigError(f"{file}: {error}; what it imports must be installed, or beside it") from error
    return module, file
