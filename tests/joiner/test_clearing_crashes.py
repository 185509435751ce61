"""Nobody asks with a token that was cleared, whenever the joiner ends (joiner/clearing.py)."""

import os
import random

import pytest

from joiner import clearing
from photon.core.columns import split_ids
from photon.core.fates import Committed
from photon.core.tokens import Token
from tests.joiner.clearing_kit import Registry, clear, foreign, made_settings, names, wait_until
from tests.joiner.fakes import CLEARED, make_worker


class Strict(Registry):
    """Notes who asks with the token that held an id before it was cleared."""

    def __init__(self):
        super().__init__()
        self.held: dict[bytes, bytes] = {}
        self.wronged: list[bytes] = []

    def commit(self, ids, times, token):
        outcomes = super().commit(ids, times, token)
        for key, outcome in zip(split_ids(ids), outcomes, strict=True):
            if outcome == Committed.WON:
                self.held[key] = token
            elif self.tokens.get(key) == CLEARED and self.held[key] == token:
                self.wronged.append(key)
        return outcomes

    def like(self):
        other = type(self)()
        other.tokens, other.held = dict(self.tokens), dict(self.held)
        return other


def test_a_retry_with_the_old_token_is_a_duplicate_after_clearing():
    """So what `Strict` looks for would lose an event."""
    registry, mine = Strict(), Token("127.0.0.1:1", 7, 0).pack()
    registry.commit(b"a" * 16, bytes(8), mine)
    registry.clear(b"a" * 16, bytes(8))
    assert registry.commit(b"a" * 16, bytes(8), mine) == bytes([Committed.DUPLICATE])
    assert registry.wronged == [b"a" * 16]


class PowerCut:
    """Keeps what is on disk: of the logs that were written, what was synced."""

    def __init__(self, root, monkeypatch):
        self._root = root
        self._synced: dict[str, int] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, sync):
        def noted(fd):
            status = os.fstat(fd)
            sync(fd)
            self._synced[os.readlink(f"/proc/self/fd/{fd}")] = status.st_size

        return noted

    def leave(self, target):
        """What the next start finds."""
        for path in self._root.rglob("*"):
            if path.is_dir():
                continue
            to = target / path.relative_to(self._root)
            to.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            volatile = path.suffix in (".jsonl", ".journal", ".manifest", ".lives")
            to.write_bytes(data[: self._synced.get(str(path), 0)] if volatile else data)


COURSE = [names(n, 3) for n in range(6)]


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_no_life_after_a_power_cut_anywhere_needs_a_token_that_was_cleared(
    tmp_path, monkeypatch, output_format
):
    """Files are listed when the ends of their intents are durable, so no intent is open again."""
    settings = made_settings(joiner={"fsync": True, "output_format": output_format})
    disk = PowerCut(tmp_path / "live", monkeypatch)
    registry = Strict()
    cuts, rng = [], random.Random(5)

    def checkpoint(step):
        if step == "tokens cleared" or rng.random() < 0.25:
            target = tmp_path / f"cut-{len(cuts)}"
            disk.leave(target)
            cuts.append((step, target, registry.like()))

    worker = make_worker(tmp_path / "live", registry, settings=settings, checkpoint=checkpoint)
    monkeypatch.setattr(clearing, "NOTE_S", 0.0)
    for number, events in enumerate(COURSE):
        registry.failures = ["after"] if number == 4 else []
        worker.join(foreign(settings, events))
        clear(worker)
        if number == 5:
            worker._resolver.start()
            wait_until(lambda: not worker.status()["unresolved"])
    worker._output.end()  # no later intent makes the last end durable
    clear(worker)
    worker.close()
    assert len(registry.cleared) == sum(map(len, COURSE))
    assert {"tokens cleared", "clearing noted", "listed", "output synced"} <= {step for step, _, _ in cuts}
    for step, root, left in cuts:
        worker = make_worker(root, left, settings=settings)
        worker.start()
        wait_until(lambda: not worker.status()["unresolved"])
        for events in COURSE:
            worker.join(foreign(settings, events))
        assert worker.stop(5)
        assert left.wronged == [], step
        worker = make_worker(root, left, settings=settings)
        clear(worker)
        worker.close()
        assert len(left.cleared) == sum(map(len, COURSE)), f"{step}: each is written, and so cleared"
