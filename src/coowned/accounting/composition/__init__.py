"""Composes the privacy losses of independent training steps into one epsilon or delta: `compose_steps`."""

from coowned.accounting.composition.steps import ALLOWED_ERROR_SHARE as ALLOWED_ERROR_SHARE
from coowned.accounting.composition.steps import Answer as Answer
from coowned.accounting.composition.steps import Composition as Composition
from coowned.accounting.composition.steps import ZeroOutTwice as ZeroOutTwice
from coowned.accounting.composition.steps import compose_steps as compose_steps
