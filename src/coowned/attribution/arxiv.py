"""arXiv metadata: the JSON lines of the public snapshot, one paper a line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from coowned.attribution.examples import AttributedExamples, attribute
from coowned.attribution.table_files import files_of
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError

_PAPERS_PER_CHUNK = 1 << 15
_SCHEMA = pa.schema(
    [
        ("id", pa.large_string()),
        ("title", pa.large_string()),
        ("abstract", pa.large_string()),
        ("categories", pa.large_string()),
    ]
)


def read_arxiv(
    path: str | os.PathLike[str],
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
) -> AttributedExamples:
    """Papers attributed to all their authors, from the metadata snapshot (`authors_parsed`), abstracts as payload.

    Names are not people: namesakes merge, which is safe, and one author under two names splits, which is not;
    `UserKeyRules.authors(initials=True)` merges more.

    Guarantees:
      - One example a paper, id = the arXiv id, users = its authors.   (test_papers_and_authors)
    """
    papers: dict[str, list[pa.Array]] = {name: [] for name in _SCHEMA.names}
    authors: list[pa.Array] = []
    rows: dict[str, list] = {name: [] for name in (*_SCHEMA.names, "authors")}

    def flush() -> None:
        for name in _SCHEMA.names:
            papers[name].append(pa.array(rows[name], pa.large_string()))
        # Names repeat: a dictionary for each chunk keeps one string a person.
        flat = [name for names in rows["authors"] for name in names]
        ends = [0]
        for names in rows["authors"]:
            ends.append(ends[-1] + len(names))
        authors.append(
            pa.LargeListArray.from_arrays(pa.array(ends), pa.array(flat, pa.large_string()).dictionary_encode())
        )
        for column in rows.values():
            column.clear()

    for place, paper in _papers(path):
        names = _authors(paper, place)
        for name in _SCHEMA.names:
            value = paper.get(name)
            if value is None and name != "id":
                value = ""
            if not isinstance(value, str):
                raise InputError(
                    f"{place}: {name!r} is {type(value).__name__}, text was expected; is it the arXiv snapshot?"
                )
            rows[name].append(value if name == "id" else " ".join(value.split()))
        rows["authors"].append(names)
        if len(rows["id"]) == _PAPERS_PER_CHUNK:
            flush()
    flush()
    payload = pa.table({name: pa.chunked_array(chunks) for name, chunks in papers.items()}, schema=_SCHEMA)
    return attribute(
        pa.chunked_array(authors),
        example_ids=payload.column("id"),
        payload=payload,
        user_keys=user_keys or UserKeyRules.authors(),
        aliases=aliases,
        columns_read=("id", "authors_parsed"),
        place=str(path),
    )


def _papers(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict]]:
    for file in files_of(path, (".json", ".jsonl", ".ndjson")):
        number = 0
        try:
            with Path(file).open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        place = f"{file}, line {number}"
                        yield place, _paper(line, place)
        except OSError as error:
            raise InputError(
                f"{file}: cannot be read after line {number} ({error.strerror}); check the file"
            ) from error


def _paper(line: bytes, place: str) -> dict:
    try:
        paper = json.loads(line.decode("utf-8"))
        json.dumps(paper, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InputError(f"{place}: not UTF-8 ({error.reason}); get the file anew") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error}); is the file cut off? get it anew") from error
    if not isinstance(paper, dict):
        raise InputError(f"{place}: a JSON object was expected, one paper a line; is it the arXiv snapshot?")
    return paper


def _authors(paper: dict, place: str) -> list[str]:
    """ "First Last Suffix" of each author."""
    parsed = paper.get("authors_parsed")
    if not isinstance(parsed, list):
        raise InputError(f"{place}: there is no list 'authors_parsed'; is it the arXiv metadata snapshot?")
    names = []
    for parts in parsed:
        if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
            raise InputError(f"{place}: an author in 'authors_parsed' is not a list [last, first, suffix]; mend it")
        last, first, suffix = (*parts[:3], "", "")[:3]
        name = " ".join(f"{first} {last} {suffix}".split())
        if name:
            names.append(name)
    return names
