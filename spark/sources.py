"""Log lines as DataFrames: the few named fields of each line, by Spark's own expressions.

A line is judged as photon.core.formats judges it: UTF-8, one JSON object, the ids strings or whole numbers
(compared as text); of a key that stands twice the last counts. What is not told apart here, such as a bad
time, the dead letters tell.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from photon.core.fates import Fate
from photon.core.formats_fields import parse_path
from photon.core.settings import Foreign, Primary

# A line is parsed as the first of `[line,"mark"]`: Spark's parser stops after the first value, so that only
# the mark in its place says that there is nothing else on the line.
_END_MARK: Final = "photon-end-of-line-5f0c9a51e7d24b6c"
_BLANKS: Final = " \t\n\r\x0b\x0c"
_BYTE_ORDER_MARK: Final = "\ufeff"
_LINE_CHARACTERS_MAX: Final = 2**31 - 1


def read_lines(session: SparkSession, paths: Sequence[str]) -> DataFrame:
    """-> line (without white space around it, blank ones left out), path. Lines end with a newline only."""
    if not paths:
        return session.range(0).select(F.lit("").alias("line"), F.lit("").alias("path"))
    lines = session.read.option("lineSep", "\n").text(list(paths))
    value = F.col("value")
    clean = value.startswith("{") & value.endswith("}")  # the common case, and trimming is dear
    line = F.when(clean, value).otherwise(_trimmed(value))
    return (
        lines.where(value.rlike(r"\S"))
        .select(line.alias("line"), F.col("_metadata.file_path").alias("path"))
        .where("line != ''")
    )


def _trimmed(value: Column) -> Column:
    """Without white space around it, and a byte order mark before it, which counts as such."""
    blanks = F.lit(_BLANKS)
    text = F.btrim(value, blanks)
    marked = text.startswith(_BYTE_ORDER_MARK)
    return F.when(marked, F.ltrim(F.substring(text, 2, _LINE_CHARACTERS_MAX), blanks)).otherwise(text)


def foreign_events(lines: DataFrame, names: Foreign) -> DataFrame:
    """Foreign lines -> id, primary_id. Both are null for a malformed line."""
    parsed = _parsed(lines)
    both = parsed.select(_id_text(names.id).alias("id"), _id_text(names.primary_id).alias("primary_id"))
    return _without_halves(both)


def _without_halves(events: DataFrame) -> DataFrame:
    """An event that names no primary is malformed, whatever else it says."""
    whole = F.col("id").isNotNull() & F.col("primary_id").isNotNull()
    return events.select(*(F.when(whole, F.col(name)).alias(name) for name in events.columns))


def joined_events(lines: DataFrame, foreign: Foreign, primary: Primary, field: str) -> DataFrame:
    """Joined lines -> id, primary_id and content of the primary object in `field` (null: none).

    `id` is null for a line that can't be read.
    """
    return _parsed(lines).select(
        _id_text(foreign.id).alias("id"),
        _id_text(primary.id, field).alias("primary_id"),
        _content(_place((field,))).alias("content"),
    )


def dead_letters(lines: DataFrame, names: Foreign) -> DataFrame:
    """Dead letters of foreign events -> id, fate. `id` is null for one that can't be read.

    A malformed line's letter is kept only where its line can be read here: the others have no id to count by.
    """
    foreign = lines.where(~F.element_at(F.split("path", "/"), -1).startswith("primary-"))
    letters = _parsed(foreign).select(
        _text('$[0]["fate"]').alias("fate"),
        F.when(_text('$[0]["fate"]') == Fate.MALFORMED.value, _text('$[0]["event"]')).alias("line"),
        _id_text(names.id, "event").alias("id"),
    )
    malformed = _parsed(letters.where("line IS NOT NULL")).select(
        _id_text(names.id).alias("id"),
        _id_text(names.primary_id).alias("primary_id"),
        "fate",
    )
    readable = malformed.where("id IS NOT NULL AND primary_id IS NOT NULL")
    others = letters.where(F.col("line").isNull())
    known = F.col("fate").isin(*(fate.value for fate in Fate))
    told = others.select(F.when(known, F.col("id")).alias("id"), "fate")
    return told.unionByName(readable.select("id", "fate"))


def primary_events(lines: DataFrame, names: Primary) -> DataFrame:
    """Primary lines -> id, content. Malformed ones are left out: no event can be joined with them."""
    events = _parsed(lines).select(_id_text(names.id).alias("id"), _content(_place(())).alias("content"))
    return events.where("id IS NOT NULL")


def _parsed(lines: DataFrame) -> DataFrame:
    """Adds `json`: a variant array whose first item is the line's object; null if the line is none."""
    marked = F.concat(F.lit("["), F.col("line"), F.lit(f',"{_END_MARK}"]'))
    json = F.try_parse_json(F.when(F.is_valid_utf8("line") & F.col("line").startswith("{"), marked))
    parsed = lines.withColumn("json", json)
    alone = F.try_variant_get("json", "$[1]", "string") == _END_MARK
    return parsed.withColumn("json", F.when(alone, F.col("json")))


def _text(path: str) -> Column:
    return F.try_variant_get("json", path, "string")


def _place(path: Sequence[str]) -> str:
    """Where the field is in `json`."""
    return "$[0]" + "".join([f'["{name}"]' for name in path])


def _id_text(name: str, *within: str) -> Column:
    """The id in that field (a path with dots), `within` an object of the line, as text.

    Null unless it is a string or a whole number. Whole numbers of more than 64 bits are no whole numbers to a
    variant: their digits are read by from_json.
    """
    path = (*within, *parse_path(name))
    kind = F.schema_of_variant(F.try_variant_get("json", _place(path), "variant"))
    digits = _text(_place(path))
    return F.when(kind.isin("STRING", "BIGINT"), digits).when(
        kind.startswith("DECIMAL") | (kind == "DOUBLE"), _long_digits(path)
    )


def _long_digits(path: Sequence[str]) -> Column:
    schema = "string"
    for name in reversed(path):
        quoted = "`" + name.replace("`", "``") + "`"
        schema = f"struct<{quoted}: {schema}>"
    inner = F.from_json("line", schema)
    for name in path:
        inner = inner.getField(name)
    return F.when(inner.rlike(r"^-?[0-9]+$"), inner)


def _content(path: str) -> Column:
    """A digest of the object there, whatever its white space and the order of its keys; null if none."""
    json = F.to_json(F.try_variant_get("json", path, "variant"))
    return F.when(json.isNotNull(), F.xxhash64(json))
