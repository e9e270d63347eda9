"""Recounts of users against individual bounds: the certificate's part for tiers.

It looks bounds up by key with code of its own, so that a bug of the selectors' lookup cannot hide here.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from coowned.attribution.graph import AttributionGraph
from coowned.attribution.user_keys import UserKeyRules
from coowned.errors import UncertifiableError
from coowned.progress import counted
from coowned.selection.user_bounds import UserBounds


@dataclasses.dataclass(frozen=True, kw_only=True)
class CertifiedTiers:
    """Counts of the users with one bound each, every one of them recounted against it."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]  # 0: opted out
    # The certificate's `copies_per_user` for each tier's users, contribution_bound + 1 per tier, end to end.
    copies_per_user: tuple[int, ...]
    num_examples_opted_out: int  # examples that a user with bound 0 is part of, none of which is selected
    num_unknown_keys: int  # listed, but in none of the data; a list may be of more people than the data
    digest: str  # of all keys, bounds and names that were listed, and of the bound of everybody else

    def levels(self) -> list[tuple[int, ...]]:
        """Returns for each tier how many of its users are in 0, 1, … copies."""
        size = len(self.copies_per_user) // max(1, len(self.names))
        return [self.copies_per_user[i * size : (i + 1) * size] for i in range(len(self.names))]

    def by_name(self) -> dict[str, int]:
        """Returns the bound of each tier."""
        return dict(zip(self.names, self.bounds, strict=True))

    @property
    def users(self) -> tuple[int, ...]:
        """The number of users in each tier."""
        return tuple(map(sum, self.levels()))

    @property
    def num_opted_out(self) -> int:
        """Users with bound 0."""
        return sum(users for users, bound in zip(self.users, self.bounds, strict=True) if bound == 0)

    def unknown_keys_advice(self) -> str:
        """Returns what to do about listed keys that nobody has: a mistyped key opts nobody out."""
        keys = counted(self.num_unknown_keys, "key with a bound is", "keys with bounds are")
        return f"{keys} of nobody in the data; `coowned inspect --show-keys` lists the keys that there are"

    def check(self, copies_per_user: Sequence[int]) -> bool:
        """Returns whether the tiers add up to all users, and nobody is above their bound."""
        levels = self.levels()
        return (
            len(self.names) == len(self.bounds) == len(set(self.names))
            and [sum(level) for level in zip(*levels, strict=True)] == list(copies_per_user)
            and all(not any(level[bound + 1 :]) for level, bound in zip(levels, self.bounds, strict=True))
        )


def count_tiers(
    graph: AttributionGraph, copies: np.ndarray, per_user: np.ndarray, bounds: UserBounds
) -> CertifiedTiers:
    """Checks every user against their own bound, found by key; raises an error for a user in more copies."""
    keys = list(map(str, range(graph.num_users) if graph.user_keys is None else graph.user_keys.to_pylist()))
    names = list(bounds.tiers)
    found, num_unknown = tiers_of_keys(keys, bounds)
    tier_of_user = np.array([names.index(name) for name in found], np.int64)  # (num_users,)
    own = np.array([bounds.tiers[name] for name in names], np.int64)
    over = np.flatnonzero(per_user > own[tier_of_user])
    if len(over):
        user = int(over[0])
        raise UncertifiableError(
            f"{counted(len(over), 'user is', 'users are')} in more copies than their bound (user {user}, of tier "
            f"{found[user]!r}, in {per_user[user]}); select again with these bounds"
        )
    levels = int(per_user.max(initial=0)) + 1
    users = np.bincount(tier_of_user * levels + per_user, minlength=len(names) * levels)
    out = np.flatnonzero(own[tier_of_user] == 0)
    example_of_pair = np.repeat(np.arange(graph.num_examples), graph.users_per_example)
    return CertifiedTiers(
        names=tuple(names),
        bounds=tuple(own.tolist()),
        copies_per_user=tuple(users.tolist()),
        num_examples_opted_out=len(np.unique(example_of_pair[np.isin(graph.users, out)])),
        num_unknown_keys=num_unknown,
        digest=bounds.digest,
    )


def tiers_of_keys(keys: Sequence[str], bounds: UserBounds) -> tuple[list[str], int]:
    """Returns the name of each user's tier, and how many listed keys nobody has.

    A listed key that nobody has as it is counts under the rules of names, as everywhere; of several for one person the
    smallest bound counts.
    """
    owned, rest = set(keys), bounds.table.rows()
    tiers: dict[str, tuple[int, str]] = {}
    for rules in (UserKeyRules.exact(), UserKeyRules(), UserKeyRules.authors()):
        spelled, left = rules.canonical([row[0] for row in rest]).to_list(), []
        for row, key in zip(rest, spelled, strict=True):
            if key in owned:
                tiers[key] = min(tiers.get(key, row[1:]), row[1:])
            else:
                left.append(row)
        rest = left
    others = f"bound {bounds.others}"
    return [tiers[key][1] if key in tiers else others for key in keys], len(rest)
