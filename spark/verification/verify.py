"""One run of `photon verify`: reads registry and logs, has the buckets judged, writes the details."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from idregistry.client import RegistryAt
from joiner.adapter import keeps_default_line, load_adapter
from joiner.output_files import PARQUET
from photon.core.clock import SystemClock
from photon.core.errors import AdapterError, UsageError
from photon.core.settings import Adapter, Settings
from spark.options import ALL, SCAN_TIMEOUT_S, Span, SparkOptions
from spark.reading.lines import log_files
from spark.reading.paths import check_new, check_output, input_paths, is_uri, local_name, output_paths
from spark.registered import (
    ASK_TIMEOUT_S,
    absent,
    boundaries,
    check_export,
    scan_of,
    shards_of,
    signed,
    unsigned,
)
from spark.verification import facts
from spark.verification.accounts import Terms, against_logs, judged
from spark.verification.engines import BY_ID, BY_PRIMARY, Here
from spark.verification.rules import SETTLE_S, Asked, Loser, Report, make_report, most_lost

if TYPE_CHECKING:
    from spark.verification.on_spark import OnSpark

Engine: TypeAlias = "Here | OnSpark"
HERE_BYTES_MAX: Final = 4 << 30
"""Logs of more than that are verified on Spark."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to verify: globs of the inputs, the --out of each `photon join`, where details go ("": nowhere).

    `registry`, or else `export`, the directory of an export. `span`: the time of the events. `complete`: all
    events were to be read, and to have a fate by now. `positions` and `waiting` are of the dispatchers'
    ledgers, read before anything else (photon.cluster.ledgers): how far each of the logs that it is asked for
    was read (None: nobody knows), and ids of events that wait.
    """

    foreign: tuple[str, ...]
    out: tuple[str, ...]
    primary: tuple[str, ...] = ()
    details: str = ""
    registry: RegistryAt | None = None
    export: str = ""
    span: Span = ALL
    settle_s: float = SETTLE_S
    scan_timeout_s: float = SCAN_TIMEOUT_S
    complete: bool = False
    positions: Callable[[Iterable[str]], facts.Positions] | None = None
    waiting: Sequence[bytes] = ()

    def check(self) -> None:
        """UsageError if it can't be answered; asked before a session is started for it."""
        for out in self.out:
            check_output(out)
        input_paths(self.foreign)
        if self.primary:
            input_paths(self.primary)
        if self.details:
            check_new(self.details)
        if self.export:
            check_export(self.export)
        if self.registry and self.export:
            raise UsageError("the registry itself or an export of it is asked, not both")
        if self.span.start >= self.span.end:
            raise UsageError("the time range is empty: --from must be before --to")
        _outputs(self.out, "joined")

    def log_bytes(self) -> int:
        """Of all that is to be read; what has a URI counts nothing. StorageError."""
        paths = [
            *_outputs(self.out, "joined"),
            *_outputs(self.out, "dead-letters"),
            *input_paths(self.foreign),
            *(input_paths(self.primary) if self.primary else ()),
        ]
        return sum(file.size for file in log_files(paths)[0])

    @property
    def remote(self) -> bool:
        """Whether some of it is for Spark alone to read."""
        return any(map(is_uri, [*self.foreign, *self.primary, *self.out, self.export, self.details]))


@contextmanager
def engine_for(question: Question, spark: SparkOptions | None) -> Iterator[Engine]:
    """This process, or Spark: where it was named, or the logs are more than HERE_BYTES_MAX, or have a URI."""
    size = question.log_bytes()
    if spark is None and size <= HERE_BYTES_MAX and not question.remote:
        with (
            tempfile.TemporaryDirectory(prefix="photon-verify-") as scratch,
            Here.sized(Path(scratch), size) as here,
        ):
            yield here
        return
    from spark.session import open_session, spark_failures
    from spark.verification.on_spark import OnSpark

    with open_session(spark or SparkOptions()) as session, spark_failures(), OnSpark(session, size) as there:
        yield there


def verify(engine: Engine, question: Question, settings: Settings) -> Report:
    """Account for every foreign line. UsageError as Question.check; UnavailableError if the registry does not
    answer; SparkFailedError, StorageError.

    In this order: the ledgers, which the question has; the registry; the outputs to their end; the inputs. If
    the system goes on meanwhile, an event may seem pending that is joined by now; but none seems lost because
    its line was not read yet, and none seems joined without an input.
    """
    question.check()
    adapted = bool(settings.adapter.use)
    terms = _read_registry(engine, question, Terms(question.span, adapted, complete=question.complete))
    joined = engine.existing(_outputs(question.out, "joined"))
    letters = engine.existing(_outputs(question.out, "dead-letters"))
    stage = BY_PRIMARY if question.primary else BY_ID
    engine.spread(facts.joined_logs(joined, settings, bool(question.primary) and not adapted), stage)
    engine.spread(facts.dead_letters(letters, settings), BY_ID)
    foreign = input_paths(question.foreign)
    # Asked now: a log may have been rotated while the outputs were read.
    positions = question.positions and question.positions(filter(None, map(local_name, foreign)))
    engine.spread(facts.foreign_logs(foreign, settings, positions), stage)
    engine.spread_plan(question.waiting, facts.waiting_rows, BY_ID)
    if question.primary:
        loosely = any(path.endswith(PARQUET) for path in joined)
        engine.spread(facts.primary_logs(input_paths(question.primary), settings, loosely), BY_PRIMARY)
        engine.move(BY_PRIMARY, against_logs, BY_ID)
    ask = partial(absent, question.registry) if question.registry else None
    totals, losers = engine.judge(partial(judged, terms=terms, ask=ask))
    losers = _with_leases(most_lost(losers), question.registry)
    if question.details:
        leases = {signed(one.incarnation): one.lease for one in losers if one.lease}
        engine.write(question.details, leases)
    asked = Asked.ITSELF if question.registry else Asked.EXPORT if question.export else Asked.NOT
    known = question.complete or question.positions is not None
    # Times of ids that only the registry has are not known.
    others = terms.asked and question.span == ALL
    note = note_of(settings.adapter)
    return make_report(totals, bool(question.primary), asked, known, others, losers, note)


def _read_registry(engine: Engine, question: Question, terms: Terms) -> Terms:
    if question.export:
        began_us, edges = engine.spread_export(question.export, BY_ID)
        # Shards forget at their own times.
        terms = replace(terms, from_export=True, boundary_us=max(edges))
    elif question.registry:
        began_us = SystemClock().now_us()
        scan = partial(_scan, question.registry, question.scan_timeout_s)
        backfills = engine.spread_plan(shards_of(question.registry), scan, BY_ID)
        # Of one whose lease is over by now, all that it publishes is listed below.
        states = _leases([unsigned(one) for one in backfills], question.registry)
        running = tuple(signed(one) for one, lease in states.items() if lease == "runs")
        # Asked later than the ids, so that none is missed that was forgotten between. Lookups tell the rest.
        edge = min(boundaries(question.registry, question.scan_timeout_s).values())
        terms = replace(terms, backfills=running, boundary_us=edge)
    else:
        return terms
    settle_s = 0.0 if question.complete else question.settle_s  # who has a fate is not on its way
    return replace(terms, asked=True, settled_us=began_us - round(settle_s * 1e6))


def _scan(registry: RegistryAt, timeout_s: float, shard: int) -> Iterator[Any]:
    return map(facts.registered_rows, scan_of(registry, timeout_s, shard))


def _with_leases(losers: Sequence[Loser], registry: RegistryAt | None) -> list[Loser]:
    if registry is None:
        return list(losers)
    leases = _leases([loser.incarnation for loser in losers], registry)
    return [replace(loser, lease=leases[loser.incarnation]) for loser in losers]


def _outputs(outs: Sequence[str], kind: str) -> list[str]:
    """The files of one kind in all of them. UsageError if two hold the same: then one mirrors the other."""
    paths: list[str] = []
    seen: dict[str, str] = {}
    for out in outs:
        for path in output_paths(out, kind):
            name = "/".join(path.rsplit("/", 2)[-2:])
            if "*" not in name and kind == "joined" and seen.setdefault(name, out) != out:
                raise UsageError(
                    f"--out {out} and {seen[name]} both have joined/{name}: the same joined logs, or two "
                    "datacenters of one name; name one of them"
                )
            paths.append(path)
    return paths


def _leases(incarnations: Sequence[int], registry: RegistryAt) -> dict[int, str]:
    """Each one's lease now: one of spark.verification.rules.LEASES. UnavailableError."""
    if not incarnations:
        return {}
    with registry.client(ASK_TIMEOUT_S) as client:
        states = client.incarnations(incarnations)
    return {
        one: "fenced" if state.fenced else "runs" if state.expires_in_s > 0 else "over"
        for one, state in zip(incarnations, states, strict=True)
    }


def note_of(adapter: Adapter) -> str:
    """What the counts are worth where joined lines may not hold the foreign id."""
    if not adapter.use:
        return ""
    try:
        if keeps_default_line(load_adapter(adapter.use)):
            return ""
        why = "makes its own joined lines"
    except AdapterError as error:  # the logs may be verified where it is not installed
        why = f"can't be loaded here ({error})"
    return (
        f"the adapter {adapter.use} {why}: if its joined lines do not hold the foreign id, their events seem "
        "pending or lost, and the lines alien or unreadable"
    )
