"""What a joiner has won and nobody can read is told without being asked (paper 3.3.3)."""

import shutil
import struct

import pytest

from joiner.accounts import Place, Row, Written, compare, pack_rows, unpack_rows
from joiner.intents import Intent, IntentJournal, Range
from joiner.output_files import note_recovered
from photon.cluster.told import line_of
from photon.core.accounts import WINDOW_US, sums_by_day
from photon.core.columns import join_lines, pack_times, split_ids
from photon.core.ids import Token
from photon.logs.writer import LogPosition
from tests.joiner.fakes import NOW_US, batch_of, output_files, packed_id


def look(worker, clock):
    """What the joiner tells once what it has won is old enough; it looks twice."""
    clock.advance(60.0)
    for _ in range(2):
        worker.leases.renew_due()
        worker._accountant.step()
    account = worker.status()["account"]
    return {key: account[key] for key in ("unwritten", "gone", "unknown")}


def told(**events):
    return {"unwritten": 0, "gone": 0, "unknown": 0} | events


@pytest.fixture
def joined(make):
    """A joiner that has written three events."""
    worker = make()
    worker.join(batch_of(["a", "b", "c"]))
    return worker


def win(registry, worker, *names):
    """Registered by this joiner, with no line: it died in between, with its journal."""
    token = Token("127.0.0.1:0", worker.leases.own.incarnation, NOW_US - WINDOW_US).pack()
    registry.commit(b"".join(map(packed_id, names)), pack_times([NOW_US] * len(names)), token)


def test_what_was_won_and_written_makes_no_difference(joined, clock):
    assert look(joined, clock) == told()
    joined.join(batch_of(["d"]))
    joined._accountant.step()  # what is young is in neither account
    assert look(joined, clock) == told()


def test_an_event_that_was_won_and_stands_nowhere_is_told(joined, clock, registry):
    win(registry, joined, "x", "y")
    assert look(joined, clock) == told(unwritten=2)
    line = line_of({"account": joined.status()["account"]})
    assert line == "registered 2 events that stand in no output: run `photon recover`"


def test_a_missing_line_is_not_hidden_by_one_that_is_there_twice(joined, clock, registry):
    """As many lines as ids."""
    win(registry, joined, "x")
    del registry.tokens[packed_id("a")]
    assert look(joined, clock) == told(unwritten=1)


def test_a_difference_that_one_look_alone_shows_is_not_told(joined, clock, registry):
    win(registry, joined, "x")
    clock.advance(60.0)
    joined._accountant.step()
    assert joined.status()["account"]["unwritten"] == 0
    del registry.tokens[packed_id("x")]
    assert look(joined, clock) == told()


def test_a_file_that_is_deleted_or_cut_short_is_told_with_its_name(joined, clock, tmp_path):
    (path,) = output_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert look(joined, clock) == told(gone=3)
    assert f"3 events stood in files that are gone or cut short ({path})" in line_of(
        {"account": joined.status()["account"]}
    )
    path.write_bytes(whole)
    assert look(joined, clock) == told()
    path.unlink()
    assert look(joined, clock) == told(gone=3)


def test_what_recovery_has_released_is_missed_no_more(joined, clock, registry, tmp_path):
    output_files(tmp_path)[0].unlink()
    for name in "abc":
        del registry.tokens[packed_id(name)]
    assert look(joined, clock) == told()


def test_a_line_counts_in_whatever_root_it_stands(make, clock, tmp_path):
    worker = make("more")
    worker.join(batch_of(["a"]))
    output_files(tmp_path)[0].unlink()
    assert look(worker, clock) == told()
    output_files(tmp_path, "more")[0].unlink()
    assert look(worker, clock) == told(gone=1)


def test_the_account_goes_on_after_a_restart(joined, make, clock, registry, tmp_path):
    joined.close()
    worker = make()
    worker.join(batch_of(["d"]))
    assert look(worker, clock) == told()
    output_files(tmp_path)[0].unlink()
    assert look(worker, clock) == told(gone=3)


def test_a_complete_file_counts_as_lines_and_as_parquet(make, clock, tmp_path):
    pytest.importorskip("pyarrow")
    worker = make(output_format="parquet")
    worker.join(batch_of(["a", "b"]))
    worker.stop(5.0)
    assert not output_files(tmp_path)
    (rows,) = output_files(tmp_path, kind="parquet")
    worker = make(output_format="parquet")
    assert look(worker, clock) == told()
    rows.write_bytes(rows.read_bytes()[:-1])
    assert look(worker, clock) == told(gone=2)


@pytest.mark.parametrize("found", ["something lost", "nothing lost"])
def test_lives_whose_directory_is_lost_are_told_until_recovery_has_seen_to_them(
    joined, make, clock, registry, tmp_path, found
):
    """The outputs still tell of them. Those that lost something it has fenced."""
    incarnation = joined.leases.own.incarnation
    if found == "something lost":
        win(registry, joined, "x")
    joined.close()
    shutil.rmtree(tmp_path / "joiner")
    worker = make()
    unknown = 4 if found == "something lost" else 3
    assert look(worker, clock) == told(unknown=unknown)
    said = line_of({"account": worker.status()["account"]})
    assert f"registered {unknown} events before its directory was lost" in said
    if found == "something lost":
        registry.fences.add(incarnation)
    else:
        note_recovered(tmp_path / "out" / "joined" / "east", [incarnation])
    assert look(worker, clock) == told()


@pytest.mark.parametrize(("is_sole", "unknown"), [(True, 3), (False, 0)])
def test_lives_of_which_no_output_is_left_are_known_by_the_address_if_no_other_had_it(
    joined, make, clock, tmp_path, is_sole, unknown
):
    joined.close()
    shutil.rmtree(tmp_path / "joiner")
    shutil.rmtree(tmp_path / "out")
    assert look(make(is_sole=is_sole), clock) == told(unknown=unknown)


def test_while_a_batch_waits_for_its_end_nothing_is_compared(joined, clock, registry):
    """What was won after its token can't be told from what it has won."""
    win(registry, joined, "x")
    registry.failures = ["after"]
    joined.join(batch_of(["d"]))
    assert joined.status()["unresolved"] == 1
    clock.advance(1_000.0)
    assert look(joined, clock) == told()


def test_an_account_survives_the_segments_that_it_was_written_in(tmp_path):
    """Also one whose last ends a crash has torn off: their intents are open, and are not counted."""
    journal = IntentJournal(tmp_path, fsync=True, segment_bytes=1)
    token = Token("j:1", 7, 5 * WINDOW_US).pack()
    ids = b"".join(packed_id(f"e{n}") for n in range(40))
    for n, key in enumerate(split_ids(ids)):
        intent = Intent(token, key, pack_times([NOW_US]), join_lines([b"{}"]))
        journal.append(intent, lambda n=n: LogPosition(0, 10 * n))
        journal.sync(intent)
        lines = Range(0, 10 * n, 10 * n + 10)
        journal.written(intent, lines, sums_by_day(key, pack_times([NOW_US])))
        journal.synced(lines)
    assert len(list(tmp_path.iterdir())) < 4
    (day,) = sums_by_day(ids, pack_times([NOW_US] * 40))
    expected = {Place(0, 7, day): sums_by_day(ids, pack_times([NOW_US] * 40))[day]}
    assert journal.account(6)[1].tally.sums == expected
    journal.close()
    journal = IntentJournal(tmp_path, fsync=True)
    window, written = journal.account(6)
    assert (window, written.tally.sums, written.lengths) == (6, expected, {0: 400})
    assert len(journal.take_over()[0]) == 0
    journal.close()


def test_rows_are_read_as_they_were_written():
    rows = [Row(3, 1 << 40, (1 << 64) - 1, -5, -20_000, 7, (1 << 64) - 1), Row(0, 0, 0, 0, 0, 0, 0)]
    assert unpack_rows(pack_rows(rows)) == rows
    with pytest.raises(struct.error):
        unpack_rows(pack_rows(rows)[:-1])


def test_days_that_the_registry_forgets_are_compared_no_more():
    from idregistry.rules.surveys import Account

    written = Written()
    written.add([Row(0, 10, 7, 0, 1, 5, 50), Row(1, 10, 7, 0, 2, 3, 30)])
    account = Account({(7, 1): (1, 9), (7, 2): (3, 30)}, 2, 0)
    assert compare(account, written.tally.sums, frozenset(), {7}).unwritten == 0
    written.forget_before(2)
    assert written.tally.sums == {Place(1, 7, 2): (3, 30)}
    assert written.lengths == {1: 10}
