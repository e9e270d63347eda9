"""The configuration of a training run: a TOML file in which unknown keys are errors."""

import dataclasses
import functools
import itertools
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa

from coowned import codec, validate
from coowned.accounting.covered import CoveredEvaluation
from coowned.accounting.terms import ADJACENCIES
from coowned.attribution.sources import DataSource, resolve_path
from coowned.errors import ConfigError, InputError
from coowned.exact.grid import CLIP_NORMS
from coowned.models.model import Specification, Task
from coowned.models.registry import MODELS, USUAL_MODEL, model_class
from coowned.runs.settings import (
    DataSettings,
    MechanismSettings,
    Optimizer,
    PrivacySettings,
    ReportSettings,
    RunSettings,
    SelectionSettings,
)
from coowned.selection.registry import CLASSES, needs_bound_alone, selector_class
from coowned.selection.shards import SELECTION

_REMEDY = "`coowned train --example` prints a configuration to start from"
USUAL_SELECTOR = "greedy"  # where settings are given without it
GIVEN = "given"  # in place of a selector's word: S is in a file, or `fit` was given it, or a selector of one's own
_OF_ALL_SELECTORS = ("selector", "seed", "path")
_REASONS = "# Chosen from the graph and public numbers alone:\n"
_REASON = "# - "
_SECTIONS = ("data", "selection", "privacy", "mechanism", "model", "optimizer", "evaluation", "run", "report")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A complete configuration, checked as far as possible without the data.

    Guarantees:
      - An unknown section or key is an error that names the nearest known one.   (test_unknown_keys_name_the_nearest)
      - Wrong types, missing keys and contradictions are errors that say where.   (test_wrong_values)
      - The digest is that of the values; comments, order and [report] do not matter.   (test_digest_is_of_the_values)

    Example:
      >>> config = TrainConfig.from_toml(example())
      >>> config.mechanism.kind, config.privacy.epsilon
      ('dp-sgd', 8.0)
    """

    data: DataSettings
    selection: SelectionSettings
    privacy: PrivacySettings
    mechanism: MechanismSettings
    model: Specification
    optimizer: Optimizer
    evaluation: CoveredEvaluation | None  # None: nothing but the model is covered
    run: RunSettings
    report: ReportSettings
    folder: Path  # what relative paths are relative to
    text: str = dataclasses.field(default="", repr=False, compare=False)  # the file as it was written
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)  # as plain values

    def __post_init__(self) -> None:
        if self.run.baseline and not self.privacy.is_private:
            raise ConfigError("[run] baseline: a run without privacy is its own baseline; remove it")
        if self.evaluation is not None and not self.privacy.is_private:
            raise ConfigError("[evaluation]: a run without a guarantee covers nothing; remove the section")
        if self.evaluation is not None and self.splits[2] == 0:
            raise ConfigError("[evaluation]: the test split is empty; give it a share of [data] splits")

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, allow_large_delta: bool = False) -> "TrainConfig":
        """Reads a file; relative paths in it are relative to its folder.

        Args:
          allow_large_delta: the default of that key in `[privacy]`.
        """
        text, folder = _bytes(path), Path(path).parent
        if not allow_large_delta:
            return cls.from_toml(text, folder=folder, name=str(path))
        sections = _parse(text, str(path))
        if isinstance(privacy := sections.get("privacy"), dict):
            sections["privacy"] = {"allow_large_delta": True} | privacy
        return cls.from_sections(sections, folder=folder, name=str(path))

    @classmethod
    def read_sections(cls, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Reads the sections of a file as plain values, unchecked."""
        return _parse(_bytes(path), str(path))

    @property
    def user_bounds(self) -> Any:
        """The bounds of single users as a selector takes them; None where there are none."""
        bounds = self.selection.settings.get("contribution_bounds")
        return resolve_path(self.folder, bounds) if isinstance(bounds, str) else bounds

    @classmethod
    def from_toml(
        cls, text: str | bytes, *, folder: str | os.PathLike[str] = ".", name: str = "configuration"
    ) -> "TrainConfig":
        """Parses the text of a configuration; `name` is used in errors."""
        config = cls.from_sections(_parse(text, name), folder=folder, name=name)
        return dataclasses.replace(config, text=text if isinstance(text, str) else text.decode())

    @classmethod
    def from_sections(
        cls,
        sections: Mapping[str, Any],
        *,
        model: Specification | None = None,
        folder: str | os.PathLike[str] = ".",
        name: str = "configuration",
    ) -> "TrainConfig":
        """Builds a configuration from plain values by section and key, and checks it.

        Args:
          sections: None leaves a key out.
          model: the specification that `[model]` describes, if there is one already.
          folder: what relative paths are relative to.
          name: what errors call the configuration.
        """
        written = {key: _given_values(section) for key, section in codec.to_plain(sections).items()}
        if isinstance(privacy := written.get("privacy"), dict):
            written["privacy"] = {"adjacency": ADJACENCIES[0]} | privacy
        _give_selection_of_shards(written, name)
        path = _word(written, "selection", "path")
        if path is not None and (others := sorted(set(written["selection"]) - {"path", "seed"})):
            raise ConfigError(f"{name}: [selection] path is an S that was chosen before; remove {', '.join(others)}")
        file: Any = codec.decode_sections(_file_type(written), written, name=name, error=ConfigError, remedy=_REMEDY)
        read: dict[str, Any] = {section: getattr(file, section) for section in _SECTIONS}
        given = written.get("selection", {})
        settings = {key: getattr(file.selection, key) for key in given if key not in _OF_ALL_SELECTORS}
        usual = GIVEN if path is not None else USUAL_SELECTOR if settings else None
        selector = usual if file.selection.selector is msgspec.UNSET else file.selection.selector
        read["selection"] = SelectionSettings(selector=selector, seed=file.selection.seed, settings=settings, path=path)
        if file.optimizer.learning_rate is not None:  # otherwise the schedule is chosen together with it
            read["optimizer"] = file.optimizer.filled()
        kind = model_class(file.model.kind)
        fields = {field.name: getattr(file.model, field.name) for field in dataclasses.fields(kind)}
        read["model"] = kind(**fields) if model is None else model
        if file.privacy.is_private and file.mechanism.clip_norm is not None:
            try:
                validate.in_range(*CLIP_NORMS, clip_norm=file.mechanism.clip_norm)
            except InputError as error:
                raise ConfigError(f"{name}: [mechanism] {error}; it limits the gradient of one copy") from None
        return cls(**read, folder=Path(folder), text=codec.encode_toml(written), sections=written)

    @functools.cached_property
    def left_out(self) -> dict[str, list[str]]:
        """Keys that a run needs and the configuration omits, by section; `runs.defaults` chooses them."""
        selection, needed = self.selection, ["kind", "batch_size", "iterations"]
        by_bound = needs_bound_alone(selection.selector) and "contribution_bound" not in selection.settings
        keys = {
            "selection": ["contribution_bound"] if by_bound else [],
            "mechanism": [*needed, "clip_norm"] if self.privacy.is_private else needed,
            "optimizer": ["name", "learning_rate", "decay", "average"] if self.optimizer.learning_rate is None else [],
        }
        if selection.selector is None:
            keys["selection"] = ["selector", "contribution_bound"]
        for section in ("mechanism", "optimizer"):
            keys[section] = [key for key in keys[section] if getattr(getattr(self, section), key) is None]
        return {section: found for section, found in keys.items() if found}

    def with_keys(self, chosen: Mapping[str, Mapping[str, Any]], reasons: Sequence[str] = ()) -> "TrainConfig":
        """Returns the configuration with these keys added, by section, and the reasons as comments above its text."""
        sections = dict(self.sections)
        for name, section in chosen.items():
            sections[name] = {**sections.get(name, {}), **section}
        found = TrainConfig.from_sections(sections, model=self.model, folder=self.folder)
        header = _REASONS + "".join(f"{_REASON}{reason}\n" for reason in reasons) if reasons else ""
        return dataclasses.replace(found, text=f"{_comments(self.text)}{header}\n{found.text}")

    def completed_as(self, stored: "TrainConfig") -> "TrainConfig":
        """Returns the configuration with omitted keys, and the reasons, taken from another one that is complete."""
        chosen = {
            section: {key: value for key, value in stored.sections.get(section, {}).items() if key in keys}
            for section, keys in self.left_out.items()
        }
        return self.with_keys(chosen, reasons_in(stored.text)) if chosen else self

    @property
    def splits(self) -> list[float]:
        """The fractions of train, validation and test."""
        return list(self.model.splits) if self.data.splits is None else self.data.splits

    def task(self, schema: pa.Schema) -> Task:
        """Returns the training task for data of this schema; any error that the schema can cause is raised here."""
        # A public run, too, must not start from a private model: its own would then be taken for public.
        claims = self.privacy.is_private or self.privacy.public
        return self.model.task(schema, folder=self.folder, is_private=claims)

    def source(self) -> DataSource:
        """Returns the data source."""
        if self.data.shards is not None:
            raise ConfigError("[data] shards hold a part of the data; set path to all of them in their place")
        if self.data.path is None:
            raise ConfigError("[data] has no path: the data of this run were in memory; set it to a file or folder")
        fields = {
            name: value
            for name, value in vars(self.data).items()
            if name not in ("splits", "shards") and value is not None
        }
        for name in ("path", "aliases", "unprotected"):
            if name in fields:
                fields[name] = resolve_path(self.folder, fields[name])
        return DataSource(**fields)

    @property
    def digest(self) -> str:
        """A digest of the values, but not of the path: the data have a digest of their own."""
        values = {name: getattr(self, name) for name in _SECTIONS if name != "report"}
        if self.evaluation is None:
            del values["evaluation"]
        return codec.checksum(values | {"model": self.model.settings()})


def _bytes(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a configuration file") from error


def _parse(text: str | bytes, name: str) -> dict[str, Any]:
    return codec.decode_toml(dict[str, Any], text, name=name, error=ConfigError, remedy=_REMEDY)


def _comments(text: str) -> str:
    """Returns the lines of comments that a configuration begins with."""
    return "".join(itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))


def _given_values(section: Any) -> Any:
    """Returns a section without the keys that are None; values that are not sections are rejected later."""
    return {key: value for key, value in section.items() if value is not None} if isinstance(section, dict) else section


def _word(sections: Mapping[str, Any], section: str, key: str) -> Any:
    """Returns the word that decides which keys a section has; None if it is absent."""
    found = sections.get(section)
    return found.get(key) if isinstance(found, dict) else None


def _give_selection_of_shards(sections: dict[str, Any], name: str) -> None:
    """Adds the S that shards bring along."""
    shards = _word(sections, "data", "shards")
    if isinstance(shards, str):
        own = {"path": f"{shards.rstrip('/')}/{SELECTION}"}
        if sections.get("selection", own) != own:
            raise ConfigError(f"{name}: [data] shards bring their S along; remove [selection]")
        sections["selection"] = own


def _file_type(sections: Mapping[str, Any]) -> type[Any]:
    """Returns the type of a configuration with this selector and kind of model."""
    needed: list[Any] = [("data", DataSettings), ("privacy", PrivacySettings)]
    has_path = _word(sections, "selection", "path") is not None
    selection = _selection_type(GIVEN if has_path else _word(sections, "selection", "selector"))
    # A section without needed keys may be left out.
    optional: list[Any] = [
        (name, section, msgspec.field(default_factory=section))
        for name, section in (
            ("selection", selection),
            ("mechanism", MechanismSettings),
            ("optimizer", Optimizer),
            ("run", RunSettings),
            ("report", ReportSettings),
        )
    ]
    optional.append(("evaluation", CoveredEvaluation | None, None))
    model = _model_type(_word(sections, "model", "kind") or USUAL_MODEL)
    model_field = ("model", model) if sections.get("model") else ("model", model, msgspec.field(default_factory=model))
    return msgspec.defstruct("Configuration", [*needed, model_field, *optional], kw_only=True)


def _model_type(word: Any) -> type[Any]:
    """Returns the specification class of a kind of model, tagged with its word."""
    known = isinstance(word, str) and word in MODELS
    words = Literal[tuple(MODELS)]  # pyright: ignore[reportInvalidTypeForm]
    fields = [("kind", words, dataclasses.field(default=USUAL_MODEL))]
    base = model_class(word if known else USUAL_MODEL)
    return dataclasses.make_dataclass("ModelSection", fields, bases=(base,), frozen=True, kw_only=True)


def _selection_type(word: Any) -> type[Any]:
    """Returns the type of [selection]: selector, seed and settings, except a schedule's shape, set by [mechanism]."""
    # GIVEN is written by `fit`; a file cannot choose it, so no error offers it.
    words = Literal[(GIVEN,) if word == GIVEN else tuple(CLASSES)]  # pyright: ignore[reportInvalidTypeForm]
    fields: list[Any] = [("selector", words, msgspec.UNSET), ("seed", int, 0), ("path", str | None, None)]
    kind = selector_class(word if isinstance(word, str) and word in CLASSES else USUAL_SELECTOR)
    hints = typing.get_type_hints(kind)
    for field in () if word == GIVEN else dataclasses.fields(kind):
        if field.name not in ("batch_size", "iterations", "min_separation"):
            default = () if field.default is dataclasses.MISSING else (field.default,)
            if field.name == "contribution_bound" and kind.bound_is_enough:
                default = (msgspec.UNSET,)  # it can be chosen
            fields.append((field.name, hints[field.name], *default))
    return msgspec.defstruct("Selection", fields, kw_only=True)


def reasons_in(text: str) -> tuple[str, ...]:
    """Returns the reasons that `TrainConfig.with_keys` wrote into a configuration; () if nothing was omitted.

    >>> reasons_in(_REASONS + "# - [mechanism] clip_norm = 0.5: because.")
    ('[mechanism] clip_norm = 0.5: because.',)
    """
    _, found, after = text.partition(_REASONS)
    lines = after.splitlines() if found else []
    return tuple(line.removeprefix(_REASON) for line in lines if line.startswith(_REASON))


def example() -> str:
    """Returns a commented configuration, as `coowned train --example` prints it."""
    return _EXAMPLE


_EXAMPLE = """\
# A training run of coowned, from data to model:   coowned train this-file.toml -o RUN
# Run the same command again to resume after an interruption. Relative paths are relative to this file.

[data]
path = "papers.parquet"          # Parquet, CSV, JSONL, mail or arXiv metadata
# format = "parquet"             # by default from the suffix, then the content
users = "users"                  # the column (or columns: ["from", "to"]) that name an example's users
example_id = "example_id"        # default: the row number. Must not depend on content
# separator = ";"                # between two users in one cell
# aliases = "aliases.csv"        # several keys of one person
# unprotected = "consent.txt"    # keys of users who are not to be protected
splits = [0.8, 0.1, 0.1]         # train, validation, test, by a hash of the id

[selection]
# path = "S.parquet"             # instead of a selector: what `coowned select --splits 0.8,0.1,0.1` chose before
selector = "greedy"              # see `coowned select --help`; dp-mf needs greedy-min-separation
contribution_bound = 2           # most selected copies that contain one user
seed = 0                         # public; breaks ties in the order

[privacy]
epsilon = 8.0                    # or noise_multiplier = ...; or epsilon = "none" or public = true for no guarantee
delta = 1e-6                     # far below 1 / users; 0.1 or more only with allow_large_delta = true
adjacency = "zero-out"           # or "replace"

[mechanism]
kind = "dp-sgd"                  # or "dp-mf" (correlated noise over a schedule), or "cyclic-dp-mf" (the same with
                                 # sampling; needs the selector cyclic-groups with num_groups), or
                                 # "random-allocation" (contribution_bound = 1; every copy once per epoch)
batch_size = 256                 # expected and public: gradients are divided by it
iterations = 500
clip_norm = 1.0                  # largest gradient norm of one copy
# num_bands = 8                  # dp-mf: at most min_separation (default: equal to it); cyclic-dp-mf: num_groups
# min_separation = 8             # dp-mf: default: the largest that fits

[model]
kind = "logistic-regression"     # or linear-regression, text-classifier, bert-classifier, bert-masked-lm, or python for
                                 # a model of your own: docs/training.md, docs/own-models.md
features = "features"            # one list column, or ["x1", "x2", ...]
# num_features = 100             # numbers in a list; needed unless the column's type is a fixed-size list
label = "label"                  # 0 or 1; other labels are declared: classes = ["spam", "ham"]

[optimizer]
name = "adam"                    # any optax optimizer that needs only a learning rate
learning_rate = 0.05
# warmup = 0.05                  # fraction of the steps in which the learning rate rises; it then falls by
# decay = "cosine"               # "linear" or "cosine" (default: "constant")
# final_rate = 0.0               # to this fraction of itself
# weight_decay = 0.01            # decoupled, as in AdamW
# momentum = 0.9                 # of sgd
# average = "tail"               # release the mean of the last iterates, or "exponential"; free by post-processing
# average_window = 0.25          # fraction of the steps that are averaged
# scale_gradients = true         # scale-then-privatize; not for linear models, nor for dp-mf

# [evaluation]                   # an accuracy that may be published: covered by the guarantee, paid for from epsilon
# epsilon_share = 0.1            # training alone has the rest
# contribution_bound = 1         # most copies of one user in the test split (default: the least that keeps 90%)
# loss_bound = 5.0               # also release the mean loss, each example's clipped at this
# confusion = true               # also release how often each class was taken for each

[run]
# seed = 0                       # TEST RUNS ONLY: with a seed noise and coins are known, and there is no guarantee
# checkpoint_every = 100         # steps (default: a twentieth of the run)
# baseline = true                # also train without privacy, for comparison: not covered, never exported
# devices = 1                    # on a CPU, 2 need XLA_FLAGS=--xla_force_host_platform_device_count=2

[report]                         # what `coowned report` says about the run
# name = "Folder classifier"
# purpose = "sorts incoming mail"
# owner = "mail team"
"""
