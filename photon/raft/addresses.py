"""Which ids and addresses nodes may have, and the socket that one listens on."""

import errno
import socket
from collections.abc import Mapping

from photon.core.errors import AddressInUseError, SettingsError, UsageError
from photon.raft.handshake import ID_BYTES_MAX
from photon.raft.link import size_buffers
from photon.wire.network import is_loopback

_BACKLOG = 64


def check_peers(node: str, peers: Mapping[str, tuple[str, int]]) -> None:
    """Raise SettingsError for ids and addresses that can't be those of other nodes."""
    if node in peers:
        raise SettingsError(f"raft: {node} is among its own peers; name only the other nodes")
    for name, (host, port) in peers.items():
        _check_id(name)
        if not host or not 0 < port < 1 << 16:
            raise SettingsError(
                f"raft: {host!r}, port {port}, can't be the address of {name}; take a host and 1 to 65535"
            )


def check_node(node: str, listen_host: str, secret: bytes) -> None:
    """Raise SettingsError for what this node can't be, or must not do without a secret."""
    _check_id(node)
    if not secret and not is_loopback(f"{listen_host}:0"):
        raise SettingsError(
            f"raft: will not listen on {listen_host} without a cluster secret; set one, the same on all nodes"
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
