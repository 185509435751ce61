"""Names to addresses, without ever making the raft thread wait for a name server."""

import socket
import threading
from typing import Any

# How long an answer is used before it is asked for again.
FRESH_S = 30.0
Target = tuple[int, Any]  # address family, socket address


class Resolver:
    """`lookup` answers at once, from what is known; a name is looked up in a thread of its own meanwhile."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[float, Target]] = {}
        self._asking: set[tuple[str, int]] = set()

    def lookup(self, host: str, port: int, now: float) -> Target | None:
        """The address, or None where it is not known yet: ask again later."""
        try:
            return _first(
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            )
        except socket.gaierror:
            pass
        asked = (host, port)
        at, target = self._known.get(asked, (-FRESH_S, None))
        if now - at >= FRESH_S and asked not in self._asking:
            self._asking.add(asked)
            threading.Thread(target=self._ask, args=(asked, now), name="raft-resolver", daemon=True).start()
        return target

    def _ask(self, asked: tuple[str, int], now: float) -> None:
        try:
            self._known[asked] = (now, _first(socket.getaddrinfo(*asked, type=socket.SOCK_STREAM)))
        except OSError:
            pass  # the last answer stays; the next dial asks again
        finally:
            self._asking.discard(asked)


def _first(found: list[Any]) -> Target:
    family, _, _, _, address = found[0]
    return family, address
