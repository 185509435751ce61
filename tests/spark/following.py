"""`photon backfill --follow` in a process of its own, over logs that grow."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.system import read_lines
from tests.waiting import wait_until

WAIT_S = 120.0
US = 1_700_000_000_000_000

COMMAND = """\
import spark.backfill.follow as follow, spark.backfill.growth as growth
follow.SAME_PRIMARY_WITHIN, growth.TICK_S = "2 seconds", 0.5
from photon.cli.main import main
main()
"""

ADAPTER = """\
import os
from pathlib import Path
from joiner.adapter import Adapter

DIE = Path(__file__).parent / "die"

class Dying(Adapter):
    def join(self, primary, foreign):
        if DIE.exists():
            DIE.unlink()
            os._exit(9)
        return None
"""


class Followed:
    """Logs that grow, and the command over them."""

    def __init__(self, directory, registry, **settings):
        self.directory = directory
        self.registry = registry
        self.pairs = set()
        self.bad = self.clicks = self.queries = 0
        for side in ("queries", "clicks"):
            (directory / "logs" / side).mkdir(parents=True)
        (directory / "dying.py").write_text(ADAPTER)
        tables = {"adapter": {"use": "dying:Dying"}, "registry": {"lease_s": 2}, **settings}
        text = "".join(
            f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )
        (directory / "photon.toml").write_text(text)

    def log(self, side, *events):
        number = self.queries % 3
        with (self.directory / f"logs/{side}/{number}.jsonl").open("ab") as file:
            file.write(
                b"".join(e if isinstance(e, bytes) else json.dumps(e).encode() + b"\n" for e in events)
            )

    def more(self, count):
        """So many pairs: some clicks before their queries, some twice, some queries twice, and bad lines."""
        first = self.queries
        self.queries += count
        queries = [{"id": f"q{n}", "ts_us": US} for n in range(first, first + count)]
        clicks = [{"id": f"c{n}", "primary_id": f"q{n}", "ts_us": US} for n in range(first, first + count)]
        half = count // 2
        self.log("clicks", *clicks[:half], b"bad\n")
        self.log("queries", *queries, *queries[::10])
        self.log("clicks", *clicks[half:], *clicks[::7])
        self.pairs |= {(query["id"], click["id"]) for query, click in zip(queries, clicks, strict=True)}
        self.bad += 1
        self.clicks += len(clicks) + len(clicks[::7])

    def arguments(self, *more):
        arguments = ["backfill", "--primary", "logs/queries", "--foreign", "logs/clicks", "--out", "out"]
        return [*arguments, "--config", "photon.toml", "--registry", self.registry, *more]

    def start(self, *more, kill_at="", spark=("--master", "local[2]", "--driver-memory", "512m")):
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, *self.arguments("--follow", "--json", *spark, *more)],
            cwd=self.directory,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "PHOTON_BACKFILL_KILL_AT": kill_at,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def joined(self, growing=True):
        """(primary id, foreign id) -> times."""
        lines = read_lines(self.directory / "out/joined", growing)
        return Counter((line["primary"]["id"], line["id"]) for line in lines)

    def letters(self):
        lines = read_lines(self.directory / "out/dead-letters/backfill", growing=True)
        return Counter(line["fate"] for line in lines)

    def await_all(self, process):
        def done():
            return self.joined().keys() >= self.pairs and self.letters()["malformed"] >= self.bad

        wait_until(lambda: process.poll() is not None or done(), WAIT_S, lambda: str(len(self.joined())))
        assert process.poll() is None, process.communicate()[1][-2000:]

    def stop(self, process):
        """-> the summaries of its batches, added up."""
        process.send_signal(signal.SIGTERM)
        said, error = process.communicate(timeout=WAIT_S)
        assert process.returncode == 128 + signal.SIGTERM, error[-2000:]
        total = Counter()
        for line in said.splitlines():
            total.update({key: value for key, value in json.loads(line).items() if isinstance(value, int)})
        return total
