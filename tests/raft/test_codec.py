"""The messages: what goes in comes out, and nothing else ever raises anything but MessageError."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.raft.codec import MessageError, SnapshotPiece, decode, encode

U64 = st.integers(0, 2**64 - 1)
INDEX = st.integers(0, 2**62)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, object]:
    kind = draw(st.sampled_from(["append", "piece", "ack", "ask", "ask first", "vote", "granted", "timeout"]))
    term = draw(U64)
    if kind == "append":
        previous = draw(INDEX)
        parts = draw(st.lists(st.tuples(st.binary(max_size=40), U64), max_size=8))
        return {
            "type": "append_entries",
            "term": term,
            "commit_index": draw(U64),
            "prevLogIdx": previous,
            "prevLogTerm": draw(U64),
            "entries": [(body, previous + 1 + at, of) for at, (body, of) in enumerate(parts)],
        }
    if kind == "piece":
        data = draw(st.binary(max_size=60))
        offset = draw(st.integers(0, 1000))
        total = offset + len(data) + draw(st.integers(0, 1000))
        piece = SnapshotPiece(draw(U64), draw(U64), offset, total, data)
        return {"type": "append_entries", "term": term, "commit_index": draw(U64), "serialized": piece}
    if kind == "ack":
        return {
            "type": "next_node_idx",
            "term": term,
            "next_node_idx": draw(U64),
            "reset": draw(st.booleans()),
            "success": draw(st.booleans()),
        }
    if kind == "ask":
        last = {"last_log_index": draw(U64), "last_log_term": draw(U64)}
        return {"type": "request_vote", "term": term, **last, "transfer": draw(st.booleans())}
    if kind == "ask first":
        last = {"last_log_index": draw(U64), "last_log_term": draw(U64)}
        return {"type": "request_pre_vote", "term": term, **last, "round": draw(U64)}
    if kind == "granted":
        return {"type": "response_pre_vote", "term": term, "round": draw(U64)}
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
