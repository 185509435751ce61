"""Drills of recovery with real processes: a run that is told to lose events, and a reading without Spark."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from idregistry.client import RegistryClient
from photon.cluster.topology import read_topology
from photon.core.clock import SystemClock
from photon.core.columns import pack_times, split_ids
from photon.core.ids import IdPacker, parse_token
from spark.losses import Loss, LostEvents, Survey
from tests.system import PHOTON, join_arguments, write_lines
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).parent / "drill_site"
LEASE_S = 1.0


class Run:
    """A `photon join --follow` over growing logs, whose joiner obeys tests/recovery/drill_site."""

    def __init__(
        self, root: Path, datacenters: int = 1, roots: Sequence[Path] = (), joiner: str = ""
    ) -> None:
        self.root, self.logs, self.out = root, root / "logs", root / "out"
        self.work = self.out / ".photon"
        self.drill = root / "drill"
        self.clicks = 0
        self.datacenters = datacenters
        for name in ("queries", "clicks"):
            (self.logs / name).mkdir(parents=True)
        self.config = root / "photon.toml"
        more = f"output_roots = {json.dumps([str(path) for path in roots])}\n" if roots else ""
        self.config.write_text(f"[registry]\nlease_s = {LEASE_S}\n[joiner]\n{more}{joiner}")
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        path = os.pathsep.join([str(SITE), str(ROOT)])
        environment = {**os.environ, "PHOTON_DRILL": str(self.drill), "PYTHONPATH": path}
        arguments = join_arguments(self.logs, self.out, "--follow", "--config", self.config)
        self.process = subprocess.Popen(
            [*PHOTON, *map(str, arguments), "--datacenters", str(self.datacenters)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def begin(self, count: int) -> None:
        """Started, and so many clicks joined."""
        self.start()
        self.click(count)
        wait_until(lambda: sum(self.joined().values()) == count)

    def stop(self) -> dict[str, Any]:
        assert self.process is not None
        self.process.terminate()
        printed, errors = self.process.communicate(timeout=100)
        assert self.process.returncode == 0, errors
        self.process = None
        found: dict[str, Any] = json.loads(printed)
        return found

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def click(self, count: int) -> None:
        """So many queries, each with a click."""
        first, self.clicks = self.clicks, self.clicks + count
        numbers = range(first, self.clicks)
        write_lines(self.logs / "queries" / f"q{first}.jsonl", [{"id": f"q{n}"} for n in numbers])
        rows = [{"id": f"c{n}", "primary_id": f"q{n}", "ts_us": 1_000_000 + n} for n in numbers]
        write_lines(self.logs / "clicks" / f"c{first}.jsonl", rows)

    def told(self, what: str, datacenter: str = "east") -> None:
        """What its next joiner to have something registered does."""
        temporary = self.drill.with_suffix(".new")
        temporary.write_text(f"{what}|{self.work / datacenter / 'joiner'}")
        temporary.rename(self.drill)

    def obeyed(self) -> bool:
        return Path(f"{self.drill}.done").exists()

    def joined(self, out: Path | None = None) -> Counter[str]:
        """Ids of the whole joined lines that are JSON, of all datacenters."""
        found: Counter[str] = Counter()
        for path in sorted(((out or self.out) / "joined").rglob("*.jsonl")):
            for line in path.read_bytes().split(b"\n")[:-1]:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue
                assert event["primary"]["id"] == event["primary_id"]
                found[event["id"]] += 1
        return found

    def all_once(self) -> Counter[str]:
        return Counter(f"c{n}" for n in range(self.clicks))

    def recover(
        self, die_at: str = "", passes: int = 0, apply: bool = True, gone: bool = False
    ) -> tuple[int, dict[str, Any]]:
        """As `photon recover`, without Spark. Its exit status (-9: it died) and its report."""
        words = [self.work, self.out, self.logs / "clicks", die_at or "never", passes, int(apply), int(gone)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.recovery.recover_child", *map(str, words)],
            capture_output=True, text=True, timeout=100, check=False, cwd=ROOT,
        )  # fmt: skip
        if done.returncode < 0:
            return done.returncode, {}
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def until_over(self) -> None:
        """Until nobody that has lost something holds a lease."""
        wait_until(
            lambda: "alive" not in [one["state"] for one in self.recover(apply=False)[1]["incarnations"]],
            what="a lease does not end",
        )


class PlainReading:
    """photon.recovery.recover.Reading in plain Python, of everything at once."""

    def __init__(self, addresses: Sequence[str], outs: Sequence[Path], clicks: Path) -> None:
        self._client = RegistryClient(addresses, 20.0, SystemClock(), random.Random())
        self._outs, self._clicks = outs, clicks
        self._packer = IdPacker()

    def survey(self, young_us: int, doubtful_us: int) -> Survey:
        registered = self._registered()
        joined = self._joined()
        lost = {key: token for key, token in registered.items() if key not in joined}
        held = [parse_token(token) for token in lost.values()]
        losses = []
        for who, group in groupby(sorted(held, key=_who), key=_who):
            times = [token.time_us for token in group]
            young = sum(time_us > young_us for time_us in times)
            doubtful = sum(time_us <= doubtful_us for time_us in times)
            losses.append(Loss(*who, len(times) - young, young, doubtful, min(times)))
        return Survey(len(registered), 0, 0, losses)

    def lost(self, incarnations: Sequence[int]) -> "PlainLost":
        held = {k: t for k, t in self._registered().items() if parse_token(t).incarnation in incarnations}
        joined = self._joined()
        lines = {}
        for path in sorted(self._clicks.glob("*.jsonl")):
            for line in path.read_bytes().splitlines():
                event = json.loads(line)
                lines[self._packer.pack([event["id"]])] = (event["ts_us"], line)
        return PlainLost({key: token for key, token in held.items() if key not in joined}, lines)

    def _registered(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        for shard in self._client.configuration().shards:
            for piece in self._client.scan(shard, fresh=True):
                found.update(zip(split_ids(piece.ids), piece.tokens, strict=True))
        return found

    def _joined(self) -> set[bytes]:
        found = set()
        for out in self._outs:
            for path in sorted((out / "joined").rglob("*.jsonl")):
                for line in path.read_bytes().split(b"\n"):
                    try:
                        found.add(self._packer.pack([json.loads(line)["id"]]))
                    except ValueError:
                        continue
        return found


class PlainLost:
    untold = 0

    def __init__(self, lost: dict[bytes, bytes], lines: dict[bytes, tuple[int, bytes]]) -> None:
        self._lost, self._lines = lost, lines
        gone = (token for key, token in lost.items() if key not in lines)
        self.missing = dict(Counter(parse_token(token).incarnation for token in gone))

    def events(self) -> Iterator[LostEvents]:
        """In two pieces, where there are two events."""
        keys = sorted((key for key in self._lost if key in self._lines), key=lambda k: (self._lost[k], k))
        middle = (len(keys) + 1) // 2
        for part in filter(None, (keys[:middle], keys[middle:])):
            tokens = [(token, len([*group])) for token, group in groupby(map(self._lost.__getitem__, part))]
            yield LostEvents(
                b"".join(part),
                pack_times([self._lines[key][0] for key in part]),
                [token for token, _ in tokens],
                [count for _, count in tokens],
                b"".join(self._lines[key][1] + b"\n" for key in part),
            )


def _who(token: Any) -> tuple[str, int]:
    return token.address, token.incarnation


def addresses_of(work: Path) -> list[str]:
    return [replica.grpc for replica in read_topology(work / "topology.json").replicas]
