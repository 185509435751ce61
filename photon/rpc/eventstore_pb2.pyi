from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("ids", "store", "missed")
    IDS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    store: bytes
    missed: bool
    def __init__(self, ids: _Optional[bytes] = ..., store: _Optional[bytes] = ..., missed: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("ids", "events", "store")
    IDS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    events: bytes
    store: bytes
    def __init__(self, ids: _Optional[bytes] = ..., events: _Optional[bytes] = ..., store: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembersResponse(_message.Message):
    __slots__ = ("version", "store", "caches", "virtual_nodes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    CACHES_FIELD_NUMBER: _ClassVar[int]
    VIRTUAL_NODES_FIELD_NUMBER: _ClassVar[int]
    version: int
    store: bytes
    caches: _containers.RepeatedScalarFieldContainer[str]
    virtual_nodes: int
    def __init__(self, version: _Optional[int] = ..., store: _Optional[bytes] = ..., caches: _Optional[_Iterable[str]] = ..., virtual_nodes: _Optional[int] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("address", "leaving")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    address: str
    leaving: bool
    def __init__(self, address: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ArrivalsRequest(_message.Message):
    __slots__ = ("after", "read_to_us")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    READ_TO_US_FIELD_NUMBER: _ClassVar[int]
    after: int
    read_to_us: int
    def __init__(self, after: _Optional[int] = ..., read_to_us: _Optional[int] = ...) -> None: ...

class ArrivalsResponse(_message.Message):
    __slots__ = ("ids", "position", "read_to_us")
    IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    READ_TO_US_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    position: int
    read_to_us: int
    def __init__(self, ids: _Optional[bytes] = ..., position: _Optional[int] = ..., read_to_us: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
