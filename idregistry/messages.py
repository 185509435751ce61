"""What client and server agree on beyond the .proto: bounds and words. Pure."""

from collections.abc import Sequence
from typing import Final

from photon.core.ids import ID_BYTES
from photon.core.tokens import TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, parse_token

TIME_BYTES: Final = 8

IDS_MAX: Final = 65_536
"""Ids in one request. A larger one could not stay one segment, and within a segment an id wins once."""

BATCH_BYTES_MAX: Final = 1_900_000
"""A command's size; holds the largest request and stays under the log's own bound (RaftLimits: 2 MiB)."""

SCAN_S_MAX: Final = 3600.0
"""A scan is given a deadline no further off: until then a client that stalls keeps one of few slots."""

INCARNATIONS_MAX: Final = 4096
"""Incarnations asked about in one request."""

LEADER_DETAILS: Final = "leader="
"""Details of FAILED_PRECONDITION: after it the leader's gRPC address, or nothing where none is known."""


def request_bytes(ids: bytes, token: bytes) -> int:
    """What a request adds to a command: ids, times, token and its row in the segment table."""
    return len(ids) + len(ids) // ID_BYTES * TIME_BYTES + len(token) + 8


def columns_mistake(ids: bytes, times: bytes) -> str | None:
    """What is wrong with a request's columns, or None."""
    count, rest = divmod(len(ids), ID_BYTES)
    if rest:
        return f"ids has {len(ids)} bytes, no multiple of {ID_BYTES}"
    if len(times) != count * TIME_BYTES:
        return f"times has {len(times)} bytes, expected {count} x {TIME_BYTES}"
    if count > IDS_MAX:
        return f"{count} ids in one request, at most {IDS_MAX} are taken"
    return None


def segments_mistake(ids: bytes, tokens: Sequence[bytes], counts: Sequence[int]) -> str | None:
    """What is wrong with a release's tokens, each for so many ids, or None."""
    if len(tokens) != len(counts) or sum(counts) * ID_BYTES != len(ids) or min(counts, default=1) < 1:
        return f"{len(tokens)} tokens with counts that add up to {sum(counts)} are no token for each id"
    for token in tokens:
        mistake = token_mistake(token)
        if mistake is not None:
            return mistake
    size = sum(request_bytes(b"", token) for token in tokens) + request_bytes(ids, b"")
    if size > BATCH_BYTES_MAX:
        return (
            f"the ids and tokens make {size} bytes, at most {BATCH_BYTES_MAX} are taken: send fewer at a time"
        )
    return None


def token_mistake(token: bytes) -> str | None:
    """What is wrong with a token, or None. Only joiners' tokens are taken: the registry keeps each holder."""
    try:
        parse_token(token)
    except ValueError as error:
        return f"{error}; a token has {TOKEN_BYTES_MIN} to {TOKEN_BYTES_MAX} bytes, see photon.core.tokens"
    return None
