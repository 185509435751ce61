"""A snapshot becomes the state beside the work: nothing stands still, and nothing is lost, meanwhile."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from photon.raft.port import ChangeKind, RaftLimits
from photon.raft.snapshot import SnapshotId, StateMachineError
from tests.raft.cluster import Cluster
from tests.raft.kit import Lone, Register, snapshot_of
from tests.waiting import wait_until


class PreparedRegister(Register):
    """Takes snapshots in beside the work; `prepared` says in which thread it did."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[str] = []
        self.put = 0
        self.go_on = threading.Event()
        self.go_on.set()

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        put_register = super().prepare(chunks)
        self.prepared.append(threading.current_thread().name)
        assert self.go_on.wait(60)

        def put() -> None:
            put_register()
            self.put += 1

        return put


def answers(lone: Lone) -> list[tuple[int, bool, bool]]:
    return [
        (message["next_node_idx"], message["success"], message["reset"])
        for _, message in lone.wire.take("next_node_idx")
    ]


def test_what_follows_a_snapshot_does_not_have_it_sent_again_while_it_is_taken_in(
    lone: Lone, tmp_path: Path
) -> None:
    lone.hear_snapshot(snapshot_of(tmp_path, 50), 50)
    lone.hear_entries([1, 1], after=(50, 1), commit=50)
    lone.turn()
    assert answers(lone) == [(2, False, False)] * 2, "it lives, and that is all it says"
    assert lone.replica.leader == "b"
    lone.take_in()
    assert answers(lone) == [(51, True, False)]
    lone.hear_entries([1], after=(51, 1), commit=50)
    lone.turn()
    assert answers(lone) == [(51, False, True)], "now it asks for what it missed"
    lone.hear_entries([1, 1], after=(50, 1), commit=52)
    lone.turn()
    assert (lone.replica.core.applied_index, lone.replica.installs) == (52, 1)


def test_where_the_log_differed_before_a_snapshot_is_forgotten_with_it(lone: Lone, tmp_path: Path) -> None:
    """Else the leader is sent back to before what it knows to be here, and does not believe it, for ever."""
    lone.hear_entries([1] + [2] * 8, term=2)
    lone.hear_entries([], after=(9, 3), term=3, peer="c")
    lone.hear_snapshot(snapshot_of(tmp_path, 50), 50, peer="c", term=3)
    lone.take_in()
    answers(lone)
    lone.hear_entries([3], after=(60, 3), term=3, commit=50, peer="c")
    lone.turn()
    assert answers(lone) == [(51, False, True)]


def test_a_snapshot_that_is_another_than_it_was_said_to_be_is_not_taken(lone: Lone, tmp_path: Path) -> None:
    lone.hear_snapshot(snapshot_of(tmp_path, 40), 50)
    lone.take_in()
    assert lone.replica.store.snapshots.current is None
    assert lone.replica.core.applied_index == 1


def test_a_snapshot_that_has_come_in_is_not_written_over(lone: Lone, tmp_path: Path) -> None:
    lone.hear_snapshot(snapshot_of(tmp_path, 50), 50)
    lone.hear_snapshot(snapshot_of(tmp_path, 60), 60, peer="c", term=2)
    lone.take_in()
    assert lone.replica.store.snapshots.current == SnapshotId(50, 1)
    assert lone.machine.tokens == {b"snap50": 50}


def test_a_snapshot_that_was_overtaken_meanwhile_is_dropped(lone: Lone, tmp_path: Path) -> None:
    lone.hear_snapshot(snapshot_of(tmp_path, 4), 4)
    lone.hear_entries([1] * 6, commit=7)
    lone.turn()
    before = dict(lone.machine.tokens)
    answers(lone)
    lone.take_in()
    assert lone.machine.tokens == before
    assert lone.replica.store.snapshots.current is None
    assert answers(lone) == [(8, True, False)]


def test_it_waits_until_the_host_has_a_job_free(lone: Lone, tmp_path: Path) -> None:
    other = lone.jobs.start(lambda: None)
    lone.hear_snapshot(snapshot_of(tmp_path, 50), 50)
    assert lone.jobs.running is other
    lone.take_in()
    assert lone.jobs.running is not other
    lone.take_in()
    assert lone.replica.installs == 1


def test_a_state_that_cannot_be_prepared_stops_the_replica(lone: Lone, tmp_path: Path) -> None:
    def broken(chunks: Iterable[bytes]) -> Callable[[], None]:
        raise RuntimeError("a bug")

    lone.machine.prepare = broken  # type: ignore[attr-defined]
    lone.hear_snapshot(snapshot_of(tmp_path, 50), 50)
    lone.jobs.finish()
    with pytest.raises(StateMachineError, match="prepare raised RuntimeError"):
        lone.replica.tick()
    assert lone.replica.store.snapshots.current is None


def test_a_host_goes_on_with_everything_while_one_group_takes_a_snapshot_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.raft.cluster.Register", PreparedRegister)
    limits = RaftLimits(compact_entries=30, tail_entries=3, segment_bytes=2000)
    cluster = Cluster(tmp_path, names="a", limits=limits)
    try:
        cluster.start()
        for number in range(100):
            cluster.register(b"id%d" % number, 1)
        cluster.add_address("b")
        cluster.start("b")
        node = cluster.nodes["b"]
        node.in_raft_thread(lambda: node.add_group(1, ["b"]))
        wait_until(lambda: node.in_raft_thread(lambda: node.logs[1].is_leader))
        machine = node.machines[0]
        assert isinstance(machine, PreparedRegister)
        machine.go_on.clear()
        cluster.change(ChangeKind.ADD_LEARNER, "b")
        wait_until(lambda: bool(machine.prepared))
        for number in range(20):
            # Its thread answers for the other group, and the leader for this one.
            assert node.in_raft_thread(lambda: node.logs[1].is_leader)
            cluster.register(b"more%d" % number, 1)
        assert machine.tokens == {}
        machine.go_on.set()
        cluster.wait_until_equal()
        assert (machine.prepared[0], machine.put) == ("raft-snapshot_0", len(machine.prepared))
    finally:
        cluster.stop()
