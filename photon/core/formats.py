"""Log files to packed columns: which format a file has, by its name (docs/formats.md).

A format is two ports: a Framing, which cuts a growing file between records, and a LogFormat, which turns
whole records into columns.
"""

from photon.core.blocks import BlockFormat, Labels, labels_of
from photon.core.formats_batches import ForeignBatch, LogFormat, Malformed, PrimaryBatch
from photon.core.formats_json import JsonLines
from photon.core.framing import holds_blocks
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary

__all__ = ["ForeignBatch", "Formats", "JsonLines", "LogFormat", "Malformed", "PrimaryBatch"]


class Formats:
    """The formats of one system. Not for several threads at once, and one IdPacker for each thread.

    `lines` also parses lines cut out of a file of any format: in all of them an event is a JSON line.
    """

    lines: JsonLines
    blocks: BlockFormat
    labels: Labels

    def __init__(self, primary: Primary, foreign: Foreign, packer: IdPacker) -> None:
        """SettingsError for field paths that can't be."""
        self.lines = JsonLines(primary, foreign, packer)
        self.labels = labels_of(primary, foreign, packer)
        self.blocks = BlockFormat(self.labels)

    def of(self, name: str) -> LogFormat:
        """By the file's suffix, that of its compression taken off first; JSON lines if it is none of ours."""
        return self.blocks if holds_blocks(name) else self.lines
