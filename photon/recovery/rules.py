"""What recovery may do, what follows, and the report of it (paper 3.3.3). Pure.

An event is lost when it is registered with a token and stands in no joined log. It may be joined again when
nobody can write it under that token any more: when the token's incarnation is fenced.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum, StrEnum
from itertools import chain, repeat
from typing import Any, Final

from photon.core.columns import split_ids
from photon.core.fates import Released
from photon.core.ids import parse_token
from spark.losses import Loss, Survey

GONE_SHARE_MAX: Final = 0.1
GONE_EVENTS_MAX: Final = 10_000
"""More than both of them looks like an output that was not named."""
KNOWN_SHARE_MIN: Final = 0.1
"""Of the joined ids the registry knows more: all, unless it forgets old ones (registry.retention_days)."""
CLOSING_US: Final = 600_000_000
"""How far the clocks of those who took tokens and of those who closed files may differ."""


class Life(StrEnum):
    """Of an incarnation: what recovery may do with it."""

    ALIVE = "alive"
    """Its lease runs."""
    OVER = "over"
    """It can be fenced: its lease is over, or runs out, as its run has ended."""
    FENCED = "fenced"
    BACKFILL = "backfill"
    """A backfill's: its own rerun, or its --abandon, ends what it left; fenced, it can do neither."""
    UNNAMED = "unnamed"
    """No output that was named tells of it: what it registered may stand in one that was not."""


@dataclass(frozen=True, slots=True)
class Held:
    """What is known of an incarnation's lease, and of its loss."""

    loss: Loss
    life: Life
    lease_s: float = 0.0
    """For so long its lease may still run."""

    @property
    def lost(self) -> int:
        """Of one that can write no more all that is missing is lost; of another one what is not young."""
        return self.loss.lost + (self.loss.young if self.life in (Life.OVER, Life.FENCED) else 0)

    @property
    def in_flight(self) -> int:
        return self.loss.lost + self.loss.young - self.lost

    @property
    def wanted(self) -> bool:
        """To be fenced, once its lease is over."""
        return self.life in (Life.ALIVE, Life.OVER, Life.FENCED) and self.lost > 0

    @property
    def recoverable(self) -> bool:
        return self.life in (Life.OVER, Life.FENCED) and self.lost > 0


def life_of(
    loss: Loss, fenced: bool, expires_in_s: float, named: bool, gone: bool, ended: bool = False
) -> Held:
    """From what the registry says of the incarnation. `named`: an output that was named tells of it; `gone`:
    the user says that what is not there is gone; `ended`: its run has, and a registry that was started since
    counts leases anew."""
    if loss.is_backfill and not gone:
        return Held(loss, Life.BACKFILL, expires_in_s)
    if not named and not gone:
        return Held(loss, Life.UNNAMED, expires_in_s)
    if fenced:
        return Held(loss, Life.FENCED)
    return Held(loss, Life.ALIVE if expires_in_s > 0 and not ended else Life.OVER, expires_in_s)


def refusal(survey: Survey, held: Sequence[Held], missing: Sequence[str], gone: bool) -> str | None:
    """Why nothing may be released, whatever is lost; None if it may.

    `missing`: complete files that are in no output; `gone`: the user says that what is not there is gone.
    """
    # Before the fence too: a sound run's joiners shall not be fenced.
    if any(one.wanted for one in held) and survey.known < KNOWN_SHARE_MIN * survey.joined:
        return (
            f"of about {survey.joined:,} joined ids the registry knows {survey.known:,}, as if ids.key or "
            "[foreign] were not those of the run: name its settings with --config, or its --work, whose own "
            "are used"
        )
    wanted = sum(one.lost for one in held if one.recoverable)
    if not wanted:
        return None
    if survey.untold:
        return (
            f"{survey.untold:,} joined lines do not tell which foreign event they hold (the adapter's "
            "doing?), so what seems lost may stand there; joined again it would stand there twice"
        )
    doubtful = sum(one.loss.doubtful for one in held if one.recoverable)
    if doubtful and missing and not gone:
        return (
            f"{doubtful:,} of the lost events may stand in complete files that are not there any more "
            f"({len(missing)}, {missing[0]} first): name where these lie now with another --out, or say "
            "--gone-for-good if they are deleted"
        )
    if wanted > max(GONE_EVENTS_MAX, GONE_SHARE_MAX * survey.registered) and not gone:
        return (
            f"{wanted:,} of {survey.registered:,} registered events would be joined again, as if an output "
            "was not named: name all of them with --out, of every datacenter, or say --gone-for-good"
        )
    return None


def reread_refusal(untold: int, taken_away: Sequence[str]) -> str | None:
    """As `refusal`, of what only the reading after the fence can tell. `taken_away`: complete files that were
    there before it."""
    if untold:
        return f"{untold:,} joined lines came that do not tell their foreign event; nothing is released"
    if taken_away:
        return (
            f"{taken_away[0]} was taken away while the joined logs were read; nothing is released. Run "
            "again, with another --out that names where it lies now"
        )
    return None


class Step(Enum):
    """What a plan needs next."""

    RELEASE = "release"
    INJECT = "inject"
    FORGET = "forget"


def after_release(outcomes: bytes) -> Step:
    """From the outcomes of all its ids (core.fates.Released).

    One that is ABSENT was released by a run that was killed, before or after it was injected: once more does
    no harm, as the registry joins it once. What is another's by now (OTHER) is joined.
    """
    if not {*outcomes} <= {Released.RELEASED, Released.ABSENT, Released.OTHER}:
        return Step.RELEASE
    return Step.FORGET if {*outcomes} <= {Released.OTHER} else Step.INJECT


def taken(ids: bytes, outcomes: bytes) -> int:
    """How many of a plan's ids are another's by now, whatever the time that they were asked for with."""
    left = {one for one, outcome in zip(split_ids(ids), outcomes, strict=True) if outcome != Released.OTHER}
    return len({*split_ids(ids)} - left)


def events_of(ids: bytes, tokens: Sequence[bytes], counts: Sequence[int]) -> Counter[int]:
    """Incarnation -> how many distinct ids of a plan its tokens hold."""
    runs = chain.from_iterable(map(repeat, tokens, counts))
    return Counter(parse_token(token).incarnation for token, _ in {*zip(runs, split_ids(ids), strict=True)})


@dataclass(frozen=True, slots=True)
class Report:
    """What was found and done. Events all, where nothing else is said.

    `recovered` were released and put into the inbox, those of `plans_finished` plans of an earlier run with
    them; `no_input`: they are in none of the inputs, so they stay registered; `taken`: somebody else joined
    or released them meanwhile.
    """

    applied: bool
    survey: Survey
    held: Sequence[Held]
    inbox: str
    refused: str | None = None
    plans_finished: int = 0
    recovered: int = 0
    no_input: int = 0
    taken: int = 0
    done: Mapping[int, int] = field(default_factory=dict)
    """Incarnation -> how many of its events were recovered or taken."""
    notes: Sequence[str] = ()
    plans_left: int = 0
    """Of earlier runs, where this one did not finish them."""
    ended: bool = False
    """No dispatcher runs that would read the inbox."""

    @property
    def lost(self) -> int:
        return sum(one.lost for one in self.held)

    @property
    def in_flight(self) -> int:
        return sum(one.in_flight for one in self.held)

    @property
    def remaining(self) -> int:
        """Lost, and not recovered by this run."""
        return sum(max(0, one.lost - self.done.get(one.loss.incarnation, 0)) for one in self.held)

    @property
    def recoverable(self) -> int:
        """What --apply can be expected to join again."""
        return sum(one.lost for one in self.held if one.recoverable)

    @property
    def status(self) -> int:
        """What the command ends with: 1 while something remains to be done."""
        unfinished = self.plans_left if not self.applied else 0
        return 1 if self.remaining or unfinished or self.refused is not None else 0

    def as_document(self) -> dict[str, Any]:
        """For --json."""
        return {
            "applied": self.applied,
            "registered": self.survey.registered,
            "lost": self.lost,
            "in_flight": self.in_flight,
            "joined_damaged": self.survey.damaged,
            "joined_untold": self.survey.untold,
            "recovered": self.recovered,
            "no_input": self.no_input,
            "taken": self.taken,
            "remaining": self.remaining,
            "plans_finished": self.plans_finished,
            "plans_left": self.plans_left,
            "refused": self.refused,
            "inbox": self.inbox,
            "incarnations": [_row(one) for one in self.held],
            "notes": [*self.notes],
        }


def _row(one: Held) -> dict[str, Any]:
    loss = one.loss
    return {
        "joiner": loss.address,
        "incarnation": f"{loss.incarnation:016x}",
        "state": one.life.value,
        "lease_s": round(one.lease_s, 1),
        "lost": one.lost,
        "in_flight": one.in_flight,
        "doubtful": loss.doubtful,
        "oldest_us": loss.oldest_us,
    }


def notes_of(survey: Survey, plans: int) -> list[str]:
    """What the user should know besides. `plans`: Report.plans_left."""
    notes = []
    if plans:
        notes.append(f"{plans} plans of an earlier run are not finished; --apply finishes them first")
    if survey.damaged:
        notes.append(f"{survey.damaged:,} joined lines are no JSON objects (cut short, or glued together)")
    return notes


def fenced_now(one: Held, fenced: bool, expires_in_s: float) -> Held:
    """With what its fence said: whether it is fenced, for how long its lease may still run."""
    if fenced:
        return replace(one, life=Life.FENCED, lease_s=0.0)
    return replace(one, life=Life.ALIVE, lease_s=expires_in_s)


def seen_again(one: Held, missing: Mapping[int, int], done: Mapping[int, int]) -> Held:
    """As the reading after the fence found it. `missing`: incarnation -> lost events that no input has;
    `done`: those that were in a plan."""
    number = one.loss.incarnation
    lost = missing.get(number, 0) + done.get(number, 0)
    return replace(one, loss=replace(one.loss, lost=lost, young=0))


def as_text(report: Report) -> str:
    """A row for each incarnation, and what it comes to."""
    lines = []
    if report.held:
        lines.append(
            f"{'incarnation':<18}{'joiner':<24}{'state':<10}{'lost':>9}{'in flight':>11}  oldest token"
        )
    lines += map(_report_row, report.held)
    lines += _sums(report)
    lines += [f"note: {note}" for note in report.notes]
    if report.refused is not None:
        lines.append(f"nothing is released: {report.refused}")
    return "\n".join(lines)


def _report_row(one: Held) -> str:
    loss = one.loss
    oldest = datetime.fromtimestamp(loss.oldest_us // 1_000_000, UTC)
    who = f"{loss.incarnation:016x}  {loss.address:<24}{one.life.value:<10}"
    return f"{who}{one.lost:>9,}{one.in_flight:>11,}  {oldest:%Y-%m-%d %H:%M:%SZ}"


def _sums(report: Report) -> list[str]:
    found = []
    if report.plans_finished:
        found.append(f"{report.plans_finished} plans of an earlier run finished")
    if report.recovered:
        found.append(f"{report.recovered:,} events released and put into {report.inbox}")
        if report.ended:
            found.append("run the join again: it joins them")
    if report.taken:
        found.append(f"{report.taken:,} events were joined by others meanwhile")
    if report.no_input:
        found.append(
            f"{report.no_input:,} lost events are in none of the inputs: name their logs with --foreign"
        )
    if report.in_flight:
        found.append(f"{report.in_flight:,} events in flight: ask again in a minute")
    found += [what for one in report.held if one.lost and (what := _advice(one))]
    if not report.lost:
        found.append("nothing is lost" + (", as far as can be told yet" if report.in_flight else ""))
    elif not report.remaining:
        found.append("nothing is lost any more")
    elif not report.applied and report.recoverable and report.refused is None:
        found.append(f"{report.recoverable:,} events can be joined again: --apply does it")
    return found


def _advice(one: Held) -> str:
    name = f"{one.loss.address} ({one.loss.incarnation:016x})"
    if one.life is Life.BACKFILL:
        return (
            f"{name} is a backfill's: run that again, or with --abandon, if it is not done, or say "
            "--gone-for-good to take these events from it"
        )
    if one.life is Life.UNNAMED:
        return (
            f"{name}: its output is not named, or gone, or made before outputs told who wrote to them "
            "(.lives): name every one with --out, of every datacenter, or say --gone-for-good if what is not "
            "there is deleted"
        )
    if one.life is Life.ALIVE:
        lease = f"its lease runs for {one.lease_s:.1f} s"
        return f"{name} is alive, {lease}: stop or restart that joiner, then run again"
    return ""
