"""The cases of epsilons.json. `python tests/golden/epsilons.py` writes the file anew.

A change of any value needs a line under "Privacy" in the changelog.
"""

import json
import pathlib

from coowned import CyclicPoisson, MinSeparation, PoissonSampling, RandomAllocation
from coowned.accounting.calculators import composed_epsilon, epsilon
from coowned.accounting.calibrate import calibrate

FILE = pathlib.Path(__file__).with_name("epsilons.json")


def _poisson(copies, probability, iterations):
    return PoissonSampling(contribution_bound=copies, sampling_probability=probability, iterations=iterations)


_MECHANISMS = {
    "poisson k=3 p=0.002 T=10000": (_poisson(3, 0.002, 10_000), 1.0, 1e-10),
    "poisson k=1 p=0.001 T=10000": (_poisson(1, 0.001, 10_000), 0.6, 1e-10),
    "poisson k=10 p=0.01 T=2500": (_poisson(10, 0.01, 2500), 4.0, 1e-10),
    "poisson k=3 p=0.05 T=500": (_poisson(3, 0.05, 500), 2.0, 1e-10),
    "poisson k=100 p=0.01 T=2500": (_poisson(100, 0.01, 2500), 20.0, 1e-10),
    "poisson k=1000 p=0.001 T=1000": (_poisson(1000, 0.001, 1000), 6.0, 1e-6),
    "poisson k=1 p=0.5 T=1": (_poisson(1, 0.5, 1), 1.0, 1e-3),
    "poisson k=2 p=0.9 T=3": (_poisson(2, 0.9, 3), 0.5, 1e-5),
    "poisson k=1 p=1e-6 T=10000": (_poisson(1, 1e-6, 10_000), 0.3, 1e-9),
    "poisson k=2 p=1 T=100": (_poisson(2, 1.0, 100), 8.0, 1e-12),
    "min-separation k=8 b=16": (
        MinSeparation(contribution_bound=8, min_separation=16, num_bands=16, iterations=2500),
        3.0,
        1e-10,
    ),
    "cyclic k=3 p=0.08 T=2500 groups=8": (
        CyclicPoisson(contribution_bound=3, sampling_probability=0.08, iterations=2500, num_groups=8, num_bands=8),
        3.0,
        1e-10,
    ),
    "random allocation t=6 T=2500 groups=8": (
        RandomAllocation(contribution_bound=1, rounds_per_epoch=6, iterations=2500, num_groups=8, num_bands=8),
        2.0,
        1e-10,
    ),
    "random allocation t=46 T=2500": (
        RandomAllocation(contribution_bound=1, rounds_per_epoch=46, iterations=2500),
        0.8,
        1e-10,
    ),
}


def _cases():
    for name, (mechanism, noise, delta) in _MECHANISMS.items():
        for adjacency in ("zero-out", "replace"):
            yield (
                f"epsilon {adjacency}: {name} sigma={noise:g} delta={delta:g}",
                lambda m=mechanism, s=noise, d=delta, a=adjacency: epsilon(m, noise_multiplier=s, delta=d, adjacency=a),
            )
    for target in (0.1, 6.0, 100.0):
        yield (
            f"noise multiplier zero-out: poisson k=3 p=0.01 T=500 epsilon={target:g} delta=1e-10",
            lambda e=target: calibrate(
                _poisson(3, 0.01, 500), epsilon=e, delta=1e-10, adjacency="zero-out", cache=False
            ),
        )
    yield (
        "composed zero-out: poisson k=2 p=0.03 T=100 sigma=1.5 with min-separation k=8 sigma=6, delta=1e-8",
        lambda: composed_epsilon(
            [(_poisson(2, 0.03, 100), 1.5), (_MECHANISMS["min-separation k=8 b=16"][0], 6.0)],
            delta=1e-8,
            adjacency="zero-out",
        ),
    )


CASES = dict(_cases())

if __name__ == "__main__":
    FILE.write_text(json.dumps({name: compute() for name, compute in CASES.items()}, indent=2) + "\n", encoding="utf-8")
