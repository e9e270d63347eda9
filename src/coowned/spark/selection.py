"""Selection on Spark in rounds of votes, with the same S as on one machine."""

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

from coowned import validate
from coowned.errors import InputError
from coowned.progress import Progress, counted, reporting
from coowned.selection.bias_mitigating import BiasMitigating
from coowned.selection.greedy import Greedy
from coowned.selection.greedy_with_duplicates import GreedyWithDuplicates
from coowned.selection.priced import Priced
from coowned.selection.selector import Selector
from coowned.spark import functions as F
from coowned.spark import rounds
from coowned.spark.attribution import SparkGraph, working_on
from coowned.spark.checkpoints import Checkpoints, empty_table
from coowned.spark.priced import Pricing
from coowned.spark.rounds import finish_locally, interleaved, ordered
from coowned.spark.user_bounds import taken_before, with_bounds

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RESIDUE = 1_000_000
"""Pairs at which the driver takes over: some tens of megabytes there, and less time than a round."""

HEAVY_USER = 100_000
"""Examples of a user above which no task sees all of them."""

_Supported = Greedy | GreedyWithDuplicates | BiasMitigating | Priced


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """A selector's choice, and the bound proven for it."""

    table: "DataFrame"  # example_id, copies
    upper_bound: int | None  # on the size of any S


def select(
    data: "DataFrame | SparkGraph",
    selector: Selector,
    *,
    seed: int = 0,
    residue: int = RESIDUE,
    progress: Progress | None = None,
    heavy_user: int = HEAVY_USER,
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> "DataFrame":
    """Returns the examples a selector chooses, as a table `example_id, copies` with rows for chosen examples only.

    Args:
      data: a graph from `attribute`, or a table that its defaults fit (`example_id` with `users` or `user_id`).
      selector: `Greedy`, `GreedyWithDuplicates`, `BiasMitigating`, or `Priced` without duplicates; ties="hash".
      seed: public; the same seed gives the same S, on one machine too.
      residue: when no more than this many pairs are undecided, the driver collects and finishes them; 0 never does.
      progress: called after every round as progress(done, message).
      heavy_user: a user in more examples than this has their votes found in several parts, on several executors.
      checkpoint_dir: where the tables between two rounds are kept; as in `attribute`.

    Guarantees:
      - S is the one that `selector.select` finds on one machine.       (test_equals_one_machine, test_interleaving)
        That of `Priced` is another one, with a proven bound too.       (test_priced_is_near_its_bound)
      - Neither partitioning nor lost executors change it.              (test_partitioning_changes_nothing,
                                                                         test_killed_executor_changes_nothing)
      - Bounds of single users are held as on one machine.              (test_bounds_of_single_users)
      - No task sees all pairs of a heavy user.                         (test_heavy_users_are_spread)
      - Plans do not grow from round to round, and nothing stays cached. (test_plans_are_truncated,
                                                                         test_nothing_is_left_behind)

    Cost: as many rounds as the order's dependencies are deep (see docs/spark.md), each with two shuffles of the
    undecided pairs. What it is not: fast on one machine, where the local engine takes a fraction of the time.

    References: Ganesh et al. (2025), https://arxiv.org/abs/2503.03622; the rounds are those of Blelloch, Fineman and
    Shun (2012), https://arxiv.org/abs/1202.3205, for hypergraphs with capacities.
    """
    settings: Any = {
        "seed": seed,
        "residue": residue,
        "progress": progress,
        "heavy_user": heavy_user,
        "checkpoint_dir": checkpoint_dir,
    }
    return choose(data, selector, **settings).table


def choose(
    data: "DataFrame | SparkGraph",
    selector: Selector,
    *,
    seed: int = 0,
    residue: int = RESIDUE,
    progress: Progress | None = None,
    heavy_user: int = HEAVY_USER,
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> Chosen:
    """Selects as `select` does, and also returns the proven bound."""
    supported = check_selector(selector)
    validate.seed(seed)
    validate.integer(at_least=0, at_most=1 << 31, residue=residue)
    validate.positive(heavy_user=heavy_user)
    report = reporting(progress)
    with working_on(data, checkpoint_dir) as (graph, checkpoints):
        empty = graph.counts[2]
        if supported.unattributed == "error" and empty:
            raise InputError(
                f"{counted(empty, 'example has', 'examples have')} no users; "
                'unattributed="drop" leaves out such examples, unattributed="keep" selects each once, protecting nobody'
            )
        voting = _Voting(
            graph=graph,
            selector=supported,
            seed=int(seed),
            residue=residue,
            heavy_user=heavy_user,
            report=report,
            checkpoints=checkpoints,
        )
        winners, upper_bound = voting.run()
        table = _result(graph, supported, winners, checkpoints)
    report(1.0, "selected")
    return Chosen(table=table, upper_bound=upper_bound)


def check_selector(selector: Selector) -> _Supported:
    """Returns the selector itself; raises an error if it, or one of its settings, is not supported on Spark."""
    if not isinstance(selector, _Supported):
        named = getattr(selector, "name", type(selector).__name__)
        raise InputError(
            f"the selector {named} does not run on Spark; greedy, greedy-with-duplicates, bias-mitigating and priced "
            "do. Choose one of them, or the local engine"
        )
    if isinstance(selector, Priced) and (selector.allow_duplicates or selector.time_limit is not None):
        raise InputError(
            "priced has neither duplicates nor a time limit on Spark; leave them out, choose greedy-with-duplicates, "
            "or the local engine"
        )
    if callable(selector.contribution_bounds):
        raise InputError("contribution_bounds is a rule, which Spark cannot ask of every key; give a table or a file")
    if selector.ties != "hash":
        raise InputError('ties="input" does not apply to Spark tables, which have no order; use "hash"')
    return selector


def _result(graph: SparkGraph, selector: _Supported, chosen: "DataFrame", checkpoints: Checkpoints) -> "DataFrame":
    """Saves the chosen examples and, if they are kept, those without users, as the only files left."""
    table = chosen.select("id", "copies")
    if not isinstance(selector, Greedy):  # an example that several passes took has several rows
        table = table.groupBy("id").agg(F.max("copies").alias("copies"))
    if selector.unattributed == "keep":
        kept = graph.examples.where(F.size("users") == 0).select("id", F.lit(1).alias("copies"))
        table = table.unionByName(kept)
    named = table.select(F.col("id").cast(graph.id_type).alias("example_id"), F.col("copies").cast("int"))
    saved = checkpoints.save(with_bounds(named, selector.contribution_bounds), "selected")
    checkpoints.remove("rounds")
    return saved


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Voting:
    """The loop over passes and rounds."""

    graph: SparkGraph
    selector: _Supported
    seed: int
    residue: int
    heavy_user: int
    report: Progress
    checkpoints: Checkpoints

    @functools.cached_property
    def electorate(self) -> rounds.Electorate:
        heavy = None
        if self.graph.num_pairs > max(self.residue, self.heavy_user):
            heavy = rounds.find_heavy(self.graph.pairs, self.heavy_user, self.checkpoints)
        return rounds.Electorate(contribution_bound=self.largest_bound, heavy=heavy)

    @functools.cached_property
    def largest_bound(self) -> int:
        """The largest bound of all users; those with a smaller one start with the difference already taken."""
        bounds = self.selector.contribution_bounds
        return self.selector.contribution_bound if bounds is None else max(bounds.tiers.values())

    @functools.cached_property
    def passes(self) -> int:
        """The maximum number of passes: one, unless an example may be selected again."""
        again = getattr(self.selector, "allow_duplicates", isinstance(self.selector, GreedyWithDuplicates))
        return self.largest_bound if again else 1

    @functools.cached_property
    def winners_schema(self) -> str:
        return rounds.winners_schema(self.graph.examples)

    def run(self) -> "tuple[DataFrame, int | None]":
        """Returns id, copies of every winner (several rows where several passes selected it), and a proven bound."""
        graph, checkpoints = self.graph, self.checkpoints
        self.report(0.0, f"{graph.num_examples:,} examples, {graph.num_pairs:,} pairs")
        if isinstance(self.selector, BiasMitigating):
            undecided = interleaved(graph.examples, self.seed, self.selector, checkpoints)
        else:
            undecided = ordered(graph.examples, self.seed)
        user = graph.examples.schema["users"].dataType.elementType.simpleString()  # type: ignore[union-attr]
        taken = empty_table(checkpoints.spark, f"user {user}, copies int, new boolean")
        if self.selector.contribution_bounds is not None:
            held = taken_before(graph, self.selector.contribution_bounds, self.largest_bound)
            taken = checkpoints.save(held, "rounds/bounds")
            undecided = self._without_full(undecided, taken, "rounds/allowed")
        won: list[str] = []  # the tables of winners of all passes
        upper_bound = None
        if isinstance(self.selector, Priced):
            core = self._pricing(self.selector).core(undecided, taken)
            undecided, taken, won, upper_bound = core.undecided, core.taken, core.won, core.upper_bound
            if self.selector.unattributed == "keep":
                upper_bound += graph.counts[2]
        last_won: list[str] = []
        for number in range(1, self.passes + 1):
            if number > 1:
                undecided = self._next_pass(number, last_won, taken)
            last_won, taken, over = self._run_pass(number, undecided, taken)
            won += last_won
            if over or not last_won:
                break
        schema = self.winners_schema
        return checkpoints.read(won, schema) if won else empty_table(checkpoints.spark, schema), upper_bound

    def _pricing(self, selector: Priced) -> Pricing:
        return Pricing(
            selector=selector,
            electorate=self.electorate,
            seed=self.seed,
            residue=self.residue,
            report=self.report,
            checkpoints=self.checkpoints,
        )

    def _next_pass(self, number: int, last_won: list[str], taken: "DataFrame") -> "DataFrame":
        """Returns the winners of the last pass whose users all have room: no other example can be selected again."""
        candidates = self.checkpoints.read(last_won, self.winners_schema).drop("copies")
        return self._without_full(candidates, taken, f"rounds/{number}/0/undecided")

    def _without_full(self, candidates: "DataFrame", taken: "DataFrame", folder: str) -> "DataFrame":
        """Returns the candidates all of whose users have room."""
        ballots = rounds.cast_ballots(candidates, self.electorate)
        full = rounds.full_users(taken, self.electorate, new=False)
        left = rounds.drop_decided(candidates, ballots, full, None, self.electorate)
        return self.checkpoints.save(left, folder)

    def _run_pass(self, number: int, undecided: "DataFrame", taken: "DataFrame") -> "tuple[list[str], DataFrame, bool]":
        """Runs rounds to the end of a pass; returns tables of winners, each user's copies, whether no pass follows."""
        won: list[str] = []
        examples, pairs = rounds.size_of(undecided)
        at_first, count = max(pairs, 1), 0
        title = "round" if self.passes == 1 else f"pass {number}, round"
        while pairs:
            count += 1
            folder = f"rounds/{number}/{count}"
            won.append(f"{folder}/winners")
            if pairs <= self.residue:
                self._report(number, 1.0, f"{title} {count}: {pairs:,} pairs left, finished on the driver")
                table = finish_locally(
                    undecided,
                    taken,
                    contribution_bound=self.largest_bound,
                    copies=number,
                    to_the_end=count == 1 and number < self.passes,
                )
                found = self.checkpoints.spark.createDataFrame(table, self.winners_schema)
                winners = self.checkpoints.save(found, won[-1])
                if self.passes > number and count > 1:
                    taken = self.checkpoints.save(rounds.add_taken(taken, winners), f"{folder}/taken")
                return won, taken, count == 1
            undecided, taken = self._run_round(folder, number, undecided, taken)
            before = examples
            examples, pairs = rounds.size_of(undecided)
            self.checkpoints.remove(*(f"rounds/{number}/{count - 1}/{name}" for name in ("undecided", "taken")))
            decided = f"{before - examples:,} examples decided, {examples:,} undecided ({pairs:,} pairs)"
            self._report(number, 1 - pairs / at_first, f"{title} {count}: {decided}")
        return won, taken, False

    def _run_round(
        self, folder: str, number: int, undecided: "DataFrame", taken: "DataFrame"
    ) -> "tuple[DataFrame, DataFrame]":
        """Runs one round; returns the undecided examples and each user's copies."""
        from pyspark import StorageLevel

        save = self.checkpoints.save
        ballots = rounds.cast_ballots(undecided, self.electorate).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            votes = rounds.count_votes(ballots, taken, self.electorate)
            winners = save(votes.withColumn("copies", F.lit(number)), f"{folder}/winners")
            taken = save(rounds.add_taken(taken, winners), f"{folder}/taken")
            full = rounds.full_users(taken, self.electorate, new=True)
            left = rounds.drop_decided(undecided, ballots, full, winners, self.electorate)
            return save(left, f"{folder}/undecided"), taken
        finally:
            ballots.unpersist(blocking=True)

    def _report(self, number: int, share: float, message: str) -> None:
        """Reports a share of one pass, since the number of passes is unknown."""
        self.report(share if self.passes == 1 else 1 - 0.5 ** (number - 1) + 0.5**number * share, message)
