from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    def __init__(self, ids: _Optional[bytes] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("outcomes", "events", "version")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    events: bytes
    version: int
    def __init__(self, outcomes: _Optional[bytes] = ..., events: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("ids", "events", "filled")
    IDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    FILLED_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    events: bytes
    filled: bool
    def __init__(self, ids: _Optional[bytes] = ..., events: _Optional[bytes] = ..., filled: _Optional[bool] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembersResponse(_message.Message):
    __slots__ = ("version", "members", "virtual_nodes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_NODES_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedScalarFieldContainer[str]
    virtual_nodes: int
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ..., virtual_nodes: _Optional[int] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("address", "life", "after")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    address: str
    life: int
    after: int
    def __init__(self, address: _Optional[str] = ..., life: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("life", "position", "serves", "leaves", "members", "stretches")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STRETCHES_FIELD_NUMBER: _ClassVar[int]
    life: int
    position: int
    serves: bool
    leaves: bool
    members: _containers.RepeatedScalarFieldContainer[str]
    stretches: _containers.RepeatedCompositeFieldContainer[Stretch]
    def __init__(self, life: _Optional[int] = ..., position: _Optional[int] = ..., serves: _Optional[bool] = ..., leaves: _Optional[bool] = ..., members: _Optional[_Iterable[str]] = ..., stretches: _Optional[_Iterable[_Union[Stretch, _Mapping]]] = ...) -> None: ...

class Stretch(_message.Message):
    __slots__ = ("key", "name", "head_bytes", "head", "start", "end", "ids", "starts", "lengths", "malformed", "newest_us")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    MALFORMED_FIELD_NUMBER: _ClassVar[int]
    NEWEST_US_FIELD_NUMBER: _ClassVar[int]
    key: str
    name: str
    head_bytes: int
    head: bytes
    start: int
    end: int
    ids: bytes
    starts: bytes
    lengths: bytes
    malformed: bytes
    newest_us: int
    def __init__(self, key: _Optional[str] = ..., name: _Optional[str] = ..., head_bytes: _Optional[int] = ..., head: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., ids: _Optional[bytes] = ..., starts: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., malformed: _Optional[bytes] = ..., newest_us: _Optional[int] = ...) -> None: ...

class ArrivalsRequest(_message.Message):
    __slots__ = ("after", "read_to_us")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    READ_TO_US_FIELD_NUMBER: _ClassVar[int]
    after: int
    read_to_us: int
    def __init__(self, after: _Optional[int] = ..., read_to_us: _Optional[int] = ...) -> None: ...

class ArrivalsResponse(_message.Message):
    __slots__ = ("ids", "position", "read_to_us", "version")
    IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    READ_TO_US_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    position: int
    read_to_us: int
    version: int
    def __init__(self, ids: _Optional[bytes] = ..., position: _Optional[int] = ..., read_to_us: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
