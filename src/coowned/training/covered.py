"""Covered evaluation: counts on held-out data, with exact integer noise, released once as part of the claim.

Every copy adds a vector of whole numbers on a public grid: `SCALE` for a right answer; where asked for, its loss,
clipped at a public bound, in steps of bound / SCALE; and `SCALE` in one cell of the confusion matrix. Sum and Gaussian
noise meet as integers (docs/accounting.md, "A covered evaluation").
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import codec
from coowned.accounting.covered import CoveredEvaluation, CoveredRelease
from coowned.certificate import certify
from coowned.content.data import TrainingData, content_pieces
from coowned.errors import CertificateMismatchError, InputError
from coowned.exact.keys import Purpose, RunKey
from coowned.exact.noise import NoiseStream
from coowned.models.model import Model
from coowned.selection.selector import Selection
from coowned.training.evaluate import compiled_method, example_losses

FORMAT = "coowned-covered-1"
SCALE = 2**10  # grid steps of one right answer
LEVEL = 0.95
_Z = 1.959963984540054  # 97.5% of a standard normal lie below
_CHANGED = "the covered figures do not follow from the released counts; restore the original file, or train again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoveredFigures:
    """Figures of a covered evaluation: all follow from noisy counts, so they may be published with the claim.

    Every interval is a normal (score) interval at 95% that includes sampling and noise. It takes held-out examples for
    independent draws; examples of one person are alike, so that the truth for new people is somewhat less certain.

    Attributes:
      accuracy, accuracy_low, accuracy_high: of the held-out part; None where no class is predicted.
      loss, loss_low, loss_high: mean of the losses, each clipped at the public `loss_bound`; None if not asked for.
      confusion: by true class, then predicted class: noisy shares of the held-out part; None if not asked for.
      classes: as the labels are spelled; None where no class is predicted.
      size: copies in the held-out part.
      deviation: of the noise on every count, in examples.
      counts: what was released, in 1024ths of an example: right answers, loss, confusion matrix by rows.
      run_id: of the claim.

    Guarantees:
      - The intervals hold the truth about as often as they say.   (test_covered_intervals_hold_the_truth)
      - Figures that do not follow from their counts and claim are refused.   (test_changed_figures_are_refused)
    """

    accuracy: float | None
    accuracy_low: float | None
    accuracy_high: float | None
    loss: float | None
    loss_low: float | None
    loss_high: float | None
    confusion: tuple[tuple[float, ...], ...] | None
    classes: tuple[Any, ...] | None
    loss_bound: float | None
    size: int
    deviation: float
    counts: tuple[int, ...]
    run_id: str

    @classmethod
    def of(
        cls,
        counts: npt.NDArray[np.int64],
        release: CoveredRelease,
        *,
        classes: tuple[Any, ...] | None,
        loss_bound: float | None,
        confusion: bool,
        run_id: str,
    ) -> Self:
        """Computes every figure from the released counts."""
        parts = _Parts(classes=classes, loss_bound=loss_bound, confusion=confusion)
        deviation = parts.deviation(release) / SCALE
        shares = np.asarray(counts, np.float64) / (SCALE * release.size)
        noise, left = deviation / release.size, list(shares)
        right = score_interval(left.pop(0), release.size, noise) if classes is not None else (None,) * 3
        loss: tuple[float | None, ...] = (None,) * 3
        if loss_bound is not None:
            loss = tuple(loss_bound * value for value in score_interval(left.pop(0), release.size, noise))
        table = None
        if confusion and classes is not None:
            cells = np.clip(np.reshape(left, (len(classes), len(classes))), 0, 1)
            table = tuple(tuple(map(float, row)) for row in cells)
        return cls(
            **dict(zip(("accuracy", "accuracy_low", "accuracy_high"), right, strict=True)),
            **dict(zip(("loss", "loss_low", "loss_high"), loss, strict=True)),
            confusion=table,
            classes=classes,
            loss_bound=loss_bound,
            size=release.size,
            deviation=deviation,
            counts=tuple(np.asarray(counts).tolist()),
            run_id=run_id,
        )

    @property
    def noise_share(self) -> float:
        """Standard deviation of the noise on a share of the held-out part."""
        return self.deviation / self.size

    def to_json(self) -> str:
        """Returns a JSON object with a checksum."""
        fields = codec.to_plain(self)
        return codec.encode_json({**fields, "checksum": codec.checksum(fields)}, indent=2, format=FORMAT)

    @classmethod
    def from_json(cls, text: str | bytes, *, release: CoveredRelease, run_id: str) -> Self:
        """Reads `to_json()` back; raises an error for figures that belong to another claim."""
        stored: Any = codec.decode_json(_STORED, text, name="covered figures", format=FORMAT, remedy="train again")
        fields = codec.to_plain(stored)
        if fields.pop("checksum") != codec.checksum(fields) or stored.run_id != run_id or stored.size != release.size:
            raise CertificateMismatchError(_CHANGED)
        settings = {"classes": stored.classes, "loss_bound": stored.loss_bound, "run_id": run_id}
        confusion = stored.confusion is not None
        parts = _Parts(classes=stored.classes, loss_bound=stored.loss_bound, confusion=confusion)
        if len(stored.counts) != parts.length:
            raise CertificateMismatchError(_CHANGED)
        found = cls.of(np.array(stored.counts, np.int64), release, confusion=confusion, **settings)
        if codec.to_plain(found) != fields:
            raise CertificateMismatchError(_CHANGED)
        return found

    def __str__(self) -> str:
        """Returns the figures in one line, each with its interval."""
        said = []
        if self.accuracy is not None:
            said.append(f"accuracy {self.accuracy:.1%} ({self.accuracy_low:.1%} to {self.accuracy_high:.1%})")
        if self.loss is not None:
            said.append(f"mean loss {self.loss:.3g} ({self.loss_low:.3g} to {self.loss_high:.3g})")
        return f"{', '.join(said)}; normal 95% intervals with sampling and noise, {self.size:,} held-out examples"


_STORED = msgspec.defstruct(
    "CoveredFigures",
    [*((field.name, field.type) for field in dataclasses.fields(CoveredFigures)), ("checksum", str)],
    kw_only=True,
    frozen=True,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """The layout of one copy's vector."""

    classes: tuple[Any, ...] | None
    loss_bound: float | None
    confusion: bool

    @property
    def number(self) -> int:
        """The number of parts, each of which has a length of at most SCALE."""
        return (self.classes is not None) + (self.loss_bound is not None) + self.has_confusion

    @property
    def has_confusion(self) -> bool:
        return self.confusion and self.classes is not None

    @property
    def length(self) -> int:
        cells = len(self.classes or ()) ** 2 if self.has_confusion else 0
        return (self.classes is not None) + (self.loss_bound is not None) + cells

    def deviation(self, release: CoveredRelease) -> float:
        """Returns the noise's deviation in grid steps: at least the multiplier times the longest vector of a copy."""
        return math.nextafter(release.noise_multiplier * SCALE * math.sqrt(self.number) * (1 + 2.0**-50), math.inf)


def check_covered(settings: CoveredEvaluation, model: Model) -> None:
    """Raises InputError if the settings leave nothing to release for this model."""
    if model.classes is None and settings.loss_bound is None:
        raise InputError(
            "this model predicts no class, so there is no accuracy to cover; set loss_bound to cover a loss"
        )
    if model.classes is None and settings.confusion:
        raise InputError("this model predicts no class, so there is no confusion matrix; remove confusion")


def evaluate_covered(
    model: Model,
    parameters: Mapping[str, npt.NDArray[np.float32]],
    data: TrainingData,
    held_out: Selection,
    *,
    settings: CoveredEvaluation,
    release: CoveredRelease,
    run_key: RunKey,
    run_id: str,
) -> CoveredFigures:
    """Evaluates on the held-out part and adds the noise: once, at the end of a run.

    Guarantees:
      - The held-out part is recounted first; one that is not the certified one is refused.
        (test_another_held_out_part_is_refused)
      - The same key gives the same bits, and no noise of training.   (test_the_noise_is_of_its_own)
      - Without noise the counts are those of a plain loop.   (test_counts_are_those_of_a_plain_loop)

    Args:
      model, parameters: as `train` gives them.
      data: of the whole test split.
      held_out: selected from the graph of `data`.
      release: the evaluation's part of the claim.
      run_key: of the run.
      run_id: of the claim.
    """
    check_covered(settings, model)
    release.check_certificate(certify(data.graph, held_out))
    parts = _parts(settings, model)
    counts = covered_counts(model, parameters, data, held_out, settings=settings)
    noise = evaluation_noise(run_key, deviation=parts.deviation(release), length=parts.length)
    return CoveredFigures.of(
        counts + noise,
        release,
        classes=parts.classes,
        loss_bound=parts.loss_bound,
        confusion=parts.has_confusion,
        run_id=run_id,
    )


def covered_counts(
    model: Model,
    parameters: Mapping[str, npt.NDArray[np.float32]],
    data: TrainingData,
    held_out: Selection,
    *,
    settings: CoveredEvaluation,
) -> npt.NDArray[np.int64]:
    """Sums all copies' vectors; the sum is as secret as the data. A copy that cannot be read adds nothing."""
    copies = np.asarray(held_out.copies, np.int64)
    losses, right = example_losses(model, parameters, data)
    usable = copies * np.isfinite(losses)
    sums = [] if model.classes is None else [SCALE * int(copies @ right)]
    if settings.loss_bound is not None:
        share = np.clip(np.where(np.isfinite(losses), losses, 0.0) / settings.loss_bound, 0.0, 1.0)
        sums.append(int(usable @ np.rint(SCALE * share).astype(np.int64)))
    if not settings.confusion or model.classes is None:
        return np.array(sums, np.int64)
    number = len(model.classes)
    labels, found = _classes_of(model, parameters, data)
    known = (usable > 0) & (labels >= 0) & (labels < number) & (found >= 0) & (found < number)
    cells = np.zeros(number * number, np.int64)
    np.add.at(cells, labels[known] * number + found[known], SCALE * copies[known])
    return np.concatenate([np.array(sums, np.int64), cells])


def evaluation_noise(run_key: RunKey, *, deviation: float, length: int) -> npt.NDArray[np.int64]:
    """Draws (length,) exactly rounded Gaussian noise from a stream that nothing else uses."""
    stream = NoiseStream(
        run_key,
        deviations=[deviation],
        coefficients=[1.0],
        shapes={"counts": (length,)},
        iterations=1,
        purpose=Purpose.EVALUATION,
    )
    return stream.next()["counts"][0]


def score_interval(share: float, size: int, noise: float) -> tuple[float, float, float]:
    """Returns a share in [0, 1], and the range of p with (share - p)^2 <= 1.96^2 (p (1 - p) / size + noise^2).

    Guarantees:
      - Without noise it is Wilson's interval.   (test_without_noise_it_is_wilsons)

    >>> [round(value, 3) for value in score_interval(0.8, 10, 0.0)]
    [0.8, 0.49, 0.943]
    """
    share = min(max(float(share), 0.0), 1.0)  # which is never farther from the truth
    square = _Z**2 / size
    root = 4 * square * share * (1 - share) + square**2 + 4 * (1 + square) * (_Z * noise) ** 2
    low, high = ((2 * share + square + side * math.sqrt(root)) / (2 * (1 + square)) for side in (-1, 1))
    return share, min(max(0.0, low), share), max(min(1.0, high), share)


def _parts(settings: CoveredEvaluation, model: Model) -> _Parts:
    classes = None if model.classes is None else tuple(model.classes)
    return _Parts(classes=classes, loss_bound=settings.loss_bound, confusion=settings.confusion)


def _classes_of(
    model: Model, parameters: Mapping[str, npt.NDArray[np.float32]], data: TrainingData
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns ((n,) true class, (n,) predicted class) of every example, -1 where unknown."""
    predict = compiled_method(model, "predict")
    labels_of = getattr(model, "labels_of", lambda batch: batch.get("labels"))
    labels, found = [], []
    for count, arrays in content_pieces(data):
        true = labels_of(arrays)
        if true is None:
            raise InputError("this model does not say where its labels are, so there is no confusion matrix")
        labels.append(np.nan_to_num(np.asarray(true, np.float64)[:count], nan=-1.0).astype(np.int64))
        found.append(np.asarray(predict(dict(parameters), arrays)[0])[:count].astype(np.int64))
    return np.concatenate(labels), np.concatenate(found)
