"""`photon convert`: logs between JSON lines and blocks (docs/formats.md).

What is no event is left out, counted, told, and kept beside the target; so a status of 0 says that all of a
log was taken over.
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import click

from photon.app.convert_reading import Records, read_records
from photon.core.blocks import BlockFormat, encode_foreign, encode_primary
from photon.core.columns import join_lines
from photon.core.disk import replace, storage_errors
from photon.core.errors import UsageError
from photon.core.formats import Formats, Malformed
from photon.core.framing import BLOCKS_SUFFIX, PACKED_SUFFIXES, holds_blocks
from photon.core.ids import IdPacker
from photon.core.settings import Settings, load_settings

LINES_SUFFIX: Final = ".jsonl"
REJECTED_SUFFIX: Final = ".rejected"
_TOLD_MAX: Final = 10

Recode = Callable[[bytes], tuple[bytes, int, list[Malformed]]]
"""Whole records of the source -> bytes of the target, how many events they hold, and what is none."""


@dataclass(slots=True)
class Converted:
    """One file. `rejected`: where the malformed lines are kept, if there are any."""

    source: str
    target: str
    events: int = 0
    malformed: int = 0
    source_bytes: int = 0
    target_bytes: int = 0
    rejected: str | None = None
    told: list[str] = field(default_factory=list)


@click.command("convert")
@click.argument(
    "sources", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    help="The new file; or an existing directory, which gets one for each source.",
)
@click.option("--primary", "side", flag_value="primary", help="The lines are primary events.")
@click.option("--foreign", "side", flag_value="foreign", help="The lines are foreign events.")
@click.option("--config", type=click.Path(path_type=Path), help="Settings (photon.toml): fields, ids.key.")
@click.option("--force", is_flag=True, help="Replace a target that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@click.pass_context
def command(
    context: click.Context,
    sources: tuple[Path, ...],
    out: Path,
    side: str | None,
    config: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Convert logs: JSON lines to the binary format (.pblk), and .pblk back to lines, byte for byte.

    Sources may be compressed (.gz, .zst), and should grow no more. A target is there whole or not at all.
    Exit status 1 if something in a source is no event.
    """
    settings = load_settings(config)
    pairs = [(source, _target(source, out)) for source in sources]
    _check(pairs, side, force)
    done = [convert(source, target, side, settings) for source, target in pairs]
    if as_json:
        click.echo(json.dumps({"files": [asdict(one) for one in done]}))
    for one in [] if as_json else done:
        _tell(one)
    if any(one.malformed for one in done):
        context.exit(1)


def convert(source: Path, target: Path, side: str | None, settings: Settings) -> Converted:
    """Convert one file; the target's name says into what. StorageError leaves no target."""
    recode = _recoder(source, target, side, settings)
    done = Converted(str(source), str(target))
    rejected = target.with_name(target.name + REJECTED_SUFFIX)
    # A name that no glob of logs finds while it is half written.
    partial = target.with_name(f".{target.name}.partial")
    partial_rejected = target.with_name(f".{rejected.name}.partial")
    try:
        with storage_errors(target), partial.open("wb") as good, partial_rejected.open("wb") as bad:
            for records in read_records(source, settings.logs.line_bytes_max):
                _recode(records, recode, good, bad, done, settings)
            for file in (good, bad):
                file.flush()
                os.fsync(file.fileno())
            done.target_bytes = good.tell()
        with storage_errors(target):
            if done.malformed:
                replace(partial_rejected, rejected)
                done.rejected = str(rejected)
            else:
                rejected.unlink(missing_ok=True)  # of an earlier conversion that this one replaces
            replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
        partial_rejected.unlink(missing_ok=True)
    return done


def _recode(
    records: Records, recode: Recode, good: BinaryIO, bad: BinaryIO, done: Converted, settings: Settings
) -> None:
    if records.oversized:
        longest = settings.logs.line_bytes_max
        reason = f"a line of {records.oversized} bytes is longer than 'logs.line_bytes_max' ({longest})"
        data, events, malformed = b"", 0, [Malformed(0, records.data, reason)]
    else:
        data, events, malformed = recode(records.data)
    good.write(data)
    bad.write(join_lines([one.line for one in malformed]))
    done.events += events
    done.malformed += len(malformed)
    done.source_bytes += records.oversized or len(records.data)
    room = _TOLD_MAX - len(done.told)
    done.told += [f"{done.source}:{records.start + one.start}: {one.reason}" for one in malformed[:room]]


def _recoder(source: Path, target: Path, side: str | None, settings: Settings) -> Recode:
    if holds_blocks(source.name):
        blocks = BlockFormat(None)  # for their lines, a key is not needed

        def to_lines(data: bytes) -> tuple[bytes, int, list[Malformed]]:
            lines, malformed = blocks.read_lines(data)
            return join_lines(lines), len(lines), malformed

        return to_lines
    formats = Formats(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode()))

    def primary(data: bytes) -> tuple[bytes, int, list[Malformed]]:
        batch = formats.lines.parse_primary(data)
        return encode_primary(batch, formats.labels), len(batch.lines), batch.malformed

    def foreign(data: bytes) -> tuple[bytes, int, list[Malformed]]:
        batch = formats.lines.parse_foreign(data)
        return encode_foreign(batch, formats.labels), len(batch.lines), batch.malformed

    return primary if side == "primary" else foreign


def _target(source: Path, out: Path) -> Path:
    """In a directory: the source's name, with the other format's suffix."""
    if not out.is_dir():
        return out
    name = source.name
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    if holds_blocks(name):
        return out / (name.removesuffix(BLOCKS_SUFFIX) + LINES_SUFFIX)
    return out / (name.removesuffix(LINES_SUFFIX) + BLOCKS_SUFFIX)


def _check(pairs: list[tuple[Path, Path]], side: str | None, force: bool) -> None:
    """UsageError before anything is written."""
    targets: dict[Path, Path] = {}
    for source, target in pairs:
        if target.name.endswith(PACKED_SUFFIXES):
            raise UsageError(
                f"--out {target}: is written as it is; leave the suffix off and compress it then"
            )
        if holds_blocks(source.name) == holds_blocks(target.name):
            raise UsageError(
                f"{source} to {target}: both of one format; a name that ends in {BLOCKS_SUFFIX} means "
                "blocks, any other JSON lines"
            )
        if holds_blocks(target.name) and side is None:
            raise UsageError(f"{source}: say which events these are: --primary or --foreign")
        if target in targets:
            raise UsageError(f"{targets[target]} and {source} would both become {target}; name a directory")
        if target.exists() and not force:
            raise UsageError(f"--out {target}: is there already; name another, or --force to replace it")
        if not target.parent.is_dir():
            raise UsageError(f"--out {target}: no directory {target.parent}; create it first")
        targets[target] = source


def _tell(done: Converted) -> None:
    click.echo(
        f"{done.target}: {done.events:,} events, {done.target_bytes:,} bytes (from {done.source_bytes:,})"
    )
    for line in done.told:
        click.echo(f"  {line}", err=True)
    if done.malformed:
        more = done.malformed - len(done.told)
        told = f" ({more:,} of them are not told here)" if more else ""
        click.echo(f"  {done.malformed:,} are no events{told}; they are kept in {done.rejected}", err=True)
