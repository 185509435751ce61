"""PostgreSQL as a sink: a joined line a row, by its key; each batch in a transaction with its place.

The place is a row of the table `photon_places`. A transaction moves it from where it was to where the batch
ends, or fails: of two that write by one name, one does. So whatever became of a transaction, the place tells;
and no line is there twice, for a key is there once. It is the place in that very table: of one that was made
anew, or put back from a dump, nobody knows which lines it has, so all are written again.
"""

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import psycopg
from psycopg import errors, sql

from photon.connect.keys import keys_by
from photon.connect.ports import Guarantee
from photon.connect.uris import Uri, in_words
from photon.core.columns import split_lines
from photon.core.errors import UnavailableError, UsageError, first_line
from photon.logs.writer import LogPosition

ASK_S: Final = 10
"""For one statement, and for a lock that somebody else holds."""
ANSWER_S: Final = 60.0
"""For all of a batch."""
_TIMEOUTS: Final = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
_NEVER_WORKS: Final = (
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
    errors.UndefinedColumn,
    errors.DatatypeMismatch,
    errors.InvalidColumnReference,
    errors.WrongObjectType,
)
_FIND: Final = "SELECT to_regclass(%s)"
_MAKE_PLACES: Final = """
CREATE TABLE IF NOT EXISTS photon_places
(writer text PRIMARY KEY, file bigint NOT NULL, at bigint NOT NULL, relation oid NOT NULL)"""
_FORGET_PLACE: Final = "DELETE FROM photon_places WHERE writer = %s AND relation <> to_regclass(%s)"
_LAST_PLACE: Final = "SELECT file, at FROM photon_places WHERE writer = %s"
_BEGIN_PLACE: Final = """
INSERT INTO photon_places (file, at, writer, relation) VALUES (%s, %s, %s, to_regclass(%s))
ON CONFLICT DO NOTHING"""
_MOVE_PLACE: Final = """
UPDATE photon_places SET file = %s, at = %s
WHERE writer = %s AND relation = to_regclass(%s) AND file = %s AND at = %s"""
_MAKE: Final = "CREATE TABLE IF NOT EXISTS {} (id text PRIMARY KEY, event json NOT NULL)"
_INSERT: Final = """
INSERT INTO {} (id, event) SELECT key, line::json FROM unnest(%b::text[], %b::text[]) AS of_batch (key, line)
ON CONFLICT (id) DO NOTHING"""


_KNOWN: Final = (
    "there are rows of these keys already, or a trigger or a rule left the lines out; if the rows are of "
    "other lines, have key=FIELD,FIELD tell them apart, and drop the table or name another: what was refused "
    "is not sent again"
)


def connected(conninfo: str, autocommit: bool = False) -> "psycopg.Connection[tuple[Any, ...]]":
    """A connection on which no statement and no lock takes longer than ASK_S. psycopg.Error."""
    connection = psycopg.connect(conninfo, autocommit=autocommit)
    with answering(connection, ANSWER_S):
        for name in _TIMEOUTS:
            connection.execute("SELECT set_config(%s, %s, false)", (name, f"{ASK_S}s"))
    return connection


@contextlib.contextmanager
def answering(
    connection: "psycopg.Connection[tuple[Any, ...]]", within_s: float, cancels: bool = False
) -> Iterator[None]:
    """The connection is cut after `within_s`, and what waits for it raises: a server that stands still does
    not look at its own timeouts, and it bounds no wait for a standby. `cancels`: the server is asked to end
    that wait first, and has as long again for it."""
    over = threading.Event()

    def give_up() -> None:
        if cancels and not over.wait(within_s):
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=within_s)
        if not over.wait(within_s):
            with (
                contextlib.suppress(OSError, psycopg.Error),
                socket.socket(fileno=os.dup(connection.fileno())) as it,
            ):
                it.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=give_up, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class PostgresqlSink:
    """photon.connect.ports.Sink of `postgresql://USER@HOST/DATABASE`. Options: `table`; `key`, the field, or
    fields, that rows are kept by; libpq's parameters."""

    guarantee = Guarantee.ATOMIC
    batch_bytes = 1 << 20
    linger_s = 0.0

    def __init__(self, uri: Uri, writer: str) -> None:
        given: dict[str, Any] = dict(uri.options)
        self._uri = uri
        table = given.pop("table", "joined")
        self._known_by = f"{table} {writer}"
        self._keys = keys_by(given.pop("key", "id"))
        named = sql.Identifier(*table.split("."))
        self._named = named.as_string()
        self._make, self._insert = sql.SQL(_MAKE).format(named), sql.SQL(_INSERT).format(named)
        try:
            base = psycopg.conninfo.conninfo_to_dict(uri.text.partition("?")[0])
            given = {"connect_timeout": ASK_S, "tcp_user_timeout": ASK_S * 1000, **base, **given}
            self._conninfo = psycopg.conninfo.make_conninfo("", **given)
        except psycopg.ProgrammingError as error:
            raise UsageError(
                f"{uri.shown}: {first_line(error)}; known are key, table and libpq's parameters"
            ) from error
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._place: LogPosition | None = None
        self.refused: Counter[str] = Counter()

    def open(self) -> LogPosition | None:
        self.close()
        try:
            self._connection = connection = connected(self._conninfo)
            with answering(connection, ANSWER_S):
                for name, make in (("photon_places", _MAKE_PLACES), (self._named, self._make)):
                    # Whoever may make no tables may not ask for one that is there, either.
                    if connection.execute(_FIND, (name,)).fetchone() == (None,):
                        connection.execute(make)
                connection.execute(_FORGET_PLACE, (self._known_by, self._named))
                row = connection.execute(_LAST_PLACE, (self._known_by,)).fetchone()
                connection.commit()
        except psycopg.Error as error:
            raise in_words(self._uri, error, _NEVER_WORKS) from error
        self._place = None if row is None else LogPosition(*row)
        return self._place

    def write(self, lines: bytes, start: LogPosition, end: LogPosition) -> None:
        connection = self._connection
        if connection is None:
            raise UnavailableError(f"{self._uri.shown}: not open")
        split, found = split_lines(lines), self._keys(lines)
        if None in found:
            at = start.offset + sum(len(line) + 1 for line in split[: found.index(None)])
            raise UsageError(
                f"{self._uri.shown}: the line at byte {at} has no key; name its field by key=FIELD, "
                "or several by key=FIELD,FIELD"
            )
        keys = [key.decode() for key in found if key is not None]
        texts = [line.decode("utf-8", "replace") for line in split]
        to = (end.file, end.offset, self._known_by, self._named)
        try:
            with answering(connection, ANSWER_S), connection.transaction():
                if (last := self._place) is None:
                    moved = connection.execute(_BEGIN_PLACE, to)
                else:
                    moved = connection.execute(_MOVE_PLACE, (*to, last.file, last.offset))
                if moved.rowcount != 1:
                    raise UnavailableError(
                        f"{self._uri.shown}: somebody else writes as {self._known_by}, or made the table anew"
                    )
                lacking = len(keys) - connection.execute(self._insert, (keys, texts)).rowcount
        except psycopg.Error as error:
            raise in_words(self._uri, error, _NEVER_WORKS, error.diag.message_detail) from error
        self._place = end
        if lacking:
            self.refused[_KNOWN] += lacking

    def close(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None
