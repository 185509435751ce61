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
    kinds = ["append", "piece", "ack", "ask", "ask first", "vote", "granted", "timeout", "ask file", "file"]
    kind = draw(st.sampled_from(kinds))
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
    if "file" in kind:
        name = draw(st.from_regex(r"[0-9a-z]{1,64}\.[0-9a-z]{1,8}", fullmatch=True))
        about = {"term": term, "name": name, "offset": draw(INDEX)}
        if kind == "ask file":
            return {"type": "ask_file", **about, "length": draw(NUMBER)}
        data = draw(st.binary(max_size=60))
        total = draw(INDEX) + len(data)
        return {"type": "file_piece", **about, "offset": total - len(data), "total": total, "data": data}
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


APPEND = {
    "type": "append_entries",
    "term": 3,
    "commit_index": 4,
    "prevLogIdx": 4,
    "prevLogTerm": 2,
    "entries": [(b"x", 5, 2), (b"y", 6, 3)],
}
"""A message that is good: after entry 4 of term 2 come two of terms 2 and 3, from a leader in term 3."""


def append(**changed: object) -> dict[str, object]:
    return {**APPEND, **changed}


def piece(index: int = 9, term: int = 1, total: int = 1) -> dict[str, object]:
    said = SnapshotPiece(index, term, 0, total, b"x")
    return {"type": "append_entries", "term": 3, "commit_index": 1, "serialized": said}


FALLING = "terms fall, or lie above their leader's"
BOUNDS = "past all bounds"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (append(term=2), FALLING),
        (append(term=1, entries=[]), FALLING),
        (append(entries=[(b"x", 5, 3), (b"y", 6, 2)]), FALLING),
        (append(entries=[(b"x", 5, 1), (b"y", 6, 3)]), FALLING),
        (piece(term=4), "later term than its leader"),
        (append(entries=[(b"x", 5, 2), (b"", 6, 3)]), "empty"),
        (append(term=2**62), BOUNDS),
        (append(commit_index=2**62), BOUNDS),
        (append(prevLogIdx=2**62 - 1, entries=[(b"x", 2**62, 2)]), BOUNDS),
        (piece(index=2**62), BOUNDS),
        (piece(total=2**62), BOUNDS),
        (
            {"type": "next_node_idx", "term": 1, "next_node_idx": 2**62, "reset": False, "success": True},
            BOUNDS,
        ),
        (
            {"type": "next_node_idx", "term": 2**62, "next_node_idx": 1, "reset": False, "success": True},
            BOUNDS,
        ),
        ({"type": "request_vote", "term": 2**62, "last_log_index": 1, "last_log_term": 1}, BOUNDS),
        ({"type": "request_vote", "term": 1, "last_log_index": 2**62, "last_log_term": 1}, BOUNDS),
        (
            {"type": "request_pre_vote", "term": 1, "round": 1, "last_log_index": 1, "last_log_term": 2**62},
            BOUNDS,
        ),
        ({"type": "response_pre_vote", "term": 2**62, "round": 1}, BOUNDS),
        ({"type": "response_vote", "term": 2**62}, BOUNDS),
        ({"type": "timeout_now", "term": 2**62}, BOUNDS),
    ],
)
def test_what_no_replica_can_mean_is_refused(message: dict[str, object], why: str) -> None:
    """In a log entries whose terms fall would end its replica at the next start, for good."""
    assert decode(encode(append())) == append()
    with pytest.raises(MessageError, match=why):
        decode(encode(message))


def test_a_count_of_entries_past_the_message_is_refused_without_allocating_for_it() -> None:
    data = bytearray(encode(append(entries=[])))
    data[-4:] = b"\xff\xff\xff\xff"
    with pytest.raises(MessageError):
        decode(bytes(data))
