"""`host:port` as settings, command lines and messages have it; an IPv6 literal in brackets. Pure."""

import ipaddress
import re
from typing import Final

from photon.core.errors import SettingsError

_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z0-9._-]{1,253}|\[(?P<ipv6>[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,64})?)\]):(?P<port>[1-9][0-9]{0,4})"
)
_SHOWN_CHARS_MAX: Final = 300


def split(text: str) -> tuple[str, int]:
    """Host without brackets, and port. ValueError with what `mistake` says."""
    wrong = mistake(text)
    if wrong is not None:
        raise ValueError(wrong)
    host, port = parts(text)
    return host, int(port)


def mistake(text: str) -> str | None:
    """What is wrong with an address, or None."""
    found = _ADDRESS.fullmatch(text)
    if found and int(found["port"]) < 1 << 16 and (found["ipv6"] is None or _is_ipv6(found["ipv6"])):
        return None
    # A stranger's may be of any length.
    shown = text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
    return f"{shown!r} is no address: give HOST:PORT, with a port of 1 to 65535 ([HOST]:PORT for IPv6)"


def joined(host: str, port: object) -> str:
    """`host:port`, with the brackets that an IPv6 literal needs; `host` may have them."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def parts(text: str) -> tuple[str, str]:
    """The same as `split` of what may be no address: port 0 where any may be bound, a target of gRPC's."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), port


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def split_address(address: str, where: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port` -> both. SettingsError, which names `where` it stands."""
    try:
        return split(address)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from error
