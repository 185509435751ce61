"""One run of `photon verify`: reads registry and logs, lets the jobs judge them, writes the details."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from idregistry.client import RegistryAt
from joiner.adapter import keeps_default_line, load_adapter
from joiner.output_files import PARQUET
from photon.core.clock import SystemClock
from photon.core.errors import AdapterError, UsageError
from photon.core.settings import Adapter, Settings
from spark.options import SCAN_TIMEOUT_S
from spark.reading.paths import check_new, check_output, existing, input_paths, output_paths
from spark.registered import (
    ASK_TIMEOUT_S,
    Export,
    absent,
    boundaries,
    check_export,
    read_export,
    registered,
    signed,
    unsigned,
)
from spark.session import spark_failures
from spark.verification import facts
from spark.verification import jobs as verification
from spark.verification.jobs import Span
from spark.verification.rules import SETTLE_S, Asked, Loser, Report, Total, Verdict, make_report

LOSERS_MAX: Final = 1000
"""Lives of joiners that are told with what they lost."""

_LEASES: Final = "address string, incarnation long, lease string"


@dataclass(frozen=True, slots=True)
class Question:
    """What to verify: globs of the inputs, the --out of each `photon join`, where details go ("": nowhere).

    `registry`, or else `export`, the directory of an export. `span`: the time of the events.
    """

    foreign: tuple[str, ...]
    out: tuple[str, ...]
    primary: tuple[str, ...] = ()
    details: str = ""
    registry: RegistryAt | None = None
    export: str = ""
    span: Span = field(default_factory=Span)
    settle_s: float = SETTLE_S
    scan_timeout_s: float = SCAN_TIMEOUT_S

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
        start_us, end_us = self.span.start_us, self.span.end_us
        if start_us is not None and end_us is not None and start_us >= end_us:
            raise UsageError("the time range is empty: --from must be before --to")
        _outputs(self.out, "joined")


def verify(session: SparkSession, question: Question, settings: Settings) -> Report:
    """Account for every foreign line. UsageError as Question.check, SparkFailedError if a job fails.

    UnavailableError if the registry does not answer.
    """
    question.check()
    with spark_failures(), ExitStack() as kept:
        return _Run(session, question, settings, kept).report()


class _Run:
    """What one run reads, in the order in which it must be read.

    The registry first, then the outputs to their end, then the inputs. If the system goes on meanwhile, an
    event may seem pending that is joined by now; but none seems lost because its line was not read yet, and
    none seems joined without an input.
    """

    def __init__(
        self, session: SparkSession, question: Question, settings: Settings, kept: ExitStack
    ) -> None:
        self._session, self._question, self._settings = session, question, settings
        self._kept = kept
        self._backfills: Sequence[int] = ()
        self._adapted = bool(settings.adapter.use)
        self._compares = bool(question.primary) and not self._adapted
        self._registered = self._read_registry()
        self._joined_paths = existing(session, _outputs(question.out, "joined"))
        self._joined = self._keep(
            facts.joined_events(session, self._joined_paths, settings, digests=self._compares)
        )
        self._joined.count()
        letters = existing(session, _outputs(question.out, "dead-letters"))
        self._letters = facts.dead_letters(session, letters, settings)
        self._foreign = facts.foreign_events(session, input_paths(question.foreign), settings)
        self._logs: DataFrame | None = None
        if question.primary:
            lines = facts.primary_events(session, input_paths(question.primary), settings)
            self._logs = verification.contents(lines)

    def report(self) -> Report:
        """Judge by digests of lines as they stand; again, by what they mean, if that finds any altered."""
        # Of Parquet the lines are not the bytes that stood in the primary logs.
        alike = self._alike() if any(path.endswith(PARQUET) for path in self._joined_paths) else None
        rows, totals = self._judged(alike)
        if alike is None and any(total.verdict is Verdict.ALTERED_PRIMARY for total in totals):
            rows, totals = self._judged(self._alike())
        losers = self._losers(rows)
        if self._question.details:
            self._write_details(rows, losers)
        question, others = self._question, None
        if self._registered is not None and not question.span:  # times of others are not known
            others = int(self._registered.ids.count()) - sum(total.registered for total in totals)
        asked = Asked.ITSELF if question.registry else Asked.EXPORT if question.export else Asked.NOT
        note = note_of(self._settings.adapter)
        return make_report(totals, bool(question.primary), asked, others, losers, note)

    def _read_registry(self) -> Export | None:
        question = self._question
        if question.export:
            return read_export(self._session, question.export)
        if not question.registry:
            return None
        began_us = SystemClock().now_us()
        held = registered(self._session, question.registry, question.scan_timeout_s)
        held = self._keep(held.select("id", "address", "incarnation", "token_us"))
        [found] = verification.backfills(held).collect()
        # Of one whose lease is over by now, all that it publishes is listed below.
        states = _leases([unsigned(one) for one in found.backfills], question.registry)
        self._backfills = [signed(one) for one, lease in states.items() if lease == "runs"]
        # Asked later than the ids, so that none is missed that was forgotten between.
        return Export(held, began_us, boundaries(question.registry, question.scan_timeout_s))

    def _keep(self, frame: DataFrame) -> DataFrame:
        kept = frame.persist(StorageLevel.DISK_ONLY)
        self._kept.callback(kept.unpersist)
        return kept

    def _alike(self) -> DataFrame | None:
        """Pairs of primary and content that are one of the logs', though written in another way."""
        if self._logs is None or not self._compares:
            return None
        session, settings = self._session, self._settings
        pairs = self._keep(verification.differing(self._joined, self._logs))
        if pairs.isEmpty():
            return None
        inside = facts.joined_primaries(session, self._joined_paths, settings)
        inside = inside.join(pairs, ["primary", "content"], "left_semi")
        lines = facts.primary_lines(session, input_paths(self._question.primary), settings)
        lines = lines.join(pairs.select("primary"), "primary", "left_semi")
        forms = facts.canonical_forms
        return self._keep(verification.alike(pairs, forms(inside), forms(lines)))

    def _judged(self, alike: DataFrame | None) -> tuple[DataFrame, list[Total]]:
        claims = verification.claims(self._foreign, self._joined, self._question.span)
        if self._logs is not None:
            claims = verification.against_primaries(claims, self._logs, alike)
        else:
            claims = verification.without_primaries(claims)
        rows = verification.within(verification.accounts(claims, self._letters), self._question.span)
        rows = self._against_registry(rows)
        rows = verification.judged(rows, self._adapted, from_export=bool(self._question.export))
        totals = [
            Total(
                *(Verdict(row.verdict), row.events, row.lines, row.joined, row.letters),
                example=row.example,
                registered=row.registered,
            )
            for row in verification.totals(rows).collect()
        ]
        return rows, totals

    def _against_registry(self, rows: DataFrame) -> DataFrame:
        held, question = self._registered, self._question
        if held is None:
            rows = verification.marked(verification.without_registry(rows), None)
            return self._keep(rows) if question.details else rows
        settled_us = held.began_us - round(question.settle_s * 1e6)
        rows = self._keep(verification.against_registry(rows, held.ids, settled_us, self._backfills))
        # Lookup tells what has expired; an export can't, and shards forget at their own times.
        edge = min if question.registry else max
        missing = verification.not_registered(rows, edge(held.boundaries.values()))
        gone = self._keep(absent(missing, question.registry) if question.registry else missing)
        return verification.marked(rows, None if gone.isEmpty() else gone)

    def _losers(self, rows: DataFrame) -> list[Loser]:
        if self._registered is None:
            return []
        found = [
            Loser(row.address, unsigned(row.incarnation), *row[2:])
            for row in verification.losers(rows).limit(LOSERS_MAX).collect()
        ]
        if self._question.registry:
            leases = _leases([loser.incarnation for loser in found], self._question.registry)
            found = [replace(loser, lease=leases[loser.incarnation]) for loser in found]
        return found

    def _write_details(self, rows: DataFrame, losers: Sequence[Loser]) -> None:
        leases = [(loser.address, signed(loser.incarnation), loser.lease) for loser in losers]
        frame = self._session.createDataFrame(leases, _LEASES)
        details = verification.details(rows, frame)
        details.write.partitionBy("verdict").parquet(self._question.details)


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
