"""On the PYTHONPATH of a real run: a joiner stops or kills itself once, with events registered and not written.

PHOTON_DRILL names a file that says what (`stop`, or `lose`: killed, and its directory deleted) and names that
directory. The joiner that takes the file away does it.
"""

import contextlib
import os


def _arm(drill: str) -> None:
    import shutil
    import signal
    import threading

    from joiner import commit as settling

    real = settling.Settler._write

    def write(self, batch, lines) -> None:
        if lines:  # something is registered, and about to be written
            obey()
        real(self, batch, lines)

    def obey() -> None:
        try:
            with open(drill) as file:
                what, directory = file.read().split("|")
            os.rename(drill, drill + ".done")
        except (FileNotFoundError, ValueError):
            return
        if what == "lose":
            shutil.rmtree(directory)
        # This very thread: with os.kill it may go on, and write, until the signal has reached it.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)

    settling.Settler._write = write


if os.environ.get("PHOTON_DRILL"):
    with contextlib.suppress(ImportError):  # a python that is none of Photon's
        _arm(os.environ["PHOTON_DRILL"])
