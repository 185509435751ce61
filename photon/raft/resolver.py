"""Names to addresses, without ever making the raft thread wait for a name server."""

import socket
import threading
from collections.abc import Container
from typing import Any

# How long an answer is used before it is asked for again.
FRESH_S = 30.0
Target = tuple[int, Any]  # address family, socket address
_Asked = tuple[str, int]


class Resolver:
    """`lookup` answers at once, from what is known; a name is looked up in a thread of its own meanwhile."""

    def __init__(self) -> None:
        self._known: dict[_Asked, tuple[float, Target]] = {}
        self._failed: dict[_Asked, str] = {}  # why, where the last answer was none
        self._asking: set[_Asked] = set()

    def lookup(self, host: str, port: int, now: float) -> Target | None:
        """The address, or None where it is not known yet: ask again later.

        OSError for a name that was asked for and has no address that is known; it is asked for again.
        """
        try:
            return _first(
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
            )
        except socket.gaierror:
            pass
        except UnicodeError as error:
            raise OSError(f"{host!r} can't be the name of a host") from error
        asked = (host, port)
        at, target = self._known.get(asked, (-FRESH_S, None))
        if now - at >= FRESH_S and asked not in self._asking:
            self._ask(asked, now)
        why = self._failed.get(asked)
        if target is None and why is not None:
            raise OSError(why)
        return target

    def only(self, addresses: Container[_Asked]) -> None:
        """Forget all others."""
        for asked in [*self._known, *self._failed]:
            if asked not in addresses:
                self._known.pop(asked, None)
                self._failed.pop(asked, None)

    def _ask(self, asked: _Asked, now: float) -> None:
        self._asking.add(asked)
        thread = threading.Thread(target=self._answer, args=(asked, now), name="raft-resolver", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._asking.discard(asked)
            raise OSError(f"{asked[0]} can't be looked up: {error}") from error

    def _answer(self, asked: _Asked, now: float) -> None:
        try:
            self._known[asked] = (now, _first(socket.getaddrinfo(*asked, type=socket.SOCK_STREAM)))
            self._failed.pop(asked, None)
        except (OSError, UnicodeError) as error:
            # The last answer stays; the next dial asks again.
            self._failed[asked] = f"{asked[0]} has no address: {error}"
        finally:
            self._asking.discard(asked)


def _first(found: list[Any]) -> Target:
    family, _, _, _, address = found[0]
    return family, address
