"""The store that outlives a machine: a PostgreSQL server with a standby that confirms every commit.

A commit is one statement and one round trip: it puts a blob at the end of the worker's log if the worker's
claim is alive, whose row it locks. A claim takes slots by ending the claims that had them, for which it waits
until their commits under way are over: from there on none of theirs succeeds (paper 6.2).

Whatever breaks (a connection, a server, a failover to the standby) leaves a commit of unknown outcome. It is
made again on a new connection until it is known: its place in the log says whether it was there already.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import psycopg
from psycopg import errors, sql

from millwheel.engine.logged import LoggedStore, put_together
from millwheel.errors import ZombieError
from millwheel.machines import Machine, Member, Round, View
from photon.connect.postgresql import ASK_S, answering, connected
from photon.connect.uris import parse_uri
from photon.core.clock import Attempts, Backoff
from photon.core.errors import FencedError, StorageError, UsageError, first_line

AGAIN_S: Final = 60.0
"""So long what has failed is tried again: a failover takes less."""
BEGINS_S: Final = 5.0
"""The same at the start, when somebody waits who may have mistyped something."""
SCHEMA: Final = "millwheel"
MAY_LOSE: Final = "may_lose_acknowledged"
_AGAIN: Final = Backoff(0.05, 2.0)
_ROWS_AT_ONCE: Final = 5_000
_NEVER_WORKS: Final = (
    errors.InsufficientPrivilege,
    errors.InvalidCatalogName,
    errors.UndefinedColumn,
)
_UNCONFIRMED: Final = ("01000", "57P01")
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS sequencers (one bool PRIMARY KEY DEFAULT true CHECK (one), last bigint NOT NULL);
INSERT INTO sequencers (last) VALUES (0) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS claims (sequencer bigint PRIMARY KEY, alive bool NOT NULL);
CREATE TABLE IF NOT EXISTS fences (slot smallint PRIMARY KEY, sequencer bigint NOT NULL);
CREATE TABLE IF NOT EXISTS log (lane smallint, sequencer bigint, number bigint, blob bytea NOT NULL,
                                PRIMARY KEY (lane, sequencer, number));
CREATE TABLE IF NOT EXISTS rows (name bytea PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE IF NOT EXISTS meta (name bytea PRIMARY KEY, value bytea NOT NULL);
CREATE TABLE IF NOT EXISTS lease (one bool PRIMARY KEY DEFAULT true CHECK (one),
                                  holder text NOT NULL, machine bytea NOT NULL, until timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS machines (holder text PRIMARY KEY, machine bytea NOT NULL, at bigint NOT NULL,
                                     until timestamptz NOT NULL);
CREATE TABLE IF NOT EXISTS rounds (one bool PRIMARY KEY DEFAULT true CHECK (one),
                                   number bigint NOT NULL, packed bytea NOT NULL);
CREATE TABLE IF NOT EXISTS copiers (source text PRIMARY KEY, reign bigint NOT NULL, number bigint NOT NULL);
CREATE TABLE IF NOT EXISTS copied (source text, name bytea, value bytea NOT NULL, PRIMARY KEY (source, name));
"""
_HOLD: Final = """
INSERT INTO lease (holder, machine, until) VALUES (%s, %b, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (one) DO UPDATE SET holder = EXCLUDED.holder, machine = EXCLUDED.machine, until = EXCLUDED.until
WHERE lease.holder = EXCLUDED.holder OR lease.until < clock_timestamp() RETURNING 1"""
_HELD: Final = "SELECT machine, extract(epoch FROM until)::float FROM lease"
_LET_GO: Final = "DELETE FROM lease WHERE holder = %s"
_LEADS: Final = "SELECT 1 FROM lease WHERE holder = %s FOR SHARE"
_BE_THERE: Final = """
INSERT INTO machines (holder, machine, at, until)
VALUES (%s, %b, %s, clock_timestamp() + make_interval(secs => %s))
ON CONFLICT (holder) DO UPDATE SET machine = EXCLUDED.machine, at = EXCLUDED.at, until = EXCLUDED.until"""
_THERE: Final = "SELECT machine, at FROM machines WHERE until >= clock_timestamp()"
_FORGET: Final = "DELETE FROM machines WHERE until < clock_timestamp() - interval '1 hour'"
_LEAVE: Final = "DELETE FROM machines WHERE holder = %s"
_ROUND: Final = "SELECT packed FROM rounds"
_IS_ROUND: Final = "SELECT 1 FROM rounds WHERE number = %s FOR SHARE"
_PUBLISH: Final = """
INSERT INTO rounds (number, packed) VALUES (%s, %b)
ON CONFLICT (one) DO UPDATE SET number = EXCLUDED.number, packed = EXCLUDED.packed"""
_REACH: Final = _PUBLISH + " WHERE rounds.number < EXCLUDED.number"
_NEXT_SEQUENCER: Final = "UPDATE sequencers SET last = last + 1 RETURNING last"
_END_CLAIMS: Final = """
UPDATE claims SET alive = false
WHERE alive AND sequencer IN (SELECT sequencer FROM fences WHERE slot = ANY(%s))"""
_CLAIM: Final = "INSERT INTO claims (sequencer, alive) VALUES (%s, true)"
_FENCE: Final = """
INSERT INTO fences (slot, sequencer) SELECT slot, %s FROM unnest(%s::smallint[]) AS mine (slot)
ON CONFLICT (slot) DO UPDATE SET sequencer = EXCLUDED.sequencer"""
_LANES: Final = "SELECT DISTINCT lane FROM log"
_ALIVE: Final = "SELECT 1 FROM claims WHERE sequencer = %s AND alive FOR NO KEY UPDATE"
_APPEND: Final = """
WITH own AS (SELECT 1 FROM claims WHERE sequencer = %s AND alive FOR NO KEY UPDATE)
INSERT INTO log (lane, sequencer, number, blob) SELECT %s, %s, %s, %b FROM own
ON CONFLICT DO NOTHING RETURNING number"""
_IS_THERE: Final = "SELECT 1 FROM log WHERE lane = %s AND sequencer = %s AND number = %s"
_TOUCH: Final = "UPDATE claims SET alive = alive WHERE sequencer = %s"
"""Durable, and confirmed, only after all that was committed before."""
_BLOBS: Final = "SELECT blob FROM log WHERE lane = %s ORDER BY sequencer, number"
_ALL_BLOBS: Final = "SELECT blob FROM log ORDER BY lane, sequencer, number"
_EMPTY: Final = "DELETE FROM log WHERE lane = %s"
_PUT: Final = """
INSERT INTO rows (name, value) SELECT * FROM unnest(%b::bytea[], %b::bytea[])
ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"""
_DELETE: Final = "DELETE FROM rows WHERE name = ANY(%b::bytea[])"
_GET: Final = "SELECT name, value FROM rows WHERE name = ANY(%b::bytea[])"
_SCAN: Final = """
SELECT name, value FROM rows
WHERE name >= %b AND name < %b AND substring(name FROM %s::int FOR %s::int) = ANY(%b::bytea[])
ORDER BY name"""
_COPY: Final = """
INSERT INTO copiers (source, reign, number) VALUES (%s, %s, 1)
ON CONFLICT (source) DO UPDATE SET reign = EXCLUDED.reign, number = copiers.number + 1
WHERE copiers.reign <= EXCLUDED.reign RETURNING number"""
_COPIED: Final = "SELECT name, value FROM copied WHERE source = %s"
_PUT_COPIED: Final = """
WITH own AS (SELECT source FROM copiers WHERE source = %s AND number = %s FOR NO KEY UPDATE),
gone AS (DELETE FROM copied USING own WHERE copied.source = own.source AND name = ANY(%b::bytea[])),
put AS (INSERT INTO copied (source, name, value)
        SELECT source, name, value FROM own, unnest(%b::bytea[], %b::bytea[]) AS rows (name, value)
        ON CONFLICT (source, name) DO UPDATE SET value = EXCLUDED.value)
SELECT 1 FROM own"""
_NUMBER: Final = """
INSERT INTO meta (name, value) VALUES (%b, %b) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"""

_encode: Final = msgspec.msgpack.encode
_machine: Final = msgspec.msgpack.Decoder(Machine).decode
_round: Final = msgspec.msgpack.Decoder(Round).decode
_Connection = psycopg.Connection[tuple[Any, ...]]
_Done = TypeVar("_Done")


class _UnconfirmedError(Exception):
    """The server has given up waiting for its standby: the commit may be lost with it."""


class PostgresqlStore(LoggedStore):
    """Of `postgresql://USER@HOST[,HOST]/DATABASE`, with libpq's parameters; `?schema=`: of the run, which has
    it for itself.

    UsageError for what can't work, and for a server that no standby confirms commits of, unless
    `?may_lose_acknowledged=yes`; StorageError if it does not answer for AGAIN_S.
    """

    def __init__(self, uri: str, again_s: float = AGAIN_S, number: int = 0) -> None:
        """`number`: of the round (millwheel.machines) in which it claims, and in no other; 0: in any. Whether
        a standby confirms is asked by who begins, not by those of a round: a failover may leave none."""
        super().__init__()
        self._round = number
        parsed = parse_uri(uri)
        given = dict(parsed.options)
        self._schema = given.pop("schema", SCHEMA)
        may_lose = given.pop(MAY_LOSE, "no") == "yes"
        self.shown = f"{parsed.shown} (schema {self._schema})"
        parameters: dict[str, Any] = {
            "connect_timeout": ASK_S,
            "tcp_user_timeout": ASK_S * 1000,
            "target_session_attrs": "read-write",  # of several hosts the one that is no standby
            "application_name": "photon millwheel",
            **given,
        }
        self._again_s = min(again_s, BEGINS_S)
        self._rng = random.Random()
        self._unconfirmed = set[str]()
        self._connections: dict[str, _Connection] = {}
        """One that commits, in a thread of its own, one for machines, and one for the rest."""
        try:
            self._conninfo = psycopg.conninfo.make_conninfo(uri.partition("?")[0], **parameters)
        except psycopg.ProgrammingError as error:
            raise UsageError(
                f"{self.shown}: {first_line(error)}; known are schema, {MAY_LOSE} and libpq's"
            ) from error
        try:
            if not number:
                self.do("rest", lambda connection: self._make(connection, may_lose))
        except BaseException:
            self.close()
            raise
        self._again_s = again_s

    def scan(self, prefix: bytes, behind: Sequence[bytes] = (b"",)) -> Iterator[tuple[bytes, bytes]]:
        kept = prefix.rstrip(b"\xff")  # something is left: a prefix begins with a kind of row
        end = kept[:-1] + bytes((kept[-1] + 1,))
        bounds = prefix, end, len(prefix) + 1, len(behind[0]), list(behind)
        try:
            with self._connected("rest").transaction(), self._connected("rest").cursor("scan") as cursor:
                cursor.itersize = _ROWS_AT_ONCE
                for name, value in cursor.execute(_SCAN, bounds):
                    yield bytes(name), bytes(value)
        except psycopg.Error as error:
            raise StorageError(f"{self.shown}: {first_line(error)}") from error

    def numbers(self, row: bytes, value: bytes | None = None) -> bytes | None:
        def ask(connection: _Connection) -> bytes | None:
            if value is not None:
                with connection.transaction():
                    self._check_round(connection)
                    connection.execute(_NUMBER, (row, value))
            found = connection.execute("SELECT value FROM meta WHERE name = %b", (row,)).fetchone()
            return None if found is None else bytes(found[0])

        return self.do("rest", ask)

    def hold(self, machine: Machine, seconds: float) -> tuple[Machine, float] | None:
        """Have the lease of who leads for so long, if it is free or this machine's own. Else who has it, and
        until when."""

        def hold(connection: _Connection) -> tuple[Machine, float] | None:
            while not _leads(connection, machine, seconds):
                other = connection.execute(_HELD).fetchone()
                if other is not None:  # else it was let go just now
                    return _machine(bytes(other[0])), other[1]
            return None

        return self.do("machines", hold, self._again_s)

    def renew(self, machine: Machine, at: int, seconds: float) -> View:
        """Be there for so long; lead if nobody else does."""

        def renew(connection: _Connection) -> View:
            with connection.transaction():
                leads = _leads(connection, machine, seconds)
                connection.execute(_BE_THERE, (machine.holder, _encode(machine), at, seconds))
                found = connection.execute(_ROUND).fetchone()
                members: list[Member] = []
                if leads:
                    connection.execute(_FORGET)
                    there = connection.execute(_THERE).fetchall()
                    members = [Member(_machine(bytes(packed)), at) for packed, at in there]
                lead = None if leads else connection.execute(_HELD).fetchone()
                return View(
                    leads,
                    Round() if found is None else _round(bytes(found[0])),
                    members,
                    lead=None if lead is None else _machine(bytes(lead[0])),
                )

        return self.do("machines", renew, self._again_s)

    def publish(self, holder: str, former: Round, following: Round) -> None:
        """`following` in place of `former`. ZombieError if another one leads, or that is not there."""

        def publish(connection: _Connection) -> None:
            with connection.transaction():
                # From here to the end nobody else leads, and no machine is renewed.
                leads = connection.execute(_LEADS, (holder,)).fetchone() is not None
                found = connection.execute(_ROUND).fetchone()
                there = Round() if found is None else _round(bytes(found[0]))
                if not leads or there not in (former, following):
                    raise ZombieError(f"another machine leads what is in {self.shown}")
                connection.execute(_PUBLISH, (following.number, _encode(following)))

        self.do("machines", publish, self._again_s)

    def reach(self) -> None:
        """Of a store that is not the run's first: claims of former rounds count no more."""
        row = (self._round, _encode(Round(self._round)))
        self.do("rest", lambda connection: connection.execute(_REACH, row))

    def leave(self, holder: str) -> None:
        """Neither lead nor be there any more."""

        def leave(connection: _Connection) -> None:
            with connection.transaction():
                connection.execute(_LET_GO, (holder,))
                connection.execute(_LEAVE, (holder,))

        self.do("machines", leave, self._again_s)

    def ledger(self, source: str, reign: int) -> "PostgresqlLedger":
        """Of copies; for one thread, which has this store for itself."""
        return PostgresqlLedger(self, source, reign)

    def close(self) -> None:
        for name in list(self._connections):
            self._lose(name)

    def _make(self, connection: _Connection, may_lose: bool) -> None:
        row = connection.execute("SHOW synchronous_standby_names").fetchone()
        if not (may_lose or (row and row[0])):
            raise UsageError(
                f"{self.shown}: no standby confirms commits ('synchronous_standby_names' is empty), so a "
                f"server that is lost takes acknowledged state with it; set it, or add ?{MAY_LOSE}=yes"
            )
        with connection.transaction():
            # Two that make it at once would both try.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (self._schema,))
            connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(self._schema)))
            connection.execute(_TABLES)

    def _take(self, slots: Sequence[int], me: int, workers: int) -> int:
        def take(connection: _Connection) -> int:
            with connection.transaction():
                self._check_round(connection)
                row = connection.execute(_NEXT_SEQUENCER).fetchone()
                assert row is not None
                sequencer = int(row[0])
                mine = list(slots)
                connection.execute(_END_CLAIMS, (mine,))
                connection.execute(_CLAIM, (sequencer,))
                connection.execute(_FENCE, (sequencer, mine))
                lanes = sorted(lane for (lane,) in connection.execute(_LANES))
                for lane in lanes:
                    if lane % workers == me:
                        self._write(connection, lane, {})
            return sequencer

        return self.do("commits", take)

    def _check_round(self, connection: _Connection) -> None:
        """To the end of the transaction it is the one that stands here. ZombieError."""
        if self._round and connection.execute(_IS_ROUND, (self._round,)).fetchone() is None:
            raise ZombieError(f"the workers of {self.shown} are others by now")

    def _get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        if not rows:
            return []
        found = self.do("rest", lambda connection: connection.execute(_GET, (list(rows),)).fetchall(), None)
        values = {bytes(name): bytes(value) for name, value in found}
        return list(map(values.get, rows))

    def _blobs(self) -> list[bytes]:
        found = self.do("rest", lambda connection: connection.execute(_ALL_BLOBS).fetchall())
        return [bytes(blob) for (blob,) in found]

    def _append(self, blob: bytes) -> None:
        place = self._lane, self._sequencer, self._next
        tries = 0

        def append(connection: _Connection) -> None:
            nonlocal tries
            tries += 1
            put = connection.execute(_APPEND, (self._sequencer, *place, blob)).fetchone()
            if put is not None or "commits" in self._unconfirmed:
                return
            # A former try's, whose commit nobody may have confirmed; or this one is fenced.
            if tries == 1 or connection.execute(_IS_THERE, place).fetchone() is None:
                raise ZombieError("another worker has the key intervals of this one by now")
            connection.execute(_TOUCH, (self._sequencer,))

        self.do("commits", append, ASK_S)

    def _fold(self, changes: Mapping[bytes, bytes | None]) -> None:
        def fold(connection: _Connection) -> None:
            with connection.transaction():
                if connection.execute(_ALIVE, (self._sequencer,)).fetchone() is None:
                    raise ZombieError("another worker has the key intervals of this one by now")
                self._write(connection, self._lane, changes)

        self.do("commits", fold)

    def _write(self, connection: _Connection, lane: int, more: Mapping[bytes, bytes | None]) -> None:
        """The rows of a log, and these, to the table, in the order of their names; the log is empty then.
        Whole values: done twice, it ends alike."""
        blobs = [bytes(blob) for (blob,) in connection.execute(_BLOBS, (lane,))]
        rows = put_together(blobs, more, self.shown)
        names = sorted(rows)
        for start in range(0, len(names), _ROWS_AT_ONCE):
            some = names[start : start + _ROWS_AT_ONCE]
            put = [name for name in some if rows[name] is not None]
            connection.execute(_PUT, (put, [rows[name] for name in put]))
            connection.execute(_DELETE, ([name for name in some if rows[name] is None],))
        connection.execute(_EMPTY, (lane,))

    # Connections.

    def do(self, name: str, what: Callable[[_Connection], _Done], within_s: float | None = AGAIN_S) -> _Done:
        """It, again and again on new connections where they fail. `within_s`: of one try; None where nothing
        is committed: the server's own timeouts do."""
        failure: Exception | None = None
        for _ in Attempts(_AGAIN, self._again_s, time.monotonic, time.sleep, self._rng.uniform):
            try:
                connection = self._connected(name)
                with contextlib.nullcontext() if within_s is None else answering(connection, within_s, True):
                    done = what(connection)
                if name in self._unconfirmed:
                    raise _UnconfirmedError("its standby has not confirmed a commit")
                return done
            except _NEVER_WORKS as error:
                self._lose(name)
                raise UsageError(f"{self.shown}: {first_line(error)}") from error
            except (psycopg.Error, _UnconfirmedError) as error:
                self._lose(name)
                failure = error
        assert failure is not None, "it was tried"
        raise StorageError(f"{self.shown}: {first_line(failure)}; tried for {self._again_s:g} s") from failure

    def _connected(self, name: str) -> _Connection:
        connection = self._connections.get(name)
        if connection is None:
            connection = connected(self._conninfo, autocommit=True)
            connection.add_notice_handler(partial(self._on_notice, name))
            connection.execute("SELECT set_config('search_path', %s, false)", (self._schema,))
            if name == "machines":  # a machine that freezes holds up no other one
                connection.execute("SET idle_in_transaction_session_timeout = '1s'")
            self._connections[name] = connection
        return connection

    def _on_notice(self, name: str, notice: errors.Diagnostic) -> None:
        # The wait for its standby was given up: it is committed there, and perhaps nowhere else.
        if notice.severity_nonlocalized == "WARNING" and notice.sqlstate in _UNCONFIRMED:
            self._unconfirmed.add(name)

    def _lose(self, name: str) -> None:
        self._unconfirmed.discard(name)
        connection = self._connections.pop(name, None)
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                connection.close()


class PostgresqlLedger:
    """A photon.connect.shared_copies.Ledger."""

    def __init__(self, store: PostgresqlStore, source: str, reign: int) -> None:
        self.reign, self._store, self._source, self._number = reign, store, source, 0

    def claim(self) -> tuple[int, dict[bytes, bytes]]:
        def claim(connection: _Connection) -> tuple[int, dict[bytes, bytes]]:
            with connection.transaction():
                number = connection.execute(_COPY, (self._source, self.reign)).fetchone()
                if number is None:
                    raise FencedError(f"another machine copies {self._source} by now")
                rows = connection.execute(_COPIED, (self._source,)).fetchall()
            return number[0], {bytes(name): bytes(value) for name, value in rows}

        self._number, rows = self._store.do("commits", claim)
        return self._number, rows

    def put(self, rows: Mapping[bytes, bytes | None]) -> None:
        some = {name: value for name, value in rows.items() if value is not None}
        gone = [name for name in rows if name not in some]
        given = self._source, self._number, gone, list(some), list(some.values())

        def put(connection: _Connection) -> None:
            if connection.execute(_PUT_COPIED, given).fetchone() is None:
                raise FencedError(f"{self._source} was claimed by another who copies")

        self._store.do("commits", put, ASK_S)


def _leads(connection: _Connection, machine: Machine, seconds: float) -> bool:
    return connection.execute(_HOLD, (machine.holder, _encode(machine), seconds)).fetchone() is not None
