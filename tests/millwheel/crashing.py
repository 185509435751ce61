"""The two stages in workers that die at a point between two IO steps; each life takes the next one."""

import fcntl
import os
import signal
import sys
from pathlib import Path

from millwheel import links
from millwheel.disk import Disk
from millwheel.engine import logged
from millwheel.sinks import SinkFiles
from millwheel.worker import Worker
from tests.millwheel.topologies import HELD

TOPOLOGY = HELD
LEFT = Path("points")
logged.LOG_ROWS_MAX = 10


def kind(number):
    return lambda arguments: arguments[2] == number


def always(_):
    return True


POINTS = {
    "the log is in the table, and neither is durable": (Disk, "_write", "after", always),
    "claimed, nothing read": (Disk, "claim", "after", always),
    "ready, nothing done": (Worker, "run", "before", always),
    "before a commit": (Disk, "commit", "before", always),
    "in a commit, past the fence": (Disk, "_fences", "after", lambda arguments: arguments[0]._mine.size),
    "after a commit": (Disk, "commit", "after", always),
    "records are sent": (Worker, "_send", "after", kind(links.FRAME)),
    "before an acknowledgement": (Worker, "_send", "before", kind(links.ACK)),
    "acknowledged": (Worker, "_send", "after", kind(links.ACK)),
    "lines are written": (SinkFiles, "append", "after", always),
    "before a sync of lines": (SinkFiles, "sync", "before", always),
    "lines are synced": (SinkFiles, "sync", "after", always),
    "lines left the store": (SinkFiles, "noted", "after", lambda arguments: hasattr(arguments[0], "_log")),
    "before a report": (Worker, "_send", "before", kind(links.REPORT)),
    "reported": (Worker, "_send", "after", kind(links.REPORT)),
}


def taken():
    """The next point; None if all were reached, or there are none."""
    try:
        file = LEFT.open("r+")
    except FileNotFoundError:
        return None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        points = file.read().splitlines()
        file.seek(0)
        file.truncate()
        file.writelines(f"{point}\n" for point in points[1:])
    return points[0] if points else None


def die_at(owner, name, when, matches):
    whole = getattr(owner, name)

    def until_then(*arguments, **given):
        there = matches(arguments)
        if there and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        found = whole(*arguments, **given)
        if there:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, name, until_then)


if "worker" in sys.argv:
    point = taken()
    if point is not None:
        print(f"dies: {point}", flush=True)
        die_at(*POINTS[point])
