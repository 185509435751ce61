"""The jobs of recovery (paper 3.3.3): what is registered, stands in no joined log, and in which lines of the
inputs it is found. DataFrames only.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def missing(registered: DataFrame, joined: DataFrame) -> DataFrame:
    """The registered ids (spark.registered) that no joined line has (spark.recovery.recovering)."""
    there = joined.where("id IS NOT NULL").select("id")
    return registered.join(there, "id", "left_anti")


def losses(absent: DataFrame, young_us: int, doubtful_us: int) -> DataFrame:
    """`missing` -> a row an incarnation: address, incarnation, lost, young
    (their tokens are later than `young_us`), doubtful (not later than `doubtful_us`), oldest_us."""
    young = F.col("token_us") > young_us
    return absent.groupBy("address", "incarnation").agg(
        F.count_if(~young).alias("lost"),
        F.count_if(young).alias("young"),
        F.count_if(F.col("token_us") <= doubtful_us).alias("doubtful"),
        F.min("token_us").alias("oldest_us"),
    )


def details(absent: DataFrame) -> DataFrame:
    """`missing` for its reader: id (packed, hex), joiner, incarnation (hex), token_us."""
    return absent.select(
        F.lower(F.hex("id")).alias("id"),
        F.col("address").alias("joiner"),
        F.lpad(F.lower(F.hex("incarnation")), 16, "0").alias("incarnation"),
        "token_us",
    )


def held_by(registered: DataFrame, incarnations: Sequence[int]) -> DataFrame:
    """What tokens of these (signed) hold: id, token, incarnation."""
    return registered.where(F.col("incarnation").isin([*incarnations])).select("id", "token", "incarnation")


def in_inputs(lost: DataFrame, foreign: DataFrame) -> DataFrame:
    """Lost ids (id, token, incarnation) -> a row each: id, token, lines (array of time_us, line: each once),
    bytes (of the lines, at most).

    Of an id that stands in several lines each is there: which of them was joined nobody knows any more.
    """
    lines = foreign.where("reason IS NULL").select("id", "time_us", "line")
    return (
        lost.join(lines, "id")
        .groupBy("id", "token")
        .agg(
            F.collect_set(F.struct("time_us", "line")).alias("lines"),
            F.sum(F.length("line")).alias("bytes"),
        )
    )


def not_in_inputs(lost: DataFrame, found: DataFrame) -> DataFrame:
    """A row an incarnation: how many (`events`) of its lost ids no line has."""
    return (
        lost.join(found.select("id"), "id", "left_anti")
        .groupBy("incarnation")
        .agg(F.count(F.lit(1)).alias("events"))
    )
