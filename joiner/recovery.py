"""What a restarted joiner takes over from the one before (design: "No loss when a joiner crashes").

Of each intent without an end: its lines that stand in the joined log already, found by their exact bytes,
as a multiset, after the place the intent remembers. The resolver then registers it again, with the same
token, and writes those winners that are missing.

An intent whose incarnation is fenced is dropped: recovery read the joined log after the fence, so what stands
there is there for good, and what does not is recovery's to join again.
"""

from collections.abc import Callable

from joiner.intent_records import Intent
from joiner.intents import IntentJournal
from joiner.lease import Lease
from joiner.output import JoinedLog
from joiner.settling import Unended, WrittenLines
from photon.core.columns import split_lines
from photon.core.errors import CorruptStateError
from photon.core.tokens import Token, parse_token


def take_over(journal: IntentJournal, output: JoinedLog, inherit: Callable[[Token], Lease]) -> list[Unended]:
    """The batches without an end, oldest first, each with the lease of its incarnation.

    CorruptStateError if a file of the joined log is missing. To be called before anything is appended.
    """
    intents, done_ranges = journal.take_over()
    if not intents:
        return []
    earliest = min(intent.position for intent in intents)
    output.prepare(earliest, max(intent.position for intent in intents))
    wanted = {line for intent in intents for line in split_lines(intent.lines)}
    written = WrittenLines(output.count(wanted, earliest, done_ranges))
    return [Unended(intent, inherit(_token_of(intent)), written) for intent in intents]


def _token_of(intent: Intent) -> Token:
    try:
        return parse_token(intent.token)
    except ValueError as error:
        raise CorruptStateError(
            f"intent {intent.sequence}: {error}; start the version of Photon that wrote it once more"
        ) from error
