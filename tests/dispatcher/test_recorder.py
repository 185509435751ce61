"""Recording finished batches when the disk does not take them."""

import errno

import numpy as np
import pytest

from dispatcher.driver import Recorder
from dispatcher.ledger import Ledger, RetryQueue
from dispatcher.rules.events import Resolved
from photon.core.clock import Backoff
from photon.core.errors import DiskFullError, StorageError
from photon.core.fates import Fate
from photon.core.status import no_latencies
from photon.logs.writer import DeadLetter
from tests.dispatcher.fakes import clicks, some_events
from tests.dispatcher.test_reader import Reading


class Failing(Ledger):
    """A ledger that can't be written the first `failures` times."""

    failures = 0

    def record(self, entry):
        if self.failures:
            self.failures -= 1
            raise DiskFullError("no space left")
        return super().record(entry)


def joined(count: int) -> Resolved:
    return Resolved({Fate.JOINED: count}, 0, no_latencies(), [], None, np.empty(0, np.int64))


class Scene:
    def __init__(self, tmp_path, failures: int, stop: bool) -> None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "a.jsonl").write_bytes(clicks(0, 6))
        self.reading = Reading(tmp_path / "logs", batch_events_max=2)
        self.ledger = Failing(tmp_path / "state", tmp_path / "dead", 1 << 30)
        self.ledger.failures = failures
        self.waits: list[int] = []
        queue = RetryQueue(self.ledger, 1000, 1000)
        self.recorder = Recorder(self.ledger, self.reading.reader, queue, self, lambda _: None)
        self._stop = stop

    def wait(self, _backoff: Backoff, failures: int) -> bool:
        """As the gate's."""
        self.waits.append(failures)
        assert self.recorder.storage_error == "no space left"
        return self._stop

    def record(self) -> list[int]:
        return [
            len(self.recorder.record([(batch, joined(len(batch.events)))])) for batch in self.reading.all()
        ]


def test_a_commit_is_tried_until_the_disk_takes_it(tmp_path):
    scene = Scene(tmp_path, failures=3, stop=False)
    assert scene.record() == [1, 1, 1]
    assert scene.waits == [1, 2, 3]
    assert scene.recorder.storage_error is None
    assert scene.ledger.totals.foreign_events == 6
    scene.ledger.close()


def test_nothing_is_recorded_over_the_gap_that_a_commit_given_up_leaves(tmp_path):
    scene = Scene(tmp_path, failures=1, stop=True)
    assert scene.record() == [0, 0, 0]
    assert scene.ledger.totals.foreign_events == 0
    assert scene.ledger.files() == []
    scene.ledger.close()


def test_dead_letters_that_only_a_restart_can_mend_end_the_process(tmp_path, monkeypatch):
    scene = Scene(tmp_path, failures=0, stop=True)
    (first, *_) = scene.reading.all()
    letter = DeadLetter(Fate.FILTERED, "skipped", b"{}", "a.jsonl", 0)
    filtered = Resolved(
        {Fate.FILTERED: len(first.events)}, 0, no_latencies(), [letter], None, np.empty(0, np.int64)
    )

    def lost(_fd):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("photon.logs.writer.os.fdatasync", lost)
    with pytest.raises(StorageError, match="Input/output"):
        scene.recorder.record([(first, filtered)])
    assert scene.waits == []
    scene.ledger.close()


def test_chosen_rows_of_events_stay_in_step():
    events = some_events(9, names=3)
    events.tries[:], events.sends[:], events.first_seen[:] = range(9), range(9, 18), range(18, 27)
    for rows in ([], [4], [0, 8], [1, 2, 3, 5, 6], list(range(9))):
        taken = events.take(np.array(rows, np.intp))
        assert taken.lines == [events.lines[row] for row in rows]
        assert taken.ids == b"".join(events.ids[16 * row : 16 * row + 16] for row in rows)
        assert taken.primary_ids == b"".join(events.primary_ids[16 * row : 16 * row + 16] for row in rows)
        assert taken.times == b"".join(events.times[8 * row : 8 * row + 8] for row in rows)
        assert taken.tries.tolist() == rows
        assert taken.sends.tolist() == [row + 9 for row in rows]
        assert taken.first_seen.tolist() == [row + 18 for row in rows]
        assert taken.offsets.tolist() == [row * 100 for row in rows]
        names = [taken.name(row) for row in range(len(rows))]
        assert names == [events.name(row) for row in rows]
