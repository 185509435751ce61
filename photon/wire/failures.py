"""What a failed call says, and how to mend it where TLS is why: gRPC tells the one, in OpenSSL's words."""

from typing import Any, Final

import grpc

_AGREE: Final = "set [tls] at both ends or at none"
_MENDS: Final = (
    ("WRONG_VERSION_NUMBER", f"the server does not speak TLS, which is set here: {_AGREE}"),
    (
        "Hostname Verification Check failed",
        "its certificate does not carry the name that clients look for: sign one that carries tls.name "
        "(`photon certs`), and set the same tls.name at both ends",
    ),
    (
        "certificate has expired",
        "the server's certificate has expired: sign a new one and restart the server, or set the clock",
    ),
    ("certificate is not yet valid", "the server's certificate is not valid yet: set the clocks"),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "the server's certificate is not of the CA that tls.ca names here: take both from one CA",
    ),
    (
        "Socket closed",
        f"it closed the connection at once: if it serves, it may want TLS ({_AGREE}) or refuse the "
        "certificate of this end (expired, or not of the CA that tls.ca names there); its log says which",
    ),
)
_WHILE_CONNECTING: Final = ("failed to connect to all addresses", "connections to all backends failing")
_NEVER_SENT: Final = (
    *_WHILE_CONNECTING,
    "errors resolving",
    "address lookup failed",
    "DNS resolution failed",
)
"""What gRPC says of a call for which there was no connection; its status code is that of any other failure.
Where it is not recognised, the call counts as one that was sent, and a name is found as late as ever."""


def failure_of(error: grpc.RpcError) -> str:
    """`unavailable: mend; why`: who has no room for all of it cuts gRPC's words."""
    details = error.details() or ""
    mend = mend_of(details)
    return f"{error.code().name.lower()}: {f'{mend}; ' if mend else ''}{details}"


def mend_of(details: str) -> str | None:
    """Of a failed connection; None where TLS has no part in it."""
    if not any(sign in details for sign in _WHILE_CONNECTING):
        return None
    return next((mend for sign, mend in _MENDS if sign in details), None)


def was_never_sent(error: Any) -> bool:
    """Whether a call ended so (an RpcError, or a call's future) because there was no connection for it."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return any(sign in details for sign in _NEVER_SENT)
