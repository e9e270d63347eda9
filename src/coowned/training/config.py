"""The configuration of a training run: one readable TOML file, in which an unknown key is an error."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coowned import validate
from coowned.accounting.terms import ADJACENCIES
from coowned.attribution.options import DataOptions
from coowned.attribution.sources import DataSource, beside
from coowned.errors import ConfigError, InputError
from coowned.mechanism.registry import MECHANISMS, mechanism_class
from coowned.training.optimizers import LEARNING_RATES, check_optimizer
from coowned.training.splits import TEXT_FRACTIONS, USUAL_FRACTIONS

CLIP_NORMS = (1e-20, 1e20)  # with a guarantee: sums need room
MOST_ITERATIONS = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSection(DataOptions):
    """Where the data are, how to read them, and which shares of them train, validate and test."""

    path: str
    splits: list | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionSection:
    """How S is chosen; `settings` are those of the selector."""

    selector: str
    seed: int
    settings: dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacySection:
    epsilon: float | str | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    adjacency: str = "zero-out"
    simulated_batch_size: int | None = None
    public: bool = False

    @property
    def is_private(self) -> bool:
        return not self.public and self.epsilon != "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismSection:
    kind: str
    batch_size: int
    iterations: int
    clip_norm: float | None = None
    num_bands: int | None = None
    min_separation: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogisticSection:
    """Columns of a logistic regression."""

    kind: str = "logistic-regression"
    features: str | list = "features"
    label: str = "label"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertSection:
    """A BERT that learns to fill in hidden words.

    Attributes:
      text: the column, or columns that are read one after another.
      vocabulary: a vocab.txt; default: the checkpoint's.
      checkpoint: a folder in Hugging Face's layout, or a finished run on public data, to start from.
      architecture: a config.json of another size than BERT-Tiny's, to start from scratch.
      lowercase: false for a vocabulary with capitals and accents ("cased").
      sequence_length: tokens of a text that are read.
      microbatch: examples that are differentiated at once: memory grows with it, results do not depend on it.
    """

    kind: str
    text: str | list = "text"
    vocabulary: str | None = None
    checkpoint: str | None = None
    architecture: str | None = None
    lowercase: bool = True
    sequence_length: int = 512
    microbatch: int | None = None


MODELS = {"logistic-regression": LogisticSection, "bert-masked-lm": BertSection}
ModelSection = LogisticSection | BertSection


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    learning_rate: float
    name: str = "adam"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSection:
    seed: int | None = None
    checkpoint_every: int | None = None
    devices: int = 1


_SECTIONS = {
    "data": DataSection,
    "selection": SelectionSection,
    "privacy": PrivacySection,
    "mechanism": MechanismSection,
    "model": MODELS,
    "optimizer": OptimizerSection,
    "run": RunSection,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole configuration, checked.

    Guarantees:
      - An unknown section or key is an error that names the nearest known one.   (test_unknown_keys_name_the_nearest)
      - Wrong types, missing keys and contradictions are errors that say where.   (test_wrong_values)
      - The digest is that of the values; comments and order do not matter.       (test_digest_is_of_the_values)

    Example:
      >>> config = TrainConfig.from_toml(example())
      >>> config.mechanism.kind, config.privacy.epsilon
      ('dp-sgd', 8.0)
    """

    data: DataSection
    selection: SelectionSection
    privacy: PrivacySection
    mechanism: MechanismSection
    model: ModelSection
    optimizer: OptimizerSection
    run: RunSection
    folder: Path  # what relative paths are relative to

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "TrainConfig":
        """Reads a file; relative paths in it are relative to its folder."""
        place = Path(path)
        try:
            text = place.read_text(encoding="utf-8")
        except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
            raise ConfigError(f"{place}: cannot be read ({error.strerror}); name a configuration file") from error
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: not UTF-8 text; name a configuration file") from None
        return cls.from_toml(text, folder=place.parent, name=str(place))

    @classmethod
    def from_toml(
        cls, text: str, *, folder: str | os.PathLike[str] = ".", name: str = "configuration"
    ) -> "TrainConfig":
        try:
            stored = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"{name}: not TOML ({error}); `coowned train --example` prints one to start from"
            ) from None
        for section, content in stored.items():
            if section not in _SECTIONS:
                raise ConfigError(f"{name}: there is no section [{section}]{_nearest(section, _SECTIONS)}")
            if not isinstance(content, dict):
                raise ConfigError(f"{name}: {section} must be a section [{section}] with keys, not one value")
        sections = {
            section: _read_section(section, kind, stored.get(section, {}), name) for section, kind in _SECTIONS.items()
        }
        config = cls(**sections, folder=Path(folder))
        try:
            config._check()
        except InputError as error:
            raise ConfigError(f"{name}: {error}") from None
        return config

    def _check(self) -> None:
        """What can be seen without the data: reading and selecting may take long."""
        if not self.data.path:
            raise ConfigError("[data] path is empty; name a file or folder")
        _check_names("data", "users", self.data.users)
        with _in_section("privacy"):
            self._check_privacy()
        with _in_section("mechanism"):
            self._check_mechanism()
        if isinstance(self.model, BertSection):
            with _in_section("model"):
                self._check_bert(self.model)
        else:
            _check_names("model", "features", self.model.features)
        with _in_section("optimizer"):
            check_optimizer(self.optimizer.name)
            validate.in_range(*LEARNING_RATES, learning_rate=self.optimizer.learning_rate)
        with _in_section("run"):
            validate.positive(devices=self.run.devices)
            if self.run.checkpoint_every is not None:
                validate.positive(checkpoint_every=self.run.checkpoint_every)
            if self.run.seed is not None:
                validate.seed(self.run.seed)

    def _check_privacy(self) -> None:
        privacy = self.privacy
        validate.one_of(ADJACENCIES, adjacency=privacy.adjacency)
        if privacy.delta is not None:
            validate.in_range(0, 1, open_low=True, open_high=True, delta=privacy.delta)
        if privacy.is_private:
            if isinstance(privacy.epsilon, str):
                raise ConfigError(
                    f'[privacy] epsilon must be a number, or "none" for no guarantee, not {privacy.epsilon!r}'
                )
            if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
                raise ConfigError("[privacy] needs exactly one of epsilon and noise_multiplier, or public = true")
            if privacy.epsilon is not None:
                validate.positive_number(epsilon=privacy.epsilon)
            else:
                validate.positive_number(noise_multiplier=privacy.noise_multiplier)
            if privacy.delta is None:
                raise ConfigError(
                    "[privacy] needs delta: the probability that the promise may fail, far below 1 / users"
                )
            if privacy.simulated_batch_size is not None:
                validate.positive(simulated_batch_size=privacy.simulated_batch_size)
        else:
            for key in ("noise_multiplier", "simulated_batch_size"):
                if getattr(privacy, key) is not None:
                    raise ConfigError(f"[privacy] {key} means nothing without a guarantee; leave it out")
            if privacy.public and privacy.epsilon is not None:
                raise ConfigError("[privacy] public data have no epsilon; leave it out")

    def _check_mechanism(self) -> None:
        mechanism = self.mechanism
        if mechanism.kind == "cyclic-dp-mf":
            raise ConfigError(
                "[mechanism] kind 'cyclic-dp-mf' needs a selection with groups, which no selector makes yet; train "
                "from Python with Selection.from_copies(..., groups=...), or use 'dp-sgd' or 'dp-mf'"
            )
        validate.one_of(tuple(known.training_kind for known in MECHANISMS), kind=mechanism.kind)
        validate.positive(batch_size=mechanism.batch_size)
        validate.integer(at_least=1, at_most=MOST_ITERATIONS, iterations=mechanism.iterations)
        if mechanism.clip_norm is not None:
            if self.privacy.is_private:
                validate.in_range(*CLIP_NORMS, clip_norm=mechanism.clip_norm)
            else:
                validate.in_range(0, math.inf, open_low=True, clip_norm=mechanism.clip_norm)
        elif self.privacy.is_private:
            raise ConfigError("[mechanism] needs clip_norm: the longest gradient one copy may add")
        for key in ("num_bands", "min_separation"):
            if getattr(mechanism, key) is not None and key not in mechanism_class(mechanism.kind).options:
                raise ConfigError(f"[mechanism] {key} means nothing for {mechanism.kind}; leave it out or use dp-mf")
        most, what = mechanism.iterations, "iterations"
        for key in ("min_separation", "num_bands"):
            value = getattr(mechanism, key)
            if value is not None:
                validate.positive(**{key: value})
                if value > most:
                    raise ConfigError(f"[mechanism] {key} ({value}) must be at most {what} ({most})")
                most, what = value, key

    def _check_bert(self, model: BertSection) -> None:
        validate.integer(at_least=3, sequence_length=model.sequence_length)
        _check_names("model", "text", model.text)
        if model.microbatch is not None:
            validate.positive(microbatch=model.microbatch)
        if model.vocabulary is None and model.checkpoint is None:
            raise ConfigError(
                "[model] needs vocabulary: a vocab.txt that was not made from the texts to be protected (BERT's own, "
                "say), or a checkpoint that has one"
            )
        if model.architecture is not None and model.checkpoint is not None:
            raise ConfigError("[model] a checkpoint has an architecture of its own; leave one of the two out")

    @property
    def splits(self) -> list[float]:
        """Shares of train, validation and test."""
        if self.data.splits is not None:
            return self.data.splits
        return list(TEXT_FRACTIONS if isinstance(self.model, BertSection) else USUAL_FRACTIONS)

    def path_of(self, name: str) -> Path:
        """A path of the file, seen from where the file is."""
        return self.folder / name

    def source(self) -> DataSource:
        """Where the data are read from."""
        fields = {
            field.name: getattr(self.data, field.name)
            for field in dataclasses.fields(self.data)
            if field.name != "splits" and getattr(self.data, field.name) is not None
        }
        for name in ("path", "aliases", "unprotected"):
            if name in fields:
                fields[name] = beside(self.folder, fields[name])
        return DataSource(**fields)

    @property
    def digest(self) -> str:
        """Names the values; the place of the file does not matter, since the data have a digest of their own."""
        values = {name: dataclasses.asdict(getattr(self, name)) for name in _SECTIONS}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _read_section(section: str, kind: Any, given: dict[str, Any], name: str) -> Any:
    if kind is SelectionSection:
        return _read_selection(given, name)
    if isinstance(kind, dict):  # the keys depend on the kind
        word = _typed(section, "kind", given.get("kind", next(iter(kind))), str, name)
        if word not in kind:
            raise ConfigError(f"{name}: [{section}] kind must be one of {', '.join(kind)}, not {word!r}")
        kind = kind[word]
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in given:
        if key not in fields:
            raise ConfigError(f"{name}: [{section}] has no key {key!r}{_nearest(key, fields)}")
    for key, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and key not in given:
            raise ConfigError(f"{name}: [{section}] needs the key {key!r}; `coowned train --example` shows all")
    return kind(**{key: _typed(section, key, value, fields[key].type, name) for key, value in given.items()})


def _read_selection(given: dict[str, Any], name: str) -> SelectionSection:
    """The keys beside selector and seed are the selector's own settings."""
    from coowned.selection.registry import CLASSES, selector_class

    word = _typed("selection", "selector", given.get("selector", "greedy"), str, name)
    if word not in CLASSES:
        raise ConfigError(f"{name}: there is no selector {word!r}{_nearest(word, CLASSES)}")
    own = {field.name: field for field in dataclasses.fields(selector_class(word))}
    # A schedule's shape is the mechanism's: it is said once, there.
    known = ["selector", "seed", *(key for key in own if key not in ("batch_size", "iterations", "min_separation"))]
    for key in given:
        if key not in known:
            raise ConfigError(f"{name}: [selection] has no key {key!r} for the selector {word}{_nearest(key, known)}")
    seed = _typed("selection", "seed", given.get("seed", 0), int, name)
    settings = {
        key: _typed("selection", key, value, own[key].type, name)
        for key, value in given.items()
        if key not in ("selector", "seed")
    }
    for key, field in own.items():
        if key in known and field.default is dataclasses.MISSING and key not in settings:
            raise ConfigError(f"{name}: [selection] needs the key {key!r} for the selector {word}")
    return SelectionSection(selector=word, seed=seed, settings=settings)


def _typed(section: str, key: str, value: Any, kind: Any, name: str) -> Any:
    kind = getattr(kind, "__origin__", kind) if hasattr(kind, "__metadata__") else kind
    choices = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    choices = [typing.get_origin(choice) or choice for choice in choices]
    if float in choices and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name}: [{section}] {key} is a whole number that no number can hold") from None
    if not any(type(value) is choice for choice in choices):
        words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
        wanted = " or ".join(words[choice] for choice in choices if choice in words)
        raise ConfigError(f"{name}: [{section}] {key} must be {wanted}, not {value!r}")
    return value


@contextlib.contextmanager
def _in_section(section: str) -> Iterator[None]:
    """An error about a value names the section it stands in."""
    try:
        yield
    except ConfigError:
        raise
    except InputError as error:
        raise ConfigError(f"[{section}] {error}") from None


def _check_names(section: str, key: str, names: str | list | None) -> None:
    if names is None:
        return
    listed = [names] if isinstance(names, str) else names
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise ConfigError(f"[{section}] {key} must name one column or more, not {names!r}")


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else f"; it knows {', '.join(known)}"


def example() -> str:
    """A commented configuration, as `coowned train --example` prints it."""
    return _EXAMPLE


_EXAMPLE = """\
# A training run of coowned, from data to model:   coowned train this-file.toml -o RUN
# Run the same command again to go on after an interruption. Relative paths are relative to this file.

[data]
path = "papers.parquet"          # Parquet, CSV, JSONL, mail or arXiv metadata
# format = "parquet"             # by default from the suffix, then the content
users = "users"                  # the column (or columns: ["from", "to"]) that name an example's users
example_id = "example_id"        # default: the row number. Must not be made from content
# separator = ";"                # between two users in one cell
# aliases = "aliases.csv"        # several keys of one person
# unprotected = "consent.txt"    # keys of users who are not to be protected
splits = [0.8, 0.1, 0.1]         # train, validation, test, by a hash of the id

[selection]
selector = "greedy"              # see `coowned select --help`; dp-mf takes greedy-min-separation
contribution_bound = 2           # most selected copies that contain one user
seed = 0                         # public; ties in the order

[privacy]
epsilon = 8.0                    # or noise_multiplier = ...; or epsilon = "none" or public = true for no guarantee
delta = 1e-6                     # far below 1 / users
adjacency = "zero-out"           # or "replace"

[mechanism]
kind = "dp-sgd"                  # or "dp-mf" (correlated noise over a schedule). "cyclic-dp-mf" only from Python: it
                                 # needs a selection with groups, and a selector that makes them comes later
batch_size = 256                 # expected and public: gradients are divided by it
iterations = 500
clip_norm = 1.0                  # longest gradient of one copy
# num_bands = 8                  # dp-mf: at most min_separation (default: equal to it)
# min_separation = 8             # dp-mf: default: the largest that fits

[model]
kind = "logistic-regression"
features = "features"            # one list column, or ["x1", "x2", ...]
label = "label"                  # 0 or 1

[optimizer]
name = "adam"                    # any of optax that needs only a learning rate
learning_rate = 0.05

[run]
# seed = 0                       # TEST RUNS ONLY: with a seed noise and coins are known, and there is no guarantee
# checkpoint_every = 100         # steps (default: a twentieth of the run)
# devices = 1                    # on a CPU, 2 need XLA_FLAGS=--xla_force_host_platform_device_count=2
"""
