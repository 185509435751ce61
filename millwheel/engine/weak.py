"""Weak productions under way, and acknowledgements that wait for them (paper 6.1.3, Fig. 11).

A frame that left before a commit is *unsaved* until its receiver has acknowledged it or a commit has it. What
it was made of must not count as consumed before: a commit takes all that is unsaved with it, and without one
acknowledgements wait, each for what was made of the turns before it.
"""

from typing import Final, NamedTuple

from millwheel.engine.store import Changes, frame_row

STRAGGLER_US: Final = 1_000_000
"""How long a production may be unsaved before a commit is made for it."""
FrameKey = tuple[int, int]
"""Lane and number."""


class _Held(NamedTuple):
    """Acknowledgements, and the frames made since those before."""

    since: int
    acks: dict[int, int]
    frames: list[FrameKey]


class UnderWay:
    """Of one worker, for one thread."""

    def __init__(self, sequencer: int) -> None:
        self._number = sequencer << 32
        self._unsaved: dict[FrameKey, bytes] = {}
        """Those in the commit under way are among them."""
        self._saving: set[FrameKey] = set()
        self._made: list[FrameKey] = []
        """Since the last commit began."""
        self._held: list[_Held] = []

    def next_number(self) -> int:
        """Above all that a former owner gave: nobody can know which of them arrived."""
        self._number += 1
        return self._number

    def sent(self, frame: FrameKey, packed: bytes) -> None:
        self._unsaved[frame] = packed
        self._made.append(frame)

    def packed(self, frame: FrameKey) -> bytes | None:
        """One that the store may not have yet."""
        return self._unsaved.get(frame)

    def acked(self, frame: FrameKey) -> bool:
        """Whether the store has it, or will, so that it must leave it."""
        return self._unsaved.pop(frame, None) is None or frame in self._saving

    def begin_commit(self, changes: Changes, acks: dict[int, int], now: int) -> dict[int, int]:
        """Acknowledgements that may leave after a commit of the changes; frames are added to them if there
        are any, or if the oldest straggles.
        """
        if acks:
            self._held.append(_Held(now, acks, self._made))
        self._made = []
        due: list[_Held] = []
        while self._held and not any(frame in self._unsaved for frame in self._held[0].frames):
            due.append(self._held.pop(0))
        if changes or (self._held and not 0 <= now - self._held[0].since < STRAGGLER_US):
            changes.update((frame_row(*frame), packed) for frame, packed in self._unsaved.items())
            self._saving.update(self._unsaved)
            due += self._held
            self._held = []
        ready: dict[int, int] = {}
        for held in due:
            for lane, number in held.acks.items():
                ready[lane] = max(number, ready.get(lane, 0))
        return ready

    def committed(self) -> None:
        """The commit is durable."""
        for frame in self._saving:
            self._unsaved.pop(frame, None)
        self._saving.clear()
