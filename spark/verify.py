"""One run of `photon verify`: reads the logs, lets the jobs judge them, writes the details."""

from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from photon.core.settings import Settings
from spark import sources, verification
from spark.paths import check_details, check_output, input_paths, output_paths
from spark.session import spark_failures
from spark.verdicts import Report, Total, Verdict, make_report


@dataclass(frozen=True, slots=True)
class Question:
    """What to verify: globs of the inputs, the --out of `photon join`, where the details go ("": nowhere)."""

    foreign: tuple[str, ...]
    out: str
    primary: tuple[str, ...] = ()
    details: str = ""

    def check(self) -> None:
        """UsageError if it can't be answered; asked before a session is started for it."""
        check_output(self.out)
        input_paths(self.foreign)
        if self.primary:
            input_paths(self.primary)
        if self.details:
            check_details(self.details)


def verify(session: SparkSession, question: Question, settings: Settings) -> Report:
    """Account for every foreign line. UsageError as Question.check, SparkFailedError if a job fails."""
    question.check()
    with spark_failures():
        rows = _judged(session, question, settings)
        if question.details:
            rows = rows.persist(StorageLevel.DISK_ONLY)
            verification.details(rows).write.partitionBy("verdict").parquet(question.details)
        totals = [
            Total(Verdict(row.verdict), row.events, row.lines, row.joined, row.letters, row.example)
            for row in verification.totals(rows).collect()
        ]
    return make_report(totals, primaries_given=bool(question.primary))


def _judged(session: SparkSession, question: Question, settings: Settings) -> DataFrame:
    """Outputs are read to their end before the inputs are listed.

    So of a run that goes on meanwhile an event may seem pending that is joined now, but never joined and in
    no input.
    """
    joined = sources.joined_events(
        sources.read_lines(session, output_paths(question.out, "joined")),
        settings.foreign,
        settings.primary,
        settings.adapter.field,
    )
    joined = joined.persist(StorageLevel.DISK_ONLY)
    joined.count()
    letters = sources.dead_letters(
        sources.read_lines(session, output_paths(question.out, "dead-letters")), settings.foreign
    )
    foreign = sources.foreign_events(
        sources.read_lines(session, input_paths(question.foreign)), settings.foreign
    )
    claims = verification.claims(foreign, joined)
    if question.primary:
        lines = sources.read_lines(session, input_paths(question.primary))
        claims = verification.against_primaries(claims, sources.primary_events(lines, settings.primary))
    else:
        claims = verification.without_primaries(claims)
    return verification.judged(verification.accounts(claims, letters), adapted=bool(settings.adapter.use))
