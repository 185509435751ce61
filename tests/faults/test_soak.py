"""What the soak tells of rounds that failed."""

import pytest

from tests.faults import soak
from tests.faults.kit.checkers import BrokenError, Report
from tests.faults.kit.system import NotInTimeError


@pytest.fixture
def soaked(tmp_path, monkeypatch):
    """A soak of one round, which ends with the error."""

    def run(error):
        def end(*_):
            raise error

        monkeypatch.setattr(soak, "_round", end)
        return soak.soak(0.0, 1, tmp_path)

    return run


def test_what_a_broken_round_doubled_and_lost_is_in_the_report(soaked):
    broken = {"joined_twice": ["a is joined 2 times"]}
    found = soaked(BrokenError(Report(broken, events_in=100, joined=99, duplicates=1, lost=3)))
    assert (found.events_in, found.joined, found.duplicates, found.lost) == (100, 99, 1, 3)
    assert found.not_judged == 0
    assert len(found.failed) == 1 and "a is joined 2 times" in found.failed[0]


def test_a_round_that_did_not_come_to_its_end_is_told_as_not_judged(soaked):
    found = soaked(NotInTimeError("all to be fed: not after 90 s"))
    assert found.as_document()["not_judged"] == 1
    assert found.failed == ["round 0: NotInTimeError: all to be fed: not after 90 s"]
