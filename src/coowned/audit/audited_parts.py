"""The parts of a mechanism as an audit drives them: selection, sampler, clipping and division, noise.

Every method calls the code that trains. A subclass that overrides one is a mechanism with one part exchanged: the
planted bugs of tests/audit are such subclasses, and the audit cannot tell.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from coowned.attribution.graph import AttributionGraph
from coowned.mechanism.batching import Batches
from coowned.mechanism.keys import RunKey
from coowned.mechanism.mechanism import Mechanism
from coowned.mechanism.noise import NoiseStream, noise_scale, normals_from_words
from coowned.selection.greedy import Greedy
from coowned.selection.selector import Schedule, Selection
from coowned.training.model import Model
from coowned.training.models.logistic_regression import LogisticRegression
from coowned.training.step import compiled_step

_LONG = 1e6  # a feature that makes any gradient far longer than the clip norm
# (feature, label) of a copy whose gradient is, before clipping, long and along +e1, long and along -e1, or zero.
_CONTENT = {1: (_LONG, 0.0), -1: (_LONG, 1.0), 0: (0.0, 0.5)}


class AuditedParts:
    """The real parts.

    Guarantees:
      - The worst-case user's copies come out of the clipper as clip_norm e1 each, to within 1e-5.
        (test_worst_case_gradient_is_one_clip_norm)
      - Her copies are as many as the bound, although she owns more.   (test_worst_case_user_is_at_the_bound)
    """

    def select(self, graph: AttributionGraph, *, contribution_bound: int) -> Selection:
        """S from a graph in which users own more than the bound."""
        return Greedy(contribution_bound=contribution_bound).select(graph)

    def group(self, graph: AttributionGraph, selection: Selection, *, group: int) -> Selection:
        """The same S, all of it in one group."""
        groups = np.where(selection.copies > 0, group, -1)
        return Selection.from_copies(graph, selection.copies, groups)

    def batches(
        self,
        selected: Selection | Schedule,
        mechanism: Mechanism,
        *,
        batch_size: int,
        iterations: int,
        run_key: RunKey,
    ) -> Batches:
        """The sampler, over so many steps."""
        sized = dataclasses.replace(mechanism, batch_size=batch_size, iterations=iterations)
        return sized.batches(selected, run_key=run_key)

    def model(self, num_features: int = 1) -> Model:
        """What clips: the gradient sum of a model."""
        return LogisticRegression(num_features=num_features)

    def divisor(self, *, batch_size: int, num_copies: int) -> int:
        """What the sum is divided by: the public batch size, never what was drawn."""
        del num_copies
        return batch_size

    def noise_scale(self, *, noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
        return noise_scale(noise_multiplier=noise_multiplier, clip_norm=clip_norm, batch_size=batch_size)

    def noise(
        self,
        run_key: RunKey,
        *,
        coefficients: npt.NDArray[np.float64],
        iterations: int,
        trials: int,
        configuration: str,
    ) -> Iterator[npt.NDArray[np.float32]]:
        """A row of unit noise for each step; its coordinates are the trials."""
        stream = NoiseStream(
            run_key,
            coefficients=coefficients,
            shapes={"trials": (trials,)},
            iterations=iterations,
            configurations=(configuration,),
        )
        for _ in range(iterations):
            yield stream.next()["trials"]

    def normals(self, words: npt.ArrayLike, more: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The normals that random words stand for."""
        return normals_from_words(words, more)

    def step(
        self,
        *,
        user_copies: int,
        content: int,
        other_copies: int,
        size: int,
        settings: dict[str, float],
        noise: float,
        on_host: bool = False,
    ) -> float:
        """What one training step releases along e1, for so many copies of the user and zero ones of others.

        As in training, the squared norms of the rows come with them.

        Args:
          user_copies, other_copies: drawn in the batch.
          content: +1, -1 or 0, the direction of each of her gradients before clipping.
          size: entries of the batch, padding included.
          settings: clip_norm, noise_scale and the divisor.
          noise: the unit noise along e1.
          on_host: the step of large batches, whose gradients the host sums.
        """
        from coowned.mechanism.clipping import squared_norms_of

        features, labels = np.zeros((size, 1), np.float32), np.full(size, _CONTENT[0][1], np.float32)
        features[:user_copies], labels[:user_copies] = _CONTENT[content]
        mask = np.arange(size) < user_copies + other_copies
        batch = {"features": features, "labels": labels, "squared_norms": squared_norms_of(features)}
        return float(self.release(batch, mask, settings=settings, noise=noise, on_host=on_host)[0])

    def release(
        self,
        batch: dict[str, Any],
        mask: npt.NDArray[np.bool_],
        *,
        settings: dict[str, float],
        noise: float = 0.0,
        models: int | None = None,
        on_host: bool = False,
        coefficients: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float64]:
        """([models,] num_features + 1) what one training step releases for this batch.

        Args:
          batch: features (size, num_features), labels (size,); squared_norms (size,) where they come with the rows.
          mask: (size,) True where the row is real.
          settings: clip_norm, noise_scale and the divisor.
          noise: the unit noise along e1.
          models: None is the step of one model; a number, that of a sweep, every member with these settings.
          on_host: as above.
          coefficients: (num_features + 1,) of the model before the step; zeros if they are left out.
        """
        import jax
        import jax.numpy as jnp

        from coowned.training.optimizers import make_optimizer

        features = batch["features"]
        model = self.model(getattr(features, "source", features).shape[1])
        step = compiled_step(model, "sgd", True, True, models or 1, on_host=on_host)

        def each(values: Any) -> Any:
            return jnp.repeat(jnp.asarray(values)[None], models or 1, axis=0)

        # The parameters change by minus the noisy mean gradient times the learning rate: one for those of zero, and a
        # large one for large ones, in which small changes would be lost.
        zero: dict[str, Any] = {name: jnp.zeros(shape, jnp.float32) for name, shape in model.shapes().items()}
        start = zero if coefficients is None else {"coefficients": jnp.asarray(coefficients)}
        optimizer_state: Any = make_optimizer("sgd", 1.0).init(start)
        given = {name: each(array.at[0].set(noise)) for name, array in zero.items()}
        state = jax.tree.map(each, (start, optimizer_state))
        numbers = {name: np.float32(value) for name, value in settings.items()}
        numbers = {name: jnp.asarray(value) if name == "batch_size" else each(value) for name, value in numbers.items()}
        before = np.asarray(state[0]["coefficients"], np.float64)  # the step may write over it
        (after, _), _ = step(state, batch, mask, given, numbers)
        moved = (before - np.asarray(after["coefficients"], np.float64)) / settings["learning_rate"]
        return moved[0] if models is None else moved
