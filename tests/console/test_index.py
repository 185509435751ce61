"""The index of joined lines: where each is, as the logs grow, and after a restart."""

import json

from photon.console.index import JoinedIndex
from photon.core.clock import SystemClock
from photon.core.ids import IdPacker
from photon.core.settings import parse_settings
from tests.waiting import wait_until

SETTINGS = parse_settings({"foreign": {"id": "click", "time": "at"}, "logs": {"scan_interval_s": 0.05}})
PACKER = IdPacker(SETTINGS.ids.key.encode())


def line(number):
    return json.dumps({"click": f"c{number}", "at": number, "primary": {"id": "q"}}).encode() + b"\n"


def lines_of(index, number):
    return [
        (one["datacenter"], one["offset"], one["line"]) for one in index.find(PACKER.pack([f"c{number}"]))
    ]


def test_joined_lines_are_found_where_they_are_as_the_logs_grow_and_after_a_restart(tmp_path):
    joined = tmp_path / "joined"
    (joined / "east").mkdir(parents=True)
    (joined / "west").mkdir()
    log = joined / "east" / "joiner-000000.jsonl"
    log.write_bytes(line(0) + b'{"an adapter": "made this"}\n' + line(1))
    index = JoinedIndex(SETTINGS, joined, tmp_path / "index", SystemClock())
    index.start()
    try:
        wait_until(lambda: index.status() == {"events": 2, "caught_up": True})
        offset = len(line(0)) + 28
        assert lines_of(index, 1) == [("east", offset, line(1).decode().strip())]
        (joined / "west" / "joiner-000000.jsonl").write_bytes(line(2))
        wait_until(lambda: lines_of(index, 2))
        assert lines_of(index, 2)[0][0] == "west" and lines_of(index, 3) == []
    finally:
        index.stop()
    with log.open("ab") as file:
        file.write(line(3))
    again = JoinedIndex(SETTINGS, joined, tmp_path / "index", SystemClock())
    again.start()
    try:
        wait_until(lambda: lines_of(again, 3))
        assert again.status()["events"] == 4 and lines_of(again, 0)
    finally:
        again.stop()
