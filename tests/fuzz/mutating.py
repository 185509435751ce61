"""Requests that are well-formed protobuf and otherwise anything: each field of each call mutated.

From the descriptors, so that a call or field that is added is fuzzed, too. What a caller may rightly ask for
and that would change the system for the other tests (a resharding, a replacement) is kept from being right.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from photon.core.ids import Token
from photon.core.settings import Settings, identity_digest
from photon.rpc import dispatcher_pb2, eventstore_pb2, idregistry_pb2, joiner_pb2
from tests.eventstore.kit import PACKER

SERVICES: Final = {
    "registry": idregistry_pb2.DESCRIPTOR.services_by_name["IdRegistry"],
    "eventstore": eventstore_pb2.DESCRIPTOR.services_by_name["EventStore"],
    "joiner": joiner_pb2.DESCRIPTOR.services_by_name["Joiner"],
    "dispatcher": dispatcher_pb2.DESCRIPTOR.services_by_name["Dispatcher"],
}

_F: Final = FieldDescriptor
_GIANT: Final = 3 << 20
_INTEGERS: Final[Mapping[int, tuple[int, int]]] = {
    _F.TYPE_UINT32: (0, (1 << 32) - 1),
    _F.TYPE_UINT64: (0, (1 << 64) - 1),
    _F.TYPE_FIXED64: (0, (1 << 64) - 1),
    _F.TYPE_SINT64: (-(1 << 63), (1 << 63) - 1),
}
_FAR: Final = [-(1 << 63), -1, 1, 1 << 62, (1 << 63) - 1]
"""Times at which no resharding can begin."""

_IDS: Final = PACKER.pack([f"stranger-{n}" for n in range(3)])
_KNOWN: Final = PACKER.pack(["query-0", "query-1", "query-2"])
_TIMES: Final = struct.pack("<3q", 1, 2, 3)
_TOKEN: Final = Token("stranger:1", 7, 1).pack()
_LINES: Final = b'{"id":"a","primary_id":"query-0"}\n' * 3

_RIGHT: Final[Mapping[str, Mapping[str, Any]]] = {
    "Commit": {"ids": _IDS, "times": _TIMES, "token": _TOKEN},
    "Release": {"ids": _IDS, "times": _TIMES, "tokens": [_TOKEN], "counts": [3]},
    "Scan": {"fresh": True, "ids": b"i" * 16},
    "KeepAlive": {"address": "stranger:1", "incarnation": 7, "lease_s": 1.0},
    "Fence": {"incarnation": 7},
    "Incarnations": {"incarnations": [7]},
    "Dismiss": {"incarnations": [7]},
    "Hold": {"name": "dispatcher-east", "oldest_us": 1},
    "Reshard": {"shards": 2, "at_us": 1},
    "Replace": {"old": "nobody"},
    "Set": {"retire": "nobody"},
    "Beat": {"group": "fuzzed", "name": "m", "life": 1, "address": "127.0.0.1:9", "shares": 2},
    "Drain": {"group": "fuzzed", "name": "m", "life": 1},
    "Write": {"group": "fuzzed", "share": 0, "sequencer": 1, "keys": [b"k"], "values": [b"v"]},
    "Put": {"ids": _IDS, "events": b"{}\n" * 3},
    "Follow": {"address": "127.0.0.1:9", "life": 1, "after": 1},
    "Join": {
        "ids": _IDS,
        "primary_ids": _KNOWN,
        "times": _TIMES,
        "events": _LINES,
        "tries": struct.pack("<3I", 0, 1, 2),
        "ages": _TIMES,
        "identity": identity_digest(Settings()),
    },
    "Pending": {"ids": _IDS},
}
_LOOKUPS: Final[Mapping[str, Mapping[str, Any]]] = {
    "registry": {"ids": _IDS, "times": _TIMES},
    "eventstore": {"ids": _KNOWN + _IDS},
}
_NEVER_RIGHT: Final = ("Reshard", "Replace", "Set")
_ONLY_VALUES: Final[Mapping[str, list[Any]]] = {
    "ReshardRequest.at_us": _FAR,
    "ReplaceRequest.old": ["", "nobody", "r1", "\0", "x" * _GIANT],
    # An address that can be dialed would be told to all, for a minute.
    "FollowRequest.address": ["", "x", ":", "a:b", "127.0.0.1:", "\n:1", "x" * _GIANT],
}
_ONLY: Final = {name: st.sampled_from(values) for name, values in _ONLY_VALUES.items()}

_ODD_LINES: Final = [b"}\n" * 3, b"x\n" * 3, b"\n" * 3, b"{}" * 3, b"{}\n" * 4, b"\xff{}\n" * 3, b"{} \n" * 3]
_ODD_BYTES: Final = [
    b"",
    b"\0",
    bytes(15),
    bytes(16),
    bytes(48),
    b"\xff" * 48,
    b"\xff" * 24,
    bytes(24),
    struct.pack("<3q", -(1 << 63), (1 << 63) - 1, 0),
    b"\xff" * 12,
    bytes(16 * 65_537),
    bytes(_GIANT),
    b"\n" * _GIANT,
    *_ODD_LINES,
]
_ODD_TEXT: Final = ["", "x", "r0", "127.0.0.1:1", "a:b", "-", "\0", "\n", "../../up", "[::1]:0", "x" * _GIANT]
_ODD: Final[Mapping[int, Sequence[Any]]] = {
    _F.TYPE_UINT32: [0, 1, 2, 1 << 31, (1 << 32) - 1],
    _F.TYPE_UINT64: [0, 1, 2, 1 << 63, (1 << 64) - 1],
    _F.TYPE_FIXED64: [0, 1, 2, 1 << 63, (1 << 64) - 1],
    _F.TYPE_SINT64: _FAR,
    _F.TYPE_BOOL: [False, True],
    _F.TYPE_DOUBLE: [0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")],
    _F.TYPE_BYTES: _ODD_BYTES,
    _F.TYPE_STRING: _ODD_TEXT,
}


def right(role: str, method: str) -> dict[str, Any]:
    """Fields with which the call is in order."""
    return dict(_LOOKUPS[role] if method == "Lookup" else _RIGHT.get(method, {}))


def requests(role: str, method: MethodDescriptor) -> st.SearchStrategy[Message]:
    """Right ones with a field or two that are anything, or everything anything."""
    make = message_factory.GetMessageClass(method.input_type)
    fields = {field.name: _values(method.input_type.name, field) for field in method.input_type.fields}
    if not fields:
        return st.builds(make)
    base = right(role, method.name)

    def build(mutated: Mapping[str, Any]) -> Message:
        return make(**(base | dict(mutated)))

    some = st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=2, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names})).map(
        build
    )


def corners(role: str, method: MethodDescriptor) -> Iterator[Message]:
    """The right request, and it with each field in turn set to each of its odd values."""
    make = message_factory.GetMessageClass(method.input_type)
    base = right(role, method.name)
    if method.name not in _NEVER_RIGHT:
        yield make(**base)
    for field in method.input_type.fields:
        only = _ONLY_VALUES.get(f"{method.input_type.name}.{field.name}")
        for value in only or _ODD.get(field.type, ()):
            yield make(**(base | {field.name: [value] * 3 if field.is_repeated else value}))


def _values(message: str, field: FieldDescriptor) -> st.SearchStrategy[Any]:
    only = _ONLY.get(f"{message}.{field.name}")
    if only is not None:
        return only
    if field.type == _F.TYPE_MESSAGE:
        one = _nested(field)
    else:
        one = st.sampled_from(_ODD[field.type]) | _SCALARS[field.type](field)
    if not field.is_repeated:
        return one
    return st.one_of(st.lists(one, max_size=5), st.tuples(one, st.sampled_from([2, 3, 5000])).map(_repeated))


def _repeated(value_and_count: tuple[Any, int]) -> list[Any]:
    """A giant only a few times: it is the server that is to be tried."""
    value, count = value_and_count
    giant = isinstance(value, bytes | str) and len(value) > 100
    return [value] * (min(count, 3) if giant else count)


def _nested(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    inner = field.message_type
    make = message_factory.GetMessageClass(inner)
    return st.fixed_dictionaries({f.name: _values(inner.name, f) for f in inner.fields}).map(
        lambda values: make(**values)
    )


def _integers(field: FieldDescriptor) -> st.SearchStrategy[int]:
    return st.integers(*_INTEGERS[field.type])


def _bytes(field: FieldDescriptor) -> st.SearchStrategy[bytes]:
    whole = st.integers(0, 6).flatmap(lambda count: st.binary(min_size=16 * count, max_size=16 * count))
    times = st.lists(st.sampled_from([*_FAR, 0]), max_size=6).map(lambda t: struct.pack(f"<{len(t)}q", *t))
    pieces = st.sampled_from([b"", b"{}", b"}", b"{", b"null", b"\xff", b"\0", b"x", b'{"a":1} ', b"{}\r"])
    lines = st.lists(pieces, max_size=4).map(lambda found: b"\n".join(found) + b"\n")
    three = st.tuples(*[pieces] * 3).map(lambda found: b"\n".join(found) + b"\n")
    return st.one_of(st.binary(max_size=70), whole, times, lines, three)


def _strings(field: FieldDescriptor) -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


_SCALARS: Final[Mapping[int, Callable[[FieldDescriptor], st.SearchStrategy[Any]]]] = {
    _F.TYPE_UINT32: _integers,
    _F.TYPE_UINT64: _integers,
    _F.TYPE_FIXED64: _integers,
    _F.TYPE_SINT64: _integers,
    _F.TYPE_BOOL: lambda field: st.booleans(),
    _F.TYPE_DOUBLE: lambda field: st.floats(),
    _F.TYPE_BYTES: _bytes,
    _F.TYPE_STRING: _strings,
}
