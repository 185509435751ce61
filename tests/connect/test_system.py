"""A system of several machines of which one datacenter imports: each process alone, by photon.toml."""

import csv
import json
from collections import Counter

import pyarrow.parquet
import pytest

from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


class Tables(Truth):
    """Where a datacenter imports, each round is a table, whole when it gets its name."""

    rounds = 0

    def _append(self, datacenter, kind, events):
        if datacenter not in self._roles.imported:
            super()._append(datacenter, kind, events)
            return
        self.rounds += 1
        path = self._roles.root / f"logs-{datacenter}" / kind / f"{self.rounds:03}.csv"
        with path.with_suffix(".part").open("w", newline="") as file:
            writer = csv.DictWriter(file, events[0].keys())
            writer.writeheader()
            writer.writerows(events)
        path.with_suffix(".part").rename(path)


@pytest.mark.long
@pytest.mark.soak
def test_one_datacenter_reads_tables_and_both_publish_through_kills(tmp_path):
    lake = tmp_path / "lake"
    sink = f"file://{lake}?format=parquet&every_s=0.5"
    roles = Roles(tmp_path, imported=("east",), joiner={"sinks": [sink]})
    truth = Tables(roles)

    def published():
        tables = map(pyarrow.parquet.read_table, sorted(lake.glob("*/*.parquet")))
        return Counter((row["primary_id"], row["id"]) for table in tables for row in table.to_pylist())

    def copied():
        copies = tmp_path.glob("work/east/importer/foreign/*/*.jsonl")
        whole = [line for path in copies for line in path.read_bytes().splitlines(True) if line[-1:] == b"\n"]
        return {json.loads(line)["id"] for line in whole}

    roles.start()
    try:
        truth.write(200)
        roles.await_health(SERVING)
        for victims in ([("importer", "east")], [("joiner", "east"), ("joiner", "west")]):
            truth.write(100)
            roles.kill(*victims)
            truth.write(100)
            roles.start(*victims)
            truth.await_all()
        wait_until(lambda: published().keys() >= truth.pairs, what=roles.told)
        assert published() == Counter(truth.pairs)
        # West may have joined what the importer has still to look for.
        wait_until(lambda: copied() == {click for _, click in truth.pairs}, what="not all is copied")
        assert roles.terminate(*roles.all) == [0] * len(roles.all)
    finally:
        roles.kill()
