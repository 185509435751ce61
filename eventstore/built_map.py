"""A log file map that was built outside of an event store, as files: `photon logmap build` writes it, in
generations; `photon logmap load` reads it (docs/logmap.md).

    files.json                    the manifest: which log files, how far read; which generations count
    generation-NNNNNN/
        segment-...               segments of the map (eventstore.segments); those of a generation are of
                                  ranges of hashes that do not overlap
        malformed-....jsonl       dead letters, those of a log together

The manifest is replaced as a whole when a generation is complete: what it does not name is nothing.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from eventstore.segments import Segment
from photon.core.disk import storage_errors, write_file
from photon.core.errors import CorruptStateError, UsageError
from photon.logs.files import digest

FORMAT: Final = 3
MANIFEST: Final = "files.json"


class BuiltFile(msgspec.Struct, frozen=True):
    """A log file and how far it is read: all in its first `offset` bytes (unpacked, of an archive).

    Head and tail as of photon.logs.files.FileState, in hex. `archive`: size and time of change of an
    archive. `gone`: it holds something else by now, or is deleted; its entries count no more.
    """

    number: int
    name: str
    offset: int = 0
    head_bytes: int = 0
    head: str = ""
    tail: str = ""
    events: int = 0
    malformed: int = 0
    archive: tuple[int, int] | None = None
    gone: bool = False


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The dead letters of a file: that many bytes of their part, behind those of the span before."""

    file: int
    bytes: int


class Part(msgspec.Struct, frozen=True):
    """A file of a generation; `spans`: of dead letters, all of the part."""

    name: str
    count: int
    spans: list[Span] = []


class Generation(msgspec.Struct, frozen=True):
    """What one build found."""

    name: str
    segments: list[Part]
    malformed: list[Part]


class Manifest(msgspec.Struct, frozen=True):
    """`identity`: digest of what ids are made with."""

    format: int
    identity: str
    next_number: int = 0
    files: list[BuiltFile] = []
    generations: list[Generation] = []

    @property
    def live(self) -> list[BuiltFile]:
        return [file for file in self.files if not file.gone]


def identity_digest(identity: str) -> str:
    """The settings' own text names the key."""
    return digest(identity.encode("utf-8", "surrogatepass")).hex()


def read_manifest(directory: Path) -> Manifest | None:
    """None if nothing was built there yet. CorruptStateError, StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise CorruptStateError(f"{path}: not a built log file map ({error}); build it anew") from error
    if manifest.format != FORMAT:
        raise CorruptStateError(
            f"{path}: a built map of format {manifest.format}, this Photon reads {FORMAT}; build it anew"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Durably, all or nothing. StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        write_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def check_same(directory: Path, manifest: Manifest, wanted: Manifest) -> None:
    """UsageError unless both are of the same ids."""
    if manifest.identity != wanted.identity:
        raise UsageError(
            f"{directory}: built with other ids ([primary] id or [ids] key); use the settings it was built "
            "with, or build a new one"
        )


def write_durably(path: Path, data: bytes) -> None:
    """A new file under its own name; nobody knows of it yet. OSError."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _damaged(path: Path, why: str) -> CorruptStateError:
    return CorruptStateError(f"{path}: not the file that was built ({why}); build the map anew")


def names_of(generations: Sequence[Generation]) -> set[str]:
    """Directories that count."""
    return {generation.name for generation in generations}


_LETTER_BYTES_A_STEP: Final = 1 << 20


def segments_of(directory: Path, manifest: Manifest) -> list[tuple[Path, int]]:
    """Where they are, and how many entries each has: the oldest first. CorruptStateError."""
    found = []
    for generation in manifest.generations:
        for part in generation.segments:
            path = directory / generation.name / part.name
            try:
                segment = Segment(path)
            except (OSError, ValueError) as error:
                raise _damaged(path, str(error)) from error
            if len(segment) != part.count:
                raise _damaged(path, f"{len(segment)} entries, not {part.count}")
            found.append((path, part.count))
    return found


def letters(directory: Path, manifest: Manifest, gone: Collection[int]) -> Iterator[bytes]:
    """Dead letters as they were built, in pieces; not those of `gone`. CorruptStateError."""
    for generation in manifest.generations:
        for part in generation.malformed:
            path = directory / generation.name / part.name
            with storage_errors(path), path.open("rb") as file:
                size = sum(span.bytes for span in part.spans)
                if os.fstat(file.fileno()).st_size != size:
                    raise _damaged(path, f"not of {size} bytes")
                for span in part.spans:
                    end = file.tell() + span.bytes
                    if span.file in gone:
                        file.seek(end)
                    while file.tell() < end:
                        yield file.read(min(_LETTER_BYTES_A_STEP, end - file.tell()))
