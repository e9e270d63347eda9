"""Mechanisms for the tests of accounting."""

from coowned import PoissonSampling


def poisson(copies, probability, iterations):
    return PoissonSampling(contribution_bound=copies, sampling_probability=probability, iterations=iterations)
