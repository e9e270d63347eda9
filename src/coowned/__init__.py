"""User-level differential privacy for training data that belongs to several people at once.

    import coowned as co

Every public name is loaded when it is first used, so that importing the package costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from coowned.selection.registry import CLASSES as SELECTORS

__version__ = "0.1.0"

# Where every public name is defined, in the order of the stages.
_NAMES = {
    "errors": "CoownedError InputError ConfigError InfeasibleScheduleError CertificateMismatchError "
    "UncertifiableError MissingExtraError",
    "attribution.graph": "AttributionGraph",
    "attribution.examples": "AttributedExamples take",
    "attribution.user_keys": "UserKeyRules Aliases",
    "attribution.tables": "from_table",
    "attribution.table_files": "read_parquet read_csv read_jsonl",
    "attribution.mail": "read_mail",
    "attribution.arxiv": "read_arxiv",
    "attribution.sql": "read_sql",
    "attribution.slack": "read_slack",
    "attribution.statistics": "GraphStatistics",
    "selection.selector": "Selector Selection Schedule",
    "selection.greedy_min_separation": "max_min_separation",
    "selection.pareto": "pareto",
    "certificate": "ContributionCertificate certify",
    "mechanism.poisson_sampling": "PoissonSampling",
    "mechanism.min_separation": "MinSeparation",
    "mechanism.cyclic_poisson": "CyclicPoisson",
    "mechanism.random_allocation": "RandomAllocation",
    "accounting.calculators": "epsilon calibrate epsilon_curve gaussian_dp true_positive_rate_bound "
    "sweep_noise_multiplier",
    "accounting.guarantee": "PrivacyGuarantee guarantee",
    "accounting.composition": "ComposedGuarantee compose",
    "accounting.planning": "Plan plan",
    "mechanism.banded_strategy": "BandedStrategy",
    "mechanism.batching": "PoissonBatches ScheduledBatches CyclicPoissonBatches",
    "exact.keys": "RunKey",
    "models.logistic_regression": "LogisticRegression",
    "models.bert": "BertMaskedLM BertClassifier",
    "models.linear_regression": "LinearRegression",
    "models.text_classifier": "TextClassifier",
    "models.jax_model": "JaxModel",
    "training.plan": "TrainingPlan",
    "training.loop": "train",
    "training.sweep": "grid sweep",
    "training.evaluate": "evaluate",
    "content.data": "FeatureTable",
    "fitting": "fit Run open_run",
}
_HOME = {name: f"coowned.{module}" for module, names in _NAMES.items() for name in names.split()}
_HOME |= {name: module for module, _, name in (path.rpartition(".") for path in SELECTORS.values())}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from coowned.attribution.examples import AttributedExamples as AttributedExamples
    from coowned.attribution.examples import take as take
    from coowned.attribution.graph import AttributionGraph as AttributionGraph
    from coowned.attribution.tables import from_table as from_table


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'coowned' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
