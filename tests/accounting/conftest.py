"""Fixtures for the tests of accounting: a certified selection's mechanism, and the guarantee made from both."""

import pytest

from coowned import ContributionCertificate, PoissonSampling, PrivacyGuarantee, guarantee


@pytest.fixture(scope="session")
def mechanism(greedy_certificate: ContributionCertificate) -> PoissonSampling:
    return PoissonSampling.from_certificate(greedy_certificate, batch_size=64, iterations=50)


@pytest.fixture(scope="session")
def made(greedy_certificate: ContributionCertificate, mechanism: PoissonSampling) -> PrivacyGuarantee:
    return guarantee(greedy_certificate, mechanism, epsilon=4.0, run_id="one", delta=1e-6, adjacency="zero-out")
