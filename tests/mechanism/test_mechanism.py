"""What holds for every mechanism, and every way in which a certificate may fall short of one."""

import dataclasses
import subprocess
import sys

import pytest

from coowned import (
    AttributionGraph,
    CyclicPoisson,
    MinSeparation,
    PoissonSampling,
    RandomAllocation,
    Schedule,
    Selection,
    certify,
    epsilon,
    guarantee,
)
from coowned.errors import CertificateMismatchError, InputError, UncertifiableError
from coowned.exact.keys import RunKey
from coowned.mechanism import registry
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.registry import mechanism_class_for, mechanism_from_dict, mechanisms


def cases() -> list:
    """For every mechanism, the graph and the selection that its certificate is for."""
    graph = AttributionGraph.from_users_per_example([[user % 12] for user in range(24)])
    batches = [[0, 1], [2, 3], [4, 5], [0, 6], [7, 8], [9, 10]]  # user 0 in batches 0 and 3: separation 3
    selected = {
        "poisson": Selection.from_copies(graph, [1] * 24),
        "min-separation": Schedule.from_batches(graph, batches),
        "cyclic": Selection.from_copies(graph, [1] * 24, groups=[user % 12 % 2 for user in range(24)]),
        "random-allocation": Selection.from_copies(graph, [1] * 12 + [0] * 12, groups=[0, 1] * 6 + [-1] * 12),
    }
    return [pytest.param(mechanism, graph, selected[mechanism.kind], id=mechanism.kind) for mechanism in mechanisms()]


@pytest.mark.parametrize(("mechanism_class", "graph", "selected"), cases())
def test_contract_of_every_mechanism(mechanism_class, graph, selected):
    certificate = certify(graph, selected)
    # Where random allocation could be used, sampling by coins is the default.
    default = CyclicPoisson if mechanism_class is RandomAllocation else mechanism_class
    assert mechanism_class_for(certificate) is default
    mechanism = mechanism_class.from_certificate(certificate, batch_size=2, iterations=6)
    assert isinstance(mechanism, Mechanism)
    # What is stored reads back, and as nothing else.
    assert (
        registry.mechanism_class(mechanism.kind) is registry.mechanism_class(mechanism.training_kind) is type(mechanism)
    )
    assert mechanism_from_dict(mechanism.to_dict()) == mechanism == type(mechanism).from_json(mechanism.to_json())
    for other in mechanisms():
        if other is not mechanism_class:
            with pytest.raises(InputError):
                other.from_json(mechanism.to_json())
    # A certificate of less is refused.
    mechanism.check_certificate(certificate)
    more = certify(graph, cases()[0].values[2])  # a user in two copies
    with pytest.raises(UncertifiableError, match="contribution bound 1, but"):
        mechanism.for_copies(1).check_certificate(certificate if certificate.contribution_bound > 1 else more)
    # What trains is what was accounted for.
    strategy = mechanism.check_strategy(None)
    mechanism.check_selected(selected)
    mechanism.check_sensitivity(selected, graph, strategy)
    wrong = Selection.from_copies(graph, [1] * 24) if mechanism.needs_schedule else cases()[1].values[2]
    with pytest.raises(CertificateMismatchError, match="needs a"):
        mechanism.check_selected(wrong)
    batches = mechanism.batches(selected, run_key=RunKey.from_seed(1))
    assert len(list(batches)) == mechanism.iterations
    assert mechanism.expected_copies(certificate) == 2
    # Fewer copies, fewer steps and one example are no worse than the worst user.
    settings = {"noise_multiplier": 2.0, "delta": 1e-6, "adjacency": "zero-out"}
    worst = epsilon(mechanism, **settings)
    for less in (mechanism.for_copies(1), mechanism.after(1), mechanism.for_example(certificate)):
        assert 0 < epsilon(less, **settings) <= worst
    assert sum(row["users"] for row in mechanism.levels(certificate)) == graph.num_users
    # The audit's user takes part as often as the accountant says.
    user = mechanism.worst_user(strategy)
    assert user.copies == mechanism.contribution_bound
    assert 0 <= user.rounds.min() <= user.rounds.max() < mechanism.iterations
    assert mechanism.describe()[-1] not in ".;"
    if not mechanism.needs_groups:
        with pytest.raises(InputError, match="group"):
            mechanism.for_copies(1, group=0)


def test_sizes_are_needed(greedy_certificate):
    for kind in (PoissonSampling, RandomAllocation):
        with pytest.raises(InputError, match=f"^The mechanism '{kind.kind}' needs batch_size and iterations"):
            kind.from_certificate(greedy_certificate)


def test_words_are_unique():
    words = [word for mechanism in mechanisms() for word in {mechanism.kind, mechanism.training_kind}]
    assert len(set(words)) == len(words)
    assert [mechanism.kind for mechanism in mechanisms()] == list(registry.MECHANISMS)
    with pytest.raises(InputError, match="Unknown mechanism 'magic'; choose poisson, min-separation, cyclic or random"):
        registry.mechanism_class("magic")


def test_every_disagreement_is_refused(greedy_certificate, schedule_certificate, group_certificate):
    poisson = PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=10)
    separated = MinSeparation.from_certificate(schedule_certificate)
    cyclic = CyclicPoisson.from_certificate(group_certificate, batch_size=1, iterations=8)
    for certificate, mechanism in (
        (greedy_certificate, poisson),
        (schedule_certificate, separated),
        (group_certificate, cyclic),
    ):
        mechanism.check_certificate(certificate)
    wrong = [
        (greedy_certificate, dataclasses.replace(poisson, contribution_bound=2)),  # a user in 3 copies
        (schedule_certificate, poisson),  # a schedule has no coins
        (greedy_certificate, MinSeparation(contribution_bound=3, min_separation=2, num_bands=2, iterations=10)),
        (schedule_certificate, dataclasses.replace(separated, min_separation=4)),
        (schedule_certificate, dataclasses.replace(separated, min_separation=4, num_bands=4)),
        (schedule_certificate, dataclasses.replace(separated, iterations=7)),
        (schedule_certificate, dataclasses.replace(separated, contribution_bound=1)),
        (greedy_certificate, dataclasses.replace(cyclic, contribution_bound=3, group_bounds=None)),  # no groups proven
        (
            group_certificate,
            CyclicPoisson(contribution_bound=2, sampling_probability=0.5, iterations=8, num_groups=1, num_bands=1),
        ),
        (group_certificate, dataclasses.replace(cyclic, group_bounds=(1, 2))),  # group 0 has a user in 2 copies
    ]
    for certificate, mechanism in wrong:
        with pytest.raises(UncertifiableError):
            mechanism.check_certificate(certificate)


def test_what_is_not_a_mechanism(greedy_certificate):
    with pytest.raises(InputError, match="not a mechanism"):
        guarantee(greedy_certificate, "poisson", epsilon=1.0, delta=1e-6, adjacency="zero-out")  # type: ignore[arg-type]


def test_accounting_needs_no_jax():
    code = (
        "import sys; import coowned.mechanism.registry, coowned.accounting.calculators;"
        "sys.exit(any(name.split('.')[0] in ('jax', 'jax_privacy') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
