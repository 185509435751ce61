"""Apache Iceberg as a sink: joined lines are appended to a table, each batch a snapshot.

The commit that appends a batch also sets a property of the table: up to where the joined log of this writer
is there. A commit is made upon the snapshot that was read before, or fails. So of two that write by one name
one fails, and the property tells what became of a commit whose answer was lost, also when its snapshot is
expired.
"""

import contextlib
import threading
from collections.abc import Iterable
from typing import Any, Final

import pyarrow as pa
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NoSuchNamespaceError,
    NoSuchTableError,
    UnauthorizedError,
    ValidationError,
    ValidationException,
)

from photon.connect.ports import Guarantee
from photon.connect.uris import Uri, batching, in_words
from photon.core.columns import split_lines
from photon.core.errors import UsageError, first_line
from photon.logs.parquet import MisfitError, rows_of, schema_of
from photon.logs.writer import LogPosition

PLACE: Final = "photon.place."
"""And the writer: the property that says up to where its lines are there."""
_NEVER_WORKS: Final = (
    ForbiddenError,
    UnauthorizedError,
    ValidationError,
    ValueError,
    TypeError,
    NotImplementedError,
)
_RETRIES: Final = "commit.retry.num-retries"


class IcebergSink:
    """photon.connect.ports.Sink of `iceberg://CATALOG/NAMESPACE.TABLE`.

    Options: `every_s` and `mib`, how long lines wait for others and up to how many; the catalog's properties,
    beside those that pyiceberg's configuration has of it.
    """

    guarantee = Guarantee.ATOMIC

    def __init__(self, uri: Uri, writer: str) -> None:
        given = dict(uri.options)
        self._uri, self._writer = uri, writer
        self._namespace, _, name = uri.path.rpartition(".")
        if not (uri.place and self._namespace and name):
            raise UsageError(f"{uri.shown}: write iceberg://CATALOG/NAMESPACE.TABLE")
        self.batch_bytes, self.linger_s = batching(uri, given)
        self._properties = given
        self._catalog: Any = None
        self._table: Any = None

    def reach(self, wait_s: float) -> None:
        """As photon.connect.ports.Reached. A thread that still waits for an answer is left to end with the
        process."""
        wrong: list[str] = []

        def load() -> None:
            try:
                load_catalog(self._uri.place, **self._properties)
            except Exception as error:
                wrong.append(first_line(error))

        asking = threading.Thread(target=load, name="reach", daemon=True)
        asking.start()
        asking.join(wait_s)
        if asking.is_alive():
            wrong.append(f"no answer within {wait_s:g} s")
        if wrong:
            raise UsageError(
                f"{self._uri.shown}: the catalog '{self._uri.place}' can't be reached; see to `uri` and "
                f"`type` among the sink's options or in pyiceberg's configuration: {wrong[0]}"
            )

    def open(self) -> LogPosition | None:
        try:
            self._catalog = load_catalog(self._uri.place, **self._properties)
            self._table = self._catalog.load_table(self._uri.path)
        except (NoSuchTableError, NoSuchNamespaceError):
            self._table = None
            return None
        except Exception as error:
            raise in_words(self._uri, error, _NEVER_WORKS) from error
        place = self._table.properties.get(PLACE + self._writer)
        return None if place is None else LogPosition(*map(int, place.split("-")))

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        given = split_lines(lines)
        try:
            lines = lines.decode("utf-8", "replace").encode()
            known = () if self._table is None else self._table.schema().as_arrow()
            schema = pa.schema(_merged(known, schema_of(lines)))
            if not schema.names:
                raise MisfitError(0, "no line has a value, and rows need a column")
            rows = rows_of(lines, schema)
            if self._table is None:
                self._catalog.create_namespace_if_not_exists(self._namespace)
                self._table = self._catalog.create_table(self._uri.path, schema)
            # By itself pyiceberg commits anew upon what others have committed meanwhile: also upon these
            # very lines, if their writer is another process of this name.
            self._table.metadata.properties[_RETRIES] = "0"
            place = {PLACE + self._writer: f"{end.file}-{end.offset}"}
            transaction = self._table.transaction()
            with transaction.update_schema() as update:
                update.union_by_name(schema)
            transaction.append(rows, snapshot_properties=place)
            transaction.set_properties(place)
            self._commit(transaction)
        except MisfitError as error:
            at = start.offset + sum(len(line) + 1 for line in given[: error.row])
            raise UsageError(
                f"{self._uri.shown}: the line at byte {at} does not fit: {error}; give the column "
                "another type, have an adapter write the value in another way, or name another table"
            ) from error
        except Exception as error:
            raise in_words(self._uri, error, _NEVER_WORKS) from error

    def _commit(self, transaction: Any) -> None:
        """Files of rows are there by then; where it is known that it failed, nobody needs them. (What else it
        wrote pyiceberg deletes itself.)"""
        try:
            transaction.commit_transaction()
        except (CommitFailedException, ValidationException):
            for producer in transaction._snapshot_producers:
                for one in producer._added_data_files:
                    with contextlib.suppress(Exception):
                        self._table.io.delete(one.file_path)
            raise

    def close(self) -> None:
        self._catalog = self._table = None


def _merged(known: Iterable[Any], found: Iterable[Any]) -> list[Any]:
    """The fields that lines are read by: what the table knows has its type, what is new its own."""
    ours = {field.name: field for field in found}
    theirs = [field.with_type(_merged_type(field.type, ours.pop(field.name, field).type)) for field in known]
    return [*theirs, *ours.values()]


def _merged_type(known: Any, found: Any) -> Any:
    """pyarrow reads no JSON into its large types, which pyiceberg names."""
    if pa.types.is_struct(known):
        return pa.struct(_merged(known, found if pa.types.is_struct(found) else ()))
    if pa.types.is_large_list(known) or pa.types.is_list(known):
        within = found.value_type if hasattr(found, "value_type") else known.value_type
        return pa.list_(known.value_field.with_type(_merged_type(known.value_type, within)))
    if pa.types.is_large_string(known):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(known) else known
