"""How far Algorithm 4 is from optimal on small graphs: its contribution bound beside that of the integer program.

python -m benchmarks.min_separation_gap
"""

from coowned.errors import InfeasibleScheduleError
from coowned.selection.greedy_min_separation import GreedyMinSeparation
from coowned.selection.min_separation_program import MinSeparationProgram
from coowned.synthetic.regular_graph import RegularGraph
from coowned.testing.selector_checks import copies_per_user

GRID = [(60, 4, 6, 1), (60, 4, 6, 2), (60, 6, 8, 1), (60, 6, 8, 2), (100, 8, 8, 1), (100, 8, 8, 2), (100, 8, 8, 3)]
"""(num_examples, batch_size, iterations, min_separation)"""

SEEDS = range(2)
SECONDS = 10


def measure(num_examples, batch_size, iterations, min_separation, seed):
    """(bound of Algorithm 4 or None, bound of the program or None, proven lower bound)."""
    graph = RegularGraph(num_examples=num_examples, mean_users_per_example=2, mean_examples_per_user=4).generate(
        seed=seed
    )
    settings = {"batch_size": batch_size, "iterations": iterations, "min_separation": min_separation}
    try:
        greedy = copies_per_user(graph, GreedyMinSeparation(**settings).select(graph, seed=seed).copies).max()
    except InfeasibleScheduleError:
        greedy = None
    try:
        schedule = MinSeparationProgram(**settings, time_limit=SECONDS).select(graph, seed=seed)
    except InfeasibleScheduleError:
        return greedy, None, None
    return greedy, copies_per_user(graph, schedule.copies).max(), schedule.lower_bound


def run() -> list[dict]:
    """One row a setting and seed: the value is greedy's bound over the program's."""
    rows = []
    for setting in GRID:
        for seed in SEEDS:
            greedy, program, lowest = measure(*setting, seed)
            n, size, number, separation = setting
            name = f"{n} examples, B = {size}, T = {number}, b = {separation}, seed {seed}: "
            name += f"greedy k = {greedy}, program k = {program}, at least {lowest}"
            ratio = float("nan") if greedy is None or program is None else greedy / program
            rows.append({"name": name, "value": ratio, "unit": "ratio", "bar": "", "ok": None})
    return rows


if __name__ == "__main__":
    for measured in run():
        print(f"{measured['name']:90} {measured['value']:8.3f}", flush=True)
