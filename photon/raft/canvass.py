"""Whether to stand for election: a replica asks first, and raises no term by asking (pre-vote).

Ongaro's dissertation, 9.6: those who hear a live leader say nothing, so a replica that was cut off does not
depose it when it comes back. Pure: no IO, no clock.
"""

from collections.abc import Collection


def is_majority(count: int, voters: int) -> bool:
    return 2 * count > voters


def is_up_to_date(last: tuple[int, int], own: tuple[int, int]) -> bool:
    """Whether a log that ends with this (term, index) holds all that is committed, for all one knows."""
    return last >= own


class Canvass:
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
