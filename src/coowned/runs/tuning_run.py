"""Private tuning: a random number of runs over a grid in one folder, of which only the best is kept."""

import contextlib
import dataclasses
import fcntl
import functools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from coowned import codec
from coowned.accounting.guarantee import guarantee, tuned_guarantees
from coowned.accounting.privacy_guarantee import PrivacyGuarantee
from coowned.accounting.statement import rounded_down
from coowned.accounting.tuning import NumberOfRuns
from coowned.attribution.examples import AttributedExamples
from coowned.certificate import ContributionCertificate, certify
from coowned.content.splits import graphs_of_splits, split_examples
from coowned.errors import CertificateMismatchError, InputError, require
from coowned.exact.keys import Purpose, RunKey, forget_records, random_words
from coowned.files import check_parent, check_writable, refusing_unwritable, sync_folder, write_file
from coowned.mechanism.mechanism import Mechanism
from coowned.progress import Progress, counted, reporting
from coowned.runs.config import TrainConfig
from coowned.runs.configured_run import (
    Given,
    Select,
    held_out_of,
    mechanism_of,
    run_configuration,
)
from coowned.runs.defaults import completed_for
from coowned.runs.inputs import choose, select_for, with_shape
from coowned.runs.ledger import NAME as LEDGER
from coowned.runs.ledger import enter
from coowned.runs.records import RunRecord, read_json
from coowned.runs.run_folder import RunFolder, overwrite_and_remove
from coowned.runs.stored_run import StoredRun
from coowned.runs.tuning_config import TuningConfig
from coowned.selection.selector import Schedule, Selection

_LOG = logging.getLogger(__name__)
RUNS = "runs"  # the folder of those that were trained; gone when the tuning has ended
_RECORD, _KEY = "tuning.json", "tuning-key.json"
_OURS = (RUNS, _RECORD, _KEY)
_WORDS = 64  # that are drawn at once


class _TuningRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of tuning.json: what a resumed tuning must share, its claims, and the best run once known."""

    format: Literal["coowned-tuning-1"] = "coowned-tuning-1"
    configuration: str
    graph: str
    claims: list[str]
    best: int | None = None


class _Selected(NamedTuple):
    """What some settings select: S, its certificate, and that of the held-out part."""

    training_set: Selection | Schedule
    certificate: ContributionCertificate
    held_out: ContributionCertificate


class _Candidate(NamedTuple):
    """Settings that are the same to the accountant."""

    selected: _Selected
    mechanism: Mechanism

    @property
    def accounted(self) -> tuple[Any, ...]:
        """What the accountant asks about."""
        return self.mechanism, self.selected.certificate, self.selected.held_out


class _Setting(NamedTuple):
    """A setting of the grid: its configuration, with nothing left out, and the number of its candidate."""

    config: TrainConfig
    candidate: int


def run_tuning(
    tuning: TuningConfig,
    path: str | os.PathLike[str],
    *,
    examples: AttributedExamples | None = None,
    select: Callable[[TrainConfig], Select | None] = lambda config: None,
    progress: Progress | None = None,
    announce: Callable[[str], None] = lambda text: None,
    advise: Callable[[str], object] = lambda text: None,
    ledger: str | None = LEDGER,
) -> None:
    """Trains a random number of runs with random settings of the grid, and keeps the one with the best covered score.

    The folder is then that of one finished run, whose guarantee is that of the whole tuning. All other runs, and what
    tells how many there were, are removed.

    Guarantees:
      - A tuning that is killed and resumed ends in the same bits.   (test_killed_tuning_is_resumed)
      - Number of runs, settings and every run's key follow from one key, which no run shares with another.
        (test_keys_of_runs_differ)
      - Nothing of the other runs is left, nor how many they were: not in the folder, what is made of it, the ledger,
        the log or the record of keys.   (test_only_the_best_is_left, test_nothing_tells_how_many_runs_there_were,
        test_no_record_of_keys_tells_how_many_runs_there_were)
      - Another grid, data or seed than at first is refused.   (test_another_tuning_is_refused)

    Args:
      tuning: the configurations.
      path: of the folder, made if there is none.
      examples: data in memory, in place of those that the configuration names.
      select: chooses S, by configuration, where it is given and not configured.
      progress, announce: called now and then as progress(done, message), and with each stage.
      advise: called, before the first run, with the cost of the tuning.
      ledger: as for `RunFolder.open`, of the tuning.
    """

    def tell(text: str) -> None:
        _LOG.info(text)
        announce(text)

    require("train", "training")
    folder, first = Path(path), tuning.config(tuning.settings[0])
    first.model.check_files(first.folder)
    with _locked(folder):
        stored = _stored(folder)
        if stored is not None and stored.best is not None:  # where a process was killed just before the end
            _forget_keys(folder, tuning)
            leave_the_best(folder, stored)
            return
        if examples is None:
            tell("reading")
            examples = first.source().read(content=False)
        tell("selecting")
        candidates, settings = _candidates(tuning, examples, select)
        key = _key_of(folder, first.run.seed)
        record = _begin(folder, tuning, examples, candidates, [setting.candidate for setting in settings], key)
        claims = [
            PrivacyGuarantee.from_json(claim, certificate=candidate.selected.certificate)
            for claim, candidate in zip(record.claims, candidates, strict=True)
        ]
        cost = cost_of(claims)
        _LOG.info(cost)
        advise(cost)
        if ledger is not None:
            enter(ledger, folder, claims[0], examples.graph.digest)
        drawn = draw_settings(key, tuning)
        runs = folder / RUNS
        runs.mkdir(mode=0o700, exist_ok=True)
        for number, setting in enumerate(drawn):
            config, which = settings[setting]
            run = _Run(runs / f"{number}", key.child(number), config)
            # Only who looks on is told which run it is; logs are kept, and may be repeated.
            told = _prefixed(progress, f"run {number + 1}")
            chosen = candidates[which].selected.training_set
            run.train(chosen, claims[which], examples, progress=told, announce=announce)
        # Runs are drawn alike, so that the first of several best ones is one of them at random.
        scores = [score_of(StoredRun.open(runs / f"{number}")) for number in range(len(drawn))]
        record = msgspec.structs.replace(record, best=scores.index(max(scores)))
        _write(folder, record)
        _forget_keys(folder, tuning)
        leave_the_best(folder, record)


def cost_of(claims: Sequence[PrivacyGuarantee]) -> str:
    """Describes the cost of a tuning: the noise of its runs beside that of an untuned run, and the expected runs."""
    tuning = claims[0].tuning
    assert tuning is not None
    noise = [setting.noise_multiplier for setting in tuning.settings]
    shown = " to ".join(dict.fromkeys(map(rounded_down, (min(noise), max(noise)))))
    claimed = f"epsilon {claims[0].shown_epsilon} ({claims[0].terms()})"
    if claims[0].test_run:
        claimed = "a test run"
    return (
        f"tuning: noise multiplier {shown} in every run, where an untuned run with the first setting would have "
        f"{rounded_down(tuning.untuned_noise_multiplier)}; {tuning.law.expected:.3g} runs expected, "
        f"at most {tuning.law.largest:,}, of {counted(tuning.grid_size, 'setting')}; "
        f"{claimed}, for all of it"
    )


def draw_settings(key: RunKey, tuning: TuningConfig) -> list[int]:
    """Returns the setting number of each run, with the number of runs drawn too, from the tuning's key alone."""
    words = _words(key)
    law, size = NumberOfRuns.geometric(tuning.expected_runs), len(tuning.settings)
    count = next(number for word in words if (number := law.draw(word)) is not None)
    uniform = NumberOfRuns((1,) * size)
    settings = (drawn - 1 for word in words if (drawn := uniform.draw(word)) is not None)
    return [next(settings) for _ in range(count)]


def _words(key: RunKey) -> Iterator[int]:
    for part in range(2**32):
        yield from map(int, random_words(key.derive(Purpose.TUNING, step=part), _WORDS))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Creates or opens the folder, and locks it against other processes until the end."""
    is_new = not os.path.lexists(folder)
    if is_new:
        check_parent(folder)
        with refusing_unwritable(folder):
            folder.mkdir()
    elif folder.is_dir():
        check_writable(folder)
    else:
        raise InputError(f"{folder}: not a folder; choose another folder for the tuning")
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
        except OSError:
            raise InputError(f"{folder}: another process is tuning there; wait, or choose another folder") from None
        _refuse_others(folder)
        yield
    finally:
        os.close(handle)
        if is_new:
            with contextlib.suppress(OSError):  # something is in it
                folder.rmdir()


def _refuse_others(folder: Path) -> None:
    stored = RunRecord.read(folder)
    if stored is not None and not (folder / _RECORD).exists():
        state = "this run is finished" if stored.state == "finished" else "a run that is not a tuning's"
        raise InputError(f"{folder}: {state}; choose another folder for the tuning")
    found = sorted(name for name in os.listdir(folder) if not name.startswith(".") and name not in _OURS)
    if found and not (folder / _RECORD).exists():
        raise InputError(f"{folder}: a folder with other files in it ({found[0]}); choose another one for the tuning")


def _key_of(folder: Path, seed: int | None) -> RunKey:
    if not (folder / _RECORD).exists():  # a key alone has served no run
        overwrite_and_remove(folder / _KEY)
        return RunKey.from_operating_system() if seed is None else RunKey.from_seed(seed)
    try:
        key = RunKey.from_json((folder / _KEY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CertificateMismatchError(f"{folder}: the tuning's key is missing; choose another folder") from None
    if key.seed != seed:
        raise CertificateMismatchError(f"{folder}: the tuning was started with another seed; choose another folder")
    return key


def _begin(
    folder: Path,
    tuning: TuningConfig,
    examples: AttributedExamples,
    candidates: Sequence[_Candidate],
    which: Sequence[int],
    key: RunKey,
) -> _TuningRecord:
    """Returns the record of the tuning: the stored one, or a new one that is stored with the key."""
    if (stored := _stored(folder)) is not None:
        if (stored.configuration, stored.graph) != (tuning.digest, examples.graph.digest):
            raise CertificateMismatchError(
                f"{folder}: the tuning was started with another configuration, grid or attribution; restore the "
                "original, or choose another folder"
            )
        return stored
    claims = _claims(tuning, examples, candidates, which, key)
    record = _TuningRecord(
        configuration=tuning.digest,
        graph=examples.graph.digest,
        claims=[claim.to_json(embed_certificate=False) for claim in claims],
    )
    write_file(folder / _KEY, key.to_json().encode(), mode=0o600)
    _write(folder, record)
    return record


def _stored(folder: Path) -> _TuningRecord | None:
    return read_json(_TuningRecord, folder / _RECORD, remedy="choose another folder for the tuning")


def _write(folder: Path, record: _TuningRecord) -> None:
    write_file(folder / _RECORD, codec.encode_json(record, indent=2).encode(), mode=0o600)


def _candidates(
    tuning: TuningConfig, examples: AttributedExamples, select: Callable[[TrainConfig], Select | None]
) -> tuple[list[_Candidate], list["_Setting"]]:
    """Returns the candidates that differ for the accountant, and every setting of the grid."""
    chosen: dict[str, tuple[TrainConfig, _Selected]] = {}
    candidates: list[_Candidate] = []
    settings = []
    for setting in tuning.settings:
        config = tuning.config(setting)
        shape = dataclasses.replace(config.mechanism, clip_norm=None)
        name = codec.checksum([config.selection, shape, config.left_out])
        if name not in chosen:
            chosen[name] = _selected(config, examples, select)
        complete, selected = chosen[name]
        config = config.completed_as(complete)
        mechanism = mechanism_of(config, selected.certificate)
        alike = [known.accounted for known in candidates]
        candidate = _Candidate(selected, mechanism)
        if candidate.accounted not in alike:
            candidates.append(candidate)
            alike.append(candidate.accounted)
        settings.append(_Setting(config, alike.index(candidate.accounted)))
    return candidates, settings


def _selected(
    config: TrainConfig, examples: AttributedExamples, select: Callable[[TrainConfig], Select | None]
) -> tuple[TrainConfig, _Selected]:
    """Returns the configuration with what it leaves out, and what it selects."""
    graphs = graphs_of_splits(examples.graph, split_examples(examples.graph, config.splits))
    graph, test_graph = graphs["train"], graphs["test"]
    given = select(config) or select_for(config, examples.graph)
    if given is None:
        config = completed_for(config, examples, graph)
        selected = choose(config, graph)
    else:
        selected = given(graph)
        config = completed_for(with_shape(config, selected), examples, graph, lambda graph: selected)
    held_out = held_out_of(config, test_graph, selected)
    return config, _Selected(selected, certify(graph, selected), certify(test_graph, held_out))


def _claims(
    tuning: TuningConfig,
    examples: AttributedExamples,
    candidates: Sequence[_Candidate],
    which: Sequence[int],
    key: RunKey,
) -> list[PrivacyGuarantee]:
    config = tuning.config(tuning.settings[0])
    privacy, evaluation = config.privacy, config.evaluation
    assert evaluation is not None
    asked: dict[str, Any] = {
        "delta": privacy.delta,
        "adjacency": privacy.adjacency,
        "allow_large_delta": privacy.allow_large_delta,
        "test_run": key.is_test_run,
        "epsilon_share": evaluation.epsilon_share,
    }

    def claim(candidate: _Candidate, epsilon: float) -> PrivacyGuarantee:
        chosen = candidate.selected
        return guarantee(chosen.certificate, candidate.mechanism, epsilon=epsilon, held_out=chosen.held_out, **asked)

    assert isinstance(privacy.epsilon, float | int)
    return tuned_guarantees(
        [functools.partial(claim, candidate) for candidate in candidates],
        [which.count(number) for number in range(len(candidates))],
        grid=tuning.grid,
        expected_runs=tuning.expected_runs,
        epsilon=privacy.epsilon,
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of the tuning, in a folder of its own."""

    path: Path
    key: RunKey
    config: TrainConfig

    def train(
        self,
        selected: Selection | Schedule,
        claim: PrivacyGuarantee,
        examples: AttributedExamples,
        *,
        progress: Progress,
        announce: Callable[[str], None],
    ) -> None:
        """Trains, or resumes after a kill; does nothing if the run has ended."""
        stored = RunRecord.read(self.path) if self.path.is_dir() else None
        if stored is not None and stored.state == "finished":
            return
        config = self.config
        if self.key.seed is not None:
            config = config.with_keys({"run": {"seed": self.key.seed}})
        with RunFolder.open(self.path) as opened:
            opened.give_key(self.key)
            run_configuration(
                config,
                opened,
                examples=examples,
                given=Given(select=lambda graph: selected, guarantee=claim),
                progress=progress,
                announce=announce,
            )


def score_of(run: StoredRun) -> float:
    """Returns the covered score: the noisy share of correct predictions, or the negated noisy loss of a regression.

    Shares, because settings with other individual bounds may count on more or fewer held-out examples.
    """
    figures = run.covered
    assert figures is not None
    share = figures.counts[0] / figures.size
    return share if figures.accuracy is not None else -share


def _forget_keys(folder: Path, tuning: TuningConfig) -> None:
    """Removes what this machine remembers of the keys of all runs that there may have been."""
    with contextlib.suppress(FileNotFoundError):  # where a process was killed at the very end
        key = RunKey.from_json((folder / _KEY).read_text(encoding="utf-8"))
        largest = NumberOfRuns.geometric(tuning.expected_runs).largest
        forget_records(key.child(number).fingerprint for number in range(largest))


def leave_the_best(folder: Path, record: _TuningRecord) -> None:
    """Removes all runs but the best, moves that one up, and destroys the key, in an order that a kill cannot harm."""
    runs = folder / RUNS
    best = runs / f"{record.best}"
    if runs.is_dir():
        for other in runs.iterdir():
            if other != best:
                shutil.rmtree(other)
        if best.is_dir():
            # run.json last: without it the folder is no finished run.
            for file in sorted(best.iterdir(), key=lambda file: file.name == "run.json"):
                os.replace(file, folder / file.name)
            best.rmdir()
        runs.rmdir()
    sync_folder(folder)
    overwrite_and_remove(folder / _KEY)
    (folder / _RECORD).unlink()
    sync_folder(folder)


def _prefixed(progress: Progress | None, message: str) -> Progress:
    told = reporting(progress)
    return lambda done, text: told(done, f"{message}: {text}")
