from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...

class PendingRequest(_message.Message):
    __slots__ = ("ids", "soonest")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SOONEST_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    soonest: int
    def __init__(self, ids: _Optional[bytes] = ..., soonest: _Optional[int] = ...) -> None: ...

class PendingResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
