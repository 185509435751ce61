"""What a restarted joiner takes over from the one before (design: "No loss when a joiner crashes").

Of each intent without an end: its lines that stand in the joined log already, found by their exact bytes,
as a multiset, after the place the intent remembers. The resolver then registers it again, with the same
token, and writes those winners that are missing.
"""

from joiner.intents import IntentJournal
from joiner.output import JoinedLog
from joiner.settling import Unended, WrittenLines
from photon.core.columns import split_lines


def take_over(journal: IntentJournal, output: JoinedLog) -> list[Unended]:
    """The batches without an end, oldest first. CorruptStateError if a file of the joined log is missing.

    To be called before anything is appended.
    """
    intents, done_ranges = journal.take_over()
    if not intents:
        return []
    earliest = min(intent.position for intent in intents)
    output.prepare(earliest, max(intent.position for intent in intents))
    wanted = {line for intent in intents for line in split_lines(intent.lines)}
    written = WrittenLines(output.count(wanted, earliest, done_ranges))
    return [Unended(intent, written) for intent in intents]
