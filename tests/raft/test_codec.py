"""The messages: what goes in comes out, and nothing else ever raises anything but MessageError."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.raft.rules.codec import MessageError, SnapshotPiece, decode, encode

NUMBER = st.integers(0, 2**62 - 1)
INDEX = st.integers(0, 2**61)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, object]:
    kind = draw(st.sampled_from(["append", "piece", "ack", "ask", "ask first", "vote", "granted", "timeout"]))
    term = draw(NUMBER)
    if kind == "append":
        previous = draw(INDEX)
        bodies = draw(st.lists(st.binary(min_size=1, max_size=40), max_size=8))
        before, *terms = sorted(draw(st.integers(0, term)) for _ in range(len(bodies) + 1))
        return {
            "type": "append_entries",
            "term": term,
            "commit_index": draw(NUMBER),
            "prevLogIdx": previous,
            "prevLogTerm": before,
            "entries": list(zip(bodies, range(previous + 1, previous + 1 + len(bodies)), terms, strict=True)),
        }
    if kind == "piece":
        data = draw(st.binary(max_size=60))
        offset = draw(st.integers(0, 1000))
        total = offset + len(data) + draw(st.integers(0, 1000))
        piece = SnapshotPiece(draw(NUMBER), draw(st.integers(0, term)), offset, total, data)
        return {"type": "append_entries", "term": term, "commit_index": draw(NUMBER), "serialized": piece}
    if kind == "ack":
        return {
            "type": "next_node_idx",
            "term": term,
            "next_node_idx": draw(NUMBER),
            "reset": draw(st.booleans()),
            "success": draw(st.booleans()),
        }
    if kind == "ask":
        last = {"last_log_index": draw(NUMBER), "last_log_term": draw(NUMBER)}
        return {"type": "request_vote", "term": term, **last, "transfer": draw(st.booleans())}
    if kind == "ask first":
        last = {"last_log_index": draw(NUMBER), "last_log_term": draw(NUMBER)}
        return {"type": "request_pre_vote", "term": term, **last, "round": draw(NUMBER)}
    if kind == "granted":
        return {"type": "response_pre_vote", "term": term, "round": draw(NUMBER)}
    return {"type": "response_vote" if kind == "vote" else "timeout_now", "term": term}


@given(messages())
def test_a_message_survives_the_round_trip(message: dict[str, object]) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=300))
def test_garbage_is_refused_by_its_own_error_only(data: bytes) -> None:
    with suppress(MessageError):
        decode(data)


@given(messages(), st.data())
def test_a_damaged_message_is_refused_by_its_own_error_only(
    message: dict[str, object], data: st.DataObject
) -> None:
    good = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        decode(bytes(good[: data.draw(st.integers(0, len(good)))]))


@pytest.mark.parametrize("kind", ["apply_command", "apply_command_response", "add", "anything"])
def test_no_other_kind_is_ever_sent(kind: str) -> None:
    with pytest.raises(MessageError):
        encode({"type": kind, "term": 1, "command": b""})


def append(**changed: object) -> dict[str, object]:
    """A message that is good: after entry 4 of term 2 come two of terms 2 and 3, from a leader in term 3."""
    good: dict[str, object] = {
        "type": "append_entries",
        "term": 3,
        "commit_index": 4,
        "prevLogIdx": 4,
        "prevLogTerm": 2,
        "entries": [(b"x", 5, 2), (b"y", 6, 3)],
    }
    return {**good, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"term": 2},
        {"term": 1, "entries": []},
        {"entries": [(b"x", 5, 3), (b"y", 6, 2)]},
        {"entries": [(b"x", 5, 1), (b"y", 6, 3)]},
    ],
    ids=["above the leader's", "the one before above the leader's", "falling", "falling at once"],
)
def test_entries_whose_terms_cannot_be_are_refused(changed: dict[str, object]) -> None:
    """In a log they would end its replica at the next start, for good."""
    assert decode(encode(append())) == append()
    with pytest.raises(MessageError, match="terms fall, or lie above their leader's"):
        decode(encode(append(**changed)))


def test_a_snapshot_of_a_later_term_than_its_leaders_is_refused() -> None:
    piece = SnapshotPiece(9, 4, 0, 1, b"x")
    with pytest.raises(MessageError, match="later term than its leader"):
        decode(encode({"type": "append_entries", "term": 3, "commit_index": 9, "serialized": piece}))


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(MessageError, match="empty"):
        decode(encode(append(entries=[(b"x", 5, 2), (b"", 6, 3)])))


@pytest.mark.parametrize(
    "message",
    [
        append(term=2**62),
        append(commit_index=2**62),
        append(prevLogIdx=2**62 - 1, entries=[(b"x", 2**62, 2)]),
        {
            "type": "append_entries",
            "term": 3,
            "commit_index": 1,
            "serialized": SnapshotPiece(2**62, 1, 0, 1, b"x"),
        },
        {
            "type": "append_entries",
            "term": 3,
            "commit_index": 1,
            "serialized": SnapshotPiece(9, 1, 0, 2**62, b"x"),
        },
        {"type": "next_node_idx", "term": 1, "next_node_idx": 2**62, "reset": False, "success": True},
        {"type": "next_node_idx", "term": 2**62, "next_node_idx": 1, "reset": False, "success": True},
        {"type": "request_vote", "term": 2**62, "last_log_index": 1, "last_log_term": 1},
        {"type": "request_vote", "term": 1, "last_log_index": 2**62, "last_log_term": 1},
        {"type": "request_pre_vote", "term": 1, "round": 1, "last_log_index": 1, "last_log_term": 2**62},
        {"type": "response_pre_vote", "term": 2**62, "round": 1},
        {"type": "response_vote", "term": 2**62},
        {"type": "timeout_now", "term": 2**62},
    ],
)
def test_numbers_that_no_group_comes_to_are_refused(message: dict[str, object]) -> None:
    with pytest.raises(MessageError, match="past all bounds"):
        decode(encode(message))


def test_a_count_of_entries_past_the_message_is_refused_without_allocating_for_it() -> None:
    message = {
        "type": "append_entries",
        "term": 1,
        "commit_index": 1,
        "prevLogIdx": 1,
        "prevLogTerm": 1,
        "entries": [],
    }
    data = bytearray(encode(message))
    data[-4:] = b"\xff\xff\xff\xff"
    with pytest.raises(MessageError):
        decode(bytes(data))
