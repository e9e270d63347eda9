"""A grid of configurations to tune over: lists of values for keys of a configuration, and how many runs to expect."""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coowned import codec, validate
from coowned.accounting.covered import CoveredEvaluation
from coowned.accounting.tuning import LARGEST_EXPECTED
from coowned.errors import ConfigError
from coowned.models.model import Specification
from coowned.progress import nearest
from coowned.runs.config import TrainConfig
from coowned.runs.defaults import CLIP_NORM, DECAY
from coowned.runs.settings import MechanismSettings, Optimizer

EXPECTED_RUNS = 8
_NOTE = "# A setting of the grid of a tuning. Trained alone, at the same epsilon, it would have less noise.\n\n"
LARGEST_GRID = 10_000
_NOT_TUNED = ("kind", "name", "selector", "seed")  # words that decide what other keys there are


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """A configuration with a finite, public grid: the section `[tuning]` of a file.

    Guarantees:
      - Every setting of the grid is a whole configuration, checked before anything is read.
        (test_every_setting_is_checked)
      - A grid over a key that no section has is refused with the nearest one.   (test_unknown_grid_keys)

    Attributes:
      sections: plain values by section and key, as for `TrainConfig.from_sections`; of every run but for the grid. What
        neither says is chosen as for `coowned train`, at the epsilon of the whole tuning.
      grid: values by key.
      expected_runs: the mean of the number of runs.
      model, folder: as for `TrainConfig.from_sections`.
    """

    sections: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    expected_runs: float = EXPECTED_RUNS
    model: Specification | None = None
    folder: str | os.PathLike[str] = "."
    name: str = "configuration"

    def __post_init__(self) -> None:
        validate.in_range(1, LARGEST_EXPECTED, expected_runs=self.expected_runs)
        if not self.grid or not all(isinstance(values, list | tuple) and values for values in self.grid.values()):
            raise ConfigError(f"{self.name}: [tuning] grid needs at least one key with a list of values")
        for key, values in self.grid.items():
            if len({codec.checksum([value]) for value in values}) != len(values):
                raise ConfigError(f"{self.name}: [tuning] grid has a value of {key!r} twice; list each once")
        size = len(self.settings)
        if size > LARGEST_GRID:
            raise ConfigError(f"{self.name}: [tuning] the grid has {size:,} settings; at most {LARGEST_GRID:,} will do")
        for config in map(self.config, self.settings):
            if not isinstance(config.privacy.epsilon, float | int):
                raise ConfigError(f"{self.name}: tuning needs [privacy] epsilon: that of the whole tuning")
            if config.privacy.simulated_batch_size is not None:
                raise ConfigError(f"{self.name}: tuning has no simulated epsilon; remove it from [privacy]")
            if config.run.baseline:
                raise ConfigError(f"{self.name}: tuning trains no baseline; remove it from [run]")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "TuningConfig":
        """Reads a file with a section [tuning]; the rest is that of `coowned train`."""
        sections = TrainConfig.read_sections(path)
        tuning = sections.pop("tuning", None)
        if not isinstance(tuning, dict) or not set(tuning) <= {"grid", "expected_runs"}:
            raise ConfigError(
                f"{path}: needs a section [tuning] with expected_runs and [tuning.grid], such as learning_rate = "
                "[0.01, 0.1], and no other key"
            )
        tuning.setdefault("grid", {})
        return cls(sections=sections, **tuning, folder=Path(path).parent, name=str(path))

    @property
    def settings(self) -> list[dict[str, Any]]:
        """Every setting of the grid, by key."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]

    @property
    def digest(self) -> str:
        """A digest of the values of all settings."""
        digests = [self.config(setting).digest for setting in self.settings]
        return codec.checksum({"settings": digests, "expected_runs": float(self.expected_runs)})

    def config(self, setting: Mapping[str, Any]) -> TrainConfig:
        """Returns the configuration of one setting, which may leave out what `train` chooses.

        Around a learning rate of the grid, clip norm and decay are those around a rate that is chosen.
        """
        written = codec.to_plain(self.sections)
        changed = {name: dict(section) for name, section in written.items() if section is not None}
        if changed.get("evaluation") is None:
            changed["evaluation"] = {"epsilon_share": CoveredEvaluation().epsilon_share}
        for key, value in setting.items():
            changed.setdefault(self._section(key), {})[key] = value
        if "learning_rate" in setting:
            changed["optimizer"].setdefault("decay", DECAY)
            changed.setdefault("mechanism", {}).setdefault("clip_norm", CLIP_NORM)
        config = TrainConfig.from_sections(changed, model=self.model, folder=self.folder, name=self.name)
        return dataclasses.replace(config, text=_NOTE + config.text)

    def _section(self, key: str) -> str:
        known = {
            section: [field.name for field in dataclasses.fields(kind) if field.name not in _NOT_TUNED]
            for section, kind in (("optimizer", Optimizer), ("mechanism", MechanismSettings))
        }
        found = [section for section, keys in known.items() if key in keys]
        if found:
            return found[0]
        selection = self.sections.get("selection", {})
        if key not in _NOT_TUNED and (key == "contribution_bound" or key in selection):
            return "selection"
        names = [*itertools.chain(*known.values()), "contribution_bound"]
        raise ConfigError(f"{self.name}: [tuning] grid: {key!r} cannot be tuned{nearest(key, names)}")
