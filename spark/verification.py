"""The verification of paper 3.3.3: each foreign event of the inputs against what came out. DataFrames only.

The inputs are the DataFrames of spark.sources. Everything is grouped by the foreign id once; the rows without
an id (lines that can't be read) come to one row whose id is null.
"""

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from photon.core.fates import Fate
from spark.verdicts import Verdict

_FATES: Final = (Fate.FILTERED, Fate.EXPIRED, Fate.UNJOINABLE, Fate.MALFORMED)


def claims(foreign: DataFrame, joined: DataFrame) -> DataFrame:
    """One row a foreign or joined line: id, source, primary_id, content, datacenter."""
    rows = foreign.withColumn("source", F.lit("foreign"))
    return rows.unionByName(joined.withColumn("source", F.lit("joined")), allowMissingColumns=True)


def against_primaries(rows: DataFrame, primaries: DataFrame) -> DataFrame:
    """Adds to each claim `known`: its primary is in the logs, and `altered`: none there has its content."""
    logs = primaries.groupBy(F.col("id").alias("primary_id")).agg(F.collect_set("content").alias("contents"))
    known = F.col("contents").isNotNull()
    altered = F.col("content").isNotNull() & ~F.coalesce(
        F.array_contains("contents", F.col("content")), F.lit(False)
    )
    return (
        rows.join(logs, "primary_id", "left")
        .withColumn("known", known)
        .withColumn("altered", altered)
        .drop("contents")
    )


def without_primaries(rows: DataFrame) -> DataFrame:
    """The same columns where the primary logs are not given: then nothing is held against an event."""
    return rows.withColumn("known", F.lit(False)).withColumn("altered", F.lit(False))


def accounts(rows: DataFrame, letters: DataFrame) -> DataFrame:
    """Claims and dead letters -> one row an id: where it stands, what it names, what was joined with it."""
    rows = rows.unionByName(letters.withColumn("source", F.lit("letter")), allowMissingColumns=True)
    foreign, joined = F.col("source") == "foreign", F.col("source") == "joined"
    return rows.groupBy("id").agg(
        F.count_if(foreign).alias("lines"),
        F.count_if(joined).alias("joined"),
        F.count_if(F.col("source") == "letter").alias("letters"),
        F.collect_set(F.when(foreign, F.col("primary_id"))).alias("primary_ids"),
        F.collect_set(F.when(joined, F.col("primary_id"))).alias("joined_with"),
        F.count_if(joined & F.col("primary_id").isNull()).alias("joined_with_none"),
        F.sort_array(F.collect_set("datacenter")).alias("datacenters"),
        F.sort_array(F.collect_set("fate")).alias("fates"),
        F.bool_or(foreign & F.col("known")).alias("joinable"),
        F.bool_or(joined & F.col("altered")).alias("altered"),
    )


def judged(rows: DataFrame, adapted: bool = False) -> DataFrame:
    """Adds `verdict` to accounts.

    `adapted`: an adapter of the user's made the joined lines. It may leave the primary out and change it; one
    that is inside must still be the one named. An event joined anywhere is joined, whatever the other
    datacenters made of it; among the dead letters the one that no later log can change comes first.
    """
    joined, once = F.col("joined") > 0, F.col("joined") == 1
    named = F.size(F.array_except("joined_with", "primary_ids")) == 0
    wrong = ~named if adapted else ~named | (F.col("joined_with_none") > 0)
    altered = F.lit(False) if adapted else F.col("altered")
    filtered, expired, unjoinable, malformed = (_has(fate) for fate in _FATES)
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


def _has(fate: Fate) -> Column:
    return F.array_contains("fates", fate.value)


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
    return kept.select(
        "id", "verdict", "lines", "primary_ids", "joined", "joined_with", "datacenters", "letters", "fates"
    )
