"""All that can be known to be wrong with a run before it may write: its logs, its directories, its memory.

A registry that forgot what it has registered joins it again without a word (invariant 1), so a run is only
resumed on one that remembers at least what stands in the joined logs.
"""

import contextlib
import glob
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from dispatcher.workers import check_workers
from joiner.output_files import same_directory
from photon.cluster.registry_replicas import members_of
from photon.cluster.topology import process_name
from photon.connect.importer import fields_of
from photon.connect.ports import Reached
from photon.connect.uris import Uri, is_source, make_sink, make_source, parse_uri
from photon.core.disk import make_directory, storage_errors, write_file, write_json
from photon.core.errors import CorruptStateError, SettingsError, StorageError, UsageError
from photon.core.settings import Settings, identity_settings
from photon.logs.files import as_glob, check_patterns, find, glob_matches

if TYPE_CHECKING:
    from millwheel.topology import Topology

REACH_S: Final = 10.0
"""A sink is waited for."""
SETTLED_S: Final = 3.0
"""A leader that has applied all it has committed, and says the same for so long, knows no more."""
MARK: Final = "run"
"""In the joined logs of each output: whose they are."""
_WAYS: Final[tuple[Callable[[str | Path], str], ...]] = (os.path.abspath, os.path.realpath)
"""A link may lead from a pattern to the output, or from the output into a pattern."""


class _Made(msgspec.Struct, frozen=True):
    """What a run was made with: its identity, its output from the work directory, how many joiners there are
    in each datacenter, and the settings that must stay."""

    run: str
    output: str
    joiners: dict[str, int]
    settings: dict[str, Any]


def check_run(
    primary: Sequence[str], foreign: Sequence[str], out: Path, work: Path, settings: Settings
) -> list[str]:
    """What is wrong with any run that reads these logs, or other sources, and writes there: nobody is waited
    for. The patterns of those that are logs. UsageError, SettingsError."""
    for side, texts in (("primary", primary), ("foreign", foreign)):
        for text in filter(is_source, texts):
            make_source(text, fields_of(settings, side)).close()
    check_sinks(settings.joiner.sinks, (out, *map(Path, settings.joiner.output_roots)))
    for text in settings.joiner.sinks:
        make_sink(text, "check").close()
    patterns = [text for text in (*primary, *foreign) if not is_source(text)]
    roots = settings.joiner.output_roots
    check_names([*patterns, str(out.absolute()), str(work.absolute()), *roots])
    check_patterns(patterns)
    check_outputs(out, work, roots)
    if settings.adapter.use:
        from joiner.adapter import load_adapter

        load_adapter(settings.adapter.use)
    return patterns


def check_published(topology: "Topology", follow: bool = True) -> None:
    """As check_run of a join's sinks, of what MillWheel publishes, and as check_reached. UsageError."""
    texts = [text for sink in topology.sinks.values() for text in sink.published_to]
    check_sinks(texts, ())
    patterns = [pattern for injector in topology.injectors.values() for pattern in injector.patterns]
    for uri in map(parse_uri, texts):
        if uri.scheme == "otlp":
            raise UsageError(
                f"{uri.shown}: makes spans of joined events; publish a topology's lines elsewhere"
            )
        make_sink(uri.text, "check").close()
        if uri.scheme == "file":
            written = Path(f"/{uri.path}", "writer", "000000-000000000000.jsonl")
            check_not_matched(patterns, [written], uri.shown)
        for source in map(parse_uri, filter(is_source, patterns)):
            if _reads(source, uri):
                raise UsageError(f"{uri.shown}: is read here as {source.shown}; publish to another place")
    if not follow:
        check_reached(texts)


def _reads(source: Uri, sink: Uri) -> bool:
    """Whether what is published there would come in again: a topic, or objects."""
    if (source.scheme, source.place) != (sink.scheme, sink.place) or source.path == sink.path:
        return source.shown == sink.shown
    made = Path(sink.path, "writer", "000000-000000000000.jsonl")
    return glob_matches(Path(source.path).parts, made.parts) or made.is_relative_to(source.path)


def check_reached(sinks: Iterable[str]) -> None:
    """UsageError for a sink that is not there, of those that can say so. A run that ends when all is
    published would wait for it and fail."""
    for text in sinks:
        with contextlib.closing(make_sink(text, "check")) as sink:
            if isinstance(sink, Reached):
                sink.reach(REACH_S)


def check_names(names: Sequence[str]) -> None:
    """UsageError for names of files or patterns that are empty or can't be written down."""
    for name in names:
        if not name:
            raise UsageError("a pattern is empty; name the logs to read (`.` for the current directory)")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            shown = os.fsencode(name).decode("utf-8", "backslashreplace")
            raise UsageError(f"{shown}: not UTF-8; rename it or use a pattern that matches it") from error


def check_directories(directories: Sequence[Path]) -> None:
    """Make them; UsageError if they can't be written."""
    for directory in directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{directory}: cannot be made ({error.strerror}); name a directory you can write"
            ) from error
        if not os.access(directory, os.W_OK):
            raise UsageError(f"{directory}: not writable; name a directory you can write")


def check_outputs(out: Path, work: Path, roots: Sequence[str]) -> None:
    """UsageError, SettingsError if one of them would be written into another, or into another run's logs."""
    real_work = Path(os.path.realpath(work))
    for place in (out / "dead-letters", *(Path(root, "joined") for root in (str(out), *roots))):
        if real_work.is_relative_to(os.path.realpath(place)):
            raise UsageError(f"--work {work} lies within {place}; name a directory outside of the output")
    trees: dict[str, Path] = {}
    for root in (str(out), *roots):
        tree = Path(os.path.realpath(Path(root, "joined")))
        for other, its in trees.items():
            if tree == its:
                raise same_directory(root, other)
        if trees and tree.is_relative_to(os.path.realpath(out)):
            raise SettingsError(f"joiner.output_roots: {root} lies within the output {out}; name one outside")
        for other, its in trees.items():
            for inner, here, outer, there in ((root, tree, other, its), (other, its, root, tree)):
                if here.is_relative_to(there):
                    where = f"{inner} lies within the joined logs of {outer}"
                    raise SettingsError(f"joiner.output_roots: {where}; name one outside")
        trees[root] = tree
        for above in tree.parents:
            if above.name == "joined" and os.path.isfile(above / MARK):
                raise SettingsError(
                    f"{root} lies within the joined logs of another run, {above.parent}; name one outside"
                )


def check_leaders(work: Path, settings: Settings) -> None:
    """SettingsError if `registry.leaders` names what is no replica. CorruptStateError."""
    count = settings.registry.replicas
    names = members_of(work, count).names
    # One that a new one took the place of may still be named.
    unknown = {*settings.registry.leaders} - {*names, *(f"r{number}" for number in range(count))}
    if unknown:
        raise SettingsError(
            f"registry.leaders: no replica is named {min(unknown)!r}; they are {', '.join(names)}"
        )


def check_apart(
    patterns: Sequence[str], out: Path, work: Path, datacenters: Sequence[str], roots: Sequence[str] = ()
) -> None:
    """UsageError if a pattern matches what this run will write: it would feed on its own output for ever.

    `roots`: more directories that get the joined logs.
    """
    written = [work / "logs" / "registry-r0.log"]
    for name in datacenters:
        ends = ("-000000.jsonl", "-000000.parquet", "-1-000000.jsonl", "-1-000000.parquet", ".manifest")
        for root in (out, *map(Path, roots)):
            written += [root / "joined" / name / f"joiner-{name}{end}" for end in ends]
        stems = ("foreign", "foreign-w1", "primary")
        written += [out / "dead-letters" / name / f"{stem}-000000.jsonl" for stem in stems]
        written += [
            work / name / "dispatcher" / file for file in ("worker-0/spool/0.log", "inbox/replay-0.jsonl")
        ]
    check_not_matched(patterns, written, "this run")


def check_sinks(sinks: Sequence[str], roots: Iterable[Path]) -> None:
    """UsageError if one writes into what this run writes: its lines would be taken for joined ones once more.
    Or if two are one: each would take what the other has written for its own.

    `roots`: of the joined logs.
    """
    known = set()
    for text in sinks:
        uri = parse_uri(text)
        if (target := (uri.shown.rstrip("/"), uri.options.get("table"))) in known:
            raise UsageError(f"{uri.shown}: named twice as a sink; give each a place of its own, or drop one")
        known.add(target)
        if uri.scheme == "file" and any(
            Path(f"/{uri.path}").resolve().is_relative_to((root / "joined").resolve()) for root in roots
        ):
            raise UsageError(f"{uri.shown}: the joined logs stand there; name another directory")


def check_not_matched(patterns: Sequence[str], written: Iterable[Path], by: str) -> None:
    """UsageError if a pattern matches one of the files that are `written`."""
    for pattern in patterns:
        whole = str(Path(glob.escape(pattern), "*")) if os.path.isdir(pattern) else as_glob(pattern)
        for path in written:
            if any(glob_matches(Path(way(whole)).parts, Path(way(path)).parts) for way in _WAYS):
                raise UsageError(
                    f"'{pattern}' matches what {by} writes ({path}); "
                    "narrow the pattern or put --out elsewhere"
                )


def check_matches(what: str, patterns: Sequence[str]) -> None:
    """UsageError if no log (`what`: which) is there: without primary ones every event would be given up as
    unjoinable, and a mistyped path of others would look like a job well done."""
    refused: dict[str, str] = {}
    if not find(patterns, refused.__setitem__):
        why = "; ".join(refused.values()) or "check the paths, or use --follow to wait for logs"
        raise UsageError(f"no {what} matches {', '.join(map(repr, patterns))}; {why}")


def check_same_run(
    work: Path, out: Path, settings: Settings, joiners: Mapping[str, int], joined_lines: int
) -> None:
    """What a work directory was made with must not change while it remembers: refuse rather than join twice.

    `joiners`: datacenter -> how many run there; `joined_lines`: in the output. SettingsError, UsageError,
    CorruptStateError, StorageError.
    """
    for name in joiners:
        check_workers(work / name / "dispatcher", settings.dispatcher.workers)
    path, mark = work / "run.json", out / "joined" / MARK
    marks = {root: Path(root) / "joined" / MARK for root in settings.joiner.output_roots}
    now = {
        "registry.shards": settings.registry.shards,
        "registry.replicas": settings.registry.replicas,
        "ids.time_spread_max_s": settings.ids.time_spread_max_s,
        **identity_settings(settings),
    }
    before = _read(path) if path.exists() else None
    if before is None and joined_lines:
        raise UsageError(
            f"the output holds {joined_lines:,} joined lines that {work} knows nothing of, they might be "
            "joined twice; name the --work they were made with, or an empty --out"
        )
    made = _Made(secrets.token_hex(8), os.path.relpath(out, work), {**joiners}, now)
    if before is not None:
        _check_unchanged(work, before.settings, now)
        _check_output(work, out, mark, before)
        _check_none_left_out(work, before.joiners, joiners)
        if joined_lines:
            _check_replicas(work, settings.registry.replicas)
        made = msgspec.structs.replace(made, run=before.run, output=before.output)
    _check_roots(marks, made.run)
    if made != before:
        write_json(path, made)
    for each in (mark, *marks.values()):
        with storage_errors(each):
            make_directory(each.parent)
            write_file(each, made.run.encode())


def _check_unchanged(work: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    changed = next((name for name, value in now.items() if before.get(name) != value), None)
    if changed is not None:
        how = "; `photon reshard` changes the number" if changed == "registry.shards" else ""
        raise SettingsError(
            f"{changed} was {before.get(changed)} when {work} was made; "
            f"set it back or use an empty --work and --out{how}"
        )


def _check_output(work: Path, out: Path, mark: Path, before: _Made) -> None:
    """One work directory and one output belong together: each knows what stands in the other."""
    found = mark.read_text("ascii", "replace") if mark.exists() else None
    if found is None and os.path.relpath(out, work) == before.output:
        return  # the joined logs were moved away; the run says how many are missing
    if found != before.run:
        raise UsageError(
            f"{work} belongs to the output {os.path.normpath(work / before.output)}, not to {out}; "
            "name that one, or an empty --work"
        )


def _check_roots(marks: Mapping[str, Path], identity: str) -> None:
    """An output root belongs to one run: two would write files of the same names."""
    for root, mark in marks.items():
        with storage_errors(mark):
            found = mark.read_text("ascii", "replace") if mark.exists() else identity
        if found != identity:
            raise SettingsError(
                f"joiner.output_roots: {root} belongs to another run; name another directory, or, where that "
                f"run is over, move {mark.parent} away"
            )


def _check_none_left_out(work: Path, had: Mapping[str, int], joiners: Mapping[str, int]) -> None:
    """A joiner that is left out may have registered what it has not written yet: it is the same by name."""
    missing = [name for name in had if name not in joiners]
    if missing:
        raise UsageError(
            f"{work} was made with the datacenters {', '.join(had)}, and {', '.join(missing)}, which is left "
            f"out, may have joins to finish; use --datacenters {len(had)} (or name it in the settings as "
            "before)"
        )
    for name, count in had.items():
        if joiners[name] < count:
            raise SettingsError(
                f"{work} was made with {count} joiners in {name}, and "
                f"{process_name('joiner', f'{name}/{joiners[name]}')}, which is left out, may have joins to "
                f"finish; set joiner.processes = {count} (or name as many in the settings as before)"
            )


def _read(path: Path) -> _Made:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Made)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{path}: cannot be read ({error}); restore it, or start in an empty --work and --out"
        ) from error


def _check_replicas(work: Path, replicas: int) -> None:
    """Those in the majority that forgot would outvote those that remember."""
    members = members_of(work, replicas)
    if members.mostly_lost:
        names = ", ".join(str(work / "registry" / name) for name in members.forgot)
        raise CorruptStateError(
            f"{names}: missing, or not what was there before, and with most of the registry "
            "what has been joined, so that it would be joined again; restore them, or start anew in "
            "an empty --work and --out"
        )


class RegistryMemory:
    """Whether the registry remembers at least `ids` ids, as its processes come up and say so."""

    def __init__(self, ids: int, work: Path) -> None:
        self._ids = ids
        self._work = work
        self._same_since = 0.0
        self._last: object = None

    def is_whole(self, statuses: Sequence[Mapping[str, Any]], now: float) -> bool:
        """True once it is known, False to ask again. CorruptStateError if it has forgotten."""
        if self._ids == 0:
            return True
        leading = {s["shard"]: s for status in statuses for s in status["shards"] if s["is_leader"]}
        known = sum(shard["ids"] for shard in leading.values())
        if known >= self._ids:
            return True
        every = {s["shard"] for status in statuses for s in status["shards"]}
        expected = {n for status in statuses for n in status["shards_expected"]}
        ready = bool(every) and leading.keys() == every == expected
        ready = ready and all(map(_has_applied_all, leading.values()))
        seen = (ready, known, sorted((n, s["term"]) for n, s in leading.items()))
        if seen != self._last:
            self._last, self._same_since = seen, now
        if ready and now - self._same_since >= SETTLED_S:
            raise CorruptStateError(
                f"{self._work / 'registry'}: remembers {known:,} ids, but {self._ids:,} joined lines are in "
                "the output and would be joined again; restore it, or the registry.retention_days that it "
                "was run with, or start in an empty --work and --out"
            )
        return False


def _has_applied_all(shard: Mapping[str, Any]) -> bool:
    return bool(shard["has_quorum"] and shard["applied_index"] >= shard["commit_index"])
