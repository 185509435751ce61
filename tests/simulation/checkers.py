"""What must hold of a history, whoever made it. Pure: `check(history)` names what is broken.

Each rule states what no legal run can show. Where the order of two things is not known from outside (both
were under way at the same time), either is allowed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import isfunction
from itertools import combinations

from photon.core.fates import Committed, Registered, Released
from tests.simulation.history import (
    Asked,
    Bounded,
    Commit,
    Ended,
    Fence,
    Founded,
    GiveBack,
    History,
    Kept,
    Led,
    Lookup,
    Moved,
    Raise,
    Release,
    Seen,
    Told,
    Turned,
    Versioned,
)

WON, DUPLICATE, EXPIRED, FENCED = (
    Committed.WON,
    Committed.DUPLICATE,
    Committed.EXPIRED,
    Committed.FENCED,
)
_NEVER = float("inf")
TURN_SYNCS_MAX = 28


@dataclass(slots=True)
class Answer:
    """One id of one telling: first asked at, told at, what, to whom."""

    asked: float
    told: float
    outcome: int
    token: bytes
    incarnation: int
    time_us: int
    turn: int  # of the telling, in the history
    op: int


@dataclass(slots=True)
class Facts:
    """A history, by what the rules ask of it. All times are of the first asking."""

    history: History
    asked: dict[int, Asked] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    answers: dict[bytes, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    found: dict[bytes, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    # By id: who wanted it, since when.
    wanted: dict[bytes, dict[bytes, float]] = field(default_factory=lambda: defaultdict(dict))
    # When an id may have been taken from a token, at the earliest; never where it can't have been.
    releases: dict[tuple[bytes, bytes], float] = field(default_factory=dict)
    released: dict[bytes, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    attempts: Counter[int] = field(default_factory=Counter)  # by op: asked, less told
    fences: dict[int, float] = field(default_factory=dict)
    fenced: dict[int, float] = field(default_factory=dict)  # told at
    raised: list[tuple[float, int]] = field(default_factory=list)
    raised_told: list[tuple[float, int]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    incarnations: dict[bytes, int] = field(default_factory=dict)
    times: dict[bytes, int] = field(default_factory=dict)

    def expired(self, time_us: int, by: float) -> bool:
        """Whether the boundary may have been above this time by then."""
        return any(at <= by and time_us < boundary for at, boundary in self.raised)

    def others(self, key: bytes, token: bytes, by: float) -> bool:
        """Whether anybody else had wanted the id by then."""
        return any(at <= by for other, at in self.wanted[key].items() if other != token)

    def fenced_at(self, token: bytes) -> float:
        """When its incarnation may have been fenced, at the earliest."""
        return self.fences.get(self.incarnations.get(token, -1), _NEVER)

    def holders(self, key: bytes, time_us: int, since: float, until: float) -> set[bytes]:
        """Who certainly held the id all that time by a copy of that time: one at most, if all is well. Copies
        of other times may be of more shards, and held by one that lost in another of them."""
        return {
            answer.token
            for answer in self.answers.get(key, ())
            if answer.outcome == WON
            and answer.time_us == time_us
            and answer.told <= since
            and self.releases.get((key, answer.token), _NEVER) > until
            and not self.expired(answer.time_us, until)
        }


def facts_of(history: History) -> Facts:
    """Sort a history's events."""
    facts = Facts(history)
    for turn, event in enumerate(history):
        if isinstance(event, Asked):
            facts.attempts[event.op] += 1
            _ask(facts, event)
        elif isinstance(event, Told):
            facts.attempts[event.op] -= 1
            facts.told.add(event.op)
            _tell(facts, event, turn)
        elif isinstance(event, Ended):
            facts.ended.append(event)
    for op, first in facts.asked.items():
        if isinstance(first.act, Release):
            _may_release(facts, op, first.at, first.act)
    return facts


def _may_release(facts: Facts, op: int, asked: float, act: Release) -> None:
    """A release works if it was told so, or where an asking was never answered; not before the fence."""
    for key in act.ids:
        told = [answer.outcome for answer in facts.released[key] if answer.op == op]
        if facts.attempts[op] > 0 or Released.RELEASED in told:
            at = max(asked, facts.fenced_at(act.token))
            facts.releases[key, act.token] = min(at, facts.releases.get((key, act.token), _NEVER))


def _ask(facts: Facts, event: Asked) -> None:
    if event.op in facts.asked:
        return
    facts.asked[event.op] = event
    match event.act:
        case Commit(ids, times, token, incarnation):
            facts.incarnations[token] = incarnation
            for key, time_us in zip(ids, times, strict=True):
                facts.wanted[key].setdefault(token, event.at)
                facts.times[key] = time_us
        case GiveBack(ids, token):
            for key in ids:
                facts.releases[key, token] = min(event.at, facts.releases.get((key, token), _NEVER))
        case Fence(incarnations):
            for incarnation in incarnations:
                facts.fences.setdefault(incarnation, event.at)
        case Raise(boundary_us):
            facts.raised.append((event.at, boundary_us))


def _tell(facts: Facts, event: Told, turn: int) -> None:
    first = facts.asked[event.op]
    match first.act:
        case Commit(ids, times, token, incarnation):
            for key, time_us, outcome in zip(ids, times, event.outcomes, strict=True):
                answer = Answer(first.at, event.at, outcome, token, incarnation, time_us, turn, event.op)
                facts.answers[key].append(answer)
        case Release(ids, times, token):
            for key, time_us, outcome in zip(ids, times, event.outcomes, strict=True):
                answer = Answer(first.at, event.at, outcome, token, 0, time_us, turn, event.op)
                facts.released[key].append(answer)
        case Lookup(ids, times):
            for key, time_us, outcome in zip(ids, times, event.outcomes, strict=True):
                facts.found[key].append(Answer(first.at, event.at, outcome, b"", 0, time_us, turn, event.op))
        case Fence(incarnations):
            for incarnation in incarnations:
                facts.fenced.setdefault(incarnation, event.at)
        case Raise(boundary_us):
            facts.raised_told.append((event.at, boundary_us))


# -- the rules ---------------------------------------------------------------------------------------------


def two_winners(facts: Facts) -> Iterator[str]:
    """Two tokens are told that they won an id only if one of them was released in between."""
    for key, answers in facts.answers.items():
        first_win: dict[bytes, float] = {}
        for answer in answers:
            if answer.outcome == WON:
                first_win.setdefault(answer.token, answer.told)
        for one, other in combinations(first_win, 2):
            if not (
                facts.releases.get((key, one), _NEVER) <= first_win[other]
                or facts.releases.get((key, other), _NEVER) <= first_win[one]
            ):
                yield f"{key!r} was won by {one!r} and by {other!r}"


def forgotten(facts: Facts) -> Iterator[str]:
    """What was told to have won, or to be present, is held by every replica at the end."""
    for end in facts.ended:
        for key, answers in facts.answers.items():
            for token in {answer.token for answer in answers if answer.outcome == WON}:
                held = end.held.get(key)
                lawful = held == token or (key, token) in facts.releases or facts.times[key] < end.boundary_us
                if not lawful:
                    yield f"{end.node}: {key!r} was won by {token!r} and is held by {held!r}"
        for key, answers in facts.found.items():
            present = any(answer.outcome == Registered.PRESENT for answer in answers)
            released = any((key, token) in facts.releases for token in facts.wanted[key])
            if present and key not in end.held and not released and not facts.times[key] < end.boundary_us:
                yield f"{end.node}: {key!r} was looked up and present, and is not held"


def wrong_answers(facts: Facts) -> Iterator[str]:
    """A retry with the winner's token wins; nobody is turned away without a reason."""
    for key, answers in facts.answers.items():
        won: dict[bytes, float] = {}
        for answer in answers:
            token = answer.token
            if answer.outcome == WON:
                won.setdefault(token, answer.told)
                if facts.fenced.get(answer.incarnation, _NEVER) < answer.asked:
                    yield f"{key!r}: {token!r} won though it asked after it was fenced"
                continue
            if answer.outcome == DUPLICATE:
                excused = facts.releases.get((key, token), _NEVER) <= answer.told
                if token in won and not excused:
                    yield f"{key!r}: {token!r} had won, and its retry was told that it is a duplicate"
                if not facts.others(key, token, answer.told):
                    yield f"{key!r}: {token!r} was told of a duplicate, and nobody else had asked"
            elif answer.outcome == EXPIRED:
                if not facts.expired(answer.time_us, answer.told):
                    yield f"{key!r}: {token!r} was told that it is expired, and no boundary was that high"
            elif answer.outcome == FENCED:
                if facts.fences.get(answer.incarnation, _NEVER) > answer.told:
                    yield f"{key!r}: {token!r} was told that it is fenced, and nobody had fenced it"
            else:
                yield f"{key!r}: {token!r} was told {answer.outcome}"


def wrong_releases(facts: Facts) -> Iterator[str]:
    """An id is taken from its holder, and from nobody else, once the holder is fenced; and it stays taken."""
    for key, answers in facts.released.items():
        for answer in answers:
            token, outcome = answer.token, answer.outcome
            what = f"{key!r}: a release of {token!r}"
            fenced_told = facts.fenced.get(facts.incarnations.get(token, -1), _NEVER)
            holders = facts.holders(key, answer.time_us, answer.asked, answer.told)
            if outcome == Released.RELEASED:
                if facts.fenced_at(token) > answer.told:
                    yield f"{what} was done, and nobody had fenced it"
                if facts.wanted[key].get(token, _NEVER) > answer.told:
                    yield f"{what} was done, who had not asked for it"
                if holders - {token}:
                    yield f"{what} was done, and {holders} held it"
                for end in facts.ended:
                    if end.held.get(key) == token:
                        yield f"{what} was done, and {end.node} has it still"
            elif outcome == Released.NOT_FENCED:
                if fenced_told < answer.asked:
                    yield f"{what} was told that it is not fenced, and it was"
            elif outcome == Released.ABSENT:
                if holders:
                    yield f"{what} was told that the id is absent, and {holders} held it"
            elif outcome == Released.OTHER:
                if not facts.others(key, token, answer.told) or token in holders:
                    yield f"{what} was told of another, and none could have it"
            else:
                yield f"{what} was told {outcome}"


def wrong_give_backs(facts: Facts) -> Iterator[str]:
    """Who was told that it won gives nothing back, but what it lost since: fenced, or expired."""
    for event in facts.history:
        if isinstance(event, Asked) and isinstance(event.act, GiveBack):
            token, at = event.act.token, event.at
            for key in event.act.ids:
                for answer in facts.answers[key]:
                    lost = facts.fenced_at(token) <= at or facts.expired(answer.time_us, at)
                    if answer.token == token and answer.outcome == WON and answer.told <= at and not lost:
                        yield f"{key!r}: {token!r} had won, and gave it back"


def wrong_losers(facts: Facts) -> Iterator[str]:
    """Who holds an id at the end was never told that another does."""
    for end in facts.ended:
        for key, token in end.held.items():
            if token and token not in facts.wanted[key]:
                yield f"{end.node}: {key!r} is held by {token!r}, who never asked for it"
            if any((key, other) in facts.releases for other in facts.wanted[key]):
                continue
            for answer in facts.answers.get(key, ()):
                if answer.token == token and answer.outcome in (DUPLICATE, EXPIRED):
                    yield f"{end.node}: {key!r} is held by {token!r}, who was told {answer.outcome}"


def phantoms(facts: Facts) -> Iterator[str]:
    """A lookup finds nothing that nobody has asked to register."""
    for key, answers in facts.found.items():
        for answer in answers:
            if answer.outcome == Registered.PRESENT and not facts.others(key, b"", answer.told):
                yield f"{key!r} was looked up and present, and nobody had asked for it"
            if answer.outcome == Registered.EXPIRED and not facts.expired(answer.time_us, answer.told):
                yield f"{key!r} was looked up and expired, and no boundary was that high"


def diverged(facts: Facts) -> Iterator[str]:
    """All replicas apply the same commands in the same order, at every moment, and end alike."""
    seen: dict[int, bytes] = {}
    for event in facts.history:
        if isinstance(event, Moved) and seen.setdefault(event.count, event.digest) != event.digest:
            yield f"{event.node}: command {event.count} is another one, or was answered otherwise"
    for one, other in zip(facts.ended, facts.ended[1:], strict=False):
        if one.digest != other.digest or one.held != other.held:
            yield f"{one.node} and {other.node} end differently"


def boundary_back(facts: Facts) -> Iterator[str]:
    """A replica's boundary never goes back in a life; what was told is not below it at the end."""
    at: dict[tuple[str, int], int] = {}
    for event in facts.history:
        if isinstance(event, Bounded):
            before = at.get((event.node, event.life))
            if before is not None and event.boundary_us < before:
                yield f"{event.node}: the boundary went back from {before} to {event.boundary_us}"
            at[event.node, event.life] = event.boundary_us
    highest = max((boundary for _, boundary in facts.raised_told), default=None)
    for end in facts.ended:
        if highest is not None and end.boundary_us < highest:
            yield f"{end.node}: the boundary {highest} was acknowledged, it ends at {end.boundary_us}"


def version_back(facts: Facts) -> Iterator[str]:
    """Configurations only ever follow each other, on each replica of each group; and a version is one."""
    at: dict[tuple[str, int, int], int] = {}
    known: dict[int, bytes] = {}
    for event in facts.history:
        if isinstance(event, Versioned):
            who = event.node, event.life, event.group
            if event.version < at.get(who, 0):
                yield f"{event.node}: group {event.group} went back from {at[who]} to {event.version}"
            at[who] = event.version
            if known.setdefault(event.version, event.configuration) != event.configuration:
                yield f"{event.node}: group {event.group} has another version {event.version}"


def before_its_founding(facts: Facts) -> Iterator[str]:
    """A shard that comes again is told nothing of what was true before it came."""
    founded = {event.group: event.version for event in facts.history if isinstance(event, Founded)}
    for event in facts.history:
        if isinstance(event, Versioned) and event.version < founded.get(event.group, 0):
            yield (
                f"{event.node}: group {event.group} was given version {event.version}, and version "
                f"{founded[event.group]} founded it"
            )


def two_owners(facts: Facts) -> Iterator[str]:
    """A share has one owner under a sequencer."""
    owners: dict[tuple[int, int], str] = {}
    for event in facts.history:
        if isinstance(event, Kept):
            owner = owners.setdefault((event.share, event.sequencer), event.member)
            if owner != event.member:
                yield f"share {event.share}, sequencer {event.sequencer}: {owner} and {event.member} have it"


def kept_in_vain(facts: Facts) -> Iterator[str]:
    """Who takes a share up reads all that its former owners were told is kept; they keep nothing after it."""
    kept: dict[int, list[Kept]] = defaultdict(list)
    for event in facts.history:
        if isinstance(event, Kept):
            kept[event.share].append(event)
    for share, events in kept.items():
        for taken in (event for event in events if event.taken):
            before = (one for one in events if one.sequencer < taken.sequencer)
            most = max((one.count for one in before), default=0)
            if most > taken.count:
                yield f"share {share}: {taken.member} took up {taken.count}, and {most} were kept"


def long_turn(facts: Facts) -> Iterator[str]:
    """Heartbeats of all groups wait for the turn of one: none has more than a founding to sync."""
    for event in facts.history:
        if isinstance(event, Turned) and event.syncs > TURN_SYNCS_MAX:
            yield f"{event.node}: a turn with {event.syncs} syncs"


def unfinished(facts: Facts) -> Iterator[str]:
    """After healing, everything that was asked is told."""
    for op, first in facts.asked.items():
        if op not in facts.told:
            yield f"op {op} ({type(first.act).__name__}) was never told its outcome"


def two_leaders(facts: Facts) -> Iterator[str]:
    """A term has one leader."""
    leaders: dict[int, str] = {}
    for event in facts.history:
        if isinstance(event, Led) and leaders.setdefault(event.term, event.node) != event.node:
            yield f"term {event.term} had {leaders[event.term]} and {event.node} as leaders"


RULES = [
    rule
    for rule in list(vars().values())
    if isfunction(rule) and rule.__annotations__ == {"facts": Facts, "return": Iterator[str]}
]


def check(history: History) -> dict[str, list[str]]:
    """What is broken: the rules by name, each with what it found. Empty if all hold."""
    facts = facts_of(history)
    found = defaultdict(list, {rule.__name__: list(rule(facts)) for rule in RULES})
    for event in history:
        if isinstance(event, Seen):
            found[event.rule].append(event.what)
    return {name: findings for name, findings in found.items() if findings}
