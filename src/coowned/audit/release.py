"""What a training step releases for batches of many kinds: does a copy never add more than one clip norm?"""

from coowned import validate
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.checks import CheckedLaw, certain_check, checked_law
from coowned.mechanism.noise import ROUNDING_FACTOR


def audit_release(
    *, noise_multiplier: float, copies: int, batch_size: int, parts: AuditedParts | None = None, alpha: float = 1e-3
) -> CheckedLaw:
    """Runs the compiled step on batches with few and many copies of a user and of others, and compares.

    Guarantees:
      - A clip that lets more through, a division by what was drawn, and too little noise are caught, without chance.
        (test_wrong_releases_are_caught)
    What it is not: a proof for other models than the one whose step is run.

    >>> audit_release(noise_multiplier=1.0, copies=2, batch_size=4).holds
    True
    """
    validate.positive(copies=copies, batch_size=batch_size)
    parts = parts or AuditedParts()
    clip_norm = 1.0
    scale = parts.noise_scale(noise_multiplier=noise_multiplier, clip_norm=clip_norm, batch_size=batch_size)
    counts = sorted({1, 2, copies} & set(range(1, copies + 1)))
    crowds = (0, 1, min(batch_size, 1000) // 2, min(batch_size, 1000), 2 * min(batch_size, 1000))
    size = 8 * -(-(copies + max(crowds)) // 8)

    def release(count: int, content: int, others: int, noise: float = 0.0) -> float:
        divisor = parts.divisor(batch_size=batch_size, num_copies=count + others)
        settings = {"learning_rate": 1.0, "clip_norm": clip_norm, "noise_scale": scale, "batch_size": float(divisor)}
        released = parts.step(
            user_copies=count, content=content, other_copies=others, size=size, settings=settings, noise=noise
        )
        return released * batch_size / clip_norm

    largest = max(
        abs(release(count, content, others) - release(count, 0, others)) / count
        for count in counts
        for others in sorted(set(crowds))
        for content in (1, -1)
    )
    noise = min(release(0, 0, others, noise=1.0) for others in sorted(set(crowds)))
    checks = [
        certain_check("clip norms that a copy adds", largest <= ROUNDING_FACTOR, observed=largest, expected=1.0),
        certain_check("noise multiplier", noise >= noise_multiplier, observed=noise, expected=noise_multiplier),
    ]
    return checked_law("release", checks, alpha)
