"""The watch over joined logs: it sees what stands twice at one instant, and what is taken back."""

import os

import pytest

from tests.faults.kit.output import Watch


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watch(tmp_path, clock):
    made = Watch(tmp_path, clock)
    yield made
    made.stop()


def append(tmp_path, datacenter, *ids, number=0, end="\n"):
    path = tmp_path / "joined" / datacenter / f"joiner-{datacenter}-{number:06}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f'{{"id":"{text}","primary":{{"id":"q"}}}}\n' for text in ids)[:-1] + end)
    return path


def test_lines_are_counted_as_they_come(tmp_path, watch):
    append(tmp_path, "east", "a", "b")
    watch.look()
    append(tmp_path, "west", "c")
    append(tmp_path, "east", "d", end="")
    watch.look()
    assert (watch.joined, watch.by_datacenter()) == (3, {"east": 2, "west": 1})
    append(tmp_path, "east", "e", number=1)
    watch.look()
    assert watch.joined == 4  # d has no end


def test_an_id_in_two_datacenters_is_found_at_once(tmp_path, watch):
    append(tmp_path, "east", "a", "b")
    watch.look()
    append(tmp_path, "west", "b")
    watch.look()
    assert watch.repeated == {"b": ["east/joiner-east-000000.jsonl:2", "west/joiner-west-000000.jsonl:1"]}


def test_a_line_that_was_taken_back_may_be_written_elsewhere(tmp_path, watch):
    path = append(tmp_path, "east", "a", "b")
    watch.look()
    os.truncate(path, len(path.read_bytes().splitlines(keepends=True)[0]))
    append(tmp_path, "west", "b")
    watch.look()
    watch.look()
    assert not watch.repeated
    assert watch.joined == 2


def test_a_line_that_was_taken_back_and_written_over_unseen_is_no_repetition(tmp_path, watch):
    path = append(tmp_path, "east", "a", "b")
    watch.look()
    os.truncate(path, 0)
    append(tmp_path, "east", "c", "d", "e")
    append(tmp_path, "west", "b")
    watch.look()
    assert not watch.repeated


def test_what_stood_on_a_lost_disk_stands_no_more(tmp_path, watch):
    append(tmp_path, "east", "a").unlink()
    path = append(tmp_path, "east", "a")
    watch.look()
    path.unlink()
    append(tmp_path, "west", "a")
    watch.look()
    assert (watch.by_datacenter(), watch.repeated) == ({"west": 1}, {})


def test_the_longest_stall_counts_only_while_lines_are_to_come(tmp_path, watch, clock):
    expected = True
    watch.expects = lambda: expected
    for at, text, wanted in ((1.0, "a", 1.0), (6.0, "b", 5.0), (8.0, "c", 5.0)):
        clock.now = at
        append(tmp_path, "east", text)
        watch.look()
        assert watch.longest_stall_s() == wanted
    expected = False
    clock.now = 100.0
    watch.look()
    clock.now = 101.0
    assert watch.longest_stall_s() == 5.0
