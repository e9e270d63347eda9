"""Derives all secret randomness of a run from one key: BLAKE2b makes a key for each use, ChaCha20 the words drawn.

ChaCha20 is our own because compiled loops draw from hundreds of keys: OpenSSL's (`cryptography`) gives the same bits,
but with it the noise of a sweep of 336 models runs at 0.33 (101 parameters) to 0.88 (1001) of the speed; only one long
stream (100,000 numbers) would gain, 1.2 times.

A sub-key is BLAKE2b, keyed by the run key, of (purpose, configuration, step, tensor, copy); it is the 256-bit key of a
ChaCha20 stream. What is drawn is thus a pure function of the run key and of what it is for: a run that is resumed draws
what it would have drawn, and nothing else is ever drawn from the same key.

A record that a user's processes on this machine share says which run each key has served (`claimed`).
"""

import contextlib
import dataclasses
import enum
import fcntl
import functools
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from coowned import validate
from coowned.codec import decode_json, encode_json
from coowned.errors import InputError
from coowned.exact.compiled import compiled
from coowned.files import cache_folder

StreamKey = npt.NDArray[np.uint32]  # (8,) the 256 bits a stream of random words is made from

LANES = 64  # ChaCha20 blocks that are computed side by side
WORDS = 8 * LANES  # 64-bit words of one chunk
WORD_STREAM = np.uint64(0)  # the nonce of the words themselves
TAIL_STREAM = np.uint64(1)  # the nonce of the further bits of normals in the tail

_LOW_32, _S32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_CONSTANTS = (np.uint32(0x61707865), np.uint32(0x3320646E), np.uint32(0x79622D32), np.uint32(0x6B206574))

_njit = compiled()


class Purpose(enum.Enum):
    """The purpose of a sub-key. Two purposes never share a key; the values are part of stored runs and never change."""

    COINS = "coins"  # which copies are in a batch
    NOISE = "noise"  # what is added to the sum of gradients
    EVALUATION = "evaluation"  # what is added to the counts of a covered evaluation
    MASKS = "masks"  # which tokens of a copy are hidden
    DROPOUT = "dropout"
    PARAMETERS = "parameters"  # where training starts
    TUNING = "tuning"  # how many runs a tuning has, and their settings
    CANARIES = "canaries"  # which canary users an audit includes


class _StoredKey(msgspec.Struct, frozen=True, kw_only=True):
    seed: int | None
    secret: str | None


@dataclasses.dataclass(frozen=True, repr=False)
class RunKey:
    """The one secret of a run, 256 bits; every coin and every noise value follows from it.

    Guarantees:
      - From the operating system unless a seed is given; a seeded key says so for ever.
        (test_keys_of_the_operating_system_differ, test_a_seed_marks_a_test_run)
      - No two (purpose, configuration, step, tensor, copy) are encoded alike.   (test_encoding_is_injective,
        test_purposes_never_share_a_key)
      - Neither `repr` nor an error message shows the secret.   (test_secret_is_not_shown)
      - `from_json(to_json())` gives the same streams.   (test_json_round_trip)
      - A key that a fork or a pickle has brought to another process serves no run there, unless it is a test run's.
        (test_a_key_serves_one_process)
      - Nor does a key that another process of this machine trains with, or has trained another run with.
        (test_a_key_in_use_is_refused, test_another_run_is_refused_later)
    What it is not: safe to publish. Whoever has it can subtract the noise; keep `to_json()` in a file only the trainer
    reads, never among metrics. `fingerprint` may be published unless the run is a test run.

    Example:
      >>> key = RunKey.from_seed(7)
      >>> key.is_test_run, key
      (True, RunKey(test run, fingerprint c4dcebc3cd9dbf49a156d025fd3cdcd1))
      >>> first = key.derive(Purpose.NOISE, configuration="a", step=0, tensor="weights")
      >>> other = key.derive(Purpose.NOISE, configuration="a", step=1, tensor="weights")
      >>> bool((first == other).all())
      False

    References: RFC 7693 (BLAKE2); Bernstein (2008), "ChaCha, a variant of Salsa20".
    """

    secret: bytes
    seed: int | None = None
    process: int = dataclasses.field(default_factory=os.getpid, init=False, compare=False)  # where it was made or read

    FORMAT = "coowned-run-key-1"

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes) or len(self.secret) != 32:
            raise InputError("the secret of a run key must be 32 bytes; use RunKey.from_operating_system()")

    @classmethod
    def from_operating_system(cls) -> Self:
        """Returns a fresh key from the operating system's source of entropy: the only kind a guarantee can rest on."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_seed(cls, seed: int) -> Self:
        """Returns a reproducible key for tests. Noise and coins are then known, so there is no guarantee."""
        validate.seed(seed)
        digest = hashlib.blake2b(_encode(int(seed)), digest_size=32, person=b"coowned-seed-1")
        return cls(digest.digest(), int(seed))

    @property
    def is_test_run(self) -> bool:
        """True where the key was made from a seed; a statement then says "no guarantee" in place of epsilon."""
        return self.seed is not None

    @property
    def fingerprint(self) -> str:
        """128 bits that name the key without giving it away."""
        digest = hashlib.blake2b(b"", key=self.secret, digest_size=16, person=b"coowned-name-1")
        return digest.hexdigest()

    def derive(
        self,
        purpose: Purpose,
        *,
        configuration: str | None = None,  # the member of a sweep; None for what all share (coins): refused for noise
        step: int | None = None,  # None for what is drawn once a run
        tensor: str | None = None,  # the parameter the noise is for
        copy: tuple[int, int] | None = None,  # (example, copy number), of what is drawn for one copy, such as a mask
    ) -> StreamKey:
        """Returns the key of one stream."""
        return self.derive_many(purpose, configurations=(configuration,), step=step, tensor=tensor, copy=copy)[0]

    def derive_many(
        self,
        purpose: Purpose,
        *,
        configurations: Sequence[str | None],
        step: int | None = None,
        tensor: str | None = None,
        copy: tuple[int, int] | None = None,
    ) -> npt.NDArray[np.uint32]:
        """(configurations, 8) uint32: what `derive` gives for each of them.   (test_many_keys_are_those_of_each)"""
        if not isinstance(purpose, Purpose):
            raise InputError(f"purpose must be a Purpose, not {purpose!r}")
        if purpose in (Purpose.NOISE, Purpose.EVALUATION) and (
            step is None or tensor is None or None in configurations
        ):
            raise InputError("a noise key needs configuration, step and tensor: no two releases may share noise")
        if purpose is Purpose.COINS and step is None:
            raise InputError("a coin key needs a step: coins are drawn anew in every step")
        rest = b"".join(_encode(value) for value in (step, tensor, *(copy or (None, None))))
        begun = hashlib.blake2b(_encode(purpose.value), key=self.secret, digest_size=32, person=_PERSON)
        digests = []
        for configuration in configurations:
            hashed = begun.copy()
            hashed.update(_encode(configuration) + rest)
            digests.append(hashed.digest())
        return np.frombuffer(b"".join(digests), "<u4").reshape(-1, 8).astype(np.uint32)

    def child(self, number: int) -> Self:
        """Returns the key of one run of several that share this one: no key of the other runs says anything of it.

        Guarantees:
          - No two runs, and no run and what is derived here, share a key.   (test_children_share_no_key)
          - The runs of a test are tests.   (test_children_of_a_test_run)
        """
        validate.integer(at_least=0, at_most=2**64 - 1, number=number)
        digest = hashlib.blake2b(_encode(int(number)), key=self.secret, digest_size=32, person=_CHILD).digest()
        return type(self)(digest) if self.seed is None else self.from_seed(int.from_bytes(digest[:8], "little") >> 1)

    def bind(self, run: str) -> None:
        """Refuses, with InputError, to serve another run than the one so named, unless it is a test run.

        The same run again is allowed: it is the same noise under the same gradients. Another process is not, since what
        the key serves elsewhere is not known; to resume a run, a process reads the key with `from_json`.
        """
        if not self.is_test_run and self.process != os.getpid():
            raise InputError(
                "this run key is from another process (by fork or pickle), where it may serve another run; use "
                "RunKey.from_operating_system() in each process, or resume a run from its folder"
            )
        if not self.is_test_run and _SERVED.setdefault(self.fingerprint, run) != run:
            raise InputError(
                "this run key was used by another run: the same noise added to two different gradients reveals both, "
                "and runs with the same coins are not independent; use RunKey.from_operating_system() for each run, or "
                "sweep()"
            )

    @contextlib.contextmanager
    def serving(self, run: str, *, sent: bool = False) -> Iterator[None]:
        """Binds the key to a run, for all processes of this machine, and holds it while the run goes on.

        Args:
          run: as for `bind`.
          sent: another process of the same run made the key, sent it here, and holds it.
        """
        self.bind(run)
        with contextlib.nullcontext() if sent or self.is_test_run else claimed(self.fingerprint, run):
            yield

    def to_json(self) -> str:
        """Returns the secret, as a JSON text: for a file that only the trainer can read."""
        stored = _StoredKey(seed=self.seed, secret=None if self.is_test_run else self.secret.hex())
        return encode_json(stored, format=self.FORMAT)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads `to_json()` back."""
        stored = decode_json(_StoredKey, text, name="the stored run key", format=cls.FORMAT, secret=True)
        if stored.seed is not None:
            return cls.from_seed(stored.seed)
        try:
            return cls(bytes.fromhex(stored.secret or ""))
        except ValueError:
            raise InputError("the stored run key has no secret of 64 hexadecimal digits") from None

    def __repr__(self) -> str:
        kind = "test run" if self.is_test_run else "secret"
        return f"RunKey({kind}, fingerprint {self.fingerprint})"


def random_words(key: StreamKey, count: int, *, first_chunk: int = 0) -> npt.NDArray[np.uint64]:
    """Returns the first `count` 64-bit words of a stream (from chunk `first_chunk` on, 512 words each), cost O(count).

    >>> key = RunKey.from_seed(0).derive(Purpose.MASKS, step=0, copy=(12, 0))
    >>> [hex(word) for word in random_words(key, 2)]
    ['0x35d38bdd29bbf47a', '0x25748cf1d54da27f']
    """
    validate.integer(at_least=0, count=count, first_chunk=first_chunk)
    words = np.empty(count, np.uint64)
    fill_words(key, WORD_STREAM, first_chunk, words)
    return words


@functools.lru_cache(maxsize=4096)  # a sweep's names come again in every step
def _encode_text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return b"s" + len(content).to_bytes(8, "little") + content


# Which run each secret key has served in this process. State that lasts, on purpose: no object that a caller can copy
# or make again could remember it, and a second run under the same key would give both runs' gradients away.
_SERVED: dict[str, str] = {}
_PERSON, _CHILD = b"coowned-keys-1", b"coowned-child-1"
_NOTHING, _WHOLE_NUMBER = b"n" + bytes(8), b"i" + (8).to_bytes(8, "little")


def _encode(value: Any) -> bytes:
    """Type, length, content: the concatenation of such codes can be taken apart again in one way only."""
    if isinstance(value, str):
        return _encode_text(value)
    if value is None:
        return _NOTHING
    if type(value) is not int or not 0 <= value < 2**64:
        validate.integer(at_least=0, at_most=2**64 - 1, key_field=value)
    return _WHOLE_NUMBER + int(value).to_bytes(8, "little")


# ---- ChaCha20 (Bernstein 2008: 256-bit key, 64-bit block counter, 64-bit nonce, 20 rounds), in integers alone --------


@_njit
def _rounds(state, lanes):
    """Computes the twenty rounds of the first `lanes` blocks."""
    for half in range(20):
        shift = half & 1  # columns, then diagonals
        for i in range(4):
            row_a = state[i]
            row_b = state[4 + (i + shift) % 4]
            row_c = state[8 + (i + 2 * shift) % 4]
            row_d = state[12 + (i + 3 * shift) % 4]
            for lane in range(lanes):
                a, b, c, d = row_a[lane], row_b[lane], row_c[lane], row_d[lane]
                a = np.uint32(a + b)
                d = d ^ a
                d = np.uint32(d << np.uint32(16)) | (d >> np.uint32(16))
                c = np.uint32(c + d)
                b = b ^ c
                b = np.uint32(b << np.uint32(12)) | (b >> np.uint32(20))
                a = np.uint32(a + b)
                d = d ^ a
                d = np.uint32(d << np.uint32(8)) | (d >> np.uint32(24))
                c = np.uint32(c + d)
                b = b ^ c
                b = np.uint32(b << np.uint32(7)) | (b >> np.uint32(25))
                row_a[lane], row_b[lane], row_c[lane], row_d[lane] = a, b, c, d


@_njit
def fill_words_of_keys(keys, nonce, first_block, out):
    """out (n, size) uint64: the words of n streams in ChaCha20's order, from block `first_block` (8 words) on."""
    size = out.shape[1]
    each = (size + 7) // 8  # blocks of a stream
    start, state = np.empty((16, LANES), np.uint32), np.empty((16, LANES), np.uint32)
    for i in range(4):
        start[i] = _CONSTANTS[i]
    start[14] = np.uint32(nonce & _LOW_32)
    start[15] = np.uint32(nonce >> _S32)
    for first in range(0, keys.shape[0] * each, LANES):
        lanes = min(LANES, keys.shape[0] * each - first)
        row, block = divmod(first, each)
        for lane in range(lanes):
            for i in range(8):
                start[4 + i, lane] = keys[row, i]
            start[12, lane] = np.uint32((first_block + block) & _LOW_32)
            start[13, lane] = np.uint32(np.uint64(first_block + block) >> _S32)
            block += 1
            if block == each:
                row, block = row + 1, 0
        state[:, :lanes] = start[:, :lanes]
        _rounds(state, lanes)
        row, block = divmod(first, each)
        for lane in range(lanes):
            for i in range(min(8, size - 8 * block)):
                low = np.uint32(state[2 * i, lane] + start[2 * i, lane])
                high = np.uint32(state[2 * i + 1, lane] + start[2 * i + 1, lane])
                out[row, 8 * block + i] = np.uint64(low) | (np.uint64(high) << _S32)
            block += 1
            if block == each:
                row, block = row + 1, 0


@_njit
def fill_words(key, nonce, first_chunk, out):
    """out (n,) uint64: the words of one stream from the beginning of chunk `first_chunk` on."""
    fill_words_of_keys(key.reshape(1, 8), nonce, first_chunk * LANES, out.reshape(1, out.size))


@_njit
def word_at(key, nonce, number, at):
    """Word `at` of chunk `number` of a stream, alone."""
    block = np.empty((1, 8), np.uint64)
    fill_words_of_keys(key.reshape(1, 8), nonce, number * LANES + at // 8, block)
    return block[0, at % 8]


_HELD: dict[tuple[int, str], list[int]] = {}  # by process and key: the open record, and how many hold it now


@contextlib.contextmanager
def claimed(fingerprint: str, run: str) -> Iterator[None]:
    """Locks a key for a run; raises InputError if another process holds it, or if it has served another run.

    Guarantees:
      - Of two processes that read one key only one trains with it at a time.   (test_a_key_in_use_is_refused)
      - A process that comes later trains the same run or none.   (test_another_run_is_refused_later)
      - A process that is killed leaves no lock.   (test_a_killed_process_holds_nothing)
    What it is not: protection across machines that share no cache folder, or where nothing can be written.

    Args:
      fingerprint: names the key.
      run: names the run: plan, model, data and where training starts.
    """
    own = os.getpid(), fingerprint  # a fork holds nothing
    if own not in _HELD:  # otherwise `RunKey.bind` has compared the runs of this process
        handle = _open(fingerprint)
        if handle is None:
            yield
            return
        try:
            _claim(handle, hashlib.sha256(run.encode()).hexdigest().encode())
        except BaseException:
            os.close(handle)
            raise
        _HELD[own] = [handle, 0]
    held = _HELD[own]
    held[1] += 1
    try:
        yield
    finally:
        held[1] -= 1
        if not held[1]:
            del _HELD[own]
            os.close(held[0])  # and with it the lock


def forget_records(fingerprints: Iterable[str]) -> None:
    """Removes the records of keys that are about to be destroyed, where there are any."""
    for fingerprint in fingerprints:
        with contextlib.suppress(OSError):
            (_folder() / fingerprint).unlink()


def _folder() -> Path:
    return (cache_folder() or Path(tempfile.gettempdir()) / f"coowned-{os.getuid()}") / "keys"


def _open(fingerprint: str) -> int | None:
    """Opens the record of a key; returns None if no file can be written."""
    with contextlib.suppress(OSError):
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(_folder() / fingerprint, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    return None


def _claim(handle: int, run: bytes) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends
    except OSError:
        raise InputError(
            "another process is training with this run key: with other data, the same noise would be added to two "
            "different gradients and reveal both; wait for it, start several workers with --processes or torchrun, or "
            "use RunKey.from_operating_system() for each run"
        ) from None
    served = os.read(handle, len(run) + 1)
    if served and served != run:
        raise InputError(
            "this run key was used by another run, in another process: the same noise added to two different gradients "
            "reveals both; use RunKey.from_operating_system() for each run"
        )
    if not served:
        os.write(handle, run)
        os.fsync(handle)
