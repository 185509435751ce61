"""An IdRegistry of the tests' own that keeps its promises: in memory or, for several processes, in a file."""

import fcntl
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

from idregistry.client import Held, check_registry
from idregistry.rules.commands import Standing
from idregistry.rules.surveys import Account
from photon.core.accounts import NOTHING, Sum, plus, sums_by_day, window_of
from photon.core.columns import pack_times, split_ids, unpack_times
from photon.core.errors import FencedError, SettingsMismatchError, UnavailableError
from photon.core.fates import Committed, Registered, Released
from photon.core.ids import parse_token


class FakeRegistry:
    """Ids, leases and fences (paper 2.1; design: "Recovery is fenced"). For many threads at once."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: where the state is that several processes share."""
        self.tokens: dict[bytes, bytes] = {}
        self.times: dict[bytes, int] = {}
        self.expired: set[bytes] = set()
        self.boundary_us = -(1 << 63)
        """No event before it is registered."""
        self.reached_us: int | None = None
        """The time that dispatchers are told when they report what they hold."""
        self.reports: list[int | None] = []
        self.holds: set[str] = set()
        self.fences: set[int] = set()
        self.dismissed: set[int] = set()
        self.leases: dict[int, float] = {}
        """Incarnation -> until when it has its lease, by the machine's clock."""
        self.settings = b""
        """Digest of those that it was founded with, by the first that tells one."""
        self.pending: dict[bytes, int] = {}
        """For so many lookups a commit of it is under way; then it is as it stands above."""
        self.fails: Exception | None = None
        """What lookups meet with."""
        self.calls = 0
        """Lookups."""
        self.commits = 0
        self.asked_leases: list[tuple[str, int, float]] = []
        self.holders: list[str] = []
        """Addresses of joiners that hold leases."""
        self.failures: list[str] = []
        """What befalls the next commits: "before" it is done or "after", or "" for nothing."""
        self.founded = "0" * 32
        """Its identity."""
        self._recognised: tuple[Path, str] | None = None
        self.down = False
        self.silent_to_leases = False
        self.before: Callable[[str, int], None] = lambda call, incarnation: None
        """Called with "commit" or "lease" before anything is done; may wait or raise."""
        self._lock = threading.Lock()
        self._path = path
        with self._state():
            pass

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        incarnation = parse_token(token).incarnation
        self.before("commit", incarnation)
        with self._state():
            self.commits += 1
            failure = self.failures.pop(0) if self.failures else ""
            if self.down or failure == "before":
                raise UnavailableError("registry: no quorum")
            keys = split_ids(ids)
            if incarnation in self.fences:
                return bytes([Committed.FENCED]) * len(keys)
            keyed = dict(zip(keys, unpack_times(times).tolist(), strict=True))
            expired = {
                key for key, time_us in keyed.items() if key in self.expired or time_us < self.boundary_us
            }
            for key, time_us in keyed.items():
                if key not in expired and self.tokens.setdefault(key, token) == token:
                    self.times[key] = time_us
            answer = bytes(Committed.EXPIRED if key in expired else self._outcome(key, token) for key in keys)
        if failure == "after":
            raise UnavailableError("registry: the answer was lost")
        return answer

    @property
    def present(self) -> Set[bytes]:
        """Ids that are registered, by whatever token."""
        return self.tokens.keys()

    @present.setter
    def present(self, ids: Iterable[bytes]) -> None:
        self.tokens = dict.fromkeys(ids, b"")

    def lookup(self, ids: bytes, times: bytes, tell_pending: bool) -> bytes:
        assert tell_pending
        assert len(ids) == 2 * len(times)
        self.calls += 1
        if self.fails is not None:
            raise self.fails
        return bytes(map(self._registered, split_ids(ids)))

    def lease_holders(self) -> list[str]:
        if self.fails is not None:
            raise self.fails
        return self.holders

    def hold(self, name: str, oldest_us: int | None) -> Held:
        self.reports.append(oldest_us)
        self.holds.add(name)
        return Held(self.boundary_us, self.reached_us)

    def release_hold(self, name: str) -> None:
        self.holds.remove(name)

    def identity(self) -> str:
        return self.founded

    def recognise(self, home: Path) -> None:
        check_registry(home, self.identity())
        self._recognised = home, self.founded

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        self.before("lease", incarnation)
        with self._state():
            self.asked_leases.append((token_address, incarnation, lease_s))
            if self.down or self.silent_to_leases:
                raise UnavailableError("registry: no quorum")
            if self._recognised is not None and self._recognised[1] != self.founded:
                check_registry(self._recognised[0], self.founded)
            if incarnation in self.fences:
                raise FencedError(f"incarnation {incarnation:016x} is fenced")
            if settings and self.settings not in (b"", settings):
                raise SettingsMismatchError("the registry was founded with other settings")
            self.settings = self.settings or settings
            self.leases[incarnation] = time.monotonic() + lease_s

    def dismiss(self, incarnations: Sequence[int], timeout_s: float | None = None) -> None:
        with self._state():
            if self.down:
                raise UnavailableError("registry: no quorum")
            self.dismissed.update(incarnations)

    def incarnations(self, incarnations: Sequence[int]) -> list[Standing]:
        with self._state():
            return [Standing(one in self.fences, 0.0) for one in incarnations]

    def account(self, incarnations: Collection[int], address: str, window: int) -> Account:
        """By one shard, which forgets nothing and tells all windows apart."""
        days: dict[tuple[int, int], Sum] = {}
        with self._state():
            for key, packed in self.tokens.items():
                token = parse_token(packed)
                asked = token.incarnation in incarnations or token.address == address
                if asked and window_of(token.time_us) < window:
                    for day, sum_ in sums_by_day(key, pack_times([self.times[key]])).items():
                        place = token.incarnation, day
                        days[place] = plus(days.get(place, NOTHING), sum_)
        return Account(days, -(1 << 62), -(1 << 62))

    def release(self, ids: bytes, times: bytes, tokens: Sequence[bytes], counts: Sequence[int]) -> bytes:
        wanted = [token for token, count in zip(tokens, counts, strict=True) for _ in range(count)]
        with self._state():
            if self.down:
                raise UnavailableError("registry: no quorum")
            return bytes(map(self._released, split_ids(ids), wanted))

    def release_lost(self, key: bytes) -> bool:
        """What recovery does with an id that stands nowhere: forget it, if it is of a fenced incarnation."""
        with self._state():
            token = self.tokens.get(key)
            return token is not None and self._released(key, token) is Released.RELEASED

    def _outcome(self, key: bytes, token: bytes) -> Committed:
        return Committed.WON if self.tokens[key] == token else Committed.DUPLICATE

    def _released(self, key: bytes, token: bytes) -> Released:
        if parse_token(token).incarnation not in self.fences:
            return Released.NOT_FENCED
        if self.tokens.get(key, token) != token:
            return Released.OTHER
        return Released.ABSENT if self.tokens.pop(key, None) is None else Released.RELEASED

    def _registered(self, key: bytes) -> Registered:
        if self.pending.get(key, 0) > 0:
            self.pending[key] -= 1
            return Registered.PENDING
        if key in self.tokens:
            return Registered.PRESENT
        return Registered.EXPIRED if key in self.expired else Registered.ABSENT

    @contextmanager
    def _state(self) -> Iterator[None]:
        """One call at a time. A process that is killed in the midst leaves the file as it was."""
        if self._path is None:
            with self._lock:
                yield
            return
        new = self._path.with_suffix(f".{os.getpid()}")
        with self._lock, self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self.tokens, self.fences, self.leases, self.times = pickle.loads(self._path.read_bytes())
            yield
            new.write_bytes(pickle.dumps((self.tokens, self.fences, self.leases, self.times)))
            new.rename(self._path)
