"""Hand-written inputs and outputs of a run."""

import json
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from pyarrow import parquet

from photon.core.settings import Settings


def primary(id_, **more):
    return {"id": id_, "ts_us": 1, "payload": {"n": 1.0, "text": "ü"}, **more}


def foreign(id_, primary_id, **more):
    return {"id": id_, "primary_id": primary_id, "ts_us": 2, **more}


def joined(event, primary_event):
    return {**event, "primary": primary_event}


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
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        path.write_bytes(b"".join(text + b"\n" for text in texts))
        return str(path)
