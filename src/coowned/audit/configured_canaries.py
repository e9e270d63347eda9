"""The audit with canaries for a run of `coowned train`: its configuration trained once more, with synthetic users."""

import os

from coowned import validate
from coowned.audit.canaries import CanaryAudit, audit_with_canaries
from coowned.audit.run_audit import LARGEST_SEED, store_canaries
from coowned.errors import InputError
from coowned.mechanism.keys import RunKey
from coowned.training.config import TrainConfig
from coowned.training.configured_run import make_plan
from coowned.training.run import StoredRun
from coowned.training.splits import split_examples


def audit_configured_run(
    path: str | os.PathLike[str],
    config: TrainConfig,
    *,
    canaries: int = 200,
    alpha: float = 1e-3,
    seed: int | None = None,
) -> CanaryAudit:
    """Trains the run's configuration once more with canary users, and keeps what that proves in RUN/audit.json.

    The model it trains is thrown away. What it finds was learned from the data: no guarantee covers it.

    Guarantees:
      - Another configuration than the run's is refused.   (test_another_configuration_is_refused)
      - Every canary user has as many examples as the run's bound allows.   (test_canaries_of_a_run)
    Cost: one training.

    Args:
      path: the folder of the run.
      config: the run's configuration, read from where its data can be found.
      canaries: number of canary users.
      alpha: probability that an honest run is accused.
      seed: makes it repeatable, for tests; without it keys are the operating system's.
    """
    if seed is not None:
        validate.integer(at_least=0, at_most=LARGEST_SEED, seed=seed)
    run = StoredRun.open(path)
    if run.guarantee is None:
        raise InputError(f"{run.path}: the run has no guarantee: there is no claim to audit; train with privacy")
    if run.config(config.folder).digest != config.digest:
        raise InputError(
            f"{run.path}: trained with a different configuration; compare it with {run.path / 'config.toml'}"
        )
    examples = config.source().read()
    task = config.task(examples.payload.schema)
    own = task.load(examples, {"train": split_examples(examples.graph, config.splits)["train"]})
    run_key, coins = (
        (RunKey.from_operating_system(), RunKey.from_operating_system())
        if seed is None
        else (RunKey.from_seed(2 * seed), RunKey.from_seed(2 * seed + 1))
    )
    clip_norm = config.mechanism.clip_norm
    assert clip_norm is not None  # a run with a guarantee has one
    per_user = run.certificate.contribution_bound
    make = getattr(own.model, "with_canaries", None)
    if make is None:
        kind = type(own.model).__name__
        raise InputError(f"no canaries are defined for {kind}; call audit_with_canaries with your own")
    model, content = make(canaries, per_user, clip_norm)
    found = audit_with_canaries(
        model,
        own.parts["train"],
        lambda graph: make_plan(config, graph, run_key),
        content,
        per_user=per_user,
        alpha=alpha,
        initial=task.initial,
        coins=coins,
    )
    store_canaries(run, found)
    return found
