"""The audit drives a trainer of two workers: it leaves an honest one alone and sees what only several can do wrong."""

import threading

import numpy as np
import pytest
from tests.audit import planted_bugs
from tests.audit.planted_bugs import Planted
from tests.training.thread_workers import meet

from coowned.audit import driving
from coowned.audit.driving import World, WorldData, content_for
from coowned.errors import CertificateMismatchError
from coowned.exact.keys import RunKey
from coowned.exact.noise import release
from coowned.models.probes import IN
from coowned.training import step as step_module
from coowned.training.loop import Trainer
from coowned.training.optimizers import compiled_update
from coowned.training.step import Step
from coowned.training.workers import Share, summed


class TwoWorkers(Trainer):
    """Worker 0 of two; worker 1 trains in a thread as long as this does."""

    def __init__(self, plans, model, *, devices=1):
        own, others = meet(2)
        super().__init__(plans, model, devices=devices, workers=own)
        self._other = Trainer(plans, model, devices=devices, workers=others)

    def run(self, data, state, rows, *, start, after):
        import jax

        copied = jax.tree.map(lambda leaf: jax.numpy.array(np.array(leaf)), state)
        failed = []

        def work():
            try:
                self._other.run(data, copied, [], start=start, after=lambda step, state, rows: None)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                failed.append(error)
                self._other._workers.leave()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return super().run(data, state, rows, start=start, after=after)
        except threading.BrokenBarrierError:
            thread.join()
            raise failed[0] from None
        finally:
            self._workers.leave()
            thread.join()


def two_workers(monkeypatch):
    monkeypatch.setattr(driving, "Trainer", TwoWorkers)


def noise_by_every_worker(monkeypatch):
    """Each adds the noise to its own sum, so that the total has it twice."""
    two_workers(monkeypatch)

    def step(self, state, batch, mask, noise, drawn):
        sums, clipped = self.model.clipped_sum(state[0], batch, mask, self.grids, self.devices)
        noisy = {name: total + noise[name] for name, total in sums.items()}
        total, clipped = summed(self.workers, noisy, clipped, mask, drawn)
        units = np.array([grid.unit for grid in self.grids])
        return compiled_update(self.rule)(state, release(total, None, units, self.batch_size), self.rates), clipped

    monkeypatch.setattr(Step, "__call__", step)


def a_shard_twice(monkeypatch):
    """An eighth of the examples is both workers'."""
    two_workers(monkeypatch)

    def of(self, drawn, **settings):
        own = Share.__dict__["honest"](self, drawn, **settings)
        if self.rank:
            return own
        shared = drawn.mask & (self.shards[drawn.examples] % 8 == 1)
        examples = np.append(own.examples[own.mask], drawn.examples[shared])
        numbers = np.append(own.copy_numbers[own.mask], drawn.copy_numbers[shared])
        pad = -len(examples) % settings["multiple_of"]
        mask = np.arange(len(examples) + pad) < len(examples)
        return type(own)(own.step, np.pad(examples, (0, pad)), np.pad(numbers, (0, pad)), mask)

    monkeypatch.setattr(Share, "honest", Share.of, raising=False)
    monkeypatch.setattr(Share, "of", of)


def a_shard_twice_unchecked(monkeypatch):
    """The same where nobody compares the count with the coins."""
    a_shard_twice(monkeypatch)
    count_nothing(monkeypatch)


def coins_of_their_own(monkeypatch):
    """Worker 1 draws with a key of its own."""
    two_workers(monkeypatch)

    def run(self, data, state, rows, *, start, after):
        if self._workers.rank:
            plan = self._plans[0]
            self._batches = plan.mechanism.batches(plan.selected, run_key=RunKey.from_seed(77), multiple_of=8)
        return honest(self, data, state, rows, start=start, after=after)

    honest = Trainer.run
    monkeypatch.setattr(Trainer, "run", run)


def coins_of_their_own_unchecked(monkeypatch):
    """The same where nobody compares the count with the coins."""
    coins_of_their_own(monkeypatch)
    count_nothing(monkeypatch)


def count_nothing(monkeypatch):
    """The sums of workers are added whatever copies they are of."""

    def unchecked(workers, sums, clipped, mask, drawn):
        del drawn
        held = int(workers.sum(np.array([np.count_nonzero(mask)]))[0])
        return summed(workers, sums, clipped, mask, held)

    monkeypatch.setattr(step_module, "summed", unchecked)


def first_steps(plan):
    world = World.like(plan.certificate, plan.mechanism, users=10, strategy=plan.strategy)
    content = content_for(planted_bugs.SMALL)
    data = WorldData(world=world, content=content, held=IN).in_memory()
    own = driving.audited(plan, world.selected, RunKey.from_seed(3))
    return driving.drive([own], planted_bugs.SMALL, data, steps=4)[content.tensor]


def first_steps_with(plant):
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        return first_steps(planted_bugs.poisson())


def test_two_workers_release_what_one_does():
    """To the bit, through the audit's own driver."""
    assert np.array_equal(first_steps_with(two_workers), first_steps(planted_bugs.poisson()))


def test_noise_by_every_worker_is_seen():
    """It is too much noise, which no claim forbids: the comparison with one worker sees it."""
    assert not np.allclose(first_steps_with(noise_by_every_worker), first_steps(planted_bugs.poisson()), atol=0.1)


def test_coins_of_their_own_are_seen():
    """A copy of worker 1 has coins that are not those of the run's key: the comparison with one worker sees it."""
    assert not np.allclose(
        first_steps_with(coins_of_their_own_unchecked), first_steps(planted_bugs.poisson()), atol=0.1
    )


def test_coins_of_their_own_stop_the_run():
    with pytest.raises(CertificateMismatchError, match="nothing was released"):
        first_steps_with(coins_of_their_own)


@pytest.mark.full
def test_honest_workers_pass():
    assert Planted(name="two workers", plant=two_workers).run(1, trials=1000).holds


@pytest.mark.full
def test_a_shard_that_two_hold_is_seen():
    planted = Planted(name="a shard twice", plant=a_shard_twice_unchecked)
    assert {"contributions", "sweep"} <= set(planted.run(1000).alarms)


def test_a_shard_that_two_hold_stops_the_run():
    with pytest.raises(CertificateMismatchError, match="nothing was released"):
        Planted(name="a shard twice", plant=a_shard_twice).run(1000, trials=100)
