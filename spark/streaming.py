"""What the jobs that follow logs share: Spark's settings for them, and what it calls with each batch."""

import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.storagelevel import StorageLevel

from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError, UsageError
from spark.session import SparkFailedError, spark_failures

SESSION_CONF: Final = {"spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.LocalFileSystem"}
"""RocksDB's snapshots ask for that one (Spark 4.3)."""
_STATE_CONF: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16384",
}
LOOK_S: Final = 0.2
"""So often it is looked whether logs have grown, at most."""


class Batches:
    """What Spark calls with each batch. `failure`: what a call of it raised."""

    failure: BaseException | None = None

    def take(self, rows: DataFrame, number: int) -> None:
        try:
            with spark_failures():
                rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
                try:
                    self.take_made(rows, number)
                finally:
                    rows.unpersist()
        except BaseException as error:
            self.failure = error
            raise

    def take_made(self, rows: DataFrame, number: int) -> None:
        """Rows that are made once. They have to be made: what waits is in Spark's state then."""
        raise NotImplementedError


def check_left(home: Path, begun: str, checkpoints: Path, batch: int) -> None:
    """What an earlier run has left must be all there once it had a batch. UsageError for a directory that was
    moved: Spark's checkpoints name the files that they read; CorruptStateError, StorageError."""
    if (now := os.path.abspath(home)) != begun:
        raise UsageError(
            f"{now} was begun as {begun}, and Spark's checkpoints name files by that; move it back, and run "
            "the command that it was begun with"
        )
    if batch < 0:
        clear_unbegun(checkpoints)
        return
    for there in (checkpoints / "metadata", home / "looked.json"):
        if not there.exists():
            raise CorruptStateError(
                f"{there} is gone, and what else is in {home} is nothing without it: put it back, or begin "
                "anew elsewhere, which reads all logs again"
            )


def clear_unbegun(checkpoints: Path) -> None:
    """Remove what a query left that was killed before it had noted what its first batch has: Spark refuses to
    begin over it (Spark 4.3). Nothing was read yet. StorageError."""
    if not any(path.name.isdigit() for path in (checkpoints / "offsets").glob("*")):
        with storage_errors(checkpoints), suppress(FileNotFoundError):
            shutil.rmtree(checkpoints)


def prepare_session(session: SparkSession, tasks: int) -> None:
    """For steps with state, in so many tasks each."""
    # It prints what a batch raised with its whole stack; `Batches.failure` has it.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    for name, value in {**_STATE_CONF, "spark.sql.shuffle.partitions": str(tasks)}.items():
        session.conf.set(name, value)


def attend(query: Any, look: Callable[[], object], every_s: float, going: Callable[[], bool]) -> None:
    """Until the query ends, or is not `going` on: a `look` at what has come every `every_s` seconds, unless
    it works. Raises what ended it."""
    next_look = 0.0
    while going():
        if time.monotonic() >= next_look and not _works(query):  # a batch takes what came during the last one
            next_look = time.monotonic() + every_s
            look()
        if query.awaitTermination(min(every_s, LOOK_S)):
            break


def _works(query: Any) -> bool:
    status = query.status
    return bool(status["isTriggerActive"] or status["isDataAvailable"])


def stop(query: Any) -> None:
    """Whatever has become of it."""
    with suppress(SparkFailedError), spark_failures():
        query.stop()
