"""S on disk: whole or not there."""

import re

import pyarrow
import pyarrow.parquet
import pytest

import coowned as co
from coowned.selection.selection_files import read_selection
from coowned.selection.selection_files import write_selection as write_locally
from coowned.spark import attribute, certify, select, selection_files, write_selection

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def made(spark):
    """(graph on one machine, S on Spark, its certificate)."""
    rows = [(i, [f"u{i % 7}", f"u{i % 5}"]) for i in range(60)]
    graph = attribute(spark.createDataFrame(rows, "example_id int, users array<string>"))
    selector = co.GreedyWithDuplicates(contribution_bound=4)
    found = select(graph, selector, seed=1).repartition(3)
    columns = {"example_id": [i for i, _ in rows], "users": [row for _, row in rows]}
    local = co.from_table(columns, example_id="example_id").graph
    yield local, found, certify(graph, found, selector=selector, seed=1)
    graph.release()


def names(folder):
    """What is there, but for the checksums that Hadoop keeps beside its files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".crc"))


@pytest.mark.parametrize("address", [False, True])
def test_round_trip(made, tmp_path, address):
    graph, found, certificate = made
    place = tmp_path / "S.parquet"
    written = write_selection(found, certificate, place.as_uri() if address else place)
    assert [str(part).removeprefix("file://") for part in written] == [str(place), str(tmp_path / "S.certificate.json")]
    assert place.is_dir()
    selection = read_selection(place, graph)
    expected = co.GreedyWithDuplicates(contribution_bound=4).select(graph, seed=1)
    assert selection.copies.tolist() == expected.copies.tolist()
    stored = co.ContributionCertificate.from_json((tmp_path / "S.certificate.json").read_text())
    assert stored == certificate
    stored.check(graph, selection)
    schema = pyarrow.parquet.read_schema(next(place.glob("part-*.parquet")))
    assert [str(kind) for kind in schema.types] == ["int32", "int32"]


@pytest.mark.parametrize("address", [False, True])
def test_round_trip_on_spark(spark, made, tmp_path, address):
    graph, found, certificate = made
    place = tmp_path / "S.parquet"
    write_selection(found, certificate, place)
    wanted = {row.example_id: row.copies for row in found.collect()}
    back = selection_files.read_selection(spark, place.as_uri() if address else place)
    assert {row.example_id: row.copies for row in back.collect()} == wanted
    text = selection_files.read_certificate(spark, (tmp_path / "S.certificate.json").as_uri())
    assert co.ContributionCertificate.from_json(text) == certificate
    local = tmp_path / "one.parquet"  # a file of one machine
    write_locally(local, graph, read_selection(place, graph))
    assert {row.example_id: row.copies for row in selection_files.read_selection(spark, local).collect()} == wanted


def test_other_files_are_refused(spark, tmp_path):
    cases = {
        "example_id and copies, not ['x']": {"x": [1]},
        "recounted on one machine": {"batch": [0], "position": [0], "example_id": [1]},
        "schedules and groups": {"example_id": [1], "copies": [1], "group": [0]},
        "not double and int64": {"example_id": [1.5], "copies": [1]},
        "not int64 and string": {"example_id": [1], "copies": ["1"]},
    }
    for number, (message, columns) in enumerate(cases.items()):
        file = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), file)
        with pytest.raises(co.InputError, match=re.escape(message)):
            selection_files.read_selection(spark, file)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    for place in (torn, torn.as_uri(), tmp_path / "nothing.parquet", (tmp_path / "nothing.parquet").as_uri()):
        with pytest.raises(co.InputError, match=r"(torn|nothing)\.parquet"):
            selection_files.read_selection(spark, place)
    with pytest.raises(co.InputError, match="no certificate found"):
        selection_files.read_certificate(spark, (tmp_path / "S.certificate.json").as_uri())
    (tmp_path / "S.certificate.json").write_bytes(b"\xff\xfe")
    with pytest.raises(co.InputError, match="not UTF-8"):
        selection_files.read_certificate(spark, (tmp_path / "S.certificate.json").as_uri())


@pytest.mark.parametrize("address", [False, True])
def test_half_written_is_replaced(made, tmp_path, address):
    graph, found, certificate = made
    place = tmp_path / "S.parquet"
    (place / "_temporary" / "0").mkdir(parents=True)  # what a killed writer leaves: parts, and no mark of success
    (place / "part-00000-old.parquet").write_bytes(b"PAR1 half of it")
    write_selection(found, certificate, place.as_uri() if address else place)
    assert not (place / "part-00000-old.parquet").exists()
    assert read_selection(place, graph).size == certificate.size
    assert names(tmp_path) == ["S.certificate.json", "S.parquet"]


@pytest.mark.parametrize("address", [False, True])
def test_appears_whole(made, tmp_path, address, monkeypatch):
    _, found, certificate = made
    place = tmp_path / "S.parquet"
    place.mkdir()
    (place / "part-0.parquet").write_bytes(b"the old one")
    seen = []

    def fails(*given):
        seen.append(names(tmp_path))
        raise OSError("disk full")

    if address:
        monkeypatch.setattr(selection_files, "_rename", fails)
    else:
        monkeypatch.setattr(selection_files, "files_of", fails)
    with pytest.raises(OSError, match="disk full"):
        write_selection(found, certificate, place.as_uri() if address else place)
    assert [name for name in seen[0] if not name.startswith(".")] == ["S.parquet"]  # all that is new has a hidden name
    assert (place / "part-0.parquet").read_bytes() == b"the old one"
    assert names(tmp_path) == ["S.parquet"]


@pytest.mark.parametrize("address", [False, True])
def test_other_folders_are_kept(made, tmp_path, address):
    _, found, certificate = made
    place = tmp_path / "S.parquet"
    place.mkdir()
    (place / "thesis.txt").write_text("dear")
    with pytest.raises(co.InputError, match="a folder with other files in it"):
        write_selection(found, certificate, place.as_uri() if address else place)
    assert (place / "thesis.txt").read_text() == "dear"


def test_parts_that_did_not_arrive(made, tmp_path):
    _, found, certificate = made
    with pytest.raises(co.InputError, match="a folder that the driver and every executor share"):
        write_selection(found.limit(1), certificate, tmp_path / "S.parquet")
    assert names(tmp_path) == []
