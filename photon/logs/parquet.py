"""JSON lines as Parquet (pyarrow), and back.

Each field of the events becomes a column of the type that pyarrow finds for it, but times stay the strings
that they were. Events that no column can hold exactly (a field that is a number here and a string there, a
whole number beyond what its column holds) become one column `event` of the lines themselves.
"""

import bisect
import contextlib
import errno
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from photon.core.columns import join_lines, split_lines
from photon.core.errors import StorageError

_PARQUET_ROWS: Final = 4096
COLUMN: Final = "event"
_CONVERTED_BYTES: Final = 8 << 20
_EXACT_MAX: Final = {"double": 2.0**53, "float": 2.0**24, "halffloat": 2.0**11}
"""Whole numbers beyond are not all told apart by a column of this type."""

Rest = Callable[[], None]


def parquet_lines(source: Any) -> Iterator[bytes]:
    """What `convert` made, a path or a file of pyarrow -> its rows as lines, in chunks.

    StorageError where it can't be read.
    """
    arrow, files = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    try:
        with files.ParquetFile(source) as file:
            schema = file.schema_arrow
            # An adapter may write events with one field of that name.
            plain = schema.names == [COLUMN] and schema.types[0] in (arrow.string(), arrow.binary())
            for batch in file.iter_batches(_PARQUET_ROWS):
                yield _as_lines(batch.to_pylist(), plain)
    except FileNotFoundError:
        raise
    except (OSError, arrow.ArrowException) as error:
        raise StorageError(" ".join(str(error).split())) from error


def _as_lines(rows: Sequence[Mapping[str, Any]], plain: bool) -> bytes:
    """Rows of such a file as the lines that they were made of; `plain`: they hold these in COLUMN.

    Fields that are null are left out: they are missing in the line, or null.
    """
    if plain:
        texts = [row[COLUMN] for row in rows]
        return join_lines([text.encode() if isinstance(text, str) else text for text in texts])
    told = [{name: value for name, value in row.items() if value is not None} for row in rows]
    return msgspec.json.Encoder().encode_lines(told)


def convert(
    source: Path, target: Path, rest: Rest = lambda: None, notes: Mapping[str, str] | None = None
) -> int:
    """Write the lines of a file as Parquet, a row a line, in the same order; the number of rows.

    Memory for some blocks of 8 MiB, or the longest line. `rest` is called between blocks; `notes` go
    into the file's metadata. OSError, also where what was written can't be read. The target is not synced.
    """
    pa = importlib.import_module("pyarrow")
    for part in ("compute", "json", "parquet"):
        importlib.import_module(f"pyarrow.{part}")
    # The first block's types hold for the whole of most files: parsed once, not twice.
    for blocks in (1, None):
        with contextlib.suppress(pa.ArrowException, _NotExactError):
            rows = _write(pa, target, _typed(pa, source, blocks, rest), notes)
            # pyarrow writes columns that it then refuses to read (nested too deeply).
            if _rows_read(pa, target) == rows:
                return rows
            break  # the same columns would come of it
    rows = _write(pa, target, _plain(pa, source, rest), notes)
    if _rows_read(pa, target) != rows:
        raise OSError(errno.EIO, "cannot be read back as Parquet", str(target))
    return rows


class MisfitError(ValueError):
    """What a column can't hold. `row`: of which line, from 0."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def schema_of(lines: bytes) -> Any:
    """The types of the fields, as `convert` finds them; without those that are null everywhere.

    MisfitError: a field has two types.
    """
    pa = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.json")
    return pa.schema(_typed_fields(pa, _fitting(pa, lines, None).schema))


def rows_of(lines: bytes, schema: Any) -> Any:
    """A table of this schema of the lines, a row a line; fields that the schema does not have are left out.

    MisfitError: a value is of another type, is a number that its column would change, or is null where it
    may not be.
    """
    pa = importlib.import_module("pyarrow")
    for part in ("compute", "json"):
        importlib.import_module(f"pyarrow.{part}")
    rows = _fitting(pa, lines, schema)
    for field, column in zip(schema, rows.columns, strict=True):
        if _is_exact(pa, column):
            continue
        for row, (line, held) in enumerate(zip(split_lines(lines), column.to_pylist(), strict=True)):
            value = json.loads(line).get(field.name)
            if not _keeps(value, held):
                raise MisfitError(row, f"column '{field.name}' ({field.type}): {value} would become {held}")
    return rows.cast(schema)


def _keeps(value: Any, held: Any) -> bool:
    """Whether no whole number became another one, and none infinite."""
    if isinstance(held, float):
        return math.isfinite(held) and (isinstance(value, float) or value == held)
    if isinstance(held, dict):
        return all(_keeps(value.get(name), part) for name, part in held.items())
    return not isinstance(held, list) or all(map(_keeps, value, held))


def _fitting(pa: Any, lines: bytes, schema: Any) -> Any:
    """As `_parsed`, without fields that the schema has not. MisfitError."""
    try:
        return _parsed(pa, lines, schema, "ignore")
    except pa.ArrowException as error:
        split = split_lines(lines)
        for field in (None,) if schema is None else schema:
            of_it = None if field is None else pa.schema([field])

            def fails(row: int, of_it: Any = of_it) -> str:
                """Why one of the lines up to this one does not fit."""
                try:
                    _parsed(pa, join_lines(split[: row + 1]), of_it, "ignore")
                except pa.ArrowException as error:
                    return str(error)
                return ""

            if why := fails(len(split)):
                row = bisect.bisect_left(range(len(split)), True, key=lambda row: bool(fails(row)))
                named = "" if field is None else f"column '{field.name}' ({field.type}): "
                raise MisfitError(row, named + why) from error
        raise


def _typed_fields(pa: Any, fields: Any) -> list[Any]:
    """Those of which a value was seen."""
    kinds = ((field, _kind_seen(pa, _as_written(pa, field.type))) for field in fields)
    return [field.with_type(kind) for field, kind in kinds if kind is not None]


def _kind_seen(pa: Any, kind: Any) -> Any:
    """Without what is null everywhere; None: nothing else is in it."""
    if pa.types.is_struct(kind):
        within = _typed_fields(pa, kind)
        return pa.struct(within) if within else None
    if pa.types.is_list(kind):
        within = _kind_seen(pa, kind.value_type)
        return None if within is None else pa.list_(within)
    return None if pa.types.is_null(kind) else kind


def _rows_read(pa: Any, target: Path) -> int | None:
    """Rows of the file, as its readers see it; None where they can't."""
    try:
        with pa.parquet.ParquetFile(target) as file:
            return file.metadata.num_rows  # type: ignore[no-any-return]
    except (OSError, pa.ArrowException):
        return None


class _NotExactError(Exception):
    """Typed columns would not hold what the lines say."""


def _write(pa: Any, target: Path, tables: Iterator[Any], notes: Mapping[str, str] | None) -> int:
    """The first of the tables has no rows: it tells the schema."""
    rows = 0
    with pa.parquet.ParquetWriter(target, next(tables).schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)
            rows += table.num_rows
        if notes:
            writer.add_key_value_metadata(notes)
    return rows


def _typed(pa: Any, source: Path, blocks: int | None, rest: Rest) -> Iterator[Any]:
    """With the types of the first blocks, None: of all. ArrowException, _NotExactError: they don't do."""
    schemas = []
    for block in islice(_whole_blocks(source), blocks):
        schemas.append(_parsed(pa, block, None).schema)
        rest()
    found = pa.unify_schemas(schemas, promote_options="permissive")
    schema = pa.schema([field.with_type(_as_written(pa, field.type)) for field in found])
    if schema.names in ([], [COLUMN]):
        raise _NotExactError  # rows without columns are not counted; and that one says that it holds lines
    yield schema.empty_table()
    for block in _whole_blocks(source):
        table = _parsed(pa, block, schema)
        if table.num_rows != block.count(b"\n") or not all(_is_exact(pa, column) for column in table.columns):
            raise _NotExactError
        yield table
        rest()


def _plain(pa: Any, source: Path, rest: Rest) -> Iterator[Any]:
    kind = pa.string() if all(_is_text(block) for block in _whole_blocks(source)) else pa.binary()
    yield pa.schema([(COLUMN, kind)]).empty_table()
    for block in _whole_blocks(source):
        yield pa.table({COLUMN: pa.array(block[:-1].split(b"\n"), pa.binary()).cast(kind)})
        rest()


def _parsed(pa: Any, block: bytes, schema: Any, others: str = "error") -> Any:
    if not _is_text(block):
        raise _NotExactError
    if not all(line.lstrip().startswith(b"{") for line in split_lines(block)):
        raise pa.ArrowInvalid("a line is no JSON object")  # null would pass for one, or end the process
    parse = pa.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else others
    )
    read = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    return pa.json.read_json(pa.BufferReader(block), read_options=read, parse_options=parse)


def _as_written(pa: Any, kind: Any) -> Any:
    """The type that keeps what stood in the line: strings that look like times stay strings."""
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_written(pa, field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_written(pa, kind.value_type))
    return kind


def _is_exact(pa: Any, column: Any) -> bool:
    """Whether no number of a column of fractions may have been a whole number that it can't hold."""
    kind = column.type
    if pa.types.is_struct(kind):
        # `flatten` gives the fields, each with the nulls of the whole.
        return all(_is_exact(pa, part) for part in column.flatten())
    if pa.types.is_list(kind):
        return _is_exact(pa, pa.compute.list_flatten(column))
    if not pa.types.is_floating(kind) or not len(column):
        return True
    largest = pa.compute.max(pa.compute.abs(column)).as_py()
    return largest is None or largest < _EXACT_MAX[str(kind)]


def _is_text(block: bytes) -> bool:
    try:
        block.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _whole_blocks(source: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines."""
    with source.open("rb", buffering=0) as file:
        held = b""
        while read := file.read(_CONVERTED_BYTES):
            whole = read.rfind(b"\n") + 1
            if whole:
                yield held + read[:whole]
                held = read[whole:]
            else:
                held += read
        if held:
            yield held + b"\n"
