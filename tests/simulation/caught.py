"""Which seed notices which hole. Found by `python -m tests.simulation --hole NAME --search N`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from idregistry.rules.steward import DAY_US
from tests.raft import test_guards, test_journal, test_replica
from tests.simulation.cluster import Plan
from tests.simulation.faults import ACTS, Profile
from tests.simulation.whole import USUAL, Whole

FIERCE = Profile(
    period_s=0.08,
    isolate=3,
    split=3,
    heal=3,
    heal_all=4,
    transfer=4,
    slow=3,
    kill=0,
    power=0,
    blackout=0,
    pause=1,
    leader_first=0.6,
    crash_chance=0,
    slow_disk_chance=0,
    down_s=0.5,
)
"""The leader changes all the time, and nobody dies."""

FAR_BEHIND = replace(FIERCE, isolate=4, kill=1, power=1, tail_entries=0)
"""Who comes back needs a snapshot."""

BRIEF = Profile(period_s=0.12, crash_chance=0.05, power=3, kill=3, pause=0, down_s=0.3)
"""Nobody lives for long, and the power fails all the time."""

FAILING = Profile(period_s=0.3, error_chance=0.01, crash_chance=0.001, kill=1, power=2, down_s=0.4)
"""Writes and syncs fail, and half of the nodes that this ends lose power before they are up again."""

ROTTEN = Profile(
    cut=0.3,
    cut_one_way=0.3,
    isolate=0.3,
    split=0.2,
    kill=0.3,
    power=0.3,
    pause=0.1,
    rot=0.3,
    crash_chance=0.001,
    down_s=1.0,
)
"""Disks of a minority are damaged while nobody looks.

Late, so that there are snapshots to damage, and calm enough that what was damaged comes back and is used.
"""

STILL = Profile(
    1000.0, drift=0, crash_chance=0, slow_disk_chance=0, down_s=0.5, **dict.fromkeys(ACTS, 0) | {"heal": 1}
)
"""Nothing goes wrong by itself."""

QUIET = replace(STILL, cut=1, heal=0, down_s=2.0)
"""One link is cut in the second second, and nothing else happens."""

DARK = Whole(114, blackouts=0.9)
"""The power of all hosts fails whenever groups have come."""

AHEAD = Whole(0, leap_us=365 * DAY_US)
"""All clocks, and some events, are a year ahead from the middle on."""

HELD = Whole(0, holds=True)
"""Dispatchers hold the boundary, for longer than ids are kept."""

PUT_BACK = Whole(0, profile=STILL, blackouts=0, put_back=True)

CALM = replace(USUAL, period_s=20.0, crash_chance=0.00002, error_chance=0.00001)

HOUR = Whole(2, profile=CALM, blackouts=0.02, members=50, seconds=3600.0, heal_seconds=120.0)
"""A hundred shares move between fifty members for an hour: three quarters of an hour on one core."""

MOVING = Whole(0, members=6, seconds=30.0, heal_seconds=60.0)
"""Shares move between members that die and stand still."""


@dataclass(frozen=True, slots=True)
class Case:
    """A hole, rules of which any one reports it, and the plan: the first seed that is known to notice.

    So many `tries` from there on are allowed: a change in how messages are timed moves what a seed plays.
    """

    hole: str
    rules: set[str]
    plan: Plan | Whole
    tries: int = 20


CASES = [
    Case("s1_snapshot_piece_commits", {"diverged"}, Plan(15, 5)),
    Case("s2_truncates_what_matches", {"forgotten"}, Plan(0, 3, hostile=True)),
    Case("s4_restart_clears_the_journal", {"two_winners"}, Plan(0, 3)),
    Case("s6_no_snapshot_after_a_restart", {"forgotten"}, Plan(1, 3)),
    Case("s8_goes_on_after_an_exception", {"unfinished"}, Plan(0, 3)),
    Case("s10_commit_index_outlives_the_log", {"stopped"}, Plan(0, 3)),
    Case("s11_nothing_is_synced", {"forgotten"}, Plan(9, 3)),
    Case("s12_damaged_snapshot_is_an_empty_one", {"diverged", "forgotten"}, Plan(0, 5, profile=ROTTEN)),
    Case("s14_part_of_the_state_is_not_in_the_snapshot", {"forgotten"}, Plan(0, 3)),
    Case("l2_lost_proposals_are_not_told", {"unfinished"}, Plan(7, 3)),
    Case("acknowledged_before_it_is_synced", {"forgotten"}, Plan(194, 3, profile=BRIEF)),
    Case("installing_keeps_the_old_conflict", {"unfinished"}, Plan(32, 3, profile=FAR_BEHIND)),
    Case(
        "prepared_state_is_not_put",
        {"diverged", "forgotten"},
        Plan(2, machine="registry", profile=FAR_BEHIND),
    ),
    Case("what_a_failed_sync_dropped_is_believed", {"stopped"}, Plan(0, profile=FAILING)),
    Case("a_failed_sync_is_tried_again", {"forgotten", "stopped"}, Plan(2, profile=FAILING)),
    Case("names_are_not_synced", {"stopped"}, Plan(0, 3)),
    Case("disks_lie", {"forgotten"}, Plan(2, 3)),
    Case("a_release_needs_no_fence", {"wrong_releases"}, Plan(2, machine="registry")),
    Case("a_release_is_told_and_not_done", {"wrong_releases"}, Plan(1, machine="registry")),
    Case("a_release_takes_the_id_from_whoever_holds_it", {"wrong_releases"}, Plan(5, machine="registry")),
    Case("r1_an_old_directory_is_believed", {"before_its_founding", "two_winners"}, DARK),
    Case("r2_a_snapshot_takes_the_whole_way", {"crowded"}, Whole(0)),
    Case("r4_holders_are_kept_in_one_chunk", {"unfinished"}, Whole(92, seconds=30.0, heal_seconds=15.0)),
    Case("r5_a_disk_that_was_put_back_is_believed", {"two_winners", "diverged"}, PUT_BACK),
    Case("r7_the_boundary_leaps", {"leapt"}, AHEAD),
    Case("r8_holds_are_not_heeded", {"passed_a_hold"}, HELD),
    Case("r6_all_groups_are_founded_in_one_turn", {"long_turn"}, Whole(0, profile=STILL, blackouts=0)),
    Case("p1_sequencers_are_not_checked", {"kept_in_vain"}, MOVING),
]
"""Noticed in a simulated cluster."""

SWEPT = [
    "s4_restart_clears_the_journal",
    "s5_compaction_rewrites_the_journal",
    "s6_no_snapshot_after_a_restart",
    "s11_nothing_is_synced",
    "s11_vote_is_forgotten",
    "s13_snapshot_is_renamed_before_it_is_whole",
    "names_are_not_synced",
    "seal_is_not_secured",
    "directory_is_synced_only_when_made",
    "names_are_not_secured_at_the_start",
    "disks_lie",
]
"""Noticed where one replica's disk is ended at every point in turn (`crash_points`)."""

UNITS: dict[str, Callable[..., None]] = {
    "s1_snapshot_piece_commits": (
        test_guards.test_s1_a_piece_of_a_snapshot_commits_nothing_of_the_log_it_finds
    ),
    "s2_truncates_what_matches": test_guards.test_s2_a_repeated_message_never_truncates_what_matches,
    "s2_acknowledges_what_was_not_compared": (
        test_guards.test_s2_a_heartbeat_commits_no_further_than_it_has_compared
    ),
    "s3_acknowledgements_of_any_term": (
        test_guards.test_s3_an_acknowledgement_of_another_term_does_not_count
    ),
    "s9_older_snapshot_replaces_the_log": (
        test_guards.test_s9_an_older_snapshot_never_replaces_what_is_committed
    ),
    "s10_commit_index_outlives_the_log": (
        test_replica.test_the_commit_index_is_never_believed_from_before_a_restart
    ),
    "s11_vote_is_forgotten": test_guards.test_a_vote_is_on_disk_before_it_is_given,
    "s11_no_checksums": partial(
        test_journal.test_any_flipped_byte_in_what_was_synced_stops_or_changes_nothing, segment_bytes=200
    ),
    "l1_backing_off_bounces": test_guards.test_l1_backing_off_never_bounces_forward,
    "l2_lost_proposals_are_not_told": (
        test_guards.test_waiting_proposals_are_unknown_as_soon_as_leadership_is_lost
    ),
    "votes_are_counted_by_message": test_guards.test_a_vote_counts_once_a_voter,
    "leader_counts_what_it_has_not_synced": (
        test_guards.test_a_leader_counts_itself_only_for_what_it_has_synced
    ),
    "installing_drops_the_matching_tail": (
        test_guards.test_an_installed_snapshot_keeps_the_matching_tail_of_the_log
    ),
}
"""Noticed by the test of the guard itself, which must fail while the switch is on."""

ELSEWHERE = {
    "l4": "nothing is broken, the leader changes without need: test_holes.py counts elections",
    "s7": "nothing is pickled, frames are authenticated: tests/raft/test_transport.py, test_codec.py",
    "l3": "sockets: tests/raft/test_transport.py, a large message leaves without any further send",
    "r3": "the simulator has one thread: tests/idregistry/test_service.py, many lookups at once",
}
"""What breaks no rule that is checked, or has no meaning where sockets and threads are played."""

NO_SEED = {
    "s2_acknowledges_what_was_not_compared": "a heartbeat must meet a conflict that no entry has shown yet",
    "s3_acknowledgements_of_any_term": (
        "an acknowledgement must outlive two changes of leader, and what it names be cut off meanwhile"
    ),
    "s9_older_snapshot_replaces_the_log": "a whole snapshot must arrive after all that follows it",
    "s11_no_checksums": "damage must hit a length or a command, and leave what can still be read",
    "l1_backing_off_bounces": "it costs time, and the simulated logs are too short to cost much",
    "votes_are_counted_by_message": "one voter's message must come twice, and be the vote that is lacking",
    "leader_counts_what_it_has_not_synced": (
        "a leader must lose power between its followers' acknowledgement and its own sync, in one turn"
    ),
    "installing_drops_the_matching_tail": "what is dropped is sent again, unless the leader dies first",
}
"""Why the seeds that were tried do not notice it: the test of the guard alone does."""


def table() -> str:
    """Which hole is noticed by what, as Markdown: README.md has it."""
    seeds = {case.hole: case for case in CASES}
    rows = ["| hole | noticed by |", "|---|---|"]
    for hole in sorted({*seeds, *SWEPT, *UNITS}, key=_in_order):
        by = [_seed(seeds[hole])] if hole in seeds else []
        by += ["the end at every point"] if hole in SWEPT else []
        by += ["the guard's own test"] if hole in UNITS else []
        why = f"; no seed: {NO_SEED[hole]}" if hole in NO_SEED else ""
        rows.append(f"| {hole.replace('_', ' ')} | {', '.join(by)}{why} |")
    rows += [f"| {hole} | {why} |" for hole, why in ELSEWHERE.items()]
    return "\n".join(rows) + "\n"


def _in_order(hole: str) -> tuple[bool, str, int, str]:
    number, _, rest = hole.partition("_")
    numbered = number[1:].isdigit()
    return (False, number[0], int(number[1:]), rest) if numbered else (True, "", 0, hole)


def _seed(case: Case) -> str:
    plan = case.plan
    if isinstance(plan, Whole):
        return f"seed {plan.seed} of a registry whole"
    mood = ", hostile network" if plan.hostile else ""
    return f"seed {plan.seed} of {plan.replicas} replicas, {plan.machine}{mood}"
