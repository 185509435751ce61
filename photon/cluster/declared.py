"""Where MillWheel and Photon meet: what a computation says is unmatched no joiner joins any more, and what a
joiner has joined is never said to be (photon.core.ids).
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from millwheel.computation import Batch, BatchComputation, BatchContext
from photon.cluster.registry_access import Named, registry_of, running_topology
from photon.core.columns import take_ids, take_times
from photon.core.errors import UsageError
from photon.core.fates import Committed
from photon.core.ids import UNMATCHED, mark_ids, parse_token
from photon.core.settings import identity_digest, load_settings
from photon.logs.formats import JsonLines, json_lines

if TYPE_CHECKING:
    from idregistry.client import RegistryClient

_TIMEOUT_S: Final = 3.0
"""A worker that waits longer would be taken for dead. It starts again, and asks again."""


class Declared(BatchComputation):
    """Reads primary events (JSON objects) without a match so far, as `millwheel.ready.Unmatched` produces
    them, and produces to `stream` those that no joiner has marked as matched. Each is marked as unmatched
    before: what names it from then on has the fate `late`.

    While the registry does not answer, the events wait. One that is older than it remembers becomes a dead
    letter.
    """

    asks_outside = True

    def __init__(
        self, stream: str, *, work: str | Path | None = None, config: str | Path | None = None
    ) -> None:
        """Whose registry: that of a `photon join` or `dev`, by its `work` directory (OUT/.photon), or of the
        system that `config`, a photon.toml, names. UsageError unless one of them is given."""
        if (work is None) == (config is None):
            raise UsageError(
                "Declared: give one of work= (of a run here) and config= (a system's photon.toml)"
            )
        self._stream = stream
        self._work, self._config = (
            None if path is None else Path(path).absolute() for path in (work, config)
        )
        self._opened: tuple[RegistryClient, JsonLines] | None = None
        self._closing = contextlib.ExitStack()

    def process_batch(self, batch: Batch, ctx: BatchContext) -> None:
        client, lines = self._open()
        values = batch.values
        if not isinstance(values, list):
            raise TypeError("Declared reads primary events, JSON objects")
        events = [msgspec.json.encode(value) for value in values]
        parsed = lines.parse_primary(b"\n".join(events))
        if parsed.malformed:
            raise ValueError(f"no primary event: {parsed.malformed[0].reason}")
        times, wrong = lines.primary_times(parsed.ids, events)
        if wrong:
            raise ValueError(f"the primary event's time {next(iter(wrong.values()))}")
        # An id that stands twice would lose against itself.
        _, first, row_of = np.unique(np.frombuffer(parsed.ids, "V16"), return_index=True, return_inverse=True)
        marks = mark_ids(take_ids(parsed.ids, first))
        outcomes = np.frombuffer(client.commit(marks, take_times(times, first), UNMATCHED), np.uint8)[row_of]
        if (outcomes == Committed.EXPIRED).any():
            raise ValueError("older than the registry remembers: whether it is matched can't be told")
        rows = np.flatnonzero(outcomes == Committed.WON).tolist()
        names = [batch.names[batch.codes[row]] for row in rows]
        ctx.produce(self._stream, names, [values[row] for row in rows], batch.times[rows])

    def _open(self) -> "tuple[RegistryClient, JsonLines]":
        """UnavailableError; UsageError, SettingsMismatchError where the joiners don't mark, or otherwise."""
        if self._opened is not None:
            return self._opened
        if self._work is not None:
            topology = running_topology(self._work)
            settings, registry = topology.settings, registry_of(topology)
        else:
            settings = load_settings(self._config)
            registry = Named(settings=settings).at()
        if not settings.joiner.mark_matched:
            raise UsageError(
                "Declared: set joiner.mark_matched = true for all joiners, or what they join would be called "
                "unmatched"
            )
        client = self._closing.enter_context(registry.client(_TIMEOUT_S))
        token = parse_token(UNMATCHED)
        try:
            # The registry knows by which settings its joiners find ids and times.
            client.keep_alive(
                token.address, token.incarnation, settings.registry.lease_s, identity_digest(settings)
            )
        except BaseException:
            self._closing.close()
            raise
        self._opened = client, json_lines(settings)
        return self._opened
