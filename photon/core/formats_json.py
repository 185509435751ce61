"""JSON lines to packed columns."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from photon.core.formats_batches import ForeignBatch, Malformed, PrimaryBatch
from photon.core.formats_fields import Field, decoder_of, parse_path
from photon.core.formats_lines import decode, split_chunk
from photon.core.formats_times import event_times, time_type
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary

_ID = str | int


class JsonLines:
    """One JSON object a line, UTF-8. Paths of the fields come from the settings; no other is looked at."""

    def __init__(self, primary: Primary, foreign: Foreign, packer: IdPacker) -> None:
        """SettingsError for paths that can't be."""
        self._packer = packer
        self._time_unit = foreign.time_unit
        self._time_field = foreign.time
        self._primary, columns = decoder_of("PrimaryEvent", {"id": Field(parse_path(primary.id), _ID)})
        self._primary_id = columns["id"]
        self._foreign, columns = decoder_of(
            "ForeignEvent",
            {
                "id": Field(parse_path(foreign.id), _ID),
                "primary_id": Field(parse_path(foreign.primary_id), _ID),
                "time": Field(parse_path(foreign.time), time_type(foreign.time_unit), optional=True),
            },
        )
        self._id, self._named_id, self._time = columns["id"], columns["primary_id"], columns["time"]

    def parse_primary(self, chunk: bytes) -> PrimaryBatch:
        found = split_chunk(chunk)
        events, good, malformed = decode(self._primary, chunk, found)
        lines, starts = found.lines, found.starts
        if good is not None:
            lines, starts = [lines[row] for row in good], starts[good]
        return PrimaryBatch(self._packer.pack(self._primary_id(events)), lines, starts, malformed)

    def parse_foreign(self, chunk: bytes) -> ForeignBatch:
        found = split_chunk(chunk)
        events, good, malformed = decode(self._foreign, chunk, found)
        lines, starts = found.lines, found.starts
        if good is not None:
            lines, starts = [lines[row] for row in good], starts[good]
        texts, named, values = self._id(events), self._named_id(events), self._time(events)
        ids = self._packer.pack(texts)
        times = event_times(ids, values, self._time_unit)
        if not isinstance(times, bytes):
            fits = self._without_bad_times(ids, values, lines, starts, malformed)
            lines, starts = list(compress(lines, fits)), starts[fits]
            texts, named = list(compress(texts, fits)), list(compress(named, fits))
            ids = self._packer.pack(texts)
            times = event_times(ids, list(compress(values, fits)), self._time_unit)
            assert isinstance(times, bytes)
        return ForeignBatch(ids, self._packer.pack(named), times, lines, starts, malformed)

    def _without_bad_times(
        self,
        ids: bytes,
        values: Sequence[Any],
        lines: list[bytes],
        starts: npt.NDArray[np.int64],
        malformed: list[Malformed],
    ) -> npt.NDArray[np.bool_]:
        """The slow path: which events have a usable time; the others are added to the malformed ones."""
        fits = np.ones(len(lines), np.bool_)
        for row, value in enumerate(values):
            one = event_times(ids[16 * row : 16 * row + 16], [value], self._time_unit)
            if isinstance(one, str):
                fits[row] = False
                reason = f"field '{self._time_field}' {one}"
                malformed.append(Malformed(int(starts[row]), lines[row], reason))
        malformed.sort(key=lambda bad: bad.start)
        return fits
