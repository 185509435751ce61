"""What the tests of this folder share: inputs and outputs of a run by hand, a real registry, a job."""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from pyarrow import parquet

from idregistry.client import RegistryAt, RegistryClient
from joiner.adapter import splice_column
from photon.core.clock import SystemClock
from photon.core.columns import pack_times
from photon.core.fates import Committed
from photon.core.ids import IdPacker, Token
from photon.core.settings import Settings
from photon.rpc.network import Network, Tls
from tests.forked import Child
from tests.idregistry import replica
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
BEGUN_US = 1_700_000_000_000_000


def primary(id_, **more):
    return {"id": id_, "ts_us": 1, "payload": {"n": 1.0, "text": "ü"}, **more}


def foreign(id_, primary_id, **more):
    return {"id": id_, "primary_id": primary_id, "ts_us": 2, **more}


def _line(event):
    return event if isinstance(event, bytes) else json.dumps(event).encode()


def joined(event, primary_event):
    """The line that the default adapter makes."""
    return splice_column([_line(primary_event)], _line(event) + b"\n").rstrip(b"\n")


def letter(fate, event):
    return {"fate": fate, "reason": "told", "event": event, "file": "clicks.jsonl", "offset": 0}


@contextmanager
def engine(session, directory, workers=1):
    """This process, or Spark; with several buckets."""
    if session is None:
        from spark.verification.engines import Here

        with tempfile.TemporaryDirectory(dir=directory) as scratch, Here(Path(scratch), 3, workers) as here:
            yield here
    else:
        from spark.verification.on_spark import OnSpark

        with OnSpark(session, 100 << 20) as there:
            yield there


class WrittenLogs:
    """Directories as `photon join` leaves them; lines are objects, or bytes to be written as they are."""

    def __init__(self, directory):
        self.directory = directory
        self.out = directory / "out"
        (self.out / "joined").mkdir(parents=True)

    def foreign(self, *lines, name="clicks.jsonl"):
        return self._write(self.directory / "clicks" / name, lines)

    def primary(self, *lines, name="queries.jsonl"):
        return self._write(self.directory / "queries" / name, lines)

    def joined(self, datacenter, *lines):
        return self._write(self.out / "joined" / datacenter / "joined-000000.jsonl", lines)

    def letters(self, datacenter, *lines, stem="foreign"):
        return self._write(self.out / "dead-letters" / datacenter / f"{stem}-000000.jsonl", lines)

    def ask(self, session, settings=None, primary=None, **more):
        """What `photon verify` says of them: the report, and {id: verdict} of the details.

        `session`: None for this process, else Spark's.
        """
        from spark.verification.verify import Question, verify

        details = str(self.directory / f"details-{time.monotonic_ns()}")
        queries = (str(self.directory / "queries"),) if primary is None else primary
        clicks = (str(self.directory / "clicks"),)
        question = Question(clicks, (str(self.out),), queries, details, **more)
        with engine(session, self.directory) as chosen:
            report = verify(chosen, question, settings or Settings())
        rows = [SimpleNamespace(**row) for row in parquet.read_table(details).to_pylist()]
        found = {row.id: row for row in rows}
        assert len(rows) == len(found)
        self.details = found
        return report, {id_: row.verdict for id_, row in found.items()}

    def _write(self, path, lines):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return str(path)


def copy_of(run, directory):
    """A run of its own: where it is stands in its topology."""
    shutil.copytree(run, directory)
    [topology] = directory.rglob(".photon/topology.json")
    topology.write_text(topology.read_text().replace(str(run), str(directory)))
    return directory


def planned_job(incarnation, **more):
    """A job of a backfill."""
    from spark.backfill.job import Job

    facts = {"reading": "", "spark": "", "output_format": "jsonl", "patterns": ((), ()), "registry": ""}
    numbers = {"incarnation": incarnation, "begun_us": BEGUN_US, "buckets": 3, "first_number": 5}
    return Job(**facts | numbers | {"primary": (), "foreign": ()} | more)


class RealRegistry:
    """A registry of one replica, in a process of its own. Ends with `close`."""

    def __init__(self, directory: Path, shards: int = 1, tls: Tls | None = None, **settings: float) -> None:
        directory.mkdir(exist_ok=True)
        grpc, raft = free_ports(2)
        self.address = f"127.0.0.1:{grpc}"
        given = {
            "node": "r0",
            "grpc": {"r0": self.address},
            "raft": raft,
            "dialed": {"r0": raft},
            "directory": str(directory / "r0"),
            "log": str(directory / "r0.log"),
            "settings": {"shards": shards, "replicas": 1, **settings},
            "joining": False,
            "sets": {},
            "tls": tls and [str(tls.cert), str(tls.key), str(tls.ca), tls.name],
        }
        self._process = Child(replica.main, given)
        self.at = RegistryAt((self.address,), Network(tls))
        self.client = RegistryClient([self.address], 20.0, SystemClock(), random.Random(), Network(tls))

    def commit(self, ids: Sequence[str], token: Token, *times_us: int) -> None:
        """Register event ids as texts, with a time for each, or one for all; every one must be won."""
        packed = IdPacker().pack(list(ids))
        outcomes = self.client.commit(packed, _times(ids, times_us), token.pack())
        assert set(outcomes) <= {Committed.WON}, outcomes

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


def _times(ids: Sequence[str], times_us: Sequence[int]) -> bytes:
    return pack_times(list(times_us) if len(times_us) > 1 else list(times_us or (2,)) * len(ids))
