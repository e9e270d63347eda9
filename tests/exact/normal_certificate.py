"""A proof by interval arithmetic that `coowned.exact.normals.approximate` is as close as it says.

The kernels' own source is run on two other kinds of numbers:

* `Taylor` series with interval coefficients bound how far the formula, in exact arithmetic, is from the inverse of the
  distribution function, on small cells that cover its range;
* `Rounded` numbers bound what the float64 operations add to that, each off by at most 2^-53 of its result.

With D(q) = Phi(R(q)) - 1/2 - q the central formula R is off by at most |D| / phi; with L(r) = log Q(N(r)) + r^2 the
tail formula N by at most |L| / h, h = phi / Q the hazard rate. D and L are bounded by their Taylor polynomials in the
middle of a cell, and the last derivative over the whole of it.
"""

import dataclasses
import itertools

import mpmath
from mpmath import iv

from coowned.exact import normals

ORDER = 9  # of the Taylor polynomials
U = 2.0**-53  # rounding error of one float64 operation, relative to its result


def largest(x) -> float:
    """The largest absolute value of an interval, as a float that is not smaller."""
    return float(abs(iv.mpf(x)).b) * (1 + 1e-15)


# ---- the formulas in exact arithmetic --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Taylor:
    """Interval coefficients of a power series around the middle of a cell (or around every point of it)."""

    terms: list

    def __add__(self, other):
        if isinstance(other, Taylor):
            return Taylor([a + b for a, b in zip(self.terms, other.terms, strict=True)])
        return Taylor([self.terms[0] + iv.mpf(other), *self.terms[1:]])

    def __sub__(self, other):
        return self + -1 * other

    def __rsub__(self, other):
        return -1 * self + other

    def __mul__(self, other):
        if not isinstance(other, Taylor):
            return Taylor([a * iv.mpf(other) for a in self.terms])
        return Taylor([sum(self.terms[i] * other.terms[k - i] for i in range(k + 1)) for k in range(len(self.terms))])

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other):
        quotient: list = []
        for k, own in enumerate(self.terms):
            known = sum((quotient[i] * other.terms[k - i] for i in range(k)), iv.mpf(0))
            quotient.append((own - known) / other.terms[0])
        return Taylor(quotient)


def around(x) -> Taylor:
    return Taylor([iv.mpf(x), iv.mpf(1), *[iv.mpf(0)] * (ORDER - 1)])


def tail_between(z) -> object:
    """An interval that holds Q(z) for all z of an interval above 0; Q falls."""
    nearest, farthest = (mpmath.libmp.to_rational(end) for end in z._mpi_)
    low, _, unit = normals.upper_tail(*map(int, farthest), 60)
    _, high, _ = normals.upper_tail(*map(int, nearest), 60)
    return iv.mpf([low, high]) / unit


def density(z) -> object:
    return iv.exp(-z * z / 2) / iv.sqrt(2 * iv.pi)


def central_defect(q: Taylor) -> list:
    """The Taylor terms of Phi(R(q)) - 1/2 - q."""
    z = normals.central_normal.py_func(q)
    phi = [density(z.terms[0])]  # of phi(z(q)): phi' = -z z' phi
    slope = [(k + 1) * z.terms[k + 1] for k in range(ORDER)]
    moved = [sum(z.terms[i] * slope[k - i] for i in range(k + 1)) for k in range(ORDER)]
    for k in range(1, ORDER):
        phi.append(-sum(moved[i] * phi[k - 1 - i] for i in range(k)) / k)
    terms = [sum(phi[i] * slope[k - 1 - i] for i in range(k)) / k for k in range(1, ORDER + 1)]
    terms[0] -= 1
    if q.terms[0].a != q.terms[0].b:  # of a whole cell only the last term is used
        return [None, *terms]
    return [iv.mpf(1) / 2 - tail_between(z.terms[0]) - q.terms[0], *terms]


def tail_defect(r: Taylor) -> list:
    """The Taylor terms of log Q(N(r)) + r^2."""
    z = normals.tail_normal.py_func(r)
    tail = tail_between(z.terms[0])
    hazard = [density(z.terms[0]) / tail]  # h' = h (h - z) z'
    slope = [(k + 1) * z.terms[k + 1] for k in range(ORDER)]
    for k in range(1, ORDER):
        inner = [hazard[i] - z.terms[i] for i in range(k)]
        product = [sum(hazard[i] * inner[j - i] for i in range(j + 1)) for j in range(k)]
        hazard.append(sum(product[i] * slope[k - 1 - i] for i in range(k)) / k)
    terms = [-sum(hazard[i] * slope[k - 1 - i] for i in range(k)) / k for k in range(1, ORDER + 1)]
    square = r * r
    return [iv.log(tail) + square.terms[0], *(terms[k] + square.terms[k + 1] for k in range(ORDER))]


def formula_error(defect, low: float, high: float) -> float:
    """A bound on |defect| over [low, high]; a cell on which the last derivative is not known well is halved."""
    middle, half = (low + high) / 2, iv.mpf(high - low) / 2 * (1 + iv.mpf(2) ** -40)
    remainder = largest(defect(around(iv.mpf([low, high])))[ORDER]) * half**ORDER
    if largest(remainder) > 2.0**-55:
        return max(formula_error(defect, low, middle), formula_error(defect, middle, high))
    terms = defect(around(middle))[:ORDER]
    return largest(sum(largest(term) * half**k for k, term in enumerate(terms)) + remainder)


# ---- what float64 adds -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rounded:
    """All values a float64 variable should have on a cell, and how far it may be from what it should have."""

    value: object  # an interval
    error: float = 0.0

    @staticmethod
    def of(other) -> "Rounded":
        return other if isinstance(other, Rounded) else Rounded(iv.mpf(other))

    def rounded(self) -> "Rounded":
        return Rounded(self.value, self.error + U * (largest(self.value) + self.error))

    def __add__(self, other):
        other = Rounded.of(other)
        return Rounded(self.value + other.value, self.error + other.error).rounded()

    def __sub__(self, other):
        other = Rounded.of(other)
        return Rounded(self.value - other.value, self.error + other.error).rounded()

    def __rsub__(self, other):
        return Rounded.of(other) - self

    def __mul__(self, other):
        other = Rounded.of(other)
        error = largest(self.value) * other.error + largest(other.value) * self.error + self.error * other.error
        return Rounded(self.value * other.value, error).rounded()

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other):
        smallest = float(abs(other.value).a) - other.error
        error = (self.error + largest(self.value / other.value) * other.error) / smallest
        return Rounded(self.value / other.value, error * (1 + 1e-12)).rounded()


def central_error(low: float, high: float) -> tuple[float, float]:
    """(absolute error of the central formula for q in [low, high], smallest |z| there)."""
    q = iv.mpf([low, high])
    # The word's unread digits move q by 2^-65 at most; its conversion and an addition round twice.
    computed = normals.central_normal.py_func(Rounded(q, 2.0**-65 + 2 * U * high))
    smallest = float(abs(normals.central_normal.py_func(Taylor([q])).terms[0]).a)
    formula = formula_error(central_defect, low, high) / float(density(computed.value + iv.mpf([-1, 1]) * 1e-9).a)
    return computed.error + formula * (1 + 1e-9), smallest


def log_error() -> float:
    """The relative error of -log(p) for 2^-64 <= p <= 0.08, where p is off by 2^-48 + 3·2^-53 of itself."""
    worst = 0.0
    edges = [0.7071 + 0.7072 * i / 64 for i in range(65)]
    for low, high in itertools.pairwise(edges):
        for exponent in (*range(-64, -3),):
            m = Rounded(iv.mpf([low, high]))
            found = normals.log_of.py_func(_ExactDifference(m.value), exponent)
            whole = iv.log(m.value) + exponent * iv.log(2)
            if float(whole.b) > -2.5:
                continue
            worst = max(worst, found.error / float(abs(whole).a))
    series = 2 * mpmath.mpf("0.172") ** 27 / 27 * mpmath.mpf("1.04")  # terms of artanh that are left out
    with mpmath.workprec(200):
        split = 64 * abs(mpmath.mpf(normals.LN2_HIGH) + mpmath.mpf(normals.LN2_LOW) - mpmath.log(2))
    return worst + float(series + split) / 2.5


class _ExactDifference(Rounded):
    """A float64 in (0.7, 1.42): the difference to 1 is exact (Sterbenz)."""

    def __init__(self, value):
        super().__init__(value)

    def __sub__(self, other):
        return Rounded(self.value - other)


def tail_error(low: float, high: float, log_relative: float) -> tuple[float, float]:
    """(absolute error of the tail formula for sqrt(-log p) in [low, high], smallest z there)."""
    r = iv.mpf([low, high])
    # p: unread digits move it by 2^-48 of itself, and three roundings; the root halves relative errors.
    of_log = log_relative * high**2 + 2.0**-48 + 4 * U
    of_root = (of_log / (2 * low)) * (1 + 1e-9) + U * high
    z = normals.tail_normal.py_func(Taylor([r])).terms[0]
    computed = normals.tail_normal.py_func(Rounded(r, of_root))
    hazard = float((density(z) / tail_between(z)).a) * (1 - 1e-9)
    return computed.error + formula_error(tail_defect, low, high) / hazard, float(z.a)


def certify(cells: int = 400) -> dict[str, tuple[float, float]]:
    """The largest (|z - Z| - ABSOLUTE_ERROR) / |z| of both formulas, over cells that cover their ranges."""
    iv.prec = 240
    edge = int(normals.CENTRAL) / 2**64
    central = [0.0, *[edge / cells * 2.0**i for i in range(-8, 0)]]  # smaller cells near 0, where z is small
    central += [edge * (1 + 1e-9) * i / cells for i in range(1, cells + 1)]
    roots = float(mpmath.sqrt(-mpmath.log(0.5 - edge))) * (1 - 1e-9)
    tail = [roots + (normals.LARGEST_ROOT * (1 + 1e-9) - roots) * i / cells for i in range(cells + 1)]
    of_log = log_error()
    found = {"central": 0.0, "tail": 0.0}
    for low, high in itertools.pairwise(central):
        error, z = central_error(low, high)
        excess = error - normals.ABSOLUTE_ERROR
        found["central"] = max(found["central"], excess / z if z else float(excess > 0))
    for low, high in itertools.pairwise(tail):
        error, z = tail_error(low, high, of_log)
        found["tail"] = max(found["tail"], error / z)
    return found | {"log": of_log}
