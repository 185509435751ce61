"""New code for a run: tried by a process of its own, then loaded in place of what is loaded."""

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

from millwheel.links import Link
from millwheel.topology import Topology, load_topology
from photon.cluster.supervisor import FreshLauncher, Process, last_message

TRIAL_S: Final = 60.0
"""In which new code is to be loaded."""
DEPLOY_S: Final = TRIAL_S + 10.0
"""In which a run answers a deploy."""
_OURS: Final = frozenset(loaded.partition(".")[0] for loaded in sys.modules)
"""What is loaded before any topology is: never loaded again."""
_HOME: Final = Path(__file__).parents[2]
"""A current directory that has us, too, has more that is ours."""


class Trial(NamedTuple):
    """New code, loaded and looked at by a process of its own, and who waits for the outcome."""

    process: Process
    log: Path
    asker: Link
    until: float

    @classmethod
    def begin(cls, name: str, log: Path, asker: Link) -> "Trial":
        """OSError."""
        log.unlink(missing_ok=True)
        process = FreshLauncher().launch(["millwheel", "check", name], log)
        return cls(process, log, asker, time.monotonic() + TRIAL_S)

    def outcome(self) -> str | None:
        """What is wrong with it; "" for nothing, None while that is not known."""
        status = self.process.poll()
        if status is None:
            if time.monotonic() < self.until:
                return None
            self.kill()
            return f"it was not loaded within {TRIAL_S:g} s"
        return "" if status == 0 else last_message(self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def fresh(name: str) -> Topology:
    """The topology as its modules are now: its own, its package's, and others of the current directory."""
    module = name.partition(":")[0]
    importlib.invalidate_caches()
    for loaded in list(sys.modules):
        if loaded == module or loaded.startswith(f"{module}.") or _is_users(loaded, module):
            del sys.modules[loaded]
    return load_topology(name)


def _is_users(loaded: str, module: str) -> bool:
    top = loaded.partition(".")[0]
    if top in _OURS:
        return False
    here = Path.cwd()
    return top == module.partition(".")[0] or (here != _HOME and _found_in(top) == here)


def _found_in(top: str) -> Path | None:
    """The directory in which a module, or a package, was found."""
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    return Path(spec.origin).parent if spec is not None and spec.has_location else None
