"""`photon adapter test`: what an adapter makes of sample events (docs/adapters.md)."""

import contextlib
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import click
import msgspec

from joiner.adapter import BatchAdapter, Skip, load_adapter
from photon.cli.options import json_flag, path_option
from photon.core.columns import split_ids
from photon.core.errors import UsageError
from photon.core.settings import Settings, load_settings
from photon.logs.formats import json_lines, split_chunk
from photon.logs.sample import pieces

JOINED: Final = "joined"
SKIPPED: Final = "skipped"
RAISED: Final = "raised"
"""Or it returned what is no joined line."""
NO_PRIMARY: Final = "no primary"
MALFORMED: Final = "malformed"

_OUTCOMES: Final = (JOINED, SKIPPED, RAISED, NO_PRIMARY, MALFORMED)
_FAILURES: Final = (RAISED, MALFORMED)
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    primary: msgspec.Raw
    foreign: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Verdict:
    """`text`: the joined line, or the reason why there is none."""

    place: str
    outcome: str
    text: str


_Judge = Callable[[str, bytes, bytes | None], Verdict]


@click.group("adapter")
def adapter() -> None:
    """Your code between the two events."""


@adapter.command("test")
@click.argument("file", required=False, type=_FILE)
@click.option("--primary", type=_FILE, help="Primary events, instead of FILE.")
@click.option("--foreign", type=_FILE, help="Foreign events that name them.")
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
    settings = load_settings(config)
    if use is not None:
        settings = replace(settings, adapter=replace(settings.adapter, use=use))
    judge = partial(_judged, BatchAdapter(load_adapter(settings.adapter.use, settings.adapter.field)))
    with _interruptible():
        verdicts = [*_verdicts(file, primary, foreign, settings, judge)]
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


def _judged(adapter: BatchAdapter, place: str, foreign: bytes, primary: bytes | None) -> Verdict:
    """What the adapter makes of a foreign event at `place` (file:line or file:offset); as in a joiner."""
    if primary is None:
        return Verdict(place, NO_PRIMARY, "the primary event it names is not among the samples")
    joined = adapter.join_one(primary, foreign)
    if isinstance(joined, bytes):
        return Verdict(place, JOINED, joined.decode("utf-8"))
    return Verdict(place, SKIPPED if isinstance(joined, Skip) else RAISED, joined.reason)


def _verdicts(
    file: Path | None, primary: Path | None, foreign: Path | None, settings: Settings, judge: _Judge
) -> Iterator[Verdict]:
    if file is not None and primary is None and foreign is None:
        lines = split_chunk(_read(file)).lines
        return (_of_pair(f"{file.name}:{n}", line, settings, judge) for n, line in enumerate(lines, 1))
    if file is None and primary is not None and foreign is not None:
        return _of_logs(primary, foreign, settings, judge)
    raise UsageError("give either FILE, which holds pairs, or both --primary FILE and --foreign FILE")


def _of_pair(place: str, line: bytes, settings: Settings, judge: _Judge) -> Verdict:
    try:
        line.decode("utf-8")
        pair = msgspec.json.decode(line, type=_Pair)
        primary, foreign = bytes(pair.primary), bytes(pair.foreign)
        if not all(event.startswith(b"{") and len(event) > 2 for event in (primary, foreign)):
            raise msgspec.DecodeError("an event must be an object with a field at least")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Verdict(place, MALFORMED, f'no line {{"primary": {{...}}, "foreign": {{...}}}}: {error}')
    why = _too_long(primary, settings) or _too_long(foreign, settings)
    return Verdict(place, MALFORMED, why) if why else judge(place, foreign, primary)


def _of_logs(primary: Path, foreign: Path, settings: Settings, judge: _Judge) -> Iterator[Verdict]:
    parser = json_lines(settings)
    queries, clicks = parser.parse_primary(_read(primary)), parser.parse_foreign(_read(foreign))
    for path, batch in ((primary, queries), (foreign, clicks)):
        for bad in batch.malformed:
            yield Verdict(f"{path.name}:{bad.start}", MALFORMED, bad.reason)
    # Of a primary event that is repeated the first is taken.
    events = dict(reversed(list(zip(split_ids(queries.ids), queries.lines, strict=True))))
    rows = zip(split_ids(clicks.primary_ids), clicks.lines, clicks.starts.tolist(), strict=True)
    for key, line, start in rows:
        place, found = f"{foreign.name}:{start}", events.get(key)
        why = _too_long(line, settings) or _too_long(found or b"", settings)
        yield Verdict(place, MALFORMED, why) if why else judge(place, line, found)


def _too_long(event: bytes, settings: Settings) -> str:
    """Why a run would call it malformed, if it would."""
    return f"a line of {len(event)} bytes" if len(event) > settings.logs.line_bytes_max else ""


def _read(path: Path) -> bytes:
    """All of a file, unpacked. StorageError."""
    return b"".join(pieces(str(path)))


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
