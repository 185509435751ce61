"""What the log file map's LMDB file holds, but for the entries (eventstore.entries)."""

import secrets
from typing import Final

import msgspec

from eventstore.entries import LEVEL_PARTS
from photon.core.logwriter import LogPosition
from photon.core.settings import Settings

FORMAT: Final = 2
META_KEY: Final = b"meta"
SEGMENTS_KEY: Final = b"segments"
SPARSE_TABLES: Final = tuple(b"sparse" if part == 1 else b"sparse/%d" % part for part in LEVEL_PARTS)
TABLES: Final = (b"dense", b"repeated", b"files", b"meta")
LOADING: Final = "loading"
"""Beside the map: a load that is under way, or was killed; of no use to anybody else."""
LOADED_LETTERS: Final = "primary-000000.jsonl"
LOADING_LETTERS: Final = f"{LOADED_LETTERS}.loading"
"""Among the dead letters: likewise."""
_STORE_BYTES: Final = 16


class Counts(msgspec.Struct, frozen=True):
    """What was read of the primary logs so far, and where the next dead letter goes."""

    primary_events: int = 0
    malformed: int = 0
    dead_letter_file: int = 0
    dead_letter_offset: int = 0

    @property
    def dead_letters(self) -> LogPosition:
        return LogPosition(self.dead_letter_file, self.dead_letter_offset)


class Meta(msgspec.Struct, frozen=True):
    """`interval_us`: the greatest W that the map was written with, which lookups must scan.

    `store`: random, so that caches of a map that was removed are not taken for this one's.
    """

    format: int
    identity: str
    store: bytes
    interval_us: int
    counts: Counts


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """A segment in the list, which is oldest first. Those of one level are of about one size."""

    number: int
    level: int


def new_meta(identity: str, interval_us: int, counts: Counts) -> Meta:
    """Of a map that is made anew."""
    return Meta(FORMAT, identity, secrets.token_bytes(_STORE_BYTES), interval_us, counts)


def identity_of(settings: Settings) -> str:
    """By which settings ids are made of log lines: a map of other ids is refused."""
    return f"[primary] id = {settings.primary.id!r}, [ids] key = {settings.ids.key!r}"


def interval_us_of(interval_s: float) -> int:
    """W in microseconds."""
    return max(1, round(interval_s * 1e6))


def segment_name(number: int) -> str:
    return f"dense-{number:08d}"
