"""A feed that ends when a test has seen enough, as if no more had been planned."""

from contextlib import ExitStack
from typing import Final

from tests.faults.kit.feeder import Feeder, Truth, _Copy, _Due

LONG: Final = 40_000
"""Clicks of a feed that is to be cut: for as long as a test may take on a machine that is busy."""


def cut_short(feeder: Feeder) -> None:
    """What stands in no copy yet is never logged, but for the queries of clicks that do. `truth` says so."""
    with ExitStack() as held:
        copies = list(feeder._copies.values())
        for copy in copies:
            held.enter_context(copy._lock)
        kept = _kept(copies, feeder.truth)
        for copy in copies:
            copy._dues[copy._next :] = [due for due in copy._dues[copy._next :] if due.turn in kept]
        feeder.truth = _truth_of(list(kept.values()), feeder.truth)
        feeder._complete_s = [0.0] * len(feeder.truth.pairs)


def _kept(copies: list[_Copy], truth: Truth) -> dict[int, _Due]:
    """Turn -> line, of those that stand somewhere, or must."""
    written = {due.turn: due for copy in copies for due in copy._dues[: copy._next]}
    click_of = {line: text for text, line in truth.clicks.items()}
    clicks = {click_of.get(due.line) for due in written.values() if due.log == "clicks"}
    named = {truth.queries[truth.pairs[text]] for text in clicks if text in truth.pairs}
    awaited = {due.turn: due for due in copies[0]._dues if due.log == "queries" and due.line in named}
    return written | awaited


def _truth_of(dues: list[_Due], whole: Truth) -> Truth:
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
            truth.orphan_lines += text in whole.orphans
    truth.orphans = whole.orphans & truth.clicks.keys()
    truth.pairs = {text: whole.pairs[text] for text in truth.clicks if text in whole.pairs}
    return truth
