"""A feed that ends when a test has seen enough, as if no more had been planned."""

from collections.abc import Iterable, Sequence
from typing import Final

from tests.faults.kit.feeder import Copy, Due, Feeder, Truth

LONG: Final = 40_000
"""Clicks of a feed that is to be cut: for as long as a test may take on a machine that is busy."""


def cut_short(feeder: Feeder) -> None:
    """What stands in no copy yet is never logged, but for the queries of clicks that do. `truth` says so."""
    with feeder.held() as copies:
        kept = _kept(copies, feeder.truth)
        for copy in copies:
            copy.keep(kept)
        feeder.replan(_truth_of(kept.values(), feeder.truth))


def _kept(copies: Sequence[Copy], truth: Truth) -> dict[int, Due]:
    """Turn -> line, of those that stand somewhere, or must."""
    written = {due.turn: due for copy in copies for due in copy.written}
    click_of = {line: text for text, line in truth.clicks.items()}
    clicks = {click_of.get(due.line) for due in written.values() if due.log == "clicks"}
    named = {truth.queries[truth.pairs[text]] for text in clicks if text in truth.pairs}
    awaited = {due.turn: due for due in copies[0].planned if due.log == "queries" and due.line in named}
    return written | awaited


def _truth_of(dues: Iterable[Due], whole: Truth) -> Truth:
    click_of = {line: text for text, line in whole.clicks.items()}
    query_of = {line: text for text, line in whole.queries.items()}
    truth = Truth()
    for due in dues:
        if due.log == "queries":
            if due.line in query_of:
                truth.queries[query_of[due.line]] = due.line
            else:
                truth.malformed_queries += 1
        elif due.line not in click_of:
            truth.malformed += 1
        else:
            text = click_of[due.line]
            truth.repeated += text in truth.clicks
            truth.clicks[text] = due.line
            truth.orphans.update([text] if text in whole.orphans else ())
    truth.pairs = {text: whole.pairs[text] for text in truth.clicks if text in whole.pairs}
    return truth
