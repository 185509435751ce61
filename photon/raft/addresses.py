"""Where a node is: which ids and addresses there may be, the socket it listens on, names to addresses."""

import errno
import socket
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from photon.core.errors import AddressInUseError, SettingsError, UsageError
from photon.raft.handshake import ID_BYTES_MAX
from photon.raft.links import size_buffers
from photon.rpc.network import Tls, is_loopback

Address = tuple[str, int]
Target = tuple[int, Any]  # address family, socket address

# A name's address is asked for again after so long. Short, for only a peer that is away is looked up, and one
# that comes back may have another address: in Kubernetes a pod has a new one after each restart.
FRESH_S = 1.0
_BACKLOG = 64


def directly(host: str, port: int) -> Address:
    """What is dialed where nothing stands between."""
    return host, port


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One node on the network. `dialed`: what to dial for a peer's address; `tls`: None for plain links."""

    node: str
    listen: Address
    secret: bytes
    tls: Tls | None = None
    dialed: Callable[[str, int], Address] = directly

    def __post_init__(self) -> None:
        """Raise SettingsError for what this node can't be, or must not do without a secret."""
        _check_id(self.node)
        if not self.secret and not is_loopback(f"{self.listen[0]}:0"):
            raise SettingsError(
                f"raft: will not listen on {self.listen[0]} without a cluster secret; "
                "set one, the same on all nodes"
            )


def check_peers(node: str, peers: Mapping[str, Address]) -> None:
    """Raise SettingsError for ids and addresses that can't be those of other nodes."""
    if node in peers:
        raise SettingsError(f"raft: {node} is among its own peers; name only the other nodes")
    for name, (host, port) in peers.items():
        _check_id(name)
        if not host or not 0 < port < 1 << 16:
            raise SettingsError(
                f"raft: {host!r}, port {port}, can't be the address of {name}; take a host and 1 to 65535"
            )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket that never waits. Raises AddressInUseError, UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"raft: can't listen on {host}:{port}: {error}; set another address") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        size_buffers(listener)  # what it accepts takes them over, before the window is agreed on
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        kind = AddressInUseError if error.errno == errno.EADDRINUSE else UsageError
        raise kind(f"raft: can't listen on {host}:{port}: {error.strerror}; set another address") from error
    return listener


def _check_id(name: str) -> None:
    if not name or not name.isprintable() or len(name.encode()) > ID_BYTES_MAX:
        raise SettingsError(
            f"raft: {name!r} can't be a node id; take 1 to {ID_BYTES_MAX} bytes of printable text"
        )


class Resolver:
    """`lookup` answers at once, from what is known; a name is looked up in a thread of its own meanwhile."""

    def __init__(self) -> None:
        self._known: dict[Address, tuple[float, Target]] = {}
        self._failed: dict[Address, str] = {}  # why, where the last answer was none
        self._asking: set[Address] = set()

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

    def only(self, addresses: Container[Address]) -> None:
        """Forget all others."""
        for asked in [*self._known, *self._failed]:
            if asked not in addresses:
                self._known.pop(asked, None)
                self._failed.pop(asked, None)

    def _ask(self, asked: Address, now: float) -> None:
        self._asking.add(asked)
        thread = threading.Thread(target=self._answer, args=(asked, now), name="raft-resolver", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._asking.discard(asked)
            raise OSError(f"{asked[0]} can't be looked up: {error}") from error

    def _answer(self, asked: Address, now: float) -> None:
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
