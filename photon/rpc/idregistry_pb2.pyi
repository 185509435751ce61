from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LookupRequest(_message.Message):
    __slots__ = ("shard", "ids", "times", "tell_pending")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TELL_PENDING_FIELD_NUMBER: _ClassVar[int]
    shard: int
    ids: bytes
    times: bytes
    tell_pending: bool
    def __init__(self, shard: _Optional[int] = ..., ids: _Optional[bytes] = ..., times: _Optional[bytes] = ..., tell_pending: _Optional[bool] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("shard", "ids", "times", "token", "route", "registry")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    shard: int
    ids: bytes
    times: bytes
    token: bytes
    route: Route
    registry: bytes
    def __init__(self, shard: _Optional[int] = ..., ids: _Optional[bytes] = ..., times: _Optional[bytes] = ..., token: _Optional[bytes] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., registry: _Optional[bytes] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("known_us", "guard")
    KNOWN_US_FIELD_NUMBER: _ClassVar[int]
    GUARD_FIELD_NUMBER: _ClassVar[int]
    known_us: int
    guard: bool
    def __init__(self, known_us: _Optional[int] = ..., guard: _Optional[bool] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("shard", "ids", "times", "tokens", "counts", "route", "given_back")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    shard: int
    ids: bytes
    times: bytes
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    counts: _containers.RepeatedScalarFieldContainer[int]
    route: Route
    given_back: bool
    def __init__(self, shard: _Optional[int] = ..., ids: _Optional[bytes] = ..., times: _Optional[bytes] = ..., tokens: _Optional[_Iterable[bytes]] = ..., counts: _Optional[_Iterable[int]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., given_back: _Optional[bool] = ...) -> None: ...

class OutcomesResponse(_message.Message):
    __slots__ = ("outcomes", "version")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    version: int
    def __init__(self, outcomes: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("shard", "fresh", "ids")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    fresh: bool
    ids: bytes
    def __init__(self, shard: _Optional[int] = ..., fresh: _Optional[bool] = ..., ids: _Optional[bytes] = ...) -> None: ...

class ScanResponse(_message.Message):
    __slots__ = ("ids", "times", "holders", "holder_of", "token_times", "boundary_us", "guards")
    IDS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_OF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TIMES_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_US_FIELD_NUMBER: _ClassVar[int]
    GUARDS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    times: bytes
    holders: _containers.RepeatedScalarFieldContainer[bytes]
    holder_of: bytes
    token_times: bytes
    boundary_us: int
    guards: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, ids: _Optional[bytes] = ..., times: _Optional[bytes] = ..., holders: _Optional[_Iterable[bytes]] = ..., holder_of: _Optional[bytes] = ..., token_times: _Optional[bytes] = ..., boundary_us: _Optional[int] = ..., guards: _Optional[_Iterable[bool]] = ...) -> None: ...

class AccountRequest(_message.Message):
    __slots__ = ("shard", "incarnations", "address", "window")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    shard: int
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    address: str
    window: int
    def __init__(self, shard: _Optional[int] = ..., incarnations: _Optional[_Iterable[int]] = ..., address: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

class AccountResponse(_message.Message):
    __slots__ = ("incarnations", "days", "events", "sums", "first_day", "since")
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    DAYS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DAY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    days: _containers.RepeatedScalarFieldContainer[int]
    events: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    first_day: int
    since: int
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ..., days: _Optional[_Iterable[int]] = ..., events: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[int]] = ..., first_day: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class DirectoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Replica(_message.Message):
    __slots__ = ("name", "raft_host", "raft_port", "grpc", "set")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RAFT_HOST_FIELD_NUMBER: _ClassVar[int]
    RAFT_PORT_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    name: str
    raft_host: str
    raft_port: int
    grpc: str
    set: str
    def __init__(self, name: _Optional[str] = ..., raft_host: _Optional[str] = ..., raft_port: _Optional[int] = ..., grpc: _Optional[str] = ..., set: _Optional[str] = ...) -> None: ...

class DirectoryResponse(_message.Message):
    __slots__ = ("configuration", "replicas", "leaders", "abandoned_why", "removed", "led", "identity", "holders", "shards", "homes")
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LEADERS_FIELD_NUMBER: _ClassVar[int]
    ABANDONED_WHY_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    LED_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    configuration: bytes
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    leaders: _containers.RepeatedScalarFieldContainer[str]
    abandoned_why: str
    removed: _containers.RepeatedScalarFieldContainer[str]
    led: bool
    identity: bytes
    holders: _containers.RepeatedScalarFieldContainer[str]
    shards: _containers.RepeatedScalarFieldContainer[int]
    homes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, configuration: _Optional[bytes] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., leaders: _Optional[_Iterable[str]] = ..., abandoned_why: _Optional[str] = ..., removed: _Optional[_Iterable[str]] = ..., led: _Optional[bool] = ..., identity: _Optional[bytes] = ..., holders: _Optional[_Iterable[str]] = ..., shards: _Optional[_Iterable[int]] = ..., homes: _Optional[_Iterable[str]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("address", "incarnation", "lease_s", "settings")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    lease_s: float
    settings: bytes
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ..., lease_s: _Optional[float] = ..., settings: _Optional[bytes] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("fenced", "mismatched", "registry")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    mismatched: bool
    registry: bytes
    def __init__(self, fenced: _Optional[bool] = ..., mismatched: _Optional[bool] = ..., registry: _Optional[bytes] = ...) -> None: ...

class FenceRequest(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class FenceResponse(_message.Message):
    __slots__ = ("fenced", "expires_in_s")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    expires_in_s: float
    def __init__(self, fenced: _Optional[bool] = ..., expires_in_s: _Optional[float] = ...) -> None: ...

class IncarnationsRequest(_message.Message):
    __slots__ = ("incarnations",)
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class IncarnationsResponse(_message.Message):
    __slots__ = ("fenced", "expires_in_s")
    FENCED_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    fenced: _containers.RepeatedScalarFieldContainer[bool]
    expires_in_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, fenced: _Optional[_Iterable[bool]] = ..., expires_in_s: _Optional[_Iterable[float]] = ...) -> None: ...

class DismissRequest(_message.Message):
    __slots__ = ("incarnations",)
    INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    incarnations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnations: _Optional[_Iterable[int]] = ...) -> None: ...

class DismissResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReshardRequest(_message.Message):
    __slots__ = ("shards", "at_us")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    AT_US_FIELD_NUMBER: _ClassVar[int]
    shards: int
    at_us: int
    def __init__(self, shards: _Optional[int] = ..., at_us: _Optional[int] = ...) -> None: ...

class ReshardResponse(_message.Message):
    __slots__ = ("version", "start_us")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_US_FIELD_NUMBER: _ClassVar[int]
    version: int
    start_us: int
    def __init__(self, version: _Optional[int] = ..., start_us: _Optional[int] = ...) -> None: ...

class ReplaceRequest(_message.Message):
    __slots__ = ("old", "replica", "cancel")
    OLD_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    old: str
    replica: Replica
    cancel: str
    def __init__(self, old: _Optional[str] = ..., replica: _Optional[_Union[Replica, _Mapping]] = ..., cancel: _Optional[str] = ...) -> None: ...

class ReplaceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRequest(_message.Message):
    __slots__ = ("add", "retire")
    ADD_FIELD_NUMBER: _ClassVar[int]
    RETIRE_FIELD_NUMBER: _ClassVar[int]
    add: _containers.RepeatedCompositeFieldContainer[Replica]
    retire: str
    def __init__(self, add: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., retire: _Optional[str] = ...) -> None: ...

class SetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("name", "oldest_us", "release")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLDEST_US_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    oldest_us: int
    release: bool
    def __init__(self, name: _Optional[str] = ..., oldest_us: _Optional[int] = ..., release: _Optional[bool] = ...) -> None: ...

class HoldResponse(_message.Message):
    __slots__ = ("boundary_us", "reached_us", "held")
    BOUNDARY_US_FIELD_NUMBER: _ClassVar[int]
    REACHED_US_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    boundary_us: int
    reached_us: int
    held: bool
    def __init__(self, boundary_us: _Optional[int] = ..., reached_us: _Optional[int] = ..., held: _Optional[bool] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("group", "name", "life", "address", "shares")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    group: str
    name: str
    life: int
    address: str
    shares: int
    def __init__(self, group: _Optional[str] = ..., name: _Optional[str] = ..., life: _Optional[int] = ..., address: _Optional[str] = ..., shares: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("group", "name", "life")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LIFE_FIELD_NUMBER: _ClassVar[int]
    group: str
    name: str
    life: int
    def __init__(self, group: _Optional[str] = ..., name: _Optional[str] = ..., life: _Optional[int] = ...) -> None: ...

class GroupResponse(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: bytes
    def __init__(self, group: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("group", "share", "sequencer", "keys", "values", "removed", "release", "read")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    group: str
    share: int
    sequencer: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    release: bool
    read: bool
    def __init__(self, group: _Optional[str] = ..., share: _Optional[int] = ..., sequencer: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., release: _Optional[bool] = ..., read: _Optional[bool] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("stands", "keys", "values", "written")
    STANDS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    stands: bool
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    written: int
    def __init__(self, stands: _Optional[bool] = ..., keys: _Optional[_Iterable[bytes]] = ..., values: _Optional[_Iterable[bytes]] = ..., written: _Optional[int] = ...) -> None: ...

class NowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NowResponse(_message.Message):
    __slots__ = ("now_us", "shards")
    NOW_US_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    now_us: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardNow]
    def __init__(self, now_us: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardNow, _Mapping]]] = ...) -> None: ...

class ShardNow(_message.Message):
    __slots__ = ("group", "latest_us", "boundary_us", "fences", "prepared_version", "prepared_start_us", "prepared_fits", "voters", "learners")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LATEST_US_FIELD_NUMBER: _ClassVar[int]
    BOUNDARY_US_FIELD_NUMBER: _ClassVar[int]
    FENCES_FIELD_NUMBER: _ClassVar[int]
    PREPARED_VERSION_FIELD_NUMBER: _ClassVar[int]
    PREPARED_START_US_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FITS_FIELD_NUMBER: _ClassVar[int]
    VOTERS_FIELD_NUMBER: _ClassVar[int]
    LEARNERS_FIELD_NUMBER: _ClassVar[int]
    group: int
    latest_us: int
    boundary_us: int
    fences: int
    prepared_version: int
    prepared_start_us: int
    prepared_fits: bool
    voters: _containers.RepeatedScalarFieldContainer[str]
    learners: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, group: _Optional[int] = ..., latest_us: _Optional[int] = ..., boundary_us: _Optional[int] = ..., fences: _Optional[int] = ..., prepared_version: _Optional[int] = ..., prepared_start_us: _Optional[int] = ..., prepared_fits: _Optional[bool] = ..., voters: _Optional[_Iterable[str]] = ..., learners: _Optional[_Iterable[str]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: bytes
    def __init__(self, json: _Optional[bytes] = ...) -> None: ...
