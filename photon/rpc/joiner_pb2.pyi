from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("ids", "primary_ids", "times", "events", "tries", "ages", "identity")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    AGES_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    primary_ids: bytes
    times: bytes
    events: bytes
    tries: bytes
    ages: bytes
    identity: bytes
    def __init__(self, ids: _Optional[bytes] = ..., primary_ids: _Optional[bytes] = ..., times: _Optional[bytes] = ..., events: _Optional[bytes] = ..., tries: _Optional[bytes] = ..., ages: _Optional[bytes] = ..., identity: _Optional[bytes] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("outcomes", "reason_rows", "reasons")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASON_ROWS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    reason_rows: _containers.RepeatedScalarFieldContainer[int]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, outcomes: _Optional[bytes] = ..., reason_rows: _Optional[_Iterable[int]] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
