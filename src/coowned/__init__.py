"""User-level differential privacy for training data that belongs to several people at once.

    import coowned as co

Every public name is loaded when it is first used, so that importing the package costs next to nothing. Type checkers
read `__init__.pyi`, which `python -m tests.public_stub` writes.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

# Where every public name is defined, in the order of the stages. Selectors and mechanisms are in their registries.
_NAMES = {
    "errors": "CoownedError InputError ConfigError InfeasibleScheduleError CertificateMismatchError "
    "UncertifiableError MissingExtraError",
    "attribution.graph": "AttributionGraph",
    "attribution.examples": "AttributedExamples take",
    "attribution.user_keys": "UserKeyRules Aliases",
    "attribution.tables": "from_table",
    "attribution.statistics": "GraphStatistics",
    "selection.selector": "Selector Selection Schedule",
    "selection.greedy_min_separation": "max_min_separation",
    "selection.bias_mitigating": "pareto",
    "certificate": "ContributionCertificate certify",
    "accounting.calculators": "epsilon calibrate epsilon_curve gaussian_dp true_positive_rate_bound "
    "sweep_noise_multiplier",
    "accounting.privacy_guarantee": "PrivacyGuarantee",
    "accounting.guarantee": "guarantee ComposedGuarantee compose",
    "accounting.covered": "CoveredEvaluation",
    "accounting.choices": "Plan",
    "accounting.planning": "plan",
    "mechanism.banded_strategy": "BandedStrategy",
    "mechanism.batching": "PoissonBatches ScheduledBatches CyclicPoissonBatches",
    "exact.keys": "RunKey",
    "models.jax_model": "JaxModel",
    "training.plan": "TrainingPlan",
    "training.loop": "train",
    "training.sweep": "grid sweep",
    "training.evaluate": "evaluate",
    "training.covered": "CoveredFigures",
    "content.data": "FeatureTable",
    "runs.settings": "PrivacySettings MechanismSettings Optimizer RunSettings",
    "runs.inputs": "read_selection",
    "fitting": "fit",
    "tuning": "tune",
    "finished_run": "Run open_run",
}


def _homes() -> dict[str, str]:
    """Returns the module of every public name."""
    sources, selection, mechanism, models = (  # which import nothing heavy
        importlib.import_module(f"coowned.{registry}")
        for registry in ("attribution.options", "selection.registry", "mechanism.registry", "models.registry")
    )
    paths = [
        *(f"{entry.module}.{entry.reader}" for entry in sources.SOURCES.values()),
        *selection.CLASSES.values(),
        *(entry.path for entry in mechanism.MECHANISMS.values()),
        *(path for kind, path in models.MODELS.items() if kind not in models.IN_FILES),
    ]
    named = {name: f"coowned.{module}" for module, names in _NAMES.items() for name in names.split()}
    return named | {name: module for module, _, name in (path.rpartition(".") for path in paths)}


__all__ = ["__version__", *_homes()]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    homes = _homes()
    if name not in homes:
        raise AttributeError(f"module 'coowned' has no attribute {name!r}")
    value = getattr(importlib.import_module(homes[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
