"""The run key, its sub-keys, and the stream of words."""

import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coowned.errors import InputError
from coowned.exact.keys import LANES, WORDS, Purpose, RunKey, claimed, fill_words, random_words

fields = st.fixed_dictionaries(
    {
        "configuration": st.none() | st.text(max_size=4),
        "step": st.integers(0, 3) | st.integers(0, 2**64 - 1),
        "tensor": st.none() | st.text(max_size=4),
        "copy": st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    }
)


def test_a_seed_marks_a_test_run():
    assert RunKey.from_seed(3).is_test_run
    assert not RunKey.from_operating_system().is_test_run
    assert RunKey.from_json(RunKey.from_seed(3).to_json()).is_test_run


def test_keys_of_the_operating_system_differ():
    keys = {RunKey.from_operating_system().secret for _ in range(20)}
    assert len(keys) == 20
    assert {len(key) for key in keys} == {32}


@given(fields, fields)
def test_encoding_is_injective(first, second):
    key = RunKey.from_seed(0)
    same = np.array_equal(key.derive(Purpose.MASKS, **first), key.derive(Purpose.MASKS, **second))
    assert same == (first == second)


def test_fields_do_not_run_into_each_other():
    key = RunKey.from_seed(0)
    derived = [
        key.derive(Purpose.MASKS, configuration="ab", tensor="c"),
        key.derive(Purpose.MASKS, configuration="a", tensor="bc"),
        key.derive(Purpose.MASKS, configuration="", tensor=None),
        key.derive(Purpose.MASKS, configuration=None, tensor=""),
        key.derive(Purpose.MASKS, configuration="1", tensor=None),
        key.derive(Purpose.MASKS, step=1),
        key.derive(Purpose.MASKS, copy=(1, 0)),
        key.derive(Purpose.MASKS, copy=(0, 1)),
    ]
    assert len({value.tobytes() for value in derived}) == len(derived)


def test_purposes_never_share_a_key():
    key = RunKey.from_seed(0)
    place = {"configuration": "a", "step": 1, "tensor": "w", "copy": (2, 0)}
    assert len({key.derive(purpose, **place).tobytes() for purpose in Purpose}) == len(Purpose)


@given(fields, st.lists(st.none() | st.text(max_size=4), max_size=5), st.sampled_from(list(Purpose)))
def test_many_keys_are_those_of_each(place, configurations, purpose):
    """Against the hash written down from its definition, and against `derive`."""
    key, place = RunKey.from_seed(0), {name: value for name, value in place.items() if name != "configuration"}
    if purpose in (Purpose.NOISE, Purpose.EVALUATION):
        place["tensor"] = place["tensor"] or ""
        configurations = [configuration or "" for configuration in configurations]
    many = key.derive_many(purpose, configurations=configurations, **place)
    assert many.shape == (len(configurations), 8)
    assert many.dtype == np.uint32
    for configuration, row in zip(configurations, many, strict=True):
        assert np.array_equal(row, key.derive(purpose, configuration=configuration, **place))
        example, number = place["copy"] or (None, None)
        fields = (purpose.value, configuration, place["step"], place["tensor"], example, number)
        message = b"".join(plain_code(field) for field in fields)
        digest = hashlib.blake2b(message, key=key.secret, digest_size=32, person=b"coowned-keys-1").digest()
        assert row.astype("<u4").tobytes() == digest


def plain_code(field) -> bytes:
    if field is None:
        return b"n" + bytes(8)
    content = field.encode() if isinstance(field, str) else field.to_bytes(8, "little")
    return (b"s" if isinstance(field, str) else b"i") + len(content).to_bytes(8, "little") + content


def test_noise_needs_its_whole_place():
    key = RunKey.from_seed(0)
    for missing in ("configuration", "step", "tensor"):
        place = {"configuration": "a", "step": 1, "tensor": "w"} | {missing: None}
        with pytest.raises(InputError, match="noise key needs"):
            key.derive(Purpose.NOISE, **place)
    with pytest.raises(InputError, match="noise key needs"):
        key.derive_many(Purpose.NOISE, configurations=["a", None], step=1, tensor="w")
    with pytest.raises(InputError, match="coin key needs a step"):
        key.derive(Purpose.COINS)
    with pytest.raises(InputError, match="purpose must be"):
        key.derive("noise")  # type: ignore[arg-type]
    with pytest.raises(InputError):
        key.derive(Purpose.COINS, step=-1)
    with pytest.raises(InputError):
        key.derive(Purpose.COINS, step=True)


def test_secret_is_not_shown():
    key = RunKey.from_operating_system()
    for text in (repr(key), str(key), f"{key}", key.fingerprint):
        assert key.secret.hex() not in text
        assert repr(key.secret) not in text
    broken = key.to_json()[:-1]
    with pytest.raises(InputError) as caught:
        RunKey.from_json(broken)
    assert key.secret.hex() not in str(caught.value)


def test_json_round_trip():
    for key in (RunKey.from_seed(5), RunKey.from_operating_system()):
        again = RunKey.from_json(key.to_json())
        assert again == key
        assert again.fingerprint == key.fingerprint
        assert np.array_equal(again.derive(Purpose.COINS, step=3), key.derive(Purpose.COINS, step=3))


@pytest.mark.parametrize(
    "stored", ["[]", "{}", "nonsense", json.dumps({"format": RunKey.FORMAT, "seed": None, "secret": "12"})]
)
def test_other_texts_are_refused(stored):
    with pytest.raises(InputError):
        RunKey.from_json(stored)


BIND = """
import pickle, sys
from coowned.exact.keys import RunKey
key = pickle.loads(sys.stdin.buffer.read()) if sys.argv[1] == "pickle" else RunKey.from_json(sys.stdin.read())
key.bind("run")
"""


@pytest.mark.parametrize("bound", [False, True])
def test_a_key_serves_one_process(bound, monkeypatch):
    """Even if it has served nothing yet: two processes that got the same one could train two models with it."""
    key, test = RunKey.from_operating_system(), RunKey.from_seed(3)
    if bound:
        key.bind("run")

    def elsewhere(content: bytes, how: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", BIND, how], input=content, capture_output=True, check=False)

    refused = elsewhere(pickle.dumps(key), "pickle")
    assert refused.returncode == 1
    assert b"InputError: this run key is from another process" in refused.stderr
    assert key.secret.hex().encode() not in refused.stderr
    assert elsewhere(pickle.dumps(test), "pickle").returncode == 0
    assert elsewhere(key.to_json().encode(), "json").returncode == 0  # as a run is resumed
    pickle.loads(pickle.dumps(key)).bind("run")  # the same process
    monkeypatch.setattr(os, "getpid", lambda: key.process + 1)  # as after a fork
    with pytest.raises(InputError, match=r"from another process .*; use RunKey.from_operating_system"):
        key.bind("run")
    test.bind("run")


def test_a_short_secret_is_refused():
    with pytest.raises(InputError, match="32 bytes"):
        RunKey(b"short")


def plain_chacha20(key: list[int], counter: int, nonce: int) -> list[int]:
    """One block, written down from the definition, on Python integers."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key]
    start += [counter & 0xFFFFFFFF, counter >> 32, nonce & 0xFFFFFFFF, nonce >> 32]
    x = list(start)

    def quarter(a, b, c, d):
        for first, second, third, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[first] = (x[first] + x[second]) % 2**32
            x[third] ^= x[first]
            x[third] = (x[third] << turn | x[third] >> (32 - turn)) % 2**32

    for _ in range(10):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for i in range(4):
            quarter(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return [(a + b) % 2**32 for a, b in zip(x, start, strict=True)]


def test_known_answer():
    # The published first block for a key, counter and nonce of zeros.
    block = b"".join(word.to_bytes(4, "little") for word in plain_chacha20([0] * 8, 0, 0))
    assert block.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.sampled_from([0, 1, 2**64 - 1]))
def test_words_are_chacha20(key, nonce):
    first_chunk = 2**26 - 1  # its last block is number 2^32 - 1, and the next chunk carries into the upper half
    out = np.empty(2 * WORDS, np.uint64)
    fill_words(np.array(key, np.uint32), np.uint64(nonce), first_chunk, out)
    for chunk, lane, pair in ((0, 0, 0), (0, LANES - 1, 7), (1, 0, 3), (1, 5, 6)):
        block = plain_chacha20(key, (first_chunk + chunk) * LANES + lane, nonce)
        expected = block[2 * pair] | block[2 * pair + 1] << 32
        assert int(out[chunk * WORDS + 8 * lane + pair]) == expected


def test_a_stream_can_be_entered_anywhere():
    key = RunKey.from_seed(1).derive(Purpose.MASKS, step=0)
    whole = random_words(key, 3 * WORDS + 17)
    assert np.array_equal(random_words(key, WORDS + 17, first_chunk=2), whole[2 * WORDS :])
    for few in (1, 5, 127, 128, 129, WORDS - 1):  # a few words are made without the rest of their chunk
        assert np.array_equal(random_words(key, few), whole[:few])


def test_bits_are_fair():
    # 64 bit positions, 2^16 words each; normal approximation, |z| > 6.5 on any has probability below 64 * 8.1e-11.
    words = random_words(RunKey.from_seed(2).derive(Purpose.MASKS, step=0), 1 << 16)
    ones = np.array([int(((words >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)])
    assert np.abs(ones - (1 << 15)).max() / 128 < 6.5


def test_no_jax_is_imported():
    modules = "exact.keys, coowned.exact.noise, coowned.mechanism.batching, coowned.mechanism.banded_strategy"
    program = f"import sys; import coowned.{modules}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_children_share_no_key():
    for parent in (RunKey.from_operating_system(), RunKey.from_seed(5)):
        keys = [parent, *(parent.child(number) for number in range(50))]
        assert len({key.secret for key in keys}) == len(keys)
        derived = {
            tuple(key.derive(purpose, step=0, configuration="a", tensor="w")) for key in keys for purpose in Purpose
        }
        assert len(derived) == len(keys) * len(Purpose)
        assert parent.child(3) == parent.child(3)


def test_children_of_a_test_run():
    child = RunKey.from_seed(5).child(1)
    assert child.is_test_run
    assert RunKey.from_json(child.to_json()) == child
    assert not RunKey.from_operating_system().child(1).is_test_run


HOLD = """
import sys
from coowned.exact.keys import RunKey
key = RunKey.from_json(sys.stdin.readline())
with key.serving(sys.argv[1], sent=sys.argv[2] == "sent"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def process():
    started = []

    def start(key, run, how="read"):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen([sys.executable, "-c", HOLD, run, how], text=True, **pipes))
        started[-1].stdin.write(key.to_json() + "\n")
        started[-1].stdin.flush()
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_a_key_in_use_is_refused(process):
    """Also for the same run; a worker that was sent the key by the one that holds it is not refused."""
    key = RunKey.from_operating_system()
    first = process(key, "run")
    assert first.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="another process is training with this run key"), key.serving("run"):
        pass
    assert process(key, "run", "sent").stdout.readline() == "held\n"
    first.communicate("\n")
    with key.serving("run"), key.serving("run"):
        pass


def test_a_key_is_held_until_its_last_use_here_ends(process):
    """Two uses that do not end in the order in which they began."""
    key = RunKey.from_operating_system()
    first, second = key.serving("run"), key.serving("run")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert "another process is training with this run key" in process(key, "run").communicate()[1]
    second.__exit__(None, None, None)
    assert process(key, "run").stdout.readline() == "held\n"


def test_another_run_is_refused_later(process):
    key = RunKey.from_operating_system()
    with key.serving("run"):
        pass
    second = process(key, "other")
    assert "was used by another run, in another process" in second.communicate()[1]
    assert second.returncode == 1
    assert process(key, "run").stdout.readline() == "held\n"


def test_a_killed_process_holds_nothing(process):
    key = RunKey.from_operating_system()
    first = process(key, "run")
    assert first.stdout.readline() == "held\n"
    first.send_signal(signal.SIGKILL)
    first.wait()
    with key.serving("run"):
        pass


def test_what_is_remembered_is_no_secret(cache):
    key = RunKey.from_operating_system()
    with key.serving("run"):
        pass
    [record] = (cache / "keys").iterdir()
    assert record.name == key.fingerprint
    assert key.secret.hex() not in record.read_text()
    assert record.stat().st_mode & 0o077 == 0


def test_test_runs_are_not_remembered(cache):
    for run in ("a", "b"):
        with RunKey.from_seed(3).serving(run):
            pass
    assert not cache.exists()


def test_a_place_that_cannot_be_written_stops_nobody(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COOWNED_CACHE", str(tmp_path / "file"))
    with claimed("name", "run"):
        pass


def test_without_a_cache_it_is_remembered_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("COOWNED_CACHE", "off")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with claimed("name", "run"):
        pass
    assert (tmp_path / f"coowned-{os.getuid()}" / "keys" / "name").exists()
