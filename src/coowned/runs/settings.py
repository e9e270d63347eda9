"""The sections of a configuration, which are also groups of arguments of `fit`, and its keywords outside of them."""

import dataclasses
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from coowned import validate
from coowned.accounting.terms import ADJACENCIES, check_terms, refuse_large_delta
from coowned.attribution.options import DataOptions
from coowned.errors import InputError
from coowned.mechanism.registry import mechanism_class, mechanisms
from coowned.progress import Progress, did_you_mean
from coowned.training.optimizers import OptimizerOptions

MOST_ITERATIONS = 10**9
USUAL_OPTIMIZER = "adam"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(DataOptions):
    """The data source, how to read it, and the fractions for training, validation and test."""

    path: str | None = None  # of a run whose data were in memory
    splits: list[float] | None = None
    shards: str | None = None  # a folder that `coowned select --shards` wrote, in place of the data

    def __post_init__(self) -> None:
        validate.local_path(shards=self.shards)
        if self.shards is not None:
            others = [name for name, value in vars(self).items() if value and name not in ("shards", "splits")]
            if others:
                raise InputError(f"shards say what was read, and how; remove {', '.join(others)}")
        if self.path == "":
            raise InputError("path is empty; name a file or folder")
        validate.column_names(users=self.users)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """The selector of S, with its `settings`; None for the best one that a plan finds.

    Attributes:
      path: of an S that was chosen before, in place of a selector.
    """

    selector: str | None
    seed: int
    settings: dict[str, Any]
    path: str | None = None

    def __post_init__(self) -> None:
        validate.local_path(path=self.path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """The promised privacy; `epsilon = "none"` and `public = true` promise nothing.

    Example:
      >>> PrivacySettings(noise_multiplier=1.0, delta=1e-6, adjacency="zero-out").is_private
      True
    """

    epsilon: float | dict[str, float] | str | None = None  # a dict: for each tier by name
    noise_multiplier: float | None = None
    delta: float | None = None
    adjacency: str | None = None  # a file's default is "zero-out"; in Python there is none
    simulated_batch_size: int | None = None
    public: bool = False
    allow_large_delta: bool = False

    @property
    def is_private(self) -> bool:
        return not self.public and self.epsilon != "none"

    def __post_init__(self) -> None:
        adjacency = ADJACENCIES[0] if self.adjacency is None else self.adjacency
        check_terms(adjacency=adjacency, delta=self.delta)
        if not self.is_private:
            for key in ("noise_multiplier", "simulated_batch_size"):
                if getattr(self, key) is not None:
                    raise InputError(f"{key} does not apply without a guarantee; remove it")
            if self.public and self.epsilon is not None:
                raise InputError("public data have no epsilon; remove it")
            return
        if isinstance(self.epsilon, str):
            raise InputError(f'epsilon must be a number, or "none" for no guarantee, not {self.epsilon!r}')
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InputError("needs exactly one of epsilon and noise_multiplier, or public = true")
        if self.adjacency is None:
            raise InputError("adjacency is required: 'zero-out' or 'replace'")
        check_terms(adjacency=adjacency, epsilon=self.epsilon, noise_multiplier=self.noise_multiplier)
        if self.delta is None:
            raise InputError("needs delta: the probability that the guarantee may fail, far below 1 / users")
        refuse_large_delta(self.delta, allow_large_delta=self.allow_large_delta)
        if self.simulated_batch_size is not None:
            validate.positive(simulated_batch_size=self.simulated_batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismSettings:
    """The sampling of batches and the noise.

    Attributes:
      kind: "dp-sgd", "dp-mf", "cyclic-dp-mf" or "random-allocation".
      batch_size, iterations: expected and public; number of steps.
      clip_norm: longest gradient of one copy; None only without a guarantee.
      num_bands, min_separation: of the correlated noise, and of the schedule it is made for.
    """

    kind: str | None = None
    batch_size: int | None = None
    iterations: int | None = None
    clip_norm: float | None = None
    num_bands: int | None = None
    min_separation: int | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and all(known.training_kind != self.kind for known in mechanisms()):
            validate.one_of(tuple(known.training_kind for known in mechanisms()), kind=self.kind)
        if self.batch_size is not None:
            validate.positive(batch_size=self.batch_size)
        if self.iterations is not None:
            validate.integer(at_least=1, at_most=MOST_ITERATIONS, iterations=self.iterations)
        if self.clip_norm is not None:
            validate.in_range(0, math.inf, open_low=True, clip_norm=self.clip_norm)
        limit, limit_name = self.iterations, "iterations"
        for key in ("min_separation", "num_bands"):
            value = getattr(self, key)
            if value is None:
                continue
            if self.kind is not None and key not in mechanism_class(self.kind).options:
                raise InputError(f"{key} does not apply to {self.kind}; remove it or use dp-mf")
            validate.positive(**{key: value})
            if limit is not None and value > limit:
                raise InputError(f"{key} ({value}) must be at most {limit_name} ({limit})")
            limit, limit_name = value, key

    @property
    def sizes(self) -> tuple[str, int, int]:
        """Kind, batch size and iterations, which every run has."""
        found = (self.kind, self.batch_size, self.iterations)
        for key, value in zip(("kind", "batch_size", "iterations"), found, strict=True):
            if value is None:
                raise InputError(f"needs the key {key!r}")
        return found  # pyright: ignore[reportReturnType]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(OptimizerOptions):
    """Any optimizer of optax that needs only a learning rate, with the options of `OptimizerOptions`.

    Attributes:
      name: in optax; "adam" by default.
      learning_rate: of the steps that are not part of a rise or fall.

    Example:
      >>> Optimizer(learning_rate=0.1, decay="cosine").filled().options()
      {'decay': 'cosine'}
    """

    name: str | None = None
    learning_rate: float | None = None
    decay: str | None = None
    average: str | None = None

    def __post_init__(self) -> None:
        filled = self.filled(learning_rate=1.0)
        assert filled.name is not None
        assert filled.learning_rate is not None
        filled.check_options(filled.name, filled.learning_rate)

    def filled(self, **chosen: Any) -> "Optimizer":
        """Returns the settings with missing values taken from `chosen`, or else the usual ones."""
        usual = {"name": USUAL_OPTIMIZER, "decay": "constant", "average": "none"} | chosen
        values = {name: value for name, value in usual.items() if getattr(self, name) is None}
        # Checked already where nothing is left to fill in.
        return dataclasses.replace(self, **values) if values else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of how the run is carried out; a seed makes it a test run.

    Attributes:
      baseline: train the same model a second time, without privacy on the same batches, to compare evaluations with.
    """

    seed: int | None = None
    checkpoint_every: int | None = None
    devices: int = 1
    baseline: bool = False

    def __post_init__(self) -> None:
        validate.positive(devices=self.devices)
        if self.checkpoint_every is not None:
            validate.positive(checkpoint_every=self.checkpoint_every)
        if self.seed is not None:
            validate.seed(self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportSettings:
    """Texts for the report of the run; nothing else depends on them."""

    name: str = ""
    purpose: str = ""
    owner: str = ""


SECTIONS: dict[str, Any] = {
    "data": DataSettings,
    "selection": SelectionSettings,
    "privacy": PrivacySettings,
    "mechanism": MechanismSettings,
    "optimizer": Optimizer,
    "run": RunSettings,
    "report": ReportSettings,
}
"""The settings of every section but `[model]`, which are those of a specification."""


class FitKeywords(TypedDict, total=False):
    """Keywords of `fit` beside its groups: short forms of frequent keys, and callbacks.

    A key that is to be given in short is declared here, and in `_SHORT` with its section.
    """

    batch_size: int | None
    iterations: int | None
    clip_norm: float | None
    learning_rate: float | None
    splits: Sequence[float] | None
    selection_seed: int
    seed: int | None
    processes: int
    progress: Progress | None
    on_metrics: Callable[[dict[str, Any]], object] | None


GROUPS: dict[str, Any] = {
    "privacy": PrivacySettings,
    "mechanism": MechanismSettings,
    "optimizer": Optimizer,
    "run": RunSettings,
}
"""The arguments of `fit` that are groups, each with the settings of the section of its name."""
_SHORT = {
    "epsilon": "privacy",
    "delta": "privacy",
    "adjacency": "privacy",
    "batch_size": "mechanism",
    "iterations": "mechanism",
    "clip_norm": "mechanism",
    "learning_rate": "optimizer",
    "splits": "data",
    "seed": "run",
}
_WORDS = {"mechanism": "kind", "optimizer": "name"}  # the key that a plain word in place of a group stands for
_NO_KEYS = ("selection_seed", "processes", "progress", "on_metrics")


def sections_of(groups: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections that groups and keywords of `fit` describe, as plain values; None means not given.

    Guarantees:
      - A key that is given twice, differently, is refused.   (test_what_is_given_twice_is_refused)
      - A keyword that has moved warns of its new place, and means the same.   (test_moved_keywords_warn)
      - An unknown keyword is refused as Python does, with the nearest one.   (test_unknown_keywords)

    Args:
      groups: by section: its settings, or the word that says most of them; None where it was not given.
      keywords: by name, in short for one key.
    """
    sections: dict[str, dict[str, Any]] = {"data": {}}
    for name, kind in GROUPS.items():
        sections[name] = _keys(name, kind, groups.get(name))
    for name, value in keywords.items():
        if name in _NO_KEYS:
            continue
        section = _SHORT.get(name) or _moved_to(name)
        given = sections[section].get(name)
        if value is not None and given is not None and value != given:
            group = GROUPS[section].__name__
            raise InputError(f"{name} is {value!r}, but {section}={group}(...) has {given!r}; omit one of them")
        if value is not None:
            sections[section][name] = value
    return sections


def _keys(name: str, kind: type, group: Any) -> dict[str, Any]:
    """Returns the keys of a group that differ from the default."""
    if group is None:
        return {}
    if isinstance(group, str) and name in _WORDS:
        return {_WORDS[name]: group}
    if not isinstance(group, kind):
        word = " or a word" if name in _WORDS else ""
        raise InputError(f"{name} must be {kind.__name__}(...){word}, not {group!r}")
    fields = ((field.name, field.default) for field in dataclasses.fields(kind))
    return {name: value for name, default in fields if (value := getattr(group, name)) != default}


def _moved_to(name: str) -> str:
    """Returns the group that a keyword of earlier releases has moved to, and warns of it."""
    for section, kind in GROUPS.items():
        if name in {field.name for field in dataclasses.fields(kind)}:
            warnings.warn(
                f"fit({name}=...) is deprecated and will be removed in the next release; write "
                f"{section}=co.{kind.__name__}({name}=...)",
                DeprecationWarning,
                stacklevel=_stack_level(),
            )
            return section
    near = did_you_mean(name, [*FitKeywords.__annotations__, *GROUPS])
    raise TypeError(f"fit() got an unexpected keyword argument {name!r}{near}")


def _stack_level() -> int:
    """Returns the `stacklevel` for `warnings.warn` that points outside of this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "coowned":
        frame, level = frame.f_back, level + 1
    return level
