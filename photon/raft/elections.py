"""Who may lead: every message about elections goes through here before the library hears of it.

A replica asks whether it would be voted for before it raises its term (pre-vote), and a vote is given only
where no live leader is known: one that was cut off, or removed, disturbs nobody (Ongaro's dissertation, 4.2.3
and 9.6). A leader that hands over has its successor left out of both rules.
"""

from collections.abc import Collection

from photon.raft.core import RaftCore, now
from photon.raft.rules.codec import (
    REQUEST_PRE_VOTE,
    REQUEST_VOTE,
    RESPONSE_PRE_VOTE,
    RESPONSE_VOTE,
    TIMEOUT_NOW,
    Message,
    encode,
)
from photon.raft.rules.guards import is_up_to_date
from photon.raft.rules.members import is_majority
from photon.raft.sender import Wire
from photon.raft.store import ReplicaStore


class PreVote:
    """One replica's round of asking. An answer counts once, and only in its round."""

    def __init__(self) -> None:
        self.round = 0
        self._granted: dict[str, int] = {}
        self._open = False

    def begin(self) -> None:
        """A new round; the answers of those before count no more."""
        self.round += 1
        self._granted.clear()
        self._open = True

    def close(self) -> None:
        """There is a leader, or an election, of its own or with its vote."""
        self._open = False

    def grant(self, peer: str, asked_in: int, term: int) -> None:
        """A peer, which is in this term, would vote for this replica."""
        if self._open and asked_in == self.round:
            self._granted[peer] = term

    def won(self, node: str, voters: Collection[str]) -> bool:
        """Whether a majority of the voters would vote for `node`, itself among them."""
        return self._open and is_majority(len({node, *self._granted}.intersection(voters)), len(voters))

    @property
    def term(self) -> int:
        """The highest term of those that granted; 0 where none did."""
        return max(self._granted.values(), default=0)


class Elections:
    """One replica's part in its group's elections. Raft thread only."""

    def __init__(self, core: RaftCore, store: ReplicaStore, wire: Wire) -> None:
        self._core = core
        self._journal = store.journal
        self._members = store.members
        self._wire = wire
        self._pre_vote = PreVote()
        self._voted: tuple[int, set[str]] = (-1, set())  # who has voted in which term
        self._handed_over_in = -1  # the term in which a leader asked this replica to take over

    def due(self) -> None:
        """No leader was heard of for an election timeout: ask the voters, of which this must be one."""
        core = self._core
        if not core.may_stand:
            return
        self._pre_vote.begin()
        term, index = self._last_entry()
        question = encode(
            {
                "type": REQUEST_PRE_VOTE,
                "term": core.term,
                "round": self._pre_vote.round,
                "last_log_index": index,
                "last_log_term": term,
            }
        )
        for peer in core.connected():
            if peer in core.members.voters:
                self._wire.send(peer, question)
        self._stand_if_wanted()

    def heard_leader(self) -> None:
        """A leader of this term, or a later one, has spoken."""
        self._core.heard_leader_at = now()
        self._pre_vote.close()

    def receive(self, peer: str, message: Message) -> None:
        """A peer's message about an election."""
        kind = message["type"]
        if kind == REQUEST_PRE_VOTE:
            if self._would_vote(message):
                self._grant(peer, message["round"])
        elif kind == RESPONSE_PRE_VOTE:
            self._pre_vote.grant(peer, message["round"], message["term"])
            self._stand_if_wanted()
        elif kind == REQUEST_VOTE:
            if self._would_vote(message):
                self._core.deliver(peer, message)
        elif kind == RESPONSE_VOTE:
            if self._counts(peer, message["term"]):
                self._core.deliver(peer, message)
        elif kind == TIMEOUT_NOW and self._core.may_stand and peer == self._core.leader:
            self._handed_over_in = self._core.term
            self._core.deliver(peer, message)

    def sent(self, message: Message) -> Message:
        """The library asks for a vote, or gives one: what to send for it."""
        if message["type"] == RESPONSE_VOTE:
            # Who would have voted for this replica may say so only now: standing on that would depose the one
            # that it has just voted for.
            self._pre_vote.close()
        elif message["type"] == REQUEST_VOTE:
            return {**message, "transfer": message["term"] == self._handed_over_in + 1}
        return message

    def _would_vote(self, message: Message) -> bool:
        """Whether to hear out one who stands, or would: else nothing changes here, not even the term.

        A replica whose log names nobody has no vote. One whose log does not name it as a voter has: it may
        just not have come to the entry that made it one, and be needed.
        """
        if self._members.newest is None:
            return False
        if self._core.hears_leader() and not message.get("transfer", False):
            return False
        return is_up_to_date((message["last_log_term"], message["last_log_index"]), self._last_entry())

    def _grant(self, peer: str, asked_in: int) -> None:
        answer = {"type": RESPONSE_PRE_VOTE, "term": self._core.term, "round": asked_in}
        self._wire.send(peer, encode(answer))

    def _stand_if_wanted(self) -> None:
        core = self._core
        wanted = self._pre_vote.won(core.node, core.members.voters)
        if wanted and core.may_stand and not core.is_leader:
            core.elect(self._pre_vote.term)
            self._pre_vote.close()

    def _counts(self, peer: str, term: int) -> bool:
        """The library counts messages, whoever they are of: only a voter's first one shall count."""
        if term < self._voted[0]:
            return False  # late, and no reason to forget who has voted since
        if term > self._voted[0]:
            self._voted = (term, set())
        counts = peer in self._core.members.voters and peer not in self._voted[1]
        self._voted[1].add(peer)
        return counts

    def _last_entry(self) -> tuple[int, int]:
        _, index, term = self._journal.entries[-1]
        return term, index
