"""`photon adapter test`: what an adapter makes of sample events (docs/adapters.md)."""

import contextlib
import gzip
import json
import signal
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec
import zstandard

from photon.cli.options import json_flag, path_option
from photon.core.columns import split_ids
from photon.core.errors import StorageError, UsageError
from photon.core.settings import Settings, load_settings
from photon.logs.files import whole_lines
from photon.logs.formats import ForeignBatch, PrimaryBatch, json_lines, split_chunk
from photon.logs.packed import is_packed, unpacked

if TYPE_CHECKING:
    from joiner.adapter import BatchAdapter

JOINED: Final = "joined"
SKIPPED: Final = "skipped"
RAISED: Final = "raised"
"""Or it returned what is no joined line."""
NO_PRIMARY: Final = "no primary"
MALFORMED: Final = "malformed"

_OUTCOMES: Final = (JOINED, SKIPPED, RAISED, NO_PRIMARY, MALFORMED)
_FAILURES: Final = (RAISED, MALFORMED)
_STEP_BYTES: Final = 1 << 20
_OVERSIZED_BYTES_KEPT: Final = 1024


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a file of pairs."""

    primary: msgspec.Raw
    foreign: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Sample:
    """One foreign event at `place` (file:line or file:offset), and its primary event; or what is amiss."""

    place: str
    foreign: bytes
    primary: bytes | None = None
    malformed: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text`: the joined line, or the reason why there is none."""

    place: str
    outcome: str
    text: str


@click.group("adapter")
def adapter() -> None:
    """Your code between the two events."""


@adapter.command("test")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--primary",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Primary events, instead of FILE.",
)
@click.option(
    "--foreign",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Foreign events that name them.",
)
@click.option("--use", metavar="MODULE:CLASS", help="The adapter.  [default: that of --config]")
@path_option("--config", help="Settings (photon.toml).")
@json_flag("Print the outcomes as JSON.")
@click.pass_context
def test(
    context: click.Context,
    file: Path | None,
    primary: Path | None,
    foreign: Path | None,
    use: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Run an adapter over sample events and print what comes of each.

    FILE holds pairs, one a line: {"primary": {...}, "foreign": {...}}. Or give two logs, and the events are
    brought together by their ids. Exit status 1 if the adapter raised, or a sample is no event.
    """
    from joiner.adapter import BatchAdapter, load_adapter

    settings = load_settings(config)
    if use is not None:
        settings = replace(settings, adapter=replace(settings.adapter, use=use))
    samples = _samples(file, primary, foreign, settings)
    batch_adapter = BatchAdapter(load_adapter(settings.adapter.use, settings.adapter.field))
    with _interruptible():
        verdicts = [judge(sample, batch_adapter) for sample in samples]
    counts = Counter(verdict.outcome for verdict in verdicts)
    click.echo(_document(verdicts, counts) if as_json else _page(verdicts, counts))
    if any(counts[outcome] for outcome in _FAILURES):
        context.exit(1)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process: as an exception it would be taken for one of the adapter's own."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def judge(sample: Sample, batch_adapter: "BatchAdapter") -> Verdict:
    """What the adapter makes of one sample; as in a joiner."""
    from joiner.adapter import Skip

    if sample.malformed:
        return Verdict(sample.place, MALFORMED, sample.malformed)
    if sample.primary is None:
        return Verdict(sample.place, NO_PRIMARY, "the primary event it names is not among the samples")
    joined = batch_adapter.join_one(sample.primary, sample.foreign)
    if isinstance(joined, bytes):
        return Verdict(sample.place, JOINED, joined.decode("utf-8"))
    return Verdict(sample.place, SKIPPED if isinstance(joined, Skip) else RAISED, joined.reason)


def _samples(
    file: Path | None, primary: Path | None, foreign: Path | None, settings: Settings
) -> Iterator[Sample]:
    if file is not None and primary is None and foreign is None:
        return _from_pairs(file, settings)
    if file is None and primary is not None and foreign is not None:
        return _from_logs(primary, foreign, settings)
    raise UsageError("give either FILE, which holds pairs, or both --primary FILE and --foreign FILE")


def _from_pairs(file: Path, settings: Settings) -> Iterator[Sample]:
    number = 0
    for records in _read(file, settings.logs.line_bytes_max):
        lines = [records.data] if records.oversized else split_chunk(records.data).lines
        for line in lines:
            number += 1
            yield _pair(f"{file.name}:{number}", line)


def _pair(place: str, line: bytes) -> Sample:
    try:
        line.decode("utf-8")
        pair = msgspec.json.decode(line, type=_Pair)
        primary, foreign = bytes(pair.primary), bytes(pair.foreign)
        if not all(event.startswith(b"{") and len(event) > 2 for event in (primary, foreign)):
            raise msgspec.DecodeError("an event must be an object with a field at least")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Sample(place, line, malformed=f'no line {{"primary": {{...}}, "foreign": {{...}}}}: {error}')
    return Sample(place, foreign, primary)


def _from_logs(primary: Path, foreign: Path, settings: Settings) -> Iterator[Sample]:
    parser = json_lines(settings)
    events: dict[bytes, bytes] = {}
    for _, found in _batches(primary, parser.parse_primary, settings):
        if isinstance(found, Sample):
            yield found
            continue
        for key, line in zip(split_ids(found.ids), found.lines, strict=True):
            events.setdefault(key, line)  # of a primary event that is repeated the first is taken
    for start, found in _batches(foreign, parser.parse_foreign, settings):
        if isinstance(found, Sample):
            yield found
            continue
        rows = zip(split_ids(found.primary_ids), found.lines, found.starts.tolist(), strict=True)
        for key, line, offset in rows:
            yield Sample(f"{foreign.name}:{start + offset}", line, events.get(key))


def _batches(path: Path, parse: Any, settings: Settings) -> Iterator[tuple[int, Any]]:
    """Offset and batch, and a Sample for what is no event."""
    batch: PrimaryBatch | ForeignBatch
    for records in _read(path, settings.logs.line_bytes_max):
        if records.oversized:
            reason = f"a line of {records.oversized} bytes"
            yield records.start, Sample(f"{path.name}:{records.start}", records.data, malformed=reason)
            continue
        batch = parse(records.data)
        yield records.start, batch
        for bad in batch.malformed:
            place = f"{path.name}:{records.start + bad.start}"
            yield records.start, Sample(place, bad.line, malformed=bad.reason)


class _Lines(NamedTuple):
    """Whole lines from `start` on, an offset in the unpacked file.

    `oversized`: instead of them, the beginning of one that is longer than the bound, and its length.
    """

    start: int
    data: bytes
    oversized: int = 0


def _read(path: Path, line_bytes_max: int) -> Iterator[_Lines]:
    """All of a file, piece by piece; what stands after the last newline counts as a line. StorageError."""
    start, data, passed = 0, b"", 0
    for piece in _pieces(path):
        if passed:  # within an oversized line: only its end is looked for
            end = piece.find(b"\n") + 1
            passed += end or len(piece)
            if not end:
                continue
            yield _Lines(start, data, passed)
            start, data, passed = start + passed, piece[end:], 0
        else:
            data += piece
        whole = whole_lines(data)
        if whole:
            yield _Lines(start, data[:whole])
            start, data = start + whole, data[whole:]
        if len(data) > line_bytes_max:
            passed, data = len(data), data[:_OVERSIZED_BYTES_KEPT]
    if data:
        yield _Lines(start, data, passed)


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        if is_packed(path.name):
            yield from unpacked(str(path))
            return
        with path.open("rb") as file:
            yield from iter(lambda: file.read(_STEP_BYTES), b"")
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise StorageError(f"{path}: not a whole archive ({error}); replace it or leave it out") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}); see to its permissions") from error


def _page(verdicts: list[Verdict], counts: Counter[str]) -> str:
    width = max((len(verdict.place) for verdict in verdicts), default=0)
    lines = [f"{verdict.place:<{width}}  {verdict.outcome:<10}  {verdict.text}" for verdict in verdicts]
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome])
    return "\n".join([*lines, f"{len(verdicts)} events: {told or 'nothing to join'}"])


def _document(verdicts: list[Verdict], counts: Counter[str]) -> str:
    events = [
        {"place": one.place, "outcome": one.outcome}
        | ({"event": json.loads(one.text)} if one.outcome == JOINED else {"reason": one.text})
        for one in verdicts
    ]
    return json.dumps(
        {outcome.replace(" ", "_"): counts[outcome] for outcome in _OUTCOMES} | {"events": events}
    )
