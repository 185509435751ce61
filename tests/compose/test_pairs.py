"""The check of the outputs finds what it is there to find."""

import json

import pytest

from tests.compose.pairs import check_joined, expected_pairs

QUERIES = [b'{"id":"q1","text":"a"}', b'{"id":"q2","text":"b"}']
CLICKS = [
    b'{"id":"c1","primary_id":"q1"}',
    b'{"id":"c2","primary_id":"q2"}',
    b'{"id":"c3","primary_id":"q9"}',
]
EXPECTED = expected_pairs(QUERIES, [*CLICKS, CLICKS[0]])


def joined(click: bytes, query: bytes) -> bytes:
    return json.dumps(json.loads(click) | {"primary": json.loads(query)}).encode()


ONE, TWO = joined(CLICKS[0], QUERIES[0]), joined(CLICKS[1], QUERIES[1])


def test_a_click_on_a_query_that_is_nowhere_is_not_expected() -> None:
    assert EXPECTED.keys() == {"c1", "c2"}


def test_all_pairs_once_in_any_order_are_right() -> None:
    check_joined([TWO, ONE], EXPECTED)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([ONE, TWO, ONE], "joined twice: c1"),
        ([ONE], "1 of 2 not joined"),
        ([ONE, joined(CLICKS[1], QUERIES[0])], "not what the logs say"),
        ([ONE, TWO, joined(CLICKS[2], QUERIES[0])], "not in the logs"),
    ],
)
def test_what_is_wrong_is_told(lines: list[bytes], what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        check_joined(lines, EXPECTED)
