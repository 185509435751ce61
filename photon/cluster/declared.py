"""Where MillWheel and Photon meet: what a computation says is unmatched no joiner joins any more, and what a
joiner has joined is never said to be; and of what runs in several datacenters say, one is the first
(photon.core.ids).
"""

import contextlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.computation import Batch, BatchComputation, BatchContext
from millwheel.engine.records import take, values_of
from photon.cluster.registry_access import Named, registry_of, running_topology
from photon.core.columns import pack_times, take_ids, take_times
from photon.core.errors import UsageError
from photon.core.fates import Committed
from photon.core.ids import UNMATCHED, IdPacker, decided_token, mark_ids, parse_token
from photon.core.settings import Settings, identity_digest, load_settings
from photon.logs.formats import JsonLines, json_lines

if TYPE_CHECKING:
    from idregistry.client import RegistryClient

_TIMEOUT_S: Final = 3.0
"""A worker that waits longer would be taken for dead. It starts again, and asks again."""


class _AskingRegistry(BatchComputation):
    """Opens what it asks when it is first called, in the worker."""

    asks_outside = True

    def __init__(self, work: str | Path | None, config: str | Path | None) -> None:
        """UsageError unless one of them is given."""
        if (work is None) == (config is None):
            raise UsageError(
                f"{type(self).__name__}: give one of work= (of a run here) and config= (a system's "
                "photon.toml)"
            )
        self._work, self._config = (
            None if path is None else Path(path).absolute() for path in (work, config)
        )
        self._closing = contextlib.ExitStack()

    def _client(self) -> "tuple[RegistryClient, Settings]":
        """UnavailableError, UsageError."""
        if self._work is not None:
            topology = running_topology(self._work)
            settings, registry = topology.settings, registry_of(topology)
        else:
            settings = load_settings(self._config)
            registry = Named(settings=settings).at()
        return self._closing.enter_context(registry.client(_TIMEOUT_S)), settings


def _won(client: "RegistryClient", ids: bytes, times: bytes, token: bytes, what: str) -> npt.NDArray[np.intp]:
    """Rows whose marks the token has. ValueError if the registry has forgotten `what` of one."""
    # An id that stands twice would lose against itself.
    _, first, row_of = np.unique(np.frombuffer(ids, "V16"), return_index=True, return_inverse=True)
    committed = client.commit(mark_ids(take_ids(ids, first)), take_times(times, first), token)
    outcomes = np.frombuffer(committed, np.uint8)[row_of]
    if (outcomes == Committed.EXPIRED).any():
        raise ValueError(f"older than the registry remembers: whether it {what} can't be told")
    return np.flatnonzero(outcomes == Committed.WON)


class Declared(_AskingRegistry):
    """Reads primary events (JSON objects) without a match so far, as `millwheel.ready.Unmatched` produces
    them, and produces to `stream` those that no joiner has marked as matched. Each is marked as unmatched
    before: what names it from then on has the fate `late`.

    While the registry does not answer, the events wait. One that is older than it remembers becomes a dead
    letter.
    """

    def __init__(
        self, stream: str, *, work: str | Path | None = None, config: str | Path | None = None
    ) -> None:
        """Whose registry: that of a `photon join` or `dev`, by its `work` directory (OUT/.photon), or of the
        system that `config`, a photon.toml, names. UsageError unless one of them is given."""
        super().__init__(work, config)
        self._stream = stream

    def process_batch(self, batch: Batch, ctx: BatchContext) -> None:
        client, lines = self._opened
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
        rows = _won(client, parsed.ids, times, UNMATCHED, "is matched").tolist()
        names = [batch.names[batch.codes[row]] for row in rows]
        ctx.produce(self._stream, names, [values[row] for row in rows], batch.times[rows])

    @cached_property
    def _opened(self) -> "tuple[RegistryClient, JsonLines]":
        """UnavailableError; UsageError, SettingsMismatchError where the joiners don't mark, or otherwise."""
        client, settings = self._client()
        if not settings.joiner.mark_matched:
            self._closing.close()
            raise UsageError(
                "Declared: set joiner.mark_matched = true for all joiners, or what they join would be called "
                "unmatched"
            )
        token = parse_token(UNMATCHED)
        try:
            # The registry knows by which settings its joiners find ids and times.
            client.keep_alive(
                token.address, token.incarnation, settings.registry.lease_s, identity_digest(settings)
            )
        except BaseException:
            self._closing.close()
            raise
        return client, json_lines(settings)


class Decided(_AskingRegistry):
    """Of a topology that runs in several datacenters: hands on to `stream` what its own was the first to
    register, so that each result is said once, by whichever is up (docs/millwheel.md).

    A result is told by key and time, or by what `id` makes of its value; several with the same are one
    datacenter's. A datacenter that was killed says after its restart what it had registered. While the
    registry does not answer, results wait; one that is older than it remembers becomes a dead letter.
    """

    def __init__(
        self,
        stream: str,
        *,
        of: str,
        datacenter: str,
        id: Callable[[Any], str] | None = None,
        work: str | Path | None = None,
        config: str | Path | None = None,
    ) -> None:
        """`of`: a name for these results, the same in all datacenters and no others'; `datacenter`: this
        one's. The registry as of Declared."""
        super().__init__(work, config)
        if not of or not datacenter:
            raise UsageError("Decided: name the results (of=) and the datacenter (datacenter=)")
        self._stream, self._of, self._id = stream, of, id
        self._token = decided_token(datacenter)

    @cached_property
    def _opened(self) -> "tuple[RegistryClient, IdPacker]":
        """UnavailableError, UsageError."""
        client, settings = self._client()
        return client, IdPacker(settings.ids.key.encode())

    def process_batch(self, batch: Batch, ctx: BatchContext) -> None:
        client, packer = self._opened
        names = list(map(batch.names.__getitem__, batch.codes.tolist()))
        texts = list(map("\0".join, zip(names, map(str, batch.times.tolist()), strict=True)))
        if self._id is not None:
            texts = list(map(self._id, values_of(batch.values, len(batch))))
        ids = packer.pack([f"{self._of}\0{text}" for text in texts])
        rows = _won(client, ids, pack_times(batch.times), self._token, "was said")
        if len(rows):
            won = [names[row] for row in rows.tolist()]
            ctx.produce(self._stream, won, take(batch.values, rows), batch.times[rows])
