"""CSV and Parquet as sources: whole files, a row an event. A file is a partition, a record's number its row.

A file must be whole when it gets its name: write it under another and rename it. It is known by its size and
time, too: one that changes is read from its start.

Parquet keeps its types. Of CSV every value stays the text that it is, so that no id loses its zeros; only the
time, where it is a number, becomes one; what is empty is null.
"""

import codecs
import csv
import glob
import io
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from photon.connect.ports import Batch, Fields, Loss, State
from photon.connect.uris import Uri
from photon.core.errors import UnavailableError, UsageError, first_line
from photon.core.settings import parse_path
from photon.logs.files import matching_files
from photon.logs.formats import NOT_UTF8

ROWS_MAX: Final = 16_384
_HEADER_BYTES: Final = 1 << 16
_BLOCK_BYTES: Final = 4 << 20
_LOOK_EVERY_S: Final = 1.0
_DELIMITERS: Final = ",;|\t"
_STILL_S: Final = 10.0
"""So long a file that was read must not have changed before it is read anew: else one that grows is, at each
look."""
_NO_UTF8: Final = ("invalid UTF8", "'utf-8' codec")
"""In what Arrow says of values and of names."""
_INEXACT: Final = r"\A\s*[+-]?\d{16,}\s*\z"
"""Whole numbers that a double may not hold."""
_WHOLE: Final = re.compile(r"\s*[+-]?\d{1,30}\s*", re.ASCII)
_NUMBER: Final = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_KINDS: Final = (pa.int64(), pa.float64(), pa.string())
_Open = Callable[[str, Fields], Iterator[pa.RecordBatch]]


def make_csv(uri: Uri, fields: Fields) -> "TableSource":
    """Of `csv://GLOB`, or a pattern that ends in `.csv` or `.csv.gz`. Option: `delimiter`."""
    delimiter = uri.take({"delimiter": ","})["delimiter"]
    if len(delimiter.encode()) != 1:
        raise UsageError(f"{uri.text}: a delimiter is one character")
    return TableSource(uri, fields, lambda path, fields: _csv_batches(path, fields, delimiter))


def make_parquet(uri: Uri, fields: Fields) -> "TableSource":
    """Of `parquet://GLOB`, or a pattern that ends in `.parquet`."""
    uri.take({})
    return TableSource(uri, fields, _parquet_batches)


class TableSource:
    """photon.connect.ports.Source."""

    def __init__(self, uri: Uri, fields: Fields, open_table: _Open) -> None:
        self._uri, self._fields, self._open = uri, fields, open_table
        self._after: dict[str, int] = {}
        self._read: dict[str, str] = {}
        """Path -> what the file was known by when it was last read, or found."""
        self._drain = False
        self._waiting: dict[str, None] = {}
        self._current: tuple[str, Iterator[pa.RecordBatch]] | None = None
        self._row = 0
        self._looked_s = float("-inf")
        self._closed: dict[str, str] = {}
        """Directories that can't be looked into, as of the last look, and why."""
        self._to_tell = ""

    def open(self, after: Mapping[str, int], drain: bool) -> None:
        self._after, self._drain = dict(after), drain
        self._read, self._waiting, self._current = {}, {}, None
        self._looked_s = float("-inf")
        self._look()
        if drain and not self._waiting:
            raise UsageError(f"{self._uri.text}: no file matches")

    def _look(self) -> None:
        if time.monotonic() < self._looked_s + _LOOK_EVERY_S or (self._drain and self._read):
            return
        self._looked_s = time.monotonic()
        pattern, closed = self._uri.path, dict[str, str]()
        for path in sorted(matching_files(pattern, closed=closed)) if glob.has_magic(pattern) else [pattern]:
            known_by, changed_s = _known_by(path)
            new = path not in self._read or abs(time.time() - changed_s) > _STILL_S
            if known_by and new and known_by != self._read.get(path):
                self._read[path] = known_by
                self._waiting[path] = None
        told = [f"{name} cannot be read ({why})" for name, why in closed.items() if name not in self._closed]
        self._closed = closed
        if told:
            self._to_tell = f"{'; '.join(told)}; see to its permissions"
            if self._drain:
                raise UsageError(self._to_tell)

    def read(self, wait_s: float) -> Sequence[Batch]:
        if self._current is None:
            if not self._waiting:
                time.sleep(max(0.0, min(wait_s, self._looked_s + _LOOK_EVERY_S - time.monotonic())))
            self._look()
            if self._to_tell:
                reason, self._to_tell = self._to_tell, ""
                raise UnavailableError(reason)
            if not self._waiting:
                return []
            self._row = 0
            path = next(iter(self._waiting))
            self._read[path], _ = _known_by(path)
            self._current = path, self._open(path, self._fields)
        path, batches = self._current
        try:
            batch = next(batches, None)
        except Exception as error:
            self._current = None  # what is left of it would say that the file ends here
            reason = first_line(error)
            if any(sign in reason for sign in _NO_UTF8):
                reason = f"{NOT_UTF8}: convert the file, as by iconv -f LATIN1 -t UTF-8"
            elif self._drain and not isinstance(error, UsageError):
                reason += "; is it whole?"
            if self._drain:
                raise UsageError(f"{path}: {reason}") from error
            del self._waiting[path]
            if not os.path.exists(path):  # it may come again
                del self._read[path]
                gone = f"{path} is gone, though it was not read to its end: what it had more is not imported"
                raise UnavailableError(gone) from error
            self._waiting[path] = None  # the others need not wait for it
            raise UnavailableError(
                f"{path}: {reason}; tried again: write it under another name and rename it"
            ) from error
        if batch is None:
            self._current = None
            del self._waiting[path]
            return []
        first, self._row = self._row, self._row + batch.num_rows
        name = f"{path}\0{self._read[path]}"
        skipped = min(batch.num_rows, max(0, self._after.get(name, -1) + 1 - first))
        rows = batch.slice(skipped)
        if not rows.num_rows:
            return []
        self._after[name] = self._row - 1
        return [Batch(name, _lines(rows), ((first + skipped, rows.num_rows),))]

    def state(self) -> State:
        if self._current is not None or self._waiting:
            return State.ACTIVE
        return State.FINISHED if self._drain else State.IDLE

    def losses(self) -> Sequence[Loss]:
        return []

    def behind(self) -> int | None:
        return None if self._waiting else 0

    def kept(self, upto: Mapping[str, int]) -> None:
        pass

    def close(self) -> None:
        self._current = None


def _known_by(path: str) -> tuple[str, float]:
    """What tells a file from a former one, "" where it is none; when it changed."""
    try:
        status = os.stat(path)
    except OSError:
        return "", 0.0
    known_by = f"{status.st_size}-{status.st_mtime_ns}" if stat.S_ISREG(status.st_mode) else ""
    return known_by, status.st_mtime


def _csv_batches(path: str, fields: Fields, delimiter: str) -> Iterator[pa.RecordBatch]:
    with pa.input_stream(path, compression="detect") as file:
        header, encoding = _header_of(file, path, delimiter)
    convert = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    read = pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES, encoding=encoding)
    reader = pyarrow.csv.open_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    time = parse_path(fields.time)
    for batch in reader:
        numbers = fields.time_unit != "rfc3339" and len(time) == 1 and time[0] in batch.schema.names
        yield _with_numbers(batch, time[0]) if numbers else batch


def _header_of(file: Any, path: str, delimiter: str) -> tuple[list[str], str]:
    """The names, and the encoding of the file."""
    begins = file.read(_HEADER_BYTES)
    encoding = "utf-16" if begins.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    text = begins.decode(encoding, "replace")
    first = next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), [])
    if not first:
        raise OSError("it has no header")
    other = next((mark for mark in _DELIMITERS if mark in first[0]), None)
    if len(first) == 1 and other is not None:
        mend = f"write 'csv://{path}?delimiter={quote(other, safe=',;|')}' for it"
        raise UsageError(f"its header has no '{delimiter}'; {mend}")
    if twice := [name for name in first if name and first.count(name) > 1]:
        raise UsageError(f"column {twice[0]!r} stands there twice, and only one could be read: rename it")
    return first, "utf8" if encoding == "utf-8-sig" else encoding


def _with_numbers(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """The column as numbers where its values are such; one that is none stays as it is, and its event is
    malformed with a reason. No row changes another."""
    place = batch.schema.names.index(name)
    texts = batch.column(place)
    kinds = [pa.int64()]
    if not pc.any(pc.match_substring_regex(texts, _INEXACT)).as_py():
        kinds.append(pa.float64())
    for kind in kinds:
        try:
            return batch.set_column(place, name, pc.cast(texts, kind))
        except pa.ArrowInvalid:
            continue
    return batch.set_column(place, name, _one_by_one(texts))


def _one_by_one(texts: pa.Array) -> pa.Array:
    """Each value as the number it is, else as the text."""
    made: list[list[Any]] = [[], [], []]
    kinds, places = [], []
    for text in texts.to_pylist():
        number = _number(text)
        kind = 0 if isinstance(number, int) else 1 if isinstance(number, float) else 2
        kinds.append(kind)
        places.append(len(made[kind]))
        made[kind].append(text if number is None else number)
    children = [pa.array(one, type) for one, type in zip(made, _KINDS, strict=True)]
    return pa.UnionArray.from_dense(pa.array(kinds, pa.int8()), pa.array(places, pa.int32()), children)


def _number(text: str | None) -> int | float | None:
    if text is None or not _NUMBER.fullmatch(text):
        return None
    if _WHOLE.fullmatch(text) and -(1 << 63) <= int(text) < 1 << 63:
        return int(text)
    number = float(text)
    return number if math.isfinite(number) else None


def _parquet_batches(path: str, _: Fields) -> Iterator[pa.RecordBatch]:
    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_MAX):
            yield _zoned(batch)


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


def _lines(batch: pa.RecordBatch) -> bytes:
    return _ENCODER.encode_lines(batch.to_pylist())


_ENCODER: Final = msgspec.json.Encoder()
