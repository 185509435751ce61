"""What strangers say to a port: nonsense, too much, half of something, the words of another time."""

import contextlib
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from photon.core.protocol import NEWEST
from photon.raft.handshake import Handshake

PATIENCE_S: Final = 0.05
"""So long one waits for an answer to nonsense."""
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAGIC: Final = b"PHRAFTH1"


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def half_a_call(method: str) -> bytes:
    """The beginning of a gRPC call, and of its message; the rest never comes."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", method.encode()),
        (b":authority", b"stranger"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    ]
    head = b"".join(b"\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields)
    begun = frame(0, 0, 1, b"\0\0\0\xff\xff" + b"half")
    return PREFACE + frame(4, 0, 0, b"") + frame(1, 4, 1, head) + begun


def hello(version: int = NEWEST, cut: int = 0) -> bytes:
    """The first message of a replica's handshake, by one that has not got the secret."""
    said = bytearray(
        Handshake(
            "r9", bytes(32), b"a wrong secret", os.urandom, "r0", lambda peer: bytes(32), _nobody
        ).begin()
    )
    struct.pack_into("<HH", said, 2 + len(_MAGIC), version, version)
    return bytes(said[: len(said) - cut])


def sayings(rng: random.Random) -> dict[str, bytes]:
    """Some KiB each, by name."""
    return {
        "nothing": b"",
        "a line": b"hello\r\n",
        "HTTP": b"GET /metrics HTTP/1.0\r\n\r\n",
        "HTTP that does not end": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 300,
        "zeros": bytes(20_000),
        "ones": b"\xff" * 20_000,
        "random": rng.randbytes(rng.randrange(1, 20_000)),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(508),
        "half of TLS": b"\x16\x03\x01\x02\x00\x01",
        "TLS of a wrong length": b"\x16\x03\x01\xff\xff" + rng.randbytes(9000),
        "SSL 2": b"\x80\x2e\x01\x00\x02" + rng.randbytes(43),
        "HTTP/2 and nonsense": PREFACE + rng.randbytes(2000),
        "HTTP/2, a huge frame": PREFACE + frame(4, 0, 0, b"") + b"\xff\xff\xff\0\0\0\0\0\1" + bytes(3000),
        "HTTP/2, many settings": PREFACE + frame(4, 0, 0, b"") * 2000,
        "HTTP/2, pings": PREFACE + frame(4, 0, 0, b"") + frame(6, 0, 0, bytes(8)) * 1000,
        "HTTP/2, resets": PREFACE + frame(4, 0, 0, b"") + frame(3, 0, 1, bytes(4)) * 1000,
        "half a call": half_a_call("/photon.joiner.v1.Joiner/Join"),
        "a call of no method": half_a_call("/no/such"),
        "a replica without the secret": hello(),
        "half of a replica's hello": hello(cut=20),
        "a replica's hello and nonsense": hello() + rng.randbytes(3000),
        "an old replica": hello(version=0),
        "a new replica": hello(version=65_535),
        "a replica of another name": hello().replace(b"r9r0", b"r9r1"),
        "a long message of a replica": b"\xff\xff" + _MAGIC + bytes(3000),
    }


def say(port: int, said: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """Connect, say it, listen for a while, leave. What was answered, some KiB at most."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        stranger.settimeout(patience_s)
        while len(heard) < 1 << 16 and (more := stranger.recv(4096)):
            heard += more
    return heard


def flood(port: int, bytes_max: int, begin: bytes = b"") -> int:
    """Say more and more until the other end has had enough, or so much. How much was taken."""
    taken = 0
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        stranger.sendall(begin)
        block = random.Random(1).randbytes(1 << 16)
        while taken < bytes_max:
            taken += stranger.send(block)
    return taken


@contextlib.contextmanager
def crowd(ports: Sequence[int], each: int, said: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections to each port at a time, which say this and then nothing."""
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(each):
            for port in ports:
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                    stranger.sendall(said)
                    strangers.append(stranger)
        yield strangers


def _nobody(peer: str, life: bytes, last_life: bytes) -> str | None:
    return None
