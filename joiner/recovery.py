"""What a restarted joiner takes over from the one before (design: "No loss when a joiner crashes").

Of each intent without an end: its lines that stand in the joined log already (in all roots: what a crash left
in some only is taken back first), found by their exact bytes, as a multiset, after the place the intent
remembers. The resolver then registers it again, with the same token, and writes those winners that are
missing.

An intent whose incarnation is fenced is dropped: recovery read the joined log after the fence, so what stands
there is there for good, and what does not is recovery's to join again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from joiner.intent_records import Intent
from joiner.intents import IntentJournal
from joiner.lease import Lease
from joiner.output import JoinedLog, Left
from joiner.roots import check_new
from joiner.settling import Unended, WrittenLines
from photon.core.columns import split_lines
from photon.core.errors import CorruptStateError
from photon.core.tokens import Token, parse_token


@dataclass(frozen=True, slots=True)
class TakenOver:
    """`batches` without an end, oldest first, each with its incarnation's lease; bytes taken back."""

    batches: list[Unended]
    taken_back_bytes: int


def take_over(journal: IntentJournal, output: JoinedLog, inherit: Callable[[Token], Lease]) -> TakenOver:
    """Begins the output. CorruptStateError if a file of it is missing, SettingsError for a root that can't be
    a new one."""
    intents, done = journal.take_over()
    if not intents:
        return TakenOver([], output.begin())
    left = Left(min(intent.position for intent in intents), max(intent.position for intent in intents), done)
    for root in output.roots:
        if root.since is None:
            check_new(root, left.earliest)
    taken_back = output.begin(left)
    wanted = {line for intent in intents for line in split_lines(intent.lines)}
    written = WrittenLines(output.count(wanted, left.earliest, done))
    return TakenOver([Unended(intent, inherit(_token_of(intent)), written) for intent in intents], taken_back)


def _token_of(intent: Intent) -> Token:
    try:
        return parse_token(intent.token)
    except ValueError as error:
        raise CorruptStateError(
            f"intent {intent.sequence}: {error}; start the version of Photon that wrote it once more"
        ) from error
