"""The first records of sources, as log files that last as long as they are looked at."""

import contextlib
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from photon.connect.importer import STDIN
from photon.connect.ports import Fields, State
from photon.connect.rows import note_rows
from photon.connect.uris import is_source, make_source

_WAIT_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Sampled:
    """`patterns`: of log files, in place of the sources; `whole`: they hold all that the sources have."""

    patterns: list[str]
    whole: bool


@contextlib.contextmanager
def sampled(texts: Sequence[str], fields: Fields, records_max: int) -> Iterator[Sampled]:
    """About so many records of each source. UsageError, UnavailableError; StorageError."""
    with tempfile.TemporaryDirectory(prefix="photon-sample-") as directory:
        patterns, whole = [], True
        for number, text in enumerate(texts):
            path = Path(directory, f"{number}.jsonl")
            if text == STDIN:
                whole &= _copy_stdin(records_max, path)
                patterns.append(str(path))
            elif is_source(text):
                whole &= _copy(text, fields, records_max, path)
                patterns.append(str(path))
            else:
                patterns.append(text)
        yield Sampled(patterns, whole)


def _copy_stdin(lines_max: int, path: Path) -> bool:
    """Whether that is all."""
    lines = list(itertools.islice(sys.stdin.buffer, lines_max))
    path.write_bytes(b"".join(lines))
    return len(lines) < lines_max


def _copy(text: str, fields: Fields, records_max: int, path: Path) -> bool:
    """Whether that is all."""
    records, source = 0, make_source(text, fields)
    try:
        source.open({}, True)
        with path.open("wb") as file:
            while source.state() is not State.FINISHED and records < records_max:
                for batch in source.read(_WAIT_S):
                    note_rows(path, file.tell(), [batch], text)
                    file.write(batch.lines)
                    records += sum(count for _, count in batch.runs)
        return source.state() is State.FINISHED
    finally:
        source.close()
