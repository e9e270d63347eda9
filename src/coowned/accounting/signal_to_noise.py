"""The noise compared with the gradient, before training and from public numbers alone."""

import dataclasses
import math
from typing import NamedTuple

from coowned import validate
from coowned.mechanism.banded_strategy import BandedStrategy
from coowned.mechanism.mechanism import Mechanism

GOOD = 3.0  # of the whole training; below it a choice is hardly worth training
PROMISING = 10.0  # of the whole training; a rule of thumb: noise alone no longer hides what many examples share
DEFAULT_PARAMETERS = 100  # of a model that is not known: a small linear one


class Outlook(NamedTuple):
    """The prospects of a training: "hopeless", "open" or "promising", the reason, and a sentence.

    >>> Outlook.of(1.0).word, Outlook.of(50.0).word
    ('hopeless', 'promising')
    """

    word: str
    signal_to_noise: float  # predicted for the whole training
    sentence: str

    @classmethod
    def of(cls, signal_to_noise: float) -> "Outlook":
        """Returns the outlook at this predicted signal-to-noise of the whole training."""
        ratio = f"the predicted signal-to-noise of the whole training is {signal_to_noise:.2g}"
        if signal_to_noise < GOOD:
            why = f"{ratio}, below {GOOD:g}; more data or a larger epsilon is needed"
            return cls("hopeless", signal_to_noise, f"Outlook: hopeless: {why}.")
        if signal_to_noise < PROMISING:
            return cls("open", signal_to_noise, f"Outlook: open: {ratio}; only a strong pattern would be learned.")
        left = "the noise leaves room for a pattern that many examples share, if there is one"
        return cls("promising", signal_to_noise, f"Outlook: promising: {ratio}; {left}.")


def felt_parameters(num_parameters: int, num_scores: int | None) -> int:
    """Returns the effective number of parameters: of those whose noise matters for a prediction.

    A linear model's score has only the noise of the example's own features, however many there are: of as many as
    DEFAULT_PARAMETERS, say, where rows share little.

    >>> felt_parameters(16_385, 1), felt_parameters(16_385, 0)
    (100, 16385)
    """
    return min(num_parameters, DEFAULT_PARAMETERS) if num_scores else num_parameters


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignalToNoise:
    """Predicts the signal-to-noise ratio of the mean gradient, in one step and over a whole training.

    The signal is the clip norm: the longest that the mean gradient can be, reached where no copy's gradient is shorter
    and all point the same way. The noise is the expected length of what is added to it.

    Guarantees:
      - `per_step` is the clip norm over the length of the noise that training adds.   (test_ratio_is_that_of_the_noise)
      - The verdict worsens with the noise and with the number of parameters.   (test_verdict_follows_the_ratio)
      - Of a linear model noise is said to swamp the signal only where it does so in an example's scores too, however
        many features there are.   (test_linear_models_meet_the_noise_of_their_own_features)

    Attributes:
      batch_size, iterations: of the training.
      noise_multiplier: of independent noise; that of correlated noise times `BandedStrategy.error_factor`.
      num_parameters: of the model, without frozen ones.
      num_scores: that a linear model gives an example: one, or one for each class; 0 for any other model; None where
        the model is not known.

    Example:
      >>> ratio = SignalToNoise(batch_size=64, iterations=200, noise_multiplier=2.0, num_parameters=64)
      >>> ratio.per_step, round(ratio.whole_training, 1)
      (4.0, 56.6)
    """

    batch_size: int
    iterations: int
    noise_multiplier: float
    num_parameters: int
    num_scores: int | None = None

    def __post_init__(self) -> None:
        validate.positive(batch_size=self.batch_size, iterations=self.iterations, num_parameters=self.num_parameters)
        validate.positive_number(noise_multiplier=self.noise_multiplier)

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        *,
        noise_multiplier: float,
        num_parameters: int,
        num_scores: int | None = None,
        strategy: BandedStrategy | None = None,
    ) -> "SignalToNoise":
        """Returns the ratio of a mechanism that has a batch size, by default with its best strategy."""
        strategy = mechanism.check_strategy(strategy)
        assert mechanism.batch_size is not None
        return cls(
            batch_size=mechanism.batch_size,
            iterations=mechanism.iterations,
            noise_multiplier=noise_multiplier if strategy is None else noise_multiplier * strategy.error_factor(),
            num_parameters=num_parameters,
            num_scores=num_scores,
        )

    @property
    def per_step(self) -> float:
        """Ratio in one step: batch_size / (noise_multiplier * sqrt(num_parameters))."""
        return self.batch_size / (self.noise_multiplier * math.sqrt(self.num_parameters))

    @property
    def in_scores(self) -> float | None:
        """Ratio in the scores that a linear model gives one example; None for other models.

        A row x turns a gradient g into scores g x, at most |g||x| long, and noise of deviation s in every coefficient
        into noise of deviation s|x| in every score: the number of features is in neither.
        """
        return self.batch_size / (self.noise_multiplier * math.sqrt(self.num_scores)) if self.num_scores else None

    @property
    def whole_training(self) -> float:
        """Ratio of the mean over all steps, whose noise averages out."""
        return self.per_step * math.sqrt(self.iterations)

    @property
    def prefix_error(self) -> float:
        """Root mean squared error of the sums of the first 1, 2, ... mean gradients, in clip norms per parameter.

        Over all numbers of steps; independent noise after t of them is t^(1/2) times that of one.
        """
        return self.noise_multiplier / self.batch_size * math.sqrt((self.iterations + 1) / 2)

    def with_examples(self, num_distinct: int) -> float:
        """Returns the ratio of the whole training, counting as noise what so few distinct examples leave unknown."""
        return 1 / math.sqrt(1 / num_distinct + 1 / self.whole_training**2)

    def outlook(self, num_distinct: int) -> Outlook:
        """Predicts the usefulness of training on this many distinct examples, from public numbers alone.

        Guarantees:
          - More noise, or fewer examples, is never a better outlook.   (test_outlook_follows_the_ratio)
        """
        felt = dataclasses.replace(self, num_parameters=felt_parameters(self.num_parameters, self.num_scores))
        return Outlook.of(felt.with_examples(num_distinct))

    @property
    def is_swamped(self) -> bool:
        return self.whole_training < GOOD

    def verdict(self) -> str:
        """Explains the ratio in one sentence."""
        return (
            f"A step's signal-to-noise ratio is at most {self.per_step:.2g} (batch size {self.batch_size:,} over noise "
            f"multiplier {self.noise_multiplier:.3g} times the root of {self.num_parameters:,} parameters): "
            f"{self._meaning()}."
        )

    def _meaning(self) -> str:
        if self.is_swamped:
            swamped = "noise swamps the signal at this batch size"
            if self.num_scores is None:
                return f"{swamped}, unless an example uses few of the parameters, as a hashed text does"
            if self.in_scores is None or self.in_scores * math.sqrt(self.iterations) < GOOD:
                return swamped
            return (
                "over all parameters a step is mostly noise, but a linear model's score has only the noise of the "
                f"example's own features, where the ratio is at most {self.in_scores:.2g}: it can learn what many "
                "examples share"
            )
        if self.per_step < 1:
            return f"a step is mostly noise, which {self.iterations:,} steps average out"
        return "the signal is well above the noise"
