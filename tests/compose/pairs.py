"""An independent check of joined logs against the logs they were made of: plain JSON, no code of ours."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Lines = Iterable[bytes]
Event = Mapping[str, Any]


def expected_pairs(queries: Lines, clicks: Lines) -> dict[str, tuple[Event, Event]]:
    """Click id -> the click, and the query that it names; of all clicks whose query is in the logs."""
    by_id = {query["id"]: query for query in map(json.loads, queries)}
    wanted = {click["id"]: click for click in map(json.loads, clicks)}
    return {
        id_: (click, by_id[click["primary_id"]])
        for id_, click in wanted.items()
        if click["primary_id"] in by_id
    }


def check_joined(joined: Lines, expected: Mapping[str, tuple[Event, Event]]) -> None:
    """AssertionError if an id stands twice, a pair is missing, or one is not what the logs say."""
    seen: set[str] = set()
    for line in joined:
        click = json.loads(line)
        query = click.pop("primary")
        assert click["id"] not in seen, f"joined twice: {click['id']}"
        seen.add(click["id"])
        assert click["id"] in expected, f"joined, but not in the logs: {line!r}"
        assert (click, query) == expected[click["id"]], f"not what the logs say: {line!r}"
    missing = expected.keys() - seen
    assert not missing, f"{len(missing)} of {len(expected)} not joined: {sorted(missing)[:5]}"
