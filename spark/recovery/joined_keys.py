"""Which foreign events stand in joined logs, for recovery: on the side of what is there (paper 3.3.3).

What recovery takes for missing it has joined again. So a last line without its newline counts, if it is a
whole JSON object, and a line that is one without telling its event is told apart from one that is damaged.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from joiner.joined_lines import JoinedDecoder
from photon.core.chunks import Chunk
from photon.core.errors import UsageError
from photon.core.formats_fields import parse_path
from photon.core.ids import IdPacker
from photon.core.settings import Settings
from spark.reading.columns import fixed_binary
from spark.reading.joined import parsed_joined
from spark.reading.range_reading import is_object

SCHEMA: Final = "id binary, untold int, damaged int"


def joined_keys(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """SCHEMA: a row with the packed id of each joined line, both counts 0; and rows with a null id that count
    lines that tell no id. Files as they are now: lines (any number of tasks) and Parquet (one each).

    UsageError for settings by which joined lines do not tell their foreign event.
    """
    check_told(settings)
    return parsed_joined(session, paths, settings, partial(JoinedKeys, settings), SCHEMA, unended=True)


def check_told(settings: Settings) -> None:
    """UsageError where joined lines do not hold the foreign event's id."""
    if parse_path(settings.foreign.id)[0] == settings.adapter.field:
        raise UsageError(
            f"'adapter.field' is {settings.adapter.field!r}, and 'foreign.id' lies in it: joined lines do "
            "not tell which foreign event they hold, so what is lost can't be known"
        )


class JoinedKeys:
    """Chunks of joined lines -> record batches of SCHEMA. On the executors."""

    def __init__(self, settings: Settings) -> None:
        self._packer = IdPacker(settings.ids.key.encode())
        self._lines = JoinedDecoder(settings)

    def columns(self, _name: str, _path: str, chunk: Chunk) -> list[Any]:
        if chunk.oversized:
            return [_batch(b"", 1, 0)]
        found = self._lines.decode(chunk.data)
        ids = self._lines.columns["id"](found.events)
        untold = sum(is_object(bad.line) for bad in found.malformed)
        damaged = len(found.malformed) - untold
        return [_batch(self._packer.pack(ids) if ids else b"", untold, damaged)]


def _batch(ids: bytes, untold: int, damaged: int) -> Any:
    column = fixed_binary(ids)
    more = 1 if untold or damaged else 0
    counts = [
        pa.concat_arrays(
            [pa.repeat(pa.scalar(0, pa.int32()), len(column)), pa.array([count] * more, pa.int32())]
        )
        for count in (untold, damaged)
    ]
    arrays = [pa.concat_arrays([column, pa.nulls(more, column.type)]), *counts]
    return pa.RecordBatch.from_arrays(arrays, names=["id", "untold", "damaged"])
