"""The rules that close pysyncobj's holes around its message handlers. Pure: no IO, no clock.

The letters (S1, L1, ...) are those of docs/decisions/003-raft-on-pysyncobj.md.
"""

from dataclasses import dataclass

from photon.raft.journal import Entry, Journal
from photon.raft.rules.codec import Message, MessageError


@dataclass(slots=True)
class Conflict:
    """L1: where a follower's log first differs, as far as it was told in one term. Backing off never bounces.

    Several messages are under way while the leader backs off; each is refused, and a later refusal must not
    send it forward again to a place that an earlier one has ruled out.
    """

    term: int = -1
    next_index: int = 0

    def note(self, term: int, next_index: int) -> None:
        """A message of this term did not fit; the leader should go back to `next_index`."""
        if term == self.term:
            next_index = min(next_index, self.next_index)
        self.term, self.next_index = term, next_index

    def bound(self, term: int, next_index: int) -> int:
        """Where to send a leader of this term back to, at most."""
        return min(next_index, self.next_index) if term == self.term else next_index

    def clear(self) -> None:
        """A message fitted: the leader has found the place."""
        self.term = -1


@dataclass(frozen=True, slots=True)
class Fitted:
    """An append_entries made harmless.

    `verified`: the log matches the leader's up to here; None: it does not fit.
    """

    message: Message
    verified: int | None


def fit(log: Journal, commit_index: int, message: Message) -> Fitted:
    """S2: strip the entries the log has already, so that nothing that matches is ever truncated.

    What remains begins with the first entry that is new or conflicts. Where nothing remains, the message
    becomes a heartbeat at the log's own end; the acknowledgement must then be capped to `verified`, and so
    is the commit index, because what lies beyond was not compared. Raises MessageError for what no leader
    sends: its log holds all that is committed.
    """
    previous: int = message["prevLogIdx"]
    entries: list[Entry] = message["entries"]
    verified = previous + len(entries)
    if previous < commit_index:
        # What is committed here stands in the log of every later leader: no need, or no way, to compare it.
        skip = min(len(entries), commit_index - previous)
    elif log.term_at(previous) == message["prevLogTerm"]:
        skip = 0
    else:
        return Fitted(message, None)
    while skip < len(entries) and log.term_at(entries[skip][1]) == entries[skip][2]:
        skip += 1
    if skip < len(entries):
        place = previous + skip
        term = log.term_at(place)
        assert term is not None, (place, log.first_index, log.last_index)
        assert place >= commit_index, (place, commit_index)  # what is committed is never cut off
        if entries[skip][2] < term:
            raise MessageError(f"entry {place + 1} of term {entries[skip][2]} after one of {term}, committed")
        return Fitted(
            {**message, "prevLogIdx": place, "prevLogTerm": term, "entries": entries[skip:]}, verified
        )
    verified = max(verified, commit_index)
    heartbeat = {
        **message,
        "prevLogIdx": log.last_index,
        "prevLogTerm": log.term_at(log.last_index),
        "entries": [],
        "commit_index": min(message["commit_index"], verified),
    }
    return Fitted(heartbeat, verified)


def conflict_start(log: Journal, commit_index: int, previous: int) -> int | None:
    """L1: the first index of the term that conflicts at `previous`, never below what is committed.

    None where the log holds no entry there (it is shorter: its own end is the hint).
    """
    term = log.term_at(previous)
    if term is None:
        return None
    start = previous
    while start > commit_index + 1 and log.term_at(start - 1) == term:
        start -= 1
    return max(start, commit_index + 1)


def is_stale_ack(message: Message, term: int) -> bool:
    """S3: an acknowledgement counts only in the term it was given in."""
    return bool(message["term"] != term)


def is_stale_snapshot(index: int, commit_index: int, applied_index: int) -> bool:
    """S9: a snapshot that covers no more than is committed here would only take the log back."""
    return index <= max(commit_index, applied_index)


def next_index_of(acked: int, last_index: int) -> int:
    """Where an acknowledgement may send the next entries from: after the entry all logs share."""
    return max(2, min(acked, last_index + 1))
