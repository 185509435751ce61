"""`photon recover`: joins again what was registered and never came to be in a joined log (paper 3.3.3).

In this order, which is what makes it safe:

1. finish the plans that an earlier run left;
2. read registry and joined logs: whose tokens are on events that stand nowhere;
3. of those that an output tells of, fence whose lease is over; the others are left alone;
4. only then read the joined logs again, and take of it what the fenced incarnations have lost;
5. write that down, durably, with the events' lines (photon.recovery.files);
6. release the ids by compare-and-delete on their tokens;
7. put the lines into a dispatcher's inbox; 8. forget the plan.

**Nothing is doubled.** After 3 nothing can be registered with those tokens, and no line of theirs can come
into a joined log to stay: a joiner looks at its lease before and after it writes (joiner.output), and its
next life cuts what it could not take back. So what 4 does not find is nowhere, for good, and its id may go.
6 takes it out only while that very token holds it: what was released and joined again meanwhile has another
one, however old the plan is. 7 is no more than reading a log twice: the registry decides who writes.

**Nothing is lost.** From 6 on an event may stand in neither registry nor joined log, but it stands in the
plan, which the next run finishes; 6 and 7 may be done any number of times.

**A zombie** (stopped, its lease over) that goes on before 3 gets its lease again, and is not fenced. After 3,
wherever it stood: it is refused what it registers, and takes back what it wrote. Where its locks are free it
has ended, and 4, during which recovery holds them, sees all that it has written. Where they are held it may
stand anywhere: killed, from outside, just between writing and taking back, it leaves lines that 4 did not
see. A line counts in whatever root it stands.

**Its next life** cuts the lines of all that was under way, seen or not, and joins these events again: it does
6 for its own intents, and registers them with a token of its own (joiner.commit). It and this command can do
so at once, for the registry lets one of them win.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress, groupby
from pathlib import Path
from typing import Final, Protocol

from idregistry.client import RegistryClient
from photon.core.clock import Clock
from photon.core.errors import UnavailableError
from photon.core.fates import Released
from photon.recovery.files import (
    Plan,
    Plans,
    ended_joiners,
    missing_files,
    named_lives,
    note_gone,
    note_settled,
)
from photon.recovery.rules import (
    CLOSING_US,
    Held,
    Life,
    Report,
    Step,
    after_release,
    events_of,
    fenced_now,
    life_of,
    notes_of,
    refusal,
    reread_refusal,
    seen_again,
    taken,
)
from spark.losses import LostEvents, Survey
from spark.verification.rules import SETTLE_S

RELEASE_IDS_MAX: Final = 1024
"""In one request; tokens are of up to a kilobyte each."""
LEASE_WAIT_S_MAX: Final = 60.0
"""A lease that runs for longer than that is not waited for, but of a run that has ended."""
_MARGIN_S: Final = 0.2


def fence(
    registry: RegistryClient, held: Sequence[Held], clock: Clock, sleep: Callable[[float], None]
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


def release(registry: RegistryClient, plan: Plan, part: Callable[[], None]) -> bytes:
    """The outcome of each id (core.fates.Released), final ones only. `part` is called after each request.

    UnavailableError: some are released, perhaps; the plan stays, and the next run goes on with it.
    """
    tokens = [token for token, count in zip(plan.tokens, plan.counts, strict=True) for _ in range(count)]
    outcomes = bytearray()
    for low in range(0, len(tokens), RELEASE_IDS_MAX):
        high = min(low + RELEASE_IDS_MAX, len(tokens))
        runs = [[*run] for _, run in groupby(tokens[low:high])]
        packed, counts = [run[0] for run in runs], [len(run) for run in runs]
        ids, times = plan.ids[16 * low : 16 * high], plan.times[8 * low : 8 * high]
        answer = registry.release(ids, times, packed, counts)
        if after_release(answer) is Step.RELEASE:  # fenced in every shard there was; one may be new
            raise UnavailableError(
                f"{answer.count(Released.NOT_FENCED):,} events are not released: not every shard of the "
                "registry knows of the fence. The plan is kept; run the same command again"
            )
        outcomes += answer
        part()
    return bytes(outcomes)


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for. `outs`: directories of this machine with joined/ in them, every root of every
    datacenter; `plans`: where plans are kept; `gone`: what is not there is gone for good; `ended`: no joiner
    of the run lives; `settle_s`: what is younger is not lost while its incarnation lives."""

    outs: Sequence[Path]
    work: Path | None
    inbox: Path
    plans: Path
    apply: bool = False
    gone: bool = False
    ended: bool = False
    settle_s: float = SETTLE_S


class Reading(Protocol):
    """Registry, joined logs and inputs, each read anew by each call (spark.recovery)."""

    def survey(self, young_us: int, doubtful_us: int) -> Survey:
        """Tokens later than `young_us` count as young, those up to `doubtful_us` as doubtful."""
        ...

    def lost(self, incarnations: Sequence[int]) -> "LostReading":
        """What these have lost. Joined logs are read to their ends before this returns."""
        ...


class LostReading(Protocol):
    """`missing`: incarnation -> ids that stand in no input; known when `events` has ended."""

    untold: int
    """Joined lines that do not tell their event: nothing may be released."""

    @property
    def missing(self) -> Mapping[int, int]: ...

    def events(self) -> Iterator[LostEvents]:
        """In pieces of bounded size; tokens stand together."""
        ...


def recover(
    job: Job,
    registry: RegistryClient,
    reading: Reading,
    clock: Clock,
    tell: Callable[[str], None] = lambda _: None,
    checkpoint: Callable[[str], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Report:
    """One run. `tell` hears what is done now. UnavailableError, StorageError, CorruptStateError,
    SparkFailedError: run again, it goes on."""
    run = _Run(job, registry, clock, tell, checkpoint, sleep, Plans(job.plans))
    with ExitStack() as held:
        finished = run.finish_left(held) if job.apply else 0
        ended = run.ended_lives() if job.apply else set()
        report = run.recover(reading)
        if job.apply and report.refused is None:
            run.settle(ended, report)
            if job.gone and job.work is not None:
                note_gone(job.work, job.outs)
        return replace(report, plans_finished=finished, recovered=run.recovered, ended=job.ended)


@dataclass(slots=True)
class _Run:
    job: Job
    registry: RegistryClient
    clock: Clock
    tell: Callable[[str], None]
    checkpoint: Callable[[str], None]
    sleep: Callable[[float], None]
    plans: Plans
    recovered: int = 0
    taken: int = 0

    def finish_left(self, held: ExitStack) -> int:
        """Take the plans' lock and finish those of an earlier run; how many those were."""
        held.enter_context(self.plans)
        self.plans.tidy()
        left = list(self.plans.left())
        for plan in left:
            self.tell(f"finishing {plan.name}, which an earlier run has left")
            self._finish(plan)
        return len(left)

    def recover(self, reading: Reading) -> Report:
        job = self.job
        missing = missing_files(job.outs)
        doubtful_us = max((file.closed_us + CLOSING_US for file in missing), default=-1)
        self.tell("reading the registry and the joined logs")
        settle_s = 0.0 if job.ended else job.settle_s  # nobody is left who writes
        survey = reading.survey(self.clock.now_us() - int(settle_s * 1e6), doubtful_us)
        # After the survey: a life is told of before anything is registered for it.
        numbers, named = [loss.incarnation for loss in survey.losses], named_lives(job.outs)
        states = self.registry.incarnations(numbers) if numbers else []
        lives = [
            life_of(loss, state.fenced, state.expires_in_s, loss.incarnation in named, job.gone, job.ended)
            for loss, state in zip(survey.losses, states, strict=True)
        ]
        self.checkpoint("surveyed")
        names = [file.file for file in missing]
        refused = refusal(survey, lives, names, job.gone)
        left = 0 if job.apply else self.plans.count()
        notes = notes_of(survey, left)
        report = Report(job.apply, survey, lives, str(job.inbox), refused, notes=notes, plans_left=left)
        wanted = [one for one in lives if one.wanted]
        if not job.apply or refused is not None or not wanted:
            return report
        self.tell(f"fencing {len(wanted)} incarnations, or waiting for their leases to run out")
        answers = fence(self.registry, wanted, self.clock, self.sleep)
        self.checkpoint("fenced")
        lives = [fenced_now(one, *answers[one.loss.incarnation]) if one.wanted else one for one in lives]
        report = replace(report, held=lives, refused=refusal(survey, lives, names, job.gone))
        fenced = [one.loss.incarnation for one in lives if one.recoverable]
        if not fenced or report.refused is not None:
            return report
        return self._after_the_fence(reading, fenced, {*names}, report)

    def ended_lives(self) -> set[int]:
        """Those that the outputs tell of and that register nothing any more."""
        named = sorted(named_lives(self.job.outs))
        states = self.registry.incarnations(named) if named else []
        return {*compress(named, (state.fenced or state.expires_in_s <= 0 for state in states))}

    def settle(self, ended: set[int], report: Report) -> None:
        """Say of which lives that had `ended` before all is found: to their joiner, which may not know what
        they have written, if its directory was lost; and to the registry, which tells of the gone."""
        lossy = {
            one.loss.incarnation
            for one in report.held
            if one.loss.lost + one.loss.young > report.done.get(one.loss.incarnation, 0)
        }
        note_settled(self.job.outs, ended - lossy)
        self.registry.dismiss(sorted(ended - lossy))

    def _after_the_fence(
        self, reading: Reading, fenced: list[int], missing: set[str], report: Report
    ) -> Report:
        job = self.job
        with ended_joiners(job.work, job.outs) as torn_bytes:
            self.checkpoint("tails mended")
            self.tell("reading the joined logs again, and the inputs")
            lost = reading.lost(fenced)
            self.checkpoint("read again")
        taken_away = sorted({file.file for file in missing_files(job.outs)} - missing)
        refused = reread_refusal(lost.untold, taken_away)
        if refused is not None:
            return replace(report, refused=refused)
        notes = list(report.notes)
        if torn_bytes:
            what = "unfinished lines off the ends of joined logs whose joiner has ended"
            notes.append(f"took {torn_bytes} bytes of {what}")
        before, done = self.taken, Counter[int]()
        for events in lost.events():
            self.tell(f"releasing {events.count:,} events")
            plan = self.plans.write(events, job.inbox, self.checkpoint)
            self.checkpoint("planned")
            self._finish(plan)
            done += events_of(plan.ids, plan.tokens, plan.counts)
        return replace(
            report,
            held=[seen_again(one, lost.missing, done) if one.recoverable else one for one in report.held],
            no_input=sum(lost.missing.values()),
            taken=self.taken - before,
            done=done,
            notes=notes,
        )

    def _finish(self, plan: Plan) -> None:
        """From wherever it stands; again does no harm."""
        part = partial(self.checkpoint, "some released")
        outcomes = release(self.registry, plan, part)
        self.checkpoint("released")
        if after_release(outcomes) is Step.INJECT:
            self.plans.inject(plan, self.checkpoint)
            self.checkpoint("injected")
        self.plans.forget(plan)
        self.checkpoint("forgotten")
        others = taken(plan.ids, outcomes)
        self.recovered += plan.events - others
        self.taken += others
