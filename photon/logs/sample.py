"""The first lines of logs, without following them: for who looks at logs before there is a system."""

import contextlib
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import zstandard

from photon.core.errors import StorageError, UsageError
from photon.logs.files import named_files, no_text
from photon.logs.formats import IS_UTF16, UTF16, split_chunk
from photon.logs.packed import contents

_FIRST_BYTES: Final = 1 << 20
_LINE_BYTES_MAX: Final = 64 << 20
_KINDS: Final = [
    (re.compile(begin), told)
    for begin, told in (
        (IS_UTF16.pattern, f"it is {UTF16}"),
        (rb"\{\s*\n", "it is JSON over several lines; make a line of each object: jq -c . FILE"),
        (rb"\[", "it is one JSON array; make a line of each element: jq -c '.[]' FILE"),
        (
            rb'[^\s=,;"{]+=.*\s[^\s="]+=',
            "it looks like logfmt; make JSON lines of it: mlr --idkvp --ifs ' ' --ojsonl cat FILE",
        ),
        (rb"[^{].*,", "it looks like CSV with commas; write 'csv://FILE' for it"),
        (rb"[^{].*\t", "it looks like CSV with tabs; write 'csv://FILE?delimiter=%09' for it"),
        (rb"[^{].*;", "it looks like CSV with semicolons; write 'csv://FILE?delimiter=;' for it"),
    )
]
"""What a file may begin with, but for white space; what it is then, and how it can be read."""
_DECODER: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Sample:
    """`events`: decoded lines that are objects; `first`: what the first file begins with."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    first: bytes = b""


def pieces(path: str) -> Iterator[bytes]:
    """What is in a file, unpacked, in pieces of whole lines, the last one as it is, and so is what is longer
    than any line. StorageError."""
    begun = b""
    try:
        with open(path, "rb") as file:
            for piece in contents(path, file):
                begun += piece
                end = begun.rfind(b"\n") + 1 or (len(begun) if len(begun) > _LINE_BYTES_MAX else 0)
                if end:
                    yield begun[:end]
                begun = begun[end:]
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise StorageError(f"{path}: not a whole archive ({error}); replace it or leave it out") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}); see to its permissions") from error
    if begun:
        yield begun


def sample(patterns: Sequence[str], lines_max: int) -> Sample:
    """About so many lines of all files that globs and directories name, the first of each. UsageError where
    there is none; StorageError."""
    paths = files_of(patterns)
    found = Sample(first=next(pieces(paths[0]), b"")[:_FIRST_BYTES])
    for _, lines in first_lines(paths, lines_max):
        for line in split_chunk(b"\n".join(lines)).lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                event = _DECODER.decode(line)
                if isinstance(event, dict):
                    found.events.append(event)
    return found


def first_lines(paths: Sequence[str], lines_max: int) -> Iterator[tuple[str, list[bytes]]]:
    """About so many lines of all files, the first of each as they are: (path, lines). StorageError."""
    left = lines_max
    for number, path in enumerate(paths):
        if left <= 0:
            return
        share, lines = max(1, left // (len(paths) - number)), list[bytes]()
        for piece in pieces(path):
            lines += piece.removesuffix(b"\n").split(b"\n", share - len(lines))[: share - len(lines)]
            if len(lines) >= share:
                break
        left -= len(lines)
        yield path, lines


def files_of(patterns: Sequence[str]) -> list[str]:
    """UsageError where there is none."""
    paths = [file.name for file in named_files(patterns)]
    if not paths:
        raise UsageError(f"no file matches {' '.join(patterns)}; check the path")
    return paths


def no_json_lines(first: bytes) -> str:
    """What a file that begins so is, and how it can be read, where that can be told."""
    if kind := no_text(first):
        return f"it is {kind}"
    text = first.lstrip()
    found = (told for begin, told in _KINDS if begin.match(text))
    return next(found, "it holds no JSON objects, one a line (docs/formats.md)")
