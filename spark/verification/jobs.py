"""The verification of paper 3.3.3: each foreign event of the inputs against what came out. DataFrames only.

The inputs come from spark.verification.facts and spark.registered. Everything is grouped by the foreign id
once; lines that can't be read have no id and become one row whose id is null.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from photon.core.fates import Fate
from spark.recovery.rules import BACKFILL
from spark.registered import joiner_columns
from spark.verification.rules import Verdict

_FOREIGN, _JOINED, _LETTER = 0, 1, 2
_FATES: Final = (Fate.FILTERED, Fate.EXPIRED, Fate.UNJOINABLE, Fate.MALFORMED)
_FATE_NAMES: Final = tuple(fate.value for fate in _FATES)


@dataclass(frozen=True, slots=True)
class Span:
    """Event times (us) from `start_us` on and before `end_us`; None: no bound."""

    start_us: int | None = None
    end_us: int | None = None

    def __bool__(self) -> bool:
        return self.start_us is not None or self.end_us is not None

    def holds(self, time_us: Column) -> Column:
        """Null where the time is."""
        inside = time_us.isNotNull()
        if self.start_us is not None:
            inside &= time_us >= self.start_us
        if self.end_us is not None:
            inside &= time_us < self.end_us
        return inside


_ALWAYS: Final = Span()


def claims(foreign: DataFrame, joined: DataFrame, span: Span = _ALWAYS) -> DataFrame:
    """One row a foreign or joined line: id, key, source, time_us, the primary that it names or holds (16
    bytes), the content of that; `asked`, of a foreign line: it is of that time, or can't be read.

    An event that stands in several lines may be asked for by one and joined by what another names.
    """
    asked = F.col("key").isNull() | span.holds(F.col("time_us")) if span else F.lit(True)
    rows = foreign.withColumn("source", F.lit(_FOREIGN)).withColumn("asked", asked)
    return rows.unionByName(joined.withColumn("source", F.lit(_JOINED)), allowMissingColumns=True)


def contents(primaries: DataFrame) -> DataFrame:
    """Primary events -> one row an id: primary, and two contents that its lines have, mostly the same."""
    return primaries.groupBy("primary").agg(F.min("content").alias("low"), F.max("content").alias("high"))


def against_primaries(rows: DataFrame, logs: DataFrame, alike: DataFrame | None = None) -> DataFrame:
    """Adds to each claim `known`: its primary is in the logs (`contents`), and `same`: one there has its
    content.

    `same` misses an id of three contents or more, and content written in another way: `differing` finds the
    candidates, and `alike` those that are the same after all.
    """
    named = rows.where("primary IS NOT NULL").join(logs, "primary", "left")
    same = F.coalesce(F.col("content").isin(F.col("low"), F.col("high")), F.lit(False))
    named = named.withColumns({"known": F.col("low").isNotNull(), "same": same})
    if alike is not None:
        told = alike.select("primary", "content", F.lit(True).alias("alike"))
        named = named.join(told, ["primary", "content"], "left")
        named = named.withColumn("same", F.col("same") | F.col("alike").isNotNull()).drop("alike")
    none = rows.where("primary IS NULL").withColumns({"known": F.lit(False), "same": F.lit(False)})
    return named.drop("low", "high").unionByName(none)


def without_primaries(rows: DataFrame) -> DataFrame:
    """The same columns where the primary logs are not given: then nothing is held against an event."""
    return rows.withColumns({"known": F.lit(False), "same": F.lit(True)})


def differing(joined: DataFrame, logs: DataFrame) -> DataFrame:
    """primary, content: what joined lines hold of known primaries that are not `same` at first sight."""
    rows = against_primaries(joined.where("primary IS NOT NULL"), logs)
    return rows.where("known AND NOT same").select("primary", "content").distinct()


def alike(pairs: DataFrame, inside: DataFrame, logged: DataFrame) -> DataFrame:
    """Of the pairs (primary, content) those whose canonical content one of the logs' lines has too.

    `inside`: primary, content, forms of what joined lines hold; `logged`: primary, forms of primary lines.
    """
    held = inside.join(pairs, ["primary", "content"], "left_semi")
    held = held.select("primary", "content", F.explode("forms").alias("form"))
    known = logged.select("primary", F.explode("forms").alias("form"))
    return held.join(known, ["primary", "form"], "left_semi").select("primary", "content").distinct()


def accounts(rows: DataFrame, letters: DataFrame) -> DataFrame:
    """Claims and dead letters -> one row an id: where it stands, and whether it holds what it should.

    Counts `lines` (of the inputs, those that are `asked`), `joined`, `letters`, each fate of a letter, and of
    the joined lines those `not_named`, with a primary that no line of the inputs names; `empty`, with none;
    `altered`, with a content that is in no log. `joinable`: a primary it names is in the logs. `time_us`:
    that of its lines in the inputs, first of those asked, or else what the other lines tell.

    Only counts and flags, first by id and primary, then by id: a set of texts an id costs several times more.
    """
    letters = letters.withColumn("source", F.lit(_LETTER))
    rows = rows.drop("content").unionByName(letters, allowMissingColumns=True)
    foreign, joined, letter = (F.col("source") == source for source in (_FOREIGN, _JOINED, _LETTER))
    asked = foreign & F.col("asked")
    by_pair = (
        rows.repartition("key")
        .groupBy("key", "id", "primary")
        .agg(
            F.count_if(asked).alias("lines"),
            F.bool_or(foreign).alias("named"),
            F.count_if(joined).alias("joined"),
            F.count_if(joined & ~F.col("same")).alias("altered"),
            F.bool_or(foreign & F.col("known")).alias("joinable"),
            F.count_if(letter).alias("letters"),
            F.max(F.when(asked, F.col("time_us"))).alias("asked_us"),
            F.max(F.when(foreign, F.col("time_us"))).alias("own_us"),
            F.max("time_us").alias("told_us"),
            *(F.count_if(F.col("fate") == name).alias(name) for name in _FATE_NAMES),
        )
    )
    holds_none = F.col("primary").isNull()
    sums = ("lines", "joined", "altered", "letters", *_FATE_NAMES)
    return by_pair.groupBy("key", "id").agg(
        *(F.sum(name).alias(name) for name in sums),
        F.sum(F.when(~holds_none & ~F.col("named"), F.col("joined")).otherwise(0)).alias("not_named"),
        F.sum(F.when(holds_none, F.col("joined")).otherwise(0)).alias("empty"),
        F.bool_or("joinable").alias("joinable"),
        F.coalesce(F.max("asked_us"), F.max("own_us"), F.max("told_us")).alias("time_us"),
    )


def within(rows: DataFrame, span: Span) -> DataFrame:
    """Accounts of events of that time, and of the lines that can't be read, which have none."""
    return rows.where(F.col("key").isNull() | span.holds(F.col("time_us"))) if span else rows


def backfills(registered: DataFrame) -> DataFrame:
    """-> one row: the incarnations of the backfills that registered any of the ids."""
    of_backfills = F.when(F.col("address").startswith(BACKFILL), F.col("incarnation"))
    return registered.agg(F.collect_set(of_backfills).alias("backfills"))


def against_registry(
    rows: DataFrame, registered: DataFrame, settled_us: int, backfills: Sequence[int] = ()
) -> DataFrame:
    """Adds to accounts who registered them: `registered` (null: nobody, or forgotten), `address`,
    `incarnation`, `token_us`, and `settling`: the joined line may be on its way, for the token is of
    `settled_us` or later, or of one of `backfills`, running ones, which publish at their ends.
    """
    held = registered.select(
        F.col("id").alias("key"), "address", "incarnation", "token_us", F.lit(True).alias("registered")
    )
    settling = F.col("token_us") >= settled_us
    if backfills:
        settling |= F.col("incarnation").isin([*backfills])
    settling = F.coalesce(settling, F.lit(False))
    return rows.join(held, "key", "left").withColumn("settling", settling)


def without_registry(rows: DataFrame) -> DataFrame:
    """The same columns where the registry is not asked: nothing is known to be registered."""
    kinds = {"registered": "boolean", "address": "string", "incarnation": "long", "token_us": "long"}
    none = {name: F.lit(None).cast(kind) for name, kind in kinds.items()}
    return rows.withColumns({**none, "settling": F.lit(False)})


def not_registered(rows: DataFrame, boundary_us: int) -> DataFrame:
    """key, time_us of events that are joined, in the inputs, and not in the registry, though not so old that
    it may have forgotten them."""
    missing = F.col("registered").isNull() & (F.col("joined") > 0) & (F.col("lines") > 0)
    return rows.where(missing & (F.col("time_us") >= boundary_us)).select("key", "time_us")


def marked(rows: DataFrame, absent: DataFrame | None) -> DataFrame:
    """Adds `absent`: its key is among those."""
    if absent is None:
        return rows.withColumn("absent", F.lit(False))
    keys = absent.select("key", F.lit(True).alias("absent"))
    return rows.join(keys, "key", "left").withColumn("absent", F.coalesce("absent", F.lit(False)))


def judged(rows: DataFrame, adapted: bool = False, from_export: bool = False) -> DataFrame:
    """Adds `verdict` to accounts that were held against the registry and `marked`.

    `adapted`: an adapter of the user's made the joined lines. It may leave the primary out and change it; one
    that is inside must still be the one named. `from_export`: who is absent may have been registered since.
    An event joined anywhere is joined, whatever the other datacenters made of it; one that is registered was
    to be joined, whatever the dead letters say; among those the one that no later log can change comes first.
    """
    joined, once = F.col("joined") > 0, F.col("joined") == 1
    wrong = F.col("not_named") + (0 if adapted else F.col("empty")) > 0
    altered = F.lit(False) if adapted else F.col("altered") > 0
    filtered, expired, unjoinable, malformed = (F.col(name) > 0 for name in _FATE_NAMES)
    held = F.col("registered").isNotNull()
    rules: list[tuple[Column, Verdict]] = [
        (F.col("key").isNull(), Verdict.UNREADABLE),
        ((F.col("lines") == 0) & joined, Verdict.ALIEN),
        (F.col("lines") == 0, Verdict.OTHER_INPUTS),
        (joined & ~once, Verdict.JOINED_TWICE),
        (joined & wrong, Verdict.WRONG_PRIMARY),
        (joined & altered, Verdict.ALTERED_PRIMARY),
        (joined & F.col("absent"), Verdict.NOT_IN_EXPORT if from_export else Verdict.UNREGISTERED),
        (joined, Verdict.JOINED),
        (held & F.col("settling"), Verdict.IN_FLIGHT),
        (held, Verdict.LOST),
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
        F.count("registered").alias("registered"),
        F.min("id").alias("example"),
    )


def losers(rows: DataFrame) -> DataFrame:
    """Judged accounts -> a row for each life of a joiner that has lost events or has some in flight: address,
    incarnation, events (lost), in_flight, first_us and last_us (of their tokens); most first."""
    lost = rows.where(F.col("verdict").isin(Verdict.LOST.value, Verdict.IN_FLIGHT.value))
    is_lost = F.col("verdict") == Verdict.LOST.value
    by_joiner = lost.groupBy("address", "incarnation").agg(
        F.count_if(is_lost).alias("events"),
        F.count_if(~is_lost).alias("in_flight"),
        F.min("token_us").alias("first_us"),
        F.max("token_us").alias("last_us"),
    )
    return by_joiner.orderBy(F.desc("events"), F.desc("in_flight"), "address", "incarnation")


def details(rows: DataFrame, leases: DataFrame) -> DataFrame:
    """Judged accounts -> what is kept of each id: everything but the row of the unreadable lines.

    `leases`: address, incarnation, lease of joiners that lost events.
    """
    kept = rows.where(F.col("key").isNotNull()).join(F.broadcast(leases), ["address", "incarnation"], "left")
    return kept.select(
        *("id", "verdict", "time_us", "lines", "joined", "letters", *_FATE_NAMES),
        F.coalesce("registered", F.lit(False)).alias("registered"),
        *joiner_columns(),
        *("token_us", "lease"),
    )
