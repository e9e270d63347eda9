"""Many trials of a mechanism with a worst-case user, driven through its real parts.

Users side by side share each call of the sampler and each row of noise (a coordinate each), which makes hundreds of
thousands of trials cheap. A user alone, in a batch with a crowd of zero gradients, shows faults of whole batches, such
as dividing by what was drawn, at the cost of a call of the sampler a step and trial.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.attribution.graph import AttributionGraph
from coowned.audit.audited_parts import AuditedParts
from coowned.audit.claims import USERS, MechanismClaim
from coowned.mechanism.batching import Batches, ScheduledBatches
from coowned.mechanism.keys import RunKey
from coowned.selection.selector import Schedule

_CLIP_NORM = 1.0
_CHUNK = 2**21  # steps times trials that are in memory at once


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Log ratios of the claim for each kind of user: (trials,) with her, and (trials,) without or with the other her.

    Both sides share coins and noise; a test may use what each side does alone, never their difference.
    """

    present: dict[str, npt.NDArray[np.float64]]
    absent: dict[str, npt.NDArray[np.float64]]

    @property
    def trials(self) -> int:
        return len(self.present[USERS[0]])


class WorstCase:
    """A small world with worst-case users, and the parts that a mechanism is made of.

    Args:
      claim: what is audited.
      parts: the real ones, or with one exchanged.
      users_at_once: users side by side in every batch; 1 is one user in a crowd.
      trials: how many will be asked for at most.
      run_key: where coins and noise come from; never that of a training run.
    """

    def __init__(self, claim: MechanismClaim, parts: AuditedParts, *, users_at_once: int, trials: int, run_key: RunKey):
        validate.positive(users_at_once=users_at_once, trials=trials)
        self._claim, self._parts, self._key = claim, parts, run_key
        self._users = int(users_at_once)
        mechanism = claim.mechanism
        self._batch_size, crowd = self._sizes()
        if mechanism.needs_schedule:
            self.graph, self._owner, self.selected = self._scheduled(claim)
            windows = 1
        else:
            self.graph, self._owner = _world(self._users, 2 * claim.copies, crowd)
            self.selected = parts.select(self.graph, contribution_bound=claim.copies)
            if mechanism.needs_groups:
                self.selected = parts.group(self.graph, self.selected, group=claim.group)
            windows = -(-trials // self._users)
        cycle = mechanism.cycle_length
        self._stride = -(-claim.iterations // cycle) * cycle  # a trial begins where the first group has its turn
        self.batches: Batches = parts.batches(
            self.selected,
            mechanism,
            batch_size=self._batch_size,
            iterations=self._stride * windows,
            run_key=run_key,
        )
        self._released: dict[tuple[float, ...], float] = {}  # the step is a pure function: kinds of batches seen

    @property
    def copies_per_user(self) -> npt.NDArray[np.int64]:
        """(users_at_once,) copies of each worst-case user in S."""
        copies = self.selected.copies
        mine = self._owner >= 0
        return np.bincount(self._owner[mine], weights=copies[mine], minlength=self._users).astype(np.int64)

    def run(self, *, trials: int, seconds: float | None = None) -> Scores:
        """So many trials, or as many (at least one portion) as fit the time."""
        ends = None if seconds is None else time.monotonic() + seconds
        present: dict[str, list] = {user: [] for user in USERS}
        absent: dict[str, list] = {user: [] for user in USERS}
        done = 0
        for number, size in enumerate(self._portions(trials)):
            for user, (with_her, without) in self._portion(number, done, size).items():
                present[user].append(with_her)
                absent[user].append(without)
            done += size
            if ends is not None and time.monotonic() > ends:
                break
        joined = [{user: np.concatenate(parts)[:trials] for user, parts in side.items()} for side in (present, absent)]
        return Scores(*joined)

    def _portions(self, trials: int) -> Iterator[int]:
        """Sizes: multiples of the users side by side."""
        at_once = max(1, _CHUNK // (self._claim.iterations * self._users)) * self._users
        while trials > 0:
            size = min(at_once, -(-trials // self._users) * self._users)
            yield size
            trials -= size

    def _portion(self, number: int, first: int, size: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        claim = self._claim
        copies, drawn = self._draw(first, size)
        scale = self._parts.noise_scale(
            noise_multiplier=claim.noise_multiplier, clip_norm=_CLIP_NORM, batch_size=self._batch_size
        )
        gain = self._release(0, 0, 0, scale, divisor=self._batch_size, noise=1.0)
        rows = self._parts.noise(
            self._key,
            coefficients=claim.coefficients,
            iterations=claim.iterations,
            trials=size,
            configuration=f"portion {number}",
        )
        noise = np.empty((claim.iterations, size))  # in clip norms, times the public batch size
        for step, row in enumerate(rows):
            noise[step] = row
        noise *= gain
        signals = {content: self._signals(copies, drawn, content, scale) for content in (1, -1, 0)}
        found = {}
        for user in USERS:
            up = claim.signs(user)[:, None] > 0
            with_her = np.where(up, signals[1], signals[-1])
            without = signals[0] if claim.adjacency == "zero-out" else np.where(up, signals[-1], signals[1])
            found[user] = (claim.log_ratio(noise + with_her, user), claim.log_ratio(noise + without, user))
        return found

    def _draw(self, first: int, size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(iterations, size) copies of each user in each batch; (iterations, size) copies of anybody in it."""
        iterations, users = self._claim.iterations, self._users
        if isinstance(self.batches, ScheduledBatches):
            batches = [self.batches.batch(t) for t in range(iterations)]
            copies = np.array([np.count_nonzero(self._owner[b.examples[b.mask]] == 0) for b in batches])
            sizes = np.array([b.num_copies for b in batches])
            return np.repeat(copies[:, None], size, axis=1), np.repeat(sizes[:, None], size, axis=1)
        copies, sizes = np.zeros((iterations, size), np.int64), np.zeros((iterations, size), np.int64)
        for window in range(size // users):
            place = slice(window * users, (window + 1) * users)
            start = (first // users + window) * self._stride
            for t in range(iterations):
                batch = self.batches.batch(start + t)
                owners = self._owner[batch.examples[batch.mask]]
                copies[t, place] = np.bincount(owners[owners >= 0], minlength=users)
                sizes[t, place] = len(owners)
        return copies, sizes

    def _signals(
        self, copies: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64], content: int, scale: float
    ) -> npt.NDArray[np.float64]:
        """What the compiled step releases without noise, in clip norms; computed once for every kind of batch."""
        most = int(copies.max()) + 1
        kinds = drawn * most + copies
        table = np.zeros(int(kinds.max()) + 1)
        for code in np.flatnonzero(np.bincount(kinds.ravel())):
            total, count = divmod(int(code), most)
            others = total - count if self._users == 1 else 0  # those beside her add nothing to her coordinate
            divisor = self._parts.divisor(batch_size=self._batch_size, num_copies=total)
            table[code] = self._release(count, content, others, scale, divisor=divisor)
        return table[kinds]

    def _release(
        self, copies: int, content: int, others: int, scale: float, *, divisor: int, noise: float = 0.0
    ) -> float:
        kind = (copies, content, others, divisor, noise)
        if kind not in self._released:
            room = 8 << max(0, math.ceil(math.log2((copies + others) / 8))) if copies + others else 8  # few shapes
            released = self._parts.step(
                user_copies=copies,
                content=content,
                other_copies=others,
                size=room,
                settings={
                    "learning_rate": 1.0,
                    "clip_norm": _CLIP_NORM,
                    "noise_scale": scale,
                    "batch_size": float(divisor),
                },
                noise=noise,
            )
            self._released[kind] = released * self._batch_size / _CLIP_NORM
        return self._released[kind]

    def _sizes(self) -> tuple[int, int]:
        """(public batch size, copies of others): such that the sampler's coins are those of the claim."""
        claim, mine = self._claim, self._users * self._claim.copies
        base, probability = claim.mechanism.batch_size, claim.probability
        if claim.mechanism.needs_schedule:
            return min(base or 4, 64), 0
        if probability == 1:  # nobody else: the smallest batch there can be, in which a division by its size would show
            return max(base or mine, mine), 0
        if not claim.mechanism.needs_groups and self._users > 1:
            return max(1, round(probability * mine)), 0
        size = round(base / probability) if base else 0
        if not base or base / size != probability:  # the nearest coins below: accounted for with more
            size = max(mine, math.ceil(1000 / probability))
            base = max(1, math.floor(probability * size))
        times = -(-mine // size)
        return base * times, size * times - mine

    def _scheduled(self, claim: MechanismClaim) -> tuple[AttributionGraph, npt.NDArray[np.int64], Schedule]:
        """A schedule with the user in her rounds and others everywhere else."""
        self._users = 1
        graph, owner = _world(1, claim.copies, self._batch_size * claim.iterations)
        slots = claim.copies + np.arange(self._batch_size * claim.iterations).reshape(claim.iterations, -1)
        slots[claim.rounds, 0] = np.arange(claim.copies)
        return graph, owner, Schedule.from_batches(graph, slots)


@functools.lru_cache(maxsize=2)
def _world(users: int, owned: int, crowd: int) -> tuple[AttributionGraph, npt.NDArray[np.int64]]:
    """Users with `owned` examples each and a crowd with one each; (examples,) whose each is, -1 for the crowd's."""
    owner = np.concatenate([np.repeat(np.arange(users), owned), np.arange(users, users + crowd)])
    graph = AttributionGraph.from_csr(np.arange(len(owner) + 1), owner.astype(np.int32), num_users=users + crowd)
    return graph, np.where(owner < users, owner, -1)
