"""The verification of paper 3.3.3: each foreign event of the inputs against what came out. DataFrames only.

The inputs are the DataFrames of spark.sources. Everything is grouped by the foreign id once; the rows without
an id (lines that can't be read) come to one row whose id is null.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from photon.core.fates import Fate
from spark.verdicts import Verdict

_FOREIGN, _JOINED, _LETTER, _PRIMARY = "foreign", "joined", "letter", "primary"
_FATES: Final = (Fate.FILTERED, Fate.EXPIRED, Fate.UNJOINABLE, Fate.MALFORMED)


def claims(foreign: DataFrame, joined: DataFrame) -> DataFrame:
    """One row a foreign or joined line: id, source, the primary it names or holds, the content of that."""
    rows = foreign.withColumn("source", F.lit(_FOREIGN))
    return rows.unionByName(joined.withColumn("source", F.lit(_JOINED)), allowMissingColumns=True)


def against_primaries(rows: DataFrame, primaries: DataFrame) -> DataFrame:
    """Adds to each claim `known`: its primary is in the logs, and `same`: one there has its content.

    A window, not a join: an id may stand several times in the logs, with different contents, and a claim must
    stay one row.
    """
    logs = primaries.select(
        F.lit(_PRIMARY).alias("source"), F.col("id").alias("primary_id"), F.col("content")
    )
    together = rows.where("primary_id IS NOT NULL").unionByName(logs, allowMissingColumns=True)
    in_logs = F.bool_or(F.col("source") == _PRIMARY)
    looked_up = together.withColumn("same", in_logs.over(Window.partitionBy("primary_id", "content")))
    looked_up = looked_up.withColumn("known", in_logs.over(Window.partitionBy("primary_id")))
    none = rows.where("primary_id IS NULL").withColumn("same", F.lit(False)).withColumn("known", F.lit(False))
    return looked_up.where(F.col("source") != _PRIMARY).unionByName(none)


def without_primaries(rows: DataFrame) -> DataFrame:
    """The same columns where the primary logs are not given: then nothing is held against an event."""
    return rows.withColumn("known", F.lit(False)).withColumn("same", F.lit(True))


def accounts(rows: DataFrame, letters: DataFrame) -> DataFrame:
    """Claims and dead letters -> one row an id: where it stands, and whether it holds what it should.

    Counts `lines` (in the inputs), `joined`, `letters`, each fate of a letter, and of the joined lines those
    `not_named`, with a primary that no line of the inputs names; `empty`, with none; `altered`, with a
    content that is in no log. `joinable`: a primary it names is in the logs.

    Only counts and flags, first by id and primary, then by id: a set of texts an id costs several times more.
    """
    rows = rows.unionByName(letters.withColumn("source", F.lit(_LETTER)), allowMissingColumns=True)
    foreign, joined, letter = (F.col("source") == source for source in (_FOREIGN, _JOINED, _LETTER))
    pairs = rows.repartition("id").groupBy("id", "primary_id")
    by_pair = pairs.agg(
        F.count_if(foreign).alias("lines"),
        F.count_if(joined).alias("joined"),
        F.count_if(joined & ~F.col("same")).alias("altered"),
        F.bool_or(foreign & F.col("known")).alias("joinable"),
        F.count_if(letter).alias("letters"),
        *(F.count_if(F.col("fate") == fate.value).alias(fate.value) for fate in _FATES),
    )
    holds_none = F.col("primary_id").isNull()
    sums = ("lines", "joined", "altered", "letters", *(fate.value for fate in _FATES))
    return by_pair.groupBy("id").agg(
        *(F.sum(name).alias(name) for name in sums),
        F.sum(F.when(~holds_none & (F.col("lines") == 0), F.col("joined")).otherwise(0)).alias("not_named"),
        F.sum(F.when(holds_none, F.col("joined")).otherwise(0)).alias("empty"),
        F.bool_or("joinable").alias("joinable"),
    )


def judged(rows: DataFrame, adapted: bool = False) -> DataFrame:
    """Adds `verdict` to accounts.

    `adapted`: an adapter of the user's made the joined lines. It may leave the primary out and change it; one
    that is inside must still be the one named. An event joined anywhere is joined, whatever the other
    datacenters made of it; among the dead letters the one that no later log can change comes first.
    """
    joined, once = F.col("joined") > 0, F.col("joined") == 1
    wrong = F.col("not_named") + (0 if adapted else F.col("empty")) > 0
    altered = F.lit(False) if adapted else F.col("altered") > 0
    filtered, expired, unjoinable, malformed = (F.col(fate.value) > 0 for fate in _FATES)
    rules: list[tuple[Column, Verdict]] = [
        (F.col("id").isNull(), Verdict.UNREADABLE),
        ((F.col("lines") == 0) & joined, Verdict.ALIEN),
        (F.col("lines") == 0, Verdict.OTHER_INPUTS),
        (joined & ~once, Verdict.JOINED_TWICE),
        (joined & wrong, Verdict.WRONG_PRIMARY),
        (joined & altered, Verdict.ALTERED_PRIMARY),
        (joined, Verdict.JOINED),
        (filtered, Verdict.FILTERED),
        (expired, Verdict.EXPIRED),
        (unjoinable & F.col("joinable"), Verdict.LOST_UNJOINABLE),
        (unjoinable, Verdict.UNJOINABLE),
        (malformed, Verdict.MALFORMED),
        (F.col("joinable"), Verdict.LOST_PENDING),
    ]
    verdict = F.lit(Verdict.PENDING.value)
    for condition, outcome in reversed(rules):
        verdict = F.when(condition, outcome.value).otherwise(verdict)
    return rows.withColumn("verdict", verdict)


def totals(rows: DataFrame) -> DataFrame:
    """Judged accounts -> one row a verdict: events, lines, joined, letters, and one id as an example."""
    return rows.groupBy("verdict").agg(
        F.count(F.lit(1)).alias("events"),
        F.sum("lines").alias("lines"),
        F.sum("joined").alias("joined"),
        F.sum("letters").alias("letters"),
        F.min("id").alias("example"),
    )


def details(rows: DataFrame) -> DataFrame:
    """Judged accounts -> what is kept of each id: everything but the row of the unreadable lines."""
    kept = rows.where(F.col("id").isNotNull())
    return kept.select("id", "verdict", "lines", "joined", "letters", *(fate.value for fate in _FATES))
