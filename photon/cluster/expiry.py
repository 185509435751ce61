"""Tells of this process's certificate before it ends: what runs for months must not fall silent one night."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from photon.rpc.tls import Tls, expiry_complaint

LOOK_EVERY_S: Final = 6 * 3600.0


def watch_expiry(tls: Tls | None, now_s: Callable[[], float] = time.time) -> None:
    """Complain in the log, now and every few hours, once the certificate that was loaded ends soon: a newer
    file counts after a restart only."""
    if tls is None:
        return
    log = logging.getLogger("photon.tls")

    def watch() -> None:
        while True:
            complaint = expiry_complaint(tls, now_s())
            if complaint is not None:
                log.warning("%s", complaint)
            time.sleep(LOOK_EVERY_S)

    threading.Thread(target=watch, name="expiry", daemon=True).start()
