"""`photon console`: a web page on a running system. What `join` and `dev` show it by, too."""

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from photon.cli.options import path_option, system_options
from photon.cluster.registry_access import notice
from photon.cluster.topology import Topology, find_system
from photon.core.errors import UsageError
from photon.core.signals import on_signals

if TYPE_CHECKING:
    from photon.cluster.run import Watch
    from photon.cluster.statuses import Sample
    from photon.console.pages import Act
    from photon.dev.doings import Doings

LISTEN: Final = "127.0.0.1:7480"
MISSING: Final = "the console needs starlette and uvicorn: pip install 'photon-joiner[console]'"


def is_installed() -> bool:
    """Whether what it needs is here."""
    return all(importlib.util.find_spec(name) for name in ("starlette", "uvicorn"))


@click.command("console")
@system_options
@click.option("--listen", default=LISTEN, show_default=True, metavar="HOST:PORT", help="Where to serve it.")
@click.option(
    "--allow-actions",
    is_flag=True,
    help="Replay dead letters, kill workers of MillWheel. Else it only reads.",
)
@path_option("--millwheel", help="Work directory of a `photon millwheel run` to show beside the system.")
def command(
    work: Path | None, config: Path | None, listen: str, allow_actions: bool, millwheel: Path | None
) -> None:
    """Serve a web page that shows a running system, until Ctrl-C (docs/console.md).

    On this machine only; elsewhere with [tls] of --config, to clients with a certificate of its CA. Every
    address answers with JSON, too: add ?format=json.
    """
    if not is_installed():
        raise UsageError(MISSING)
    from photon.cluster.wheels import ask
    from photon.console.pages import Beside
    from photon.console.server import Console

    topology = find_system(work, config)
    asked = partial(ask, millwheel) if millwheel else None
    beside = Beside(_acts(topology, notice, asked) if allow_actions else {}, asked)
    place = work or Path(topology.settings.system.work)
    console = Console(topology, place, listen, beside=beside, notice=notice)
    on_signals(console.end, signal.SIGTERM)
    console.start()
    click.echo(f"console: {console.url}")
    try:
        console.wait()
    except KeyboardInterrupt:
        click.echo("", err=True)
    finally:
        console.stop()


def _acts(
    topology: Topology, notice: Callable[[str], None], asked: Callable[..., Mapping[str, Any]] | None
) -> "dict[str, Act]":
    """What a console may be asked to do. `asked`: a run of MillWheel."""
    from photon.console.server import replaying

    acts = {"replay": replaying(topology, notice)}
    if asked is not None:
        acts["kill-worker"] = lambda given: asked("kill", str(given.get("worker", "")))
    return acts


def _outage(doings: "Doings", what: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"told": doings.ask(what, asked)}


def watch_of(
    listen: str,
    notice: Callable[[str], None],
    doings: "Doings | None" = None,
    wheel: Path | None = None,
) -> "Watch":
    """A console for a run; on any port where the default one is taken. `doings`, `wheel`: of `photon dev`."""
    from photon.cluster.wheels import ask
    from photon.console.pages import Beside
    from photon.console.server import Console
    from photon.dev.doings import ACTIONS
    from photon.dev.pairs import LiveCheck

    @contextlib.contextmanager
    def watch(topology: Topology, work: Path) -> "Iterator[Callable[[Sample, Mapping[str, str]], None]]":
        asked = partial(ask, wheel) if wheel else None
        beside = Beside(millwheel=asked)
        with contextlib.ExitStack() as held:
            if doings is not None:
                check = LiveCheck(Path(topology.output) / "joined")
                check.start()
                held.callback(check.stop)
                acts: dict[str, Act] = {name: partial(_outage, doings, name) for name in ACTIONS}
                acts |= _acts(topology, notice, asked)
                beside = Beside(acts, asked, lambda: doings.down, lambda: doings.links, check.told)
            console = Console(topology, work, listen, listen == LISTEN, False, beside, notice)
            console.start()
            held.callback(console.stop)
            notice(f"console: {console.url}")
            yield console.pages.add

    return watch
