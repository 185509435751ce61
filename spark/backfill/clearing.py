"""Clears the tokens of what a backfill has published (paper 3.3.3), as joiner.clearing does for a joiner.

A listed file is durable and never changes, and the job is done: nothing asks for its ids with their tokens
again. To clear a token again has no effect: how far this has come is noted in the job from time to time, and
whoever goes on after a kill begins again there. In parts: it costs no memory, however much was joined.
"""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from joiner.adapter import load_adapter
from joiner.joined_ids import JoinedIds
from joiner.manifest import Manifest
from joiner.ports import Checkpoint, Registry
from photon.core.disk import storage_errors
from photon.core.errors import StorageError, UnavailableError
from photon.core.fates import Cleared
from photon.core.ids import ID_BYTES
from photon.core.settings import Settings
from spark.backfill.asking import patiently
from spark.backfill.job import STEM, Clearing, Job, Phase, Place

BATCH_IDS_MAX: Final = 4096
"""No commit of others waits long for one."""
NOTE_S: Final = 5.0
PATIENCE_S: Final = 60.0
_TIME_BYTES: Final = 8

Notice = Callable[[str], None]


def is_left(job: Job, settings: Settings) -> bool:
    """Whether there is something to clear."""
    wanted = settings.joiner.clear_tokens and job.phase is Phase.DONE
    return wanted and job.clearing.results < len(job.results)


class Clearer:
    """For a job that is done, with the settings that it was read with; the place's lock is held."""

    def __init__(
        self,
        job: Job,
        place: Place,
        settings: Settings,
        registry: Registry,
        notice: Notice,
        checkpoint: Checkpoint = lambda _: None,
    ) -> None:
        self._job = job
        self._place = place
        self._adapter = load_adapter(settings.adapter.use, settings.adapter.field)
        self._joined_ids = JoinedIds(settings, self._adapter)
        self._registry = registry
        self._ids_per_s = settings.joiner.clear_ids_per_s
        self._batch_ids = max(1, min(BATCH_IDS_MAX, self._ids_per_s))
        self._notice = notice
        self._checkpoint = checkpoint
        self._untold = 0
        self._allowed_s = self._noted_s = time.monotonic()

    def clear(self) -> Job:
        """The job with nothing left to clear. UnavailableError, StorageError: run it again, it goes on."""
        if not self._adapter.keeps_id:
            self._unclearable()
            return self._job
        with closing(Manifest(self._place.joined, STEM)) as manifest:
            listed = set(manifest.listed)
        try:
            for number in range(self._job.clearing.results, len(self._job.results)):
                result = self._job.results[number]
                name = self._job.joined_name(result.bucket)
                ids = self._clear_file(self._place.joined / name) if name in listed else 0
                self._came_to(number + 1, ids)
        except UnavailableError as error:
            raise UnavailableError(
                f"all is published; the IdRegistry keeps the tokens of some of it ({error}); run the same "
                "command again, which goes on with clearing them"
            ) from error
        finally:
            self._place.save(self._job)
        if self._untold:
            self._notice(
                f"{self._untold} joined lines hold no id and time of a foreign event as the settings name "
                "them (the adapter's doing?): the IdRegistry keeps the tokens of those events"
            )
        return self._job

    def _unclearable(self) -> None:
        """The lines of such an adapter may hold the id of another event."""
        self._notice(
            "the adapter does not say that its lines keep the foreign id (keeps_id, see docs/adapters.md): "
            "the IdRegistry keeps the tokens of this backfill's events"
        )
        self._job = _come(self._job, len(self._job.results), 0)
        self._place.save(self._job)

    def _came_to(self, results: int, ids: int) -> None:
        self._job = _come(self._job, results, ids)
        if time.monotonic() - self._noted_s >= NOTE_S:
            self._place.save(self._job)
            self._noted_s = time.monotonic()

    def _clear_file(self, path: Path) -> int:
        """How many ids were cleared: none of a file that somebody took away."""
        cleared = 0
        try:
            with storage_errors(path):
                for part in self._joined_ids.parts(path, 0, self._batch_ids):
                    self._untold += part.unclearable
                    for low in range(0, len(part.ids) // ID_BYTES, self._batch_ids):
                        high = low + self._batch_ids
                        cleared += self._clear(
                            part.ids[ID_BYTES * low : ID_BYTES * high],
                            part.times[_TIME_BYTES * low : _TIME_BYTES * high],
                        )
        except StorageError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        return cleared

    def _clear(self, ids: bytes, times: bytes) -> int:
        time.sleep(max(0.0, self._allowed_s - time.monotonic()))
        self._allowed_s = time.monotonic() + len(ids) / ID_BYTES / self._ids_per_s
        outcomes = patiently(lambda: self._registry.clear(ids, times), PATIENCE_S)
        self._checkpoint("tokens cleared")
        return outcomes.count(Cleared.CLEARED)


def _come(job: Job, results: int, ids: int) -> Job:
    return msgspec.structs.replace(job, clearing=Clearing(results, job.clearing.ids + ids))
