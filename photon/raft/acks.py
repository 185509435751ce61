"""Acknowledgements held back until the journal is synced."""

from photon.raft.codec import Message


class HeldAcks:
    """What a follower will say once what it says is true.

    In order for each peer; successes are cumulative.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[Message]] = {}

    def hold(self, peer: str, ack: Message) -> None:
        """Keep an acknowledgement; a success replaces the success before it in the same term."""
        queue = self._held.setdefault(peer, [])
        if queue and ack["success"] and queue[-1]["success"] and queue[-1]["term"] == ack["term"]:
            further = max(queue[-1]["next_node_idx"], ack["next_node_idx"])
            queue[-1] = {**ack, "next_node_idx": further}
        else:
            queue.append(ack)

    def take(self) -> dict[str, list[Message]]:
        """All that is held; none is held after."""
        held, self._held = self._held, {}
        return held
