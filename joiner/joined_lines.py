"""Joined lines: which files hold them, as lines or as Parquet, and which event each is of.

A joined line is known by the foreign event's id, in the field that the settings name. The default line has
the primary event's object in the adapter's field; an adapter may put something else there, or nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from joiner.output_files import LINES, PARQUET
from photon.core.columns import Column, Field, decoder_of
from photon.core.settings import Settings, parse_path
from photon.logs.formats import Lines, Malformed, decode, split_chunk
from photon.logs.parquet import parquet_lines

ID: Final = str | int
"""Type of an id in a line."""
BLOCK_BYTES: Final = 4 << 20


def joined_files(directory: Path) -> list[Path]:
    """The files of joined lines below a directory, in order; may be none.

    Of one that is there as lines and as Parquet, being completed just now, the Parquet: it is whole, and the
    lines go.
    """
    found: dict[Path, Path] = {}
    for ending in (LINES, PARQUET):
        found |= {path.with_suffix(""): path for path in directory.rglob(f"*{ending}")}
    return sorted(found.values())


def blocks_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file's lines in blocks of some MiB, and where each begins: at which byte, or row of Parquet.

    Only the last line of a file may lack its newline. One that grows is read as far as it goes; it is not
    mapped, for its joiner may cut it. OSError, also FileNotFoundError; of Parquet as parquet_lines.
    """
    start = 0
    if path.suffix == PARQUET:
        for data in parquet_lines(path):
            yield start, data
            start += data.count(b"\n")
        return
    with path.open("rb") as file:
        while data := file.read(BLOCK_BYTES) + file.readline():
            yield start, data
            start += len(data)


@dataclass(frozen=True, slots=True)
class JoinedEvents:
    """N joined lines, decoded. `rows`: which lines of the chunk they are, None for all; the others."""

    events: list[Any]
    rows: list[int] | None
    malformed: list[Malformed]


class JoinedDecoder:
    """Decodes joined lines: the foreign event's id, `id`, and what else is wanted of it. For one thread.

    `raw`: also the object that the adapter put into its field, `event.raw`, empty if there is none.
    """

    def __init__(
        self, settings: Settings, more: Mapping[str, Field] | None = None, raw: bool = False
    ) -> None:
        """SettingsError for field paths that can't be."""
        fields = {"id": Field(parse_path(settings.foreign.id), ID), **(more or {})}
        decoder, self.columns = decoder_of("JoinedEvent", fields)
        if raw:
            joined = msgspec.defstruct(
                "Joined",
                [("raw", msgspec.Raw, msgspec.Raw())],
                bases=(decoder.type,),
                rename={"raw": settings.adapter.field},
                kw_only=True,
                gc=False,
            )
            decoder = msgspec.json.Decoder(joined)
        self._decoder = decoder

    columns: dict[str, Column]
    """Field -> how to take it from events."""

    def decode(self, lines: bytes | Lines) -> JoinedEvents:
        """A chunk of lines, or those of its lines that are wanted."""
        return JoinedEvents(*decode(self._decoder, split_chunk(lines) if isinstance(lines, bytes) else lines))


def inside(settings: Settings) -> Field:
    """The id of the primary event's object within a joined line."""
    return Field((settings.adapter.field, *parse_path(settings.primary.id)), ID)
