"""Integer programs solved by HiGHS: sparse rows, a warm start, and cancellation by Ctrl-C or the progress callback."""

import concurrent.futures
import dataclasses
import threading
from typing import Any

import highspy
import numpy as np
import numpy.typing as npt
import scipy.sparse

from coowned.progress import Progress

_WAIT = 0.1  # seconds between two reports of a running solver


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """minimize cost · x with row_lower <= A x <= row_upper, 0 <= x <= upper, x integer."""

    cost: npt.NDArray[np.float64]  # (num_columns,)
    upper: npt.NDArray[np.float64]  # (num_columns,)
    rows: scipy.sparse.csr_array  # (num_rows, num_columns) A, of integers
    row_lower: npt.NDArray[np.float64]  # (num_rows,)
    row_upper: npt.NDArray[np.float64]  # (num_rows,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    values: npt.NDArray[np.int64] | None  # (num_columns,) the best integer solution, None if there is none
    dual_bound: float  # the solver's bound: no solution costs less, up to its tolerances
    infeasible: bool  # proven


def minimize(
    program: Program,
    *,
    warm_start: npt.NDArray[Any] | None,
    absolute_gap: float,
    time_limit: float,
    seed: int,
    progress: Progress,
) -> Outcome:
    """Solves the program; `progress` is called by the calling thread, and its exceptions, and Ctrl-C, stop the solver.

    The solver runs in a separate thread, since only Python code in the main thread receives signals.
    """
    highs = _load(program)
    for option, value in {
        "time_limit": float(time_limit),
        "random_seed": seed % (2**31 - 1),
        "mip_rel_gap": 0.0,
        "mip_abs_gap": absolute_gap,
    }.items():
        highs.setOptionValue(option, value)
    if warm_start is not None:
        solution = highspy.HighsSolution()
        solution.col_value = np.asarray(warm_start, np.float64).tolist()
        highs.setSolution(solution)
    stop = threading.Event()
    news: dict[str, float] = {}

    def look(event: Any) -> None:
        if event.callback_type == highspy.cb.HighsCallbackType.kCallbackMipInterrupt:
            news["time"] = event.data_out.running_time
            news["best"] = event.data_out.mip_primal_bound
            news["bound"] = event.data_out.mip_dual_bound
        if stop.is_set():
            event.interrupt()

    for callback in (highs.cbMipInterrupt, highs.cbSimplexInterrupt, highs.cbIpmInterrupt):
        callback.subscribe(look)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        solver = pool.submit(highs.run)
        try:
            ended = False
            while not ended:  # at least once, however soon the solver ends
                ended = bool(concurrent.futures.wait([solver], _WAIT).done)
                done = min(1.0, news.get("time", 0.0) / time_limit)
                best, bound = (abs(news.get(key, np.inf)) for key in ("best", "bound"))
                progress(done, f"integer program: best {best:.0f}, bound {bound:.2f}")
        finally:
            stop.set()
    solver.result()  # raises what the solver raised
    return _outcome(highs, program)


def _load(program: Program) -> highspy.Highs:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    model = highspy.HighsLp()
    model.num_col_ = len(program.cost)
    model.num_row_ = len(program.row_upper)
    model.col_cost_ = program.cost
    model.col_lower_ = np.zeros(len(program.cost))
    model.col_upper_ = program.upper
    model.row_lower_ = program.row_lower
    model.row_upper_ = program.row_upper
    model.integrality_ = [highspy.HighsVarType.kInteger] * len(program.cost)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.rows.indptr.astype(np.int32)
    model.a_matrix_.index_ = program.rows.indices.astype(np.int32)
    model.a_matrix_.value_ = program.rows.data.astype(np.float64)
    highs.passModel(model)
    return highs


def _outcome(highs: highspy.Highs, program: Program) -> Outcome:
    status = highs.getModelStatus()
    infeasible = status == highspy.HighsModelStatus.kInfeasible
    info = highs.getInfo()
    values = None
    solution = highs.getSolution()
    if solution.value_valid and len(solution.col_value) == len(program.cost):
        whole = np.rint(np.asarray(solution.col_value)).astype(np.int64)
        if _feasible(program, whole):
            values = whole
    return Outcome(values=values, dual_bound=float(info.mip_dual_bound), infeasible=infeasible)


def _feasible(program: Program, values: npt.NDArray[np.int64]) -> bool:
    """Checks feasibility exactly, on integers: the solver only promises it up to a tolerance."""
    sums = program.rows @ values
    inside = (sums >= program.row_lower).all() and (sums <= program.row_upper).all()
    return bool(inside and (values >= 0).all() and (values <= program.upper).all())


def distinct_rows(
    indptr: npt.NDArray[Any], entries: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the first of every set of equal rows, and for each row which of those it is equal to."""
    seen: dict[bytes, int] = {}
    which = np.empty(len(indptr) - 1, np.int64)
    first = []
    for row in range(len(which)):
        which[row] = seen.setdefault(entries[indptr[row] : indptr[row + 1]].tobytes(), len(first))
        if which[row] == len(first):
            first.append(row)
    return np.array(first, np.int64), which
