from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class PushRequest(_message.Message):
    __slots__ = ("producer", "after", "number", "lines")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    producer: str
    after: int
    number: int
    lines: bytes
    def __init__(self, producer: _Optional[str] = ..., after: _Optional[int] = ..., number: _Optional[int] = ..., lines: _Optional[bytes] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("number", "size", "checksum")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    number: int
    size: int
    checksum: int
    def __init__(self, number: _Optional[int] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
