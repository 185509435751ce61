"""Each rule over small histories: what it allows, and what it must not."""

import pytest

from photon.core.fates import Committed, Registered, Released
from tests.simulation.checkers import TURN_SYNCS_MAX, check
from tests.simulation.history import (
    Act,
    Asked,
    Bounded,
    Commit,
    Ended,
    Event,
    Fence,
    Founded,
    GiveBack,
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
    (int(Committed.WON),),
    (int(Committed.DUPLICATE),),
    (int(Committed.EXPIRED),),
    (int(Committed.FENCED),),
)
PRESENT, ABSENT = (int(Registered.PRESENT),), (int(Registered.ABSENT),)
ONE, TWO = Commit((b"x",), (5,), b"one", 1), Commit((b"x",), (5,), b"two", 2)
RELEASED, GONE, OTHER, NOT_FENCED = (
    (int(Released.RELEASED),),
    (int(Released.ABSENT),),
    (int(Released.OTHER),),
    (int(Released.NOT_FENCED),),
)
LOOK = Lookup((b"x",), (5,))
FREE_ONE, FREE_TWO = Release((b"x",), (5,), b"one"), Release((b"x",), (5,), b"two")
FENCE_ONE, FENCE_TWO = Fence((1,)), Fence((1, 2))
LATE, FREE_LATE = Commit((b"x",), (7,), b"late", 2), Release((b"x",), (7,), b"late")
BACK_ONE, BACK_TWO = GiveBack((b"x",), b"one"), GiveBack((b"x",), b"two")
LOW = -(1 << 63)


def said(*acts: tuple[Act, tuple[int, ...] | None]) -> list[Event]:
    """One after the other: asked, then told."""
    history: list[Event] = []
    for op, (act, outcomes) in enumerate(acts):
        history.append(Asked(2.0 * op, op, act))
        if outcomes is not None:
            history.append(Told(2.0 * op + 1, op, outcomes))
    return history


def ended(held: dict[bytes, bytes], node: str = "a", boundary_us: int = LOW, digest: bytes = b"") -> Ended:
    return Ended(node, held, boundary_us, digest)


LAWFUL: dict[str, list[Event]] = {
    "a shard goes through its tables, and in another life again": [
        Founded(0, 2, 1),
        Versioned(1, "a", 1, 2, 1, b"1"),
        Versioned(2, "a", 1, 2, 2, b"2"),
        Versioned(3, "a", 2, 2, 1, b"1"),
    ],
    "one group is founded in a turn": [Turned(0, "a", 15)],
    "one wins, the other loses": [*said((ONE, WON), (TWO, DUPLICATE)), ended({b"x": b"one"})],
    "a retry of the winner wins": [*said((ONE, WON), (ONE, WON)), ended({b"x": b"one"})],
    "released, then won by another": [
        *said((ONE, WON), (FENCE_ONE, ()), (FREE_ONE, RELEASED), (TWO, WON)),
        ended({b"x": b"two"}),
    ],
    "a release that nobody heard of may have been done": [
        *said((ONE, WON), (FENCE_ONE, ())),
        *(Asked(5, 9, FREE_ONE), Asked(6, 8, TWO), Told(7, 8, WON), Asked(8, 9, FREE_ONE), Told(9, 9, OTHER)),
        ended({b"x": b"two"}),
    ],
    "a release is repeated": [
        *said((ONE, WON), (FENCE_ONE, ()), (FREE_ONE, RELEASED), (FREE_ONE, GONE)),
        ended({}),
    ],
    "one is not fenced, and another holds it": [
        *said((ONE, WON), (FREE_ONE, NOT_FENCED), (FENCE_TWO, ()), (FREE_TWO, OTHER)),
        ended({b"x": b"one"}),
    ],
    "what is expired is absent": [
        *said((ONE, WON), (FENCE_ONE, ()), (Raise(9), ()), (FREE_ONE, GONE)),
        ended({}, boundary_us=9),
    ],
    "a copy of another time had won in one shard of two, and is released there": [
        *said((ONE, WON), (FENCE_TWO, ()), (LATE, FENCED), (FREE_LATE, RELEASED)),
        ended({b"x": b"one"}),
    ],
    "half a win is given back": [*said((ONE, WON), (BACK_TWO, ()), (TWO, DUPLICATE)), ended({b"x": b"one"})],
    "a fenced winner gives back what it won": [
        *said((ONE, WON), (FENCE_ONE, ()), (BACK_ONE, ()), (ONE, FENCED), (FREE_ONE, GONE), (TWO, WON)),
        ended({b"x": b"two"}),
    ],
    "a fenced winner is told so": [*said((ONE, WON), (FENCE_ONE, ()), (ONE, FENCED)), ended({b"x": b"one"})],
    "expired, and gone": [*said((ONE, WON), (Raise(9), ()), (TWO, EXPIRED)), ended({}, boundary_us=9)],
    "a lookup may be late": [*said((ONE, WON), (LOOK, ABSENT), (LOOK, PRESENT)), ended({b"x": b"one"})],
    "replicas in step": [Moved(0, "a", 1, b"1"), Moved(1, "b", 1, b"1"), Led(0, "a", 1), Led(1, "b", 2)],
    "a replica starts again from an older snapshot": [Bounded(0, "a", 1, 9), Bounded(1, "a", 2, 5)],
}

UNLAWFUL: dict[str, tuple[str, list[Event]]] = {
    "two winners": ("two_winners", said((ONE, WON), (TWO, WON))),
    "released too late": ("two_winners", said((ONE, WON), (TWO, WON), (FREE_ONE, RELEASED))),
    "won and lost": ("forgotten", [*said((ONE, WON)), ended({})]),
    "won and held by another": ("forgotten", [*said((ONE, WON), (TWO, None)), ended({b"x": b"two"})]),
    "present and lost": ("forgotten", [*said((ONE, None), (LOOK, PRESENT)), ended({})]),
    "a retry of the winner loses": ("wrong_answers", said((ONE, WON), (TWO, DUPLICATE), (ONE, DUPLICATE))),
    "a duplicate of nothing": ("wrong_answers", said((ONE, DUPLICATE))),
    "a duplicate of one that came later": ("wrong_answers", said((TWO, DUPLICATE), (ONE, WON))),
    "two winners in spite of a release that was not done": (
        "two_winners",
        said((ONE, WON), (FREE_ONE, NOT_FENCED), (TWO, WON)),
    ),
    "forgotten in spite of a release that was not done": (
        "forgotten",
        [*said((ONE, WON), (FENCE_TWO, ()), (FREE_TWO, OTHER)), ended({})],
    ),
    "released before the fence": ("wrong_releases", said((ONE, WON), (FREE_ONE, RELEASED), (FENCE_ONE, ()))),
    "released, who never asked": ("wrong_releases", said((ONE, WON), (FENCE_TWO, ()), (FREE_TWO, RELEASED))),
    "released, which another holds": (
        "wrong_releases",
        said((ONE, WON), (TWO, DUPLICATE), (FENCE_TWO, ()), (FREE_TWO, RELEASED)),
    ),
    "released, and still there": (
        "wrong_releases",
        [*said((ONE, WON), (FENCE_ONE, ()), (FREE_ONE, RELEASED)), ended({b"x": b"one"})],
    ),
    "fenced, and told that it is not": (
        "wrong_releases",
        said((ONE, WON), (FENCE_ONE, ()), (FREE_ONE, NOT_FENCED)),
    ),
    "held, and told that it is absent": (
        "wrong_releases",
        said((ONE, WON), (FENCE_TWO, ()), (FREE_TWO, GONE)),
    ),
    "its own, and told of another": (
        "wrong_releases",
        said((ONE, WON), (TWO, DUPLICATE), (FENCE_ONE, ()), (FREE_ONE, OTHER)),
    ),
    "won, and given back": ("wrong_give_backs", said((ONE, WON), (BACK_ONE, ()), (FENCE_ONE, ()))),
    "expired without a boundary": ("wrong_answers", said((ONE, EXPIRED))),
    "expired above the boundary": ("wrong_answers", said((Raise(5), ()), (ONE, EXPIRED))),
    "fenced by nobody": ("wrong_answers", said((ONE, FENCED))),
    "won though fenced": ("wrong_answers", said((FENCE_ONE, ()), (ONE, WON))),
    "misrouted": ("wrong_answers", said((ONE, (int(Committed.MISROUTED),)))),
    "the holder was turned away": (
        "wrong_losers",
        [*said((TWO, None), (ONE, DUPLICATE)), ended({b"x": b"one"})],
    ),
    "held by who never asked": ("wrong_losers", [ended({b"x": b"one"})]),
    "a lookup finds what nobody asked for": ("phantoms", said((LOOK, PRESENT))),
    "a lookup finds what is asked for later": ("phantoms", said((LOOK, PRESENT), (ONE, WON))),
    "a lookup finds expired what is not": ("phantoms", said((LOOK, (int(Registered.EXPIRED),)))),
    "another command": ("diverged", [Moved(0, "a", 1, b"1"), Moved(1, "b", 1, b"2")]),
    "another end": ("diverged", [ended({}, digest=b"1"), ended({}, node="b", digest=b"2")]),
    "another state": ("diverged", [*said((ONE, None)), ended({b"x": b"one"}), ended({}, node="b")]),
    "the boundary goes back": ("boundary_back", [Bounded(0, "a", 1, 9), Bounded(1, "a", 1, 5)]),
    "the boundary is forgotten": ("boundary_back", [*said((Raise(9), ())), ended({}, boundary_us=5)]),
    "a table is replaced by one before it": (
        "version_back",
        [Versioned(0, "a", 1, 2, 3, b"3"), Versioned(1, "a", 1, 2, 2, b"2")],
    ),
    "two tables of one version": (
        "version_back",
        [Versioned(0, "a", 1, 2, 3, b"3"), Versioned(1, "b", 1, 1, 3, b"another")],
    ),
    "a shard that came again has the table of its first life": (
        "before_its_founding",
        [Founded(0, 4097, 4), Versioned(1, "a", 1, 4097, 1, b"1")],
    ),
    "two have one share": (
        "two_owners",
        [Kept(0, 3, 1, "a/1", 0, True), Kept(1, 3, 1, "b/1", 0, True)],
    ),
    "what was kept is not there": (
        "kept_in_vain",
        [Kept(0, 3, 1, "a/1", 5, False), Kept(1, 3, 2, "b/1", 4, True)],
    ),
    "a former owner keeps something": (
        "kept_in_vain",
        [Kept(0, 3, 2, "b/1", 4, True), Kept(1, 3, 1, "a/1", 5, False)],
    ),
    "many groups are founded in a turn": ("long_turn", [Turned(0, "a", TURN_SYNCS_MAX + 1)]),
    "never told": ("unfinished", said((ONE, None))),
    "two leaders": ("two_leaders", [Led(0, "a", 1), Led(1, "b", 1)]),
    "stopped": ("stopped", [Seen(0, "stopped", "a: an assertion")]),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_a_lawful_history_passes(name: str) -> None:
    assert check(LAWFUL[name]) == {}


@pytest.mark.parametrize("name", UNLAWFUL)
def test_an_unlawful_history_is_named(name: str) -> None:
    rule, history = UNLAWFUL[name]
    assert rule in check(history)
