"""What recovery asks of the registry: leases, fences, releases (paper 3.3.3)."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final, Protocol

from photon.core.clock import Clock
from photon.core.errors import UnavailableError
from photon.core.fates import Released
from photon.recovery.plans import Plan
from photon.recovery.rules import Held, Life, Step, after_release, life_of
from spark.recovery.rules import Loss

RELEASE_IDS_MAX: Final = 1024
"""In one request; tokens are of up to a kilobyte each."""
RELEASE_S_MAX: Final = 60.0
"""For so long a shard may not know of the fence yet."""
LEASE_WAIT_S_MAX: Final = 60.0
"""A lease that runs for longer than that is not waited for, but of a run that has ended."""
_POLL_S: Final = 0.25
_MARGIN_S: Final = 0.2


class Registry(Protocol):
    """idregistry.client.RegistryClient."""

    def fence(self, incarnation: int) -> Any: ...

    def incarnations(self, incarnations: list[int]) -> Sequence[Any]: ...

    def release(
        self, ids: bytes, times: bytes, tokens_packed: Sequence[bytes], counts: Sequence[int]
    ) -> bytes: ...


def ask_lives(
    registry: Registry, losses: Sequence[Loss], named: Container[int], gone: bool, ended: bool
) -> list[Held]:
    """Without changing anything. `named`, `gone`, `ended`: recover_rules.life_of. UnavailableError."""
    states = registry.incarnations([loss.incarnation for loss in losses]) if losses else []
    return [
        life_of(loss, state.fenced, state.expires_in_s, loss.incarnation in named, gone, ended)
        for loss, state in zip(losses, states, strict=True)
    ]


def fence(
    registry: Registry, held: Sequence[Held], clock: Clock, sleep: Callable[[float], None]
) -> Mapping[int, tuple[bool, float]]:
    """Fence all whose leases are over, or are not renewed. Incarnation -> fenced, for how long it may run.

    The end of a lease is waited for once: that of a process that has ended comes, that of a living one does
    not. UnavailableError.
    """
    answers: dict[int, tuple[bool, float]] = {}
    ends_s: dict[int, float] = {}
    for one in held:
        number = one.loss.incarnation
        answer = registry.fence(number)
        answers[number] = answer.fenced, answer.expires_in_s
        ends = one.life is Life.OVER or answer.expires_in_s <= LEASE_WAIT_S_MAX
        if not answer.fenced and ends:
            ends_s[number] = clock.monotonic() + answer.expires_in_s + _MARGIN_S
    for number, end_s in sorted(ends_s.items(), key=lambda item: item[1]):
        sleep(max(0.0, end_s - clock.monotonic()))
        answer = registry.fence(number)
        answers[number] = answer.fenced, answer.expires_in_s
    return answers


def release(
    registry: Registry, plan: Plan, clock: Clock, sleep: Callable[[float], None], part: Callable[[], None]
) -> bytes:
    """The outcome of each id (core.fates.Released), final ones only. `part` is called after each request.

    UnavailableError: some are released, perhaps; the plan stays, and the next run goes on with it.
    """
    tokens = [token for token, count in zip(plan.tokens, plan.counts, strict=True) for _ in range(count)]
    outcomes = bytearray()
    deadline = clock.monotonic() + RELEASE_S_MAX
    for low in range(0, len(tokens), RELEASE_IDS_MAX):
        high = min(low + RELEASE_IDS_MAX, len(tokens))
        packed, counts = _segments(tokens[low:high])
        ids, times = plan.ids[16 * low : 16 * high], plan.times[8 * low : 8 * high]
        while after_release(answer := registry.release(ids, times, packed, counts)) is Step.RELEASE:
            if clock.monotonic() > deadline:
                raise UnavailableError(
                    f"{answer.count(Released.NOT_FENCED):,} events are not released: not every shard of the "
                    "registry knows of the fence. The plan is kept; run the same command again"
                )
            sleep(_POLL_S)
        outcomes += answer
        part()
    return bytes(outcomes)


def _segments(tokens: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    """Runs of the same token -> each once, with its length."""
    packed: list[bytes] = []
    counts: list[int] = []
    for token in tokens:
        if packed and packed[-1] == token:
            counts[-1] += 1
        else:
            packed.append(token)
            counts.append(1)
    return packed, counts
