"""`photon recover` without Spark, which kills itself between two of its steps; a process of test_recover.py.

Arguments: work directory, output, directory of the foreign logs, checkpoint to die at (or "never"), how often
to pass it before, whether to apply, whether what is not there is gone for good.
"""

import json
import signal
import sys
import threading
from pathlib import Path

from photon.cluster.registry_access import Named, asked_registry
from photon.cluster.topology import read_topology
from photon.core.clock import SystemClock
from photon.recovery.recover import Job, recover
from tests.recovery.recovering import PlainReading


def main(work: Path, out: Path, clicks: Path, die_at: str, passes: int, apply: bool, gone: bool) -> int:
    left = passes

    def checkpoint(name: str) -> None:
        nonlocal left
        if name == die_at:
            if left == 0:
                signal.pthread_kill(threading.get_ident(), signal.SIGKILL)
            left -= 1

    topology = read_topology(work / "topology.json")
    roots = [out, *map(Path, topology.settings.joiner.output_roots)]
    inbox = Path(topology.pipelines[0].directory) / "dispatcher" / "inbox"
    job = Job(roots, work, inbox, work / "recovery", apply=apply, gone=gone, settle_s=0.0)
    with asked_registry(Named(work)) as asked, asked.registry.client(20.0) as client:
        reading = PlainReading(asked.registry.addresses, roots, clicks)
        report = recover(job, client, reading, SystemClock(), checkpoint=checkpoint)
    print(json.dumps(report.as_document()))
    return report.status


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(main(*map(Path, words[:3]), words[3], int(words[4]), words[5] == "1", words[6] == "1"))
