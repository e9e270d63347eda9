"""User-level differential privacy for training data that belongs to several people at once.

    import coowned as co

Every public name is loaded when it is first used, so that importing the package costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# One line a public name: where it lives. The order is the order of the stages.
_HOME = {
    "CoownedError": "coowned.errors",
    "InputError": "coowned.errors",
    "ConfigError": "coowned.errors",
    "InfeasibleScheduleError": "coowned.errors",
    "CertificateMismatchError": "coowned.errors",
    "UncertifiableError": "coowned.errors",
    "MissingExtraError": "coowned.errors",
    "AttributionGraph": "coowned.attribution.graph",
    "AttributedExamples": "coowned.attribution.examples",
    "take": "coowned.attribution.examples",
    "UserKeyRules": "coowned.attribution.user_keys",
    "Aliases": "coowned.attribution.user_keys",
    "from_table": "coowned.attribution.tables",
    "read_parquet": "coowned.attribution.table_files",
    "read_csv": "coowned.attribution.table_files",
    "read_jsonl": "coowned.attribution.table_files",
    "read_mail": "coowned.attribution.mail",
    "read_arxiv": "coowned.attribution.arxiv",
    "read_sql": "coowned.attribution.sql",
    "read_slack": "coowned.attribution.slack",
    "GraphStatistics": "coowned.attribution.statistics",
    "Selector": "coowned.selection.selector",
    "Selection": "coowned.selection.selector",
    "Schedule": "coowned.selection.selector",
    "Greedy": "coowned.selection.greedy",
    "GreedyWithDuplicates": "coowned.selection.greedy_with_duplicates",
    "GreedyMinSeparation": "coowned.selection.greedy_min_separation",
    "max_min_separation": "coowned.selection.greedy_min_separation",
    "BiasMitigating": "coowned.selection.bias_mitigating",
    "RandomSubset": "coowned.selection.random_subset",
    "IntegerProgram": "coowned.selection.integer_program",
    "MinSeparationProgram": "coowned.selection.min_separation_program",
    "Priced": "coowned.selection.priced",
    "CyclicGroups": "coowned.selection.cyclic_groups",
    "PricedMinSeparation": "coowned.selection.priced_min_separation",
    "pareto": "coowned.selection.pareto",
    "ContributionCertificate": "coowned.certificate",
    "certify": "coowned.certificate",
    "PoissonSampling": "coowned.mechanism.poisson_sampling",
    "MinSeparation": "coowned.mechanism.min_separation",
    "CyclicPoisson": "coowned.mechanism.cyclic_poisson",
    "RandomAllocation": "coowned.mechanism.random_allocation",
    "epsilon": "coowned.accounting.calculators",
    "calibrate": "coowned.accounting.calculators",
    "epsilon_curve": "coowned.accounting.calculators",
    "gaussian_dp": "coowned.accounting.calculators",
    "true_positive_rate_bound": "coowned.accounting.calculators",
    "sweep_noise_multiplier": "coowned.accounting.calculators",
    "PrivacyGuarantee": "coowned.accounting.guarantee",
    "ComposedGuarantee": "coowned.accounting.composition",
    "guarantee": "coowned.accounting.guarantee",
    "compose": "coowned.accounting.composition",
    "Plan": "coowned.accounting.planning",
    "plan": "coowned.accounting.planning",
    "BandedStrategy": "coowned.mechanism.banded_strategy",
    "PoissonBatches": "coowned.mechanism.batching",
    "ScheduledBatches": "coowned.mechanism.batching",
    "CyclicPoissonBatches": "coowned.mechanism.batching",
    "RunKey": "coowned.mechanism.keys",
    "LogisticRegression": "coowned.training.models.logistic_regression",
    "BertMaskedLM": "coowned.training.models.bert",
    "BertClassifier": "coowned.training.models.bert",
    "LinearRegression": "coowned.training.models.linear_regression",
    "TextClassifier": "coowned.training.models.text_classifier",
    "JaxModel": "coowned.training.models.jax_model",
    "TrainingPlan": "coowned.training.plan",
    "train": "coowned.training.loop",
    "grid": "coowned.training.sweep",
    "sweep": "coowned.training.sweep",
    "evaluate": "coowned.training.evaluate",
    "FeatureTable": "coowned.training.data",
    "fit": "coowned.runs",
    "Run": "coowned.runs",
    "open_run": "coowned.runs",
}

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
