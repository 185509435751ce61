"""The bounds and times of the log. Frozen, checked once."""

from dataclasses import dataclass, fields

from photon.core.errors import SettingsError

MIB = 1 << 20
GIB = 1 << 30
# Room in a frame beside the commands: headers of the entries and of the message.
FRAME_SLACK_BYTES = MIB


@dataclass(frozen=True, slots=True)
class RaftTiming:
    """Times in seconds. For links of 100 ms: election 1-2, fallback 2-5."""

    election_s_min: float = 0.25
    election_s_max: float = 0.5
    heartbeat_s: float = 0.05
    # A leader that has not heard from a majority for so long steps down.
    leader_fallback_s: float = 1.0
    reconnect_s_min: float = 0.1
    reconnect_s_max: float = 0.3
    # A proposal is answered `Unknown` after so long, whatever else happens.
    proposal_s: float = 10.0
    # A link is closed when the peer said nothing for so long (it says something every quarter of it).
    silence_s: float = 5.0

    def __post_init__(self) -> None:
        """Raise SettingsError for times that can't work together."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise SettingsError(f"RaftTiming.{field.name}: must be above 0 seconds")
        if self.election_s_min <= 3 * self.heartbeat_s:
            raise SettingsError("RaftTiming.election_s_min: must be above three times heartbeat_s")
        if self.election_s_max <= self.election_s_min:
            raise SettingsError("RaftTiming.election_s_max: must be above election_s_min")
        if self.leader_fallback_s <= 3 * self.heartbeat_s:
            raise SettingsError("RaftTiming.leader_fallback_s: must be above three times heartbeat_s")
        if self.reconnect_s_max < self.reconnect_s_min:
            raise SettingsError("RaftTiming.reconnect_s_max: must not be below reconnect_s_min")
        if self.silence_s <= 4 * self.heartbeat_s:
            raise SettingsError("RaftTiming.silence_s: must be above four times heartbeat_s")


@dataclass(frozen=True, slots=True)
class RaftLimits:
    """Sizes and counts. `*_bytes` count the commands themselves."""

    # A larger command is refused; it always fits one AppendEntries.
    command_bytes_max: int = 2 * MIB
    # Commands proposed and not yet decided, a group.
    in_flight_max: int = 64
    # An AppendEntries carries entries up to this size (and at least one).
    batch_bytes: int = 4 * MIB
    # Bytes that may wait for one peer's socket; past it no more entries are queued, far past it the link
    # drops.
    outgoing_bytes: int = 16 * MIB
    # Compaction: a snapshot is due when this much was applied since the last one.
    compact_entries: int = 10_000
    compact_bytes: int = 64 * MIB
    # Entries before a snapshot that are kept for followers which lag a little.
    tail_entries: int = 1_000
    tail_bytes: int = 16 * MIB
    segment_bytes: int = 16 * MIB
    # A piece of a snapshot on the wire.
    snapshot_piece_bytes: int = MIB
    # A longer snapshot of a leader is refused: a faulty one must not fill the disk.
    snapshot_bytes_max: int = 64 * GIB
    # One turn applies no longer than this (and at least one command), so that neither heartbeats nor new
    # commands wait for a replay. A turn costs so little beside it that the replay takes no longer.
    apply_turn_s: float = 0.004

    def __post_init__(self) -> None:
        """Raise SettingsError for bounds that can't hold together."""
        for field in fields(self):
            if getattr(self, field.name) <= 0 and not field.name.startswith("tail_"):
                raise SettingsError(f"RaftLimits.{field.name}: must be above 0")
        if self.batch_bytes < self.command_bytes_max:
            raise SettingsError("RaftLimits.batch_bytes: must not be below command_bytes_max")
        if self.outgoing_bytes < self.batch_bytes + self.snapshot_piece_bytes:
            raise SettingsError("RaftLimits.outgoing_bytes: must hold a batch and a piece of a snapshot")
        if self.compact_entries < 2 or self.tail_entries < 0 or self.tail_bytes < 0:
            raise SettingsError(
                "RaftLimits: compact_entries is 2 or more, tail_entries and tail_bytes 0 or more"
            )

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame a peer may send."""
        return max(self.batch_bytes + self.command_bytes_max, self.snapshot_piece_bytes) + FRAME_SLACK_BYTES
