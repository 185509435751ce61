"""What is in whole files: CSV and Parquet, of which a row is an event, and JSON lines, which go through as
they are.

Parquet keeps its types. Of CSV every value stays the text that it is, so that no id loses its zeros; only the
time, where it is a number, becomes one; what is empty is null.
"""

import codecs
import csv
import gzip
import io
import itertools
import math
import re
from collections.abc import Iterator
from typing import IO, Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from photon.connect.ports import Fields
from photon.connect.uris import Uri
from photon.connect.whole_files import BLOCK_BYTES, ROWS_MAX, Rows, RowsOf
from photon.core.errors import UsageError
from photon.core.settings import parse_path
from photon.logs.files import no_text
from photon.logs.packed import contents

_HEADER_BYTES: Final = 1 << 16
_LINE_BYTES_MAX: Final = 64 << 20
_DELIMITERS: Final = ",;|\t"
_END: Final = "\0end"
"""In the first column of the last row."""
_WHOLE: Final = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_ENCODER: Final = msgspec.json.Encoder()


def delimiter_of(uri: Uri, text: str) -> str:
    """UsageError."""
    if len(text.encode()) != 1:
        raise UsageError(f"{uri.shown}: a delimiter is one character")
    return text


def csv_rows(delimiter: str) -> RowsOf:
    def rows(name: str, file: IO[bytes], fields: Fields) -> Iterator[Rows]:
        return map(_rows_of, _csv_rows(name, file, fields, delimiter))

    return rows


def parquet_rows(_name: str, file: IO[bytes], _fields: Fields) -> Iterator[Rows]:
    with pyarrow.parquet.ParquetFile(file) as parquet:
        for batch in parquet.iter_batches(ROWS_MAX):
            yield _rows_of(_zoned(batch).to_pylist())


def json_rows(name: str, file: IO[bytes], _fields: Fields) -> Iterator[Rows]:
    """Of `.gz` and `.zst`, or of what holds lines as it is. OSError, EOFError and others."""
    rest = b""
    for number, block in enumerate(contents(name, file)):
        if not number and (kind := no_text(block)):
            raise OSError(kind)
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if newline:
            yield _rows_of_lines(lines + newline)
        if len(rest) > _LINE_BYTES_MAX:
            raise OSError(f"a line of more than {_LINE_BYTES_MAX >> 20} MiB: is it JSON, an object a line?")
    if rest:
        yield _rows_of_lines(rest + b"\n")


def _rows_of(rows: list[dict[str, Any]]) -> Rows:
    return Rows(len(rows), lambda skipped: _ENCODER.encode_lines(rows[skipped:]))


def _rows_of_lines(data: bytes) -> Rows:
    return Rows(data.count(b"\n"), lambda skipped: data.split(b"\n", skipped)[-1])


def _csv_rows(name: str, file: IO[bytes], fields: Fields, delimiter: str) -> Iterator[list[dict[str, Any]]]:
    content: Any = gzip.GzipFile(fileobj=file, mode="rb") if name.endswith(".gz") else file
    begins = content.read(_HEADER_BYTES)
    content.seek(0)
    header, encoding = _header_of(begins, name, delimiter)
    convert = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    read = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, encoding=encoding)
    little = "utf-16-le" if begins.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
    end = f"\n{_END}{delimiter * (len(header) - 1)}\n".encode("utf-8" if encoding == "utf8" else little)
    stream = pa.input_stream(_Ended(content, end))
    reader = pyarrow.csv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert)
    time = parse_path(fields.time)
    batches = (one for one in reader if one.num_rows)
    for found, following in itertools.pairwise(itertools.chain(batches, [None])):
        if following is None and found.column(0)[-1].as_py() != _END:
            raise OSError("a value that begins with a quote does not end with one")
        batch = found.slice(0, found.num_rows - (following is None))
        rows = batch.to_pylist()
        if fields.time_unit != "rfc3339" and len(time) == 1 and time[0] in batch.schema.names:
            for row, number in zip(rows, _numbers(batch.column(time[0])), strict=True):
                row[time[0]] = number
        yield rows


class _Ended(io.RawIOBase):
    """A CSV file with one row more: what comes without it is in a value whose quotes are never closed."""

    def __init__(self, content: IO[bytes], end: bytes) -> None:
        self._content, self._end = content, io.BytesIO(end)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._content.read(len(buffer)) or self._end.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _header_of(begins: bytes, name: str, delimiter: str) -> tuple[list[str], str]:
    """The names, and the encoding of the file."""
    encoding = "utf-16" if begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    text = begins.decode(encoding, "replace")
    first = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    if not first:
        raise OSError("it has no header")
    other = next((mark for mark in _DELIMITERS if mark in first[0]), None)
    if len(first) == 1 and other is not None:
        named = name if "://" in name else f"csv://{name}"
        mend = f"write '{named}?delimiter={quote(other, safe=',;|')}' for it"
        raise UsageError(f"its header has no '{delimiter}'; {mend}")
    if twice := [name for name in first if name and first.count(name) > 1]:
        raise UsageError(f"column {twice[0]!r} stands there twice, and only one could be read: rename it")
    return first, "utf8" if encoding == "utf-8-sig" else encoding


def _numbers(texts: pa.Array) -> list[Any]:
    """The numbers that the values are; one that is none stays as it is, and its event is malformed with a
    reason. No row changes another."""
    try:
        return pc.cast(texts, pa.int64()).to_pylist()  # type: ignore[no-any-return]
    except pa.ArrowInvalid:
        return [text if (number := _number(text)) is None else number for text in texts.to_pylist()]


def _number(text: str | None) -> int | float | None:
    if text is None or not _NUMBER.fullmatch(text):
        return None
    if _WHOLE.fullmatch(text) and -(1 << 63) <= int(text) < 1 << 63:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None


def _zoned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Timestamps without a zone, wherever they lie, are UTC's: a time as text must have one. Nanoseconds are
    cut to microseconds, which is what times are read to."""
    for place, field in enumerate(batch.schema):
        if (kind := _in_utc(field.type)) != field.type:
            batch = batch.set_column(place, field.name, batch.column(place).cast(kind, safe=False))
    return batch


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us" if kind.unit == "ns" else kind.unit, kind.tz or "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_in_utc(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_in_utc(kind.key_type), _in_utc(kind.item_type))
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return kind
    within = kind.value_field.with_type(_in_utc(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(within, kind.list_size)
    return pa.large_list(within) if pa.types.is_large_list(kind) else pa.list_(within)
