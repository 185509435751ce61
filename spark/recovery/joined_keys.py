"""Which foreign events stand in joined logs, for recovery: on the side of what is there (paper 3.3.3).

What recovery takes for missing it has joined again. So a last line without its newline counts, if it is a
whole JSON object, and a line that is one without telling its event is told apart from one that is damaged.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from joiner.adapter import load_adapter
from photon.core.chunks import Chunk
from photon.core.errors import UsageError
from photon.core.formats import decode, split_chunk
from photon.core.formats_fields import Field, decoder_of, parse_path
from photon.core.ids import IdPacker
from photon.core.settings import Settings
from spark.reading.columns import fixed_binary
from spark.reading.joined import parsed_joined
from spark.reading.range_reading import is_object

SCHEMA: Final = "id binary, untold int, damaged int"
_ID: Final = str | int


def joined_keys(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """SCHEMA: a row with the packed id of each joined line, both counts 0; and rows with a null id that count
    lines that tell no id. Files as they are now: lines (any number of tasks) and Parquet (one each).

    UsageError for settings by which joined lines may not tell their foreign event; AdapterError.
    """
    check_told(settings)
    return parsed_joined(session, paths, settings, partial(JoinedKeys, settings), SCHEMA, unended=True)


def check_told(settings: Settings) -> None:
    """UsageError where joined lines may not hold the foreign event's id; AdapterError."""
    if parse_path(settings.foreign.id)[0] == settings.adapter.field:
        raise UsageError(
            f"'adapter.field' is {settings.adapter.field!r}, and 'foreign.id' lies in it: joined lines do "
            "not tell which foreign event they hold, so what is lost can't be known"
        )
    if not load_adapter(settings.adapter.use, settings.adapter.field).keeps_id:
        raise UsageError(
            f"'adapter.use' is {settings.adapter.use!r}, which does not say that its joined lines keep the "
            "foreign event's id, so what is lost can't be known; if they all do, say keeps_id = True in that "
            "class (docs/adapters.md)"
        )


class JoinedKeys:
    """Chunks of joined lines -> record batches of SCHEMA. On the executors."""

    def __init__(self, settings: Settings) -> None:
        self._packer = IdPacker(settings.ids.key.encode())
        fields = {"id": Field(parse_path(settings.foreign.id), _ID)}
        self._decoder, self._columns = decoder_of("JoinedKey", fields)

    def columns(self, _name: str, _path: str, chunk: Chunk) -> list[Any]:
        if chunk.oversized:
            return [_batch(b"", 1, 0)]
        events, _, malformed = decode(self._decoder, chunk.data, split_chunk(chunk.data))
        ids = self._columns["id"](events)
        untold = sum(is_object(bad.line) for bad in malformed)
        damaged = len(malformed) - untold
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
