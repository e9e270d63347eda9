"""`coowned audit`: tries to break a run's claim."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coowned import codec, validate
from coowned.cli import show
from coowned.cli.options import Json, RunFolder, VerifyKey, check_signature
from coowned.errors import CertificateMismatchError, InputError
from coowned.files import check_writable

if TYPE_CHECKING:
    from coowned.audit.canaries import CanaryAudit
    from coowned.audit.run_audit import RunAudit


def run(
    folder: RunFolder,
    alpha: Annotated[float, typer.Option(help="Probability of a false alarm over all tests together.")] = 1e-3,
    trials: Annotated[
        int | None, typer.Option(metavar="N", help="Trials of each curve (default: up to 200,000 in --seconds).")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for the whole audit, unless --trials is given.")] = 60.0,
    seed: Annotated[
        int | None, typer.Option(help="With --trials: makes the audit repeatable (default: fresh keys).")
    ] = None,
    canaries: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.toml", help="The run's configuration; trains it once more, with canary users."),
    ] = None,
    canary_users: Annotated[int, typer.Option(metavar="N", help="Number of canary users, with --canaries.")] = 200,
    verify_key: VerifyKey = None,
    json: Json = False,
) -> None:
    """Tries to break the claim of a run; exits with code 1 if it succeeds.

    Trains the run's own plan many times on synthetic data with worst-case users, and compares what is released with the
    claim: its noise, what one copy adds, and the whole curve of epsilon and delta. Keys are the audit's own: nothing of
    the run's secret key or data is used. Writes RUN/audit.json.

    With --canaries it also trains once more on the data, with canary users, each included by a fair coin,
    and reports what the model reveals about them. That uses the data: the guarantee does not cover it.

    Examples:

        coowned audit RUN

        coowned audit RUN --trials 500000 --alpha 1e-6

        coowned audit RUN --canaries run.toml
    """
    from coowned.audit.run_audit import audit_run

    if canary_users < 10:
        raise InputError(f"--canary-users must be at least 10, not {canary_users}")
    validate.in_range(0, 1, open_low=True, open_high=True, alpha=alpha)  # before it is halved
    check_signature(folder, verify_key)
    if folder.is_dir():
        check_writable(folder, folder / "audit.json")  # before an audit that may take long
    config = None
    if canaries is not None:
        from coowned.runs.config import TrainConfig

        config, alpha = TrainConfig.read(canaries), alpha / 2  # a half for each audit
    with show.progress("auditing"):
        found = audit_run(folder, alpha=alpha, trials=trials, seconds=seconds, seed=seed)
    known = None
    if config is not None:
        from coowned.audit.run_audit import audit_configured_run

        with show.progress("training with canaries"):
            known = audit_configured_run(folder, config, canaries=canary_users, alpha=alpha, seed=seed)
    if json:
        show.as_json(codec.to_plain(found.to_record()) | {"canaries": None if known is None else known.to_dict()})
    else:
        _show(found, folder)
        if known is not None:
            _show_canaries(known)
        show.written(folder / "audit.json")
    broken = [] if found.holds else [found.verdict()]
    if known is not None and not known.claim_holds:
        broken.append("The claim is broken: the model reveals more about its canaries than claimed.")
    if broken:
        raise CertificateMismatchError(f"{folder}: {' '.join(broken)}")


def _show_canaries(known: "CanaryAudit") -> None:
    from coowned.accounting.statement import rounded_down, rounded_up
    from coowned.accounting.terms import UNIT

    show.line()
    show.line(
        f"canaries: {known.included} of {known.canaries} synthetic users were included; given one who was and one "
        f"who was not, the model tells which with probability {known.area_under_curve:.3f}"
    )
    show.line(
        f"epsilon is at least {rounded_down(known.epsilon_lower_bound)} ({rounded_down(known.gaussian_lower_bound)} if "
        f"the leak is Gaussian); claimed: {rounded_up(known.claimed_epsilon)} (unit: {UNIT}; contribution bound "
        f"{known.contribution_bound:,}; delta {known.delta:.12g}; adjacency: {known.adjacency}). Learned from the "
        "data: not covered by the guarantee."
    )
    if known.largest_bound < known.claimed_epsilon:
        show.line(
            f"{known.canaries} canary users can prove at most {rounded_down(known.largest_bound)}, even if every "
            "guess is right; use more --canary-users to detect smaller leaks"
        )


def _show(found: "RunAudit", folder: Path) -> None:
    from coowned.accounting.statement import rounded_down

    for curve in found.curves:
        of_tier = "" if curve.tier is None else f", tier {curve.tier!r}"
        nearest = {event.epsilon: event for event in sorted(curve.events, key=lambda event: event.measured_delta)}
        show.table(
            f"{curve.adjacency}{of_tier}, {curve.trials:,} trials of {curve.iterations:,} steps"
            f"{' and a covered evaluation' if curve.evaluated else ''}",
            ("epsilon", "claimed delta", "measured delta, at least", ""),
            [
                (f"{e:.3f}", f"{f.delta:.5f}", f"{max(0.0, f.measured_delta):.5f}", "ALARM" if f.alarm else "")
                for e, f in sorted(nearest.items())
            ],
        )
        show.line(f"This many trials cannot resolve deltas below {curve.resolution:.1g}.")
        show.line()
    show.table(
        "direct tests",
        ("", "checks", "smallest p-value", ""),
        [
            (law.law, len(law.checks), min(check.p_value for check in law.checks), "" if law.holds else "ALARM")
            for law in found.laws
        ],
    )
    show.line()
    claim = found.claim
    show.line(
        f"epsilon is at least {rounded_down(found.epsilon_lower_bound)}; claimed: {claim.shown_epsilon} "
        f"({claim.terms()})"
    )
    if claim.test_run:
        show.line("The run used a given seed, so it has no guarantee, whatever this audit finds.")
    show.line(found.verdict())
    if found.overtime():
        show.line(found.overtime())
    show.line(found.not_seen())
