"""arXiv metadata: the JSON lines of the public snapshot, one paper per line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import pyarrow as pa

from coowned.attribution.examples import AttributedExamples, ExampleBuilder, Origin, valid_text
from coowned.attribution.identifiers import one_line
from coowned.attribution.options import SUFFIXES
from coowned.attribution.table_files import files_of, lines_of
from coowned.attribution.user_keys import Aliases, UserKeyRules
from coowned.errors import InputError
from coowned.files import read_head
from coowned.progress import Progress

if TYPE_CHECKING:
    from coowned.attribution.sources import DataSource

_PAYLOAD = pa.schema([(name, pa.large_string()) for name in ("id", "title", "abstract", "categories")])


class _Paper(msgspec.Struct):
    """The fields read from a line: metadata, which is validated, and texts, which may have any type."""

    id: str
    authors_parsed: list[Annotated[list[str], msgspec.Meta(min_length=1)]]  # [last, first, suffix]
    title: Any = None
    abstract: Any = None
    categories: Any = None


def read_arxiv(
    path: str | os.PathLike[str],
    *,
    user_keys: UserKeyRules | None = None,
    aliases: Aliases | str | os.PathLike[str] | None = None,
) -> AttributedExamples:
    """Reads papers attributed to all their authors from the metadata snapshot (`authors_parsed`), abstracts as payload.

    Names are not people: namesakes merge, which is safe, and one author under two names splits, which is not;
    `UserKeyRules.authors(initials=True)` merges more.

    Guarantees:
      - One example a paper, id = the arXiv id, users = its authors.   (test_papers_and_authors)
    """
    builder = ExampleBuilder(_PAYLOAD)
    for paper in _papers(path):
        parts = [(*author[:3], "", "")[:3] for author in paper.authors_parsed]
        names = [valid_text(" ".join(f"{first} {last} {suffix}".split())) for last, first, suffix in parts]
        builder.add_mentions([builder.code(name) for name in names if name])
        texts = [" ".join(valid_text(text).split()) for text in (paper.title, paper.abstract, paper.categories)]
        builder.add_row(valid_text(paper.id), valid_text(paper.id), *texts, characters=sum(map(len, texts)))
    return builder.attribute(
        user_keys=user_keys or UserKeyRules.authors(),
        aliases=aliases,
        origin=Origin(str(path), ("id", "authors_parsed")),
    )


def _papers(path: str | os.PathLike[str]) -> Iterator[_Paper]:
    for file in files_of(path, SUFFIXES["jsonl"]):
        line = 0
        try:
            for line, content in lines_of(file):  # noqa: B007 - errors name the line
                yield msgspec.convert(json.loads(content.decode("utf-8")), _Paper)
        except msgspec.ValidationError as error:
            problem = one_line(error).replace("`", "").replace("$.", "")
            raise InputError(f"{file}, line {line}: {problem}; is it the arXiv metadata snapshot?") from None
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{file}, line {line}: not JSON in UTF-8 ({one_line(error)}); is the file cut off? Download it again"
            ) from None
        except OSError as error:
            raise InputError(f"{file}: cannot be read after line {line} ({error.strerror}); check the file") from error


def read_source(kind: str, source: "DataSource", progress: Progress | None) -> AttributedExamples:
    """Reads a `DataSource` of this format."""
    del kind, progress
    return read_arxiv(source.path, aliases=source.aliases)


def recognizes(kind: str, path: Path) -> bool:
    """Returns whether the first line of a file is a paper with its authors."""
    del kind
    if not path.is_file():
        return False
    first = read_head(path, 1 << 20).lstrip().split(b"\n", 1)[0]
    return first.startswith(b"{") and b'"authors_parsed"' in first
