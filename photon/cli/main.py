"""The `photon` command. Each subcommand is imported when it is called."""

import difflib
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Final

import click

from photon import __version__
from photon.core.errors import PhotonError

# name -> (module with a click command called `command`, or its attribute, or one of several; a line of help)
_COMMANDS: Final = {
    "init": ("photon.cli.init", "Write a photon.toml for your logs, guessed from their first lines."),
    "join": ("photon.cli.join", "Join logs with the whole system embedded on this machine."),
    "generate": ("photon.cli.generate", "Write query and click logs with their ground truth."),
    "dev": ("photon.cli.dev", "Run several datacenters on this machine, and kill one of them."),
    "demo": ("photon.cli.demo", "Join 328,521 real departures with the weather, in two datacenters."),
    "bench": ("photon.cli.bench", "Measure catch-up, steady rate and live latency on this machine."),
    "status": ("photon.cli.status", "Show what every process of a running system says of itself."),
    "console": ("photon.cli.console", "Serve a web page that shows a running system."),
    "health": ("photon.cli.health", "Ask one process whether it serves."),
    "explain": ("photon.cli.explain", "Say all that is known of one foreign event."),
    "dead-letters": ("photon.cli.dead_letters:dead_letters", "List, show and replay what was not joined."),
    "verify": ("photon.cli.verify", "Account for every foreign event of a run (large logs: Java)."),
    "recover": ("photon.cli.recover", "Bring back what dead joiners registered and lost (needs Java)."),
    "backfill": ("photon.cli.backfill", "Join old logs as a Spark job (needs Java)."),
    "logmap": ("photon.cli.logmap:logmap", "Build log file maps with Spark, load them (needs Java)."),
    "millwheel": ("photon.cli.millwheel:group", "Say what events mean: windows, sessions, anomalies."),
    "adapter": ("photon.cli.adapter:adapter", "Try an adapter on sample lines (`adapter test`)."),
    "connect": ("photon.cli.connect:group", "Check a source or a sink (`connect test`)."),
    "certs": ("photon.cli.certs", "Make a CA and certificates for [tls]."),
    "reshard": ("photon.cli.registry:reshard", "Change the number of shards of the IdRegistry."),
    "drain": ("photon.cli.dispatcher:drain", "Give a dispatcher's shares to the others, to take it away."),
    "registry": ("photon.cli.roles:GROUPS", "The IdRegistry (`registry serve`, `replace`, `scan`)."),
    "eventstore": ("photon.cli.roles:GROUPS", "The EventStore (`eventstore serve`)."),
    "joiner": ("photon.cli.roles:GROUPS", "The joiner (`joiner serve`)."),
    "importer": ("photon.cli.roles:GROUPS", "The importer of Kafka and tables (`importer serve`)."),
    "dispatcher": ("photon.cli.roles:GROUPS", "The dispatcher (`dispatcher serve`, `init`)."),
}

EXAMPLES: Final = {
    "init": ("init --primary 'queries/*.jsonl' --foreign 'clicks/*.jsonl'",),
    "join": (
        "join --primary 'queries/*.jsonl' --foreign 'clicks/*.jsonl' --out out --config photon.toml",
        "join --primary queries --foreign clicks --out out --datacenters 2 --follow",
        "join --check --primary queries --foreign clicks --config photon.toml",
    ),
    "generate": (
        "generate --out logs --queries 20000 --clicks 4000 --duplicates 0.02",
        "generate --out logs --rate 2000 --duration 60",
    ),
    "dev": ("dev --datacenters 2", "dev --millwheel"),
    "demo": ("demo",),
    "bench": ("bench --quick", "bench registry"),
    "status": ("status --work out", "status --config photon.toml --watch"),
    "console": (
        "console --work out",
        "console --config photon.toml --allow-actions",
    ),
    "health": ("health 127.0.0.1:7430",),
    "explain": (
        "explain 10.1.0.1:1001:1700000024308642 --work out",
        "explain click-1 click-2 --config photon.toml --json",
    ),
    "dead-letters": (
        "dead-letters list --out out",
        "dead-letters show --out out --fate unjoinable --limit 3",
        "dead-letters replay --out out --fate unjoinable",
    ),
    "verify": ("verify --primary queries --foreign clicks --out out --complete",),
    "recover": (
        "recover --foreign clicks --work out --details missing",
        "recover --foreign clicks --work out --apply",
    ),
    "backfill": (
        "backfill --primary 'old/queries/*' --foreign 'old/clicks/*' --out out",
        "backfill --follow --primary 'queries/*' --foreign 'clicks/*' --out out --config photon.toml",
    ),
    "logmap": (
        "logmap build --primary 'queries/*' --map built",
        "logmap load --map built --into work/east/eventstore/map",
    ),
    "millwheel": (
        "millwheel windows --input 'joined/*/*' --key payload.ad --time ts_us --window 1h --work wheel",
        "millwheel run visits:TOPOLOGY --work wheel --workers 2 --follow",
        "millwheel run visits:TOPOLOGY --work w --follow --store postgresql://db/w --machine wheel-1:7400",
        "millwheel history visits:TOPOLOGY --out old --goes-on",
        "millwheel spark visits:TOPOLOGY --work wheel --master spark://host:7077",
    ),
    "adapter": ("adapter test --use mine:Adapter --primary queries.jsonl --foreign clicks.jsonl",),
    "connect": (
        "connect test kafka://localhost:9092/clicks --as source",
        "connect test file:///tmp/joined --read 'cat /tmp/joined/*/*.jsonl'",
    ),
    "certs": ("certs --out tls --name db1.example --name 10.0.0.7",),
    "reshard": ("reshard 4 --work out", "reshard 8 --config photon.toml --at 2026-01-31T12:00:00+00:00"),
    "drain": ("drain dispatcher-east-1 --config photon.toml",),
    "registry": (
        "registry serve --config photon.toml --name r0",
        "registry add-set b --config photon.toml",
        "registry scan 0 --work out",
    ),
    "eventstore": ("eventstore serve --config photon.toml --name east",),
    "joiner": ("joiner serve --config photon.toml --name east/1",),
    "importer": ("importer serve --config photon.toml --name east",),
    "dispatcher": (
        "dispatcher serve --config photon.toml --name east",
        "dispatcher init --from now --work out",
    ),
}
"""What `photon COMMAND --help` ends with: a call or two that people make."""

_START_A_JVM: Final = ("verify", "recover", "backfill", "registry")


class LazyGroup(click.Group):
    """Lists the commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        if cmd_name in _START_A_JVM:
            # A JVM is forked while gRPC channels are open. What gRPC does after a fork by default ends the
            # child now and then, before it becomes a JVM. Read when gRPC is first imported.
            os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        found: Any = getattr(importlib.import_module(module), attribute or "command")
        command: click.Command = found[cmd_name] if isinstance(found, dict) else found
        shown = "\n".join(f"  photon {example}" for example in EXAMPLES[cmd_name])
        command.epilog = f"\b\nExamples:\n{shown}"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[1:2] != ["serve"]:
            # What gRPC notes of handshakes goes to stderr, among the words of a command which tells of them
            # itself. In the log of a server that is started by itself it is the only word of whom it refused;
            # those that `join` and `dev` start have it from photon.cluster.supervisor and are quiet too.
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if near := difflib.get_close_matches(args[0], _COMMANDS, 1):
                raise click.UsageError(f"{error.message} Did you mean {near[0]}?", ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=LazyGroup)
@click.version_option(__version__, prog_name="photon")
def photon() -> None:
    """Joins a foreign log with a primary log, each event exactly once, through the loss of a datacenter."""


def main(arguments: list[str] | None = None) -> None:
    """Exit status 0 done, 1 ran but failed, 2 bad usage or settings."""
    try:
        status: Any = photon.main(arguments, prog_name="photon", standalone_mode=False)
    except click.exceptions.Exit as end:
        status = end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        status = 0
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" (see `{context.command_path} --help`)" if context is not None else ""
        message = error.format_message()
        if "unexpected extra argument" in message:
            message += ". Put globs in quotes, or the shell makes several arguments of one."
        click.echo(f"photon: {message}{where}", err=True)
        status = 2
    except click.Abort:
        status = 130
    except PhotonError as error:
        click.echo(f"photon: {error}", err=True)
        status = error.exit_status
    except OSError as error:
        if error.filename is None:
            raise
        # Here: some commands need nothing else of what it imports.
        from photon.core.disk import storage_error

        failed = storage_error(error, Path(str(error.filename)))
        click.echo(f"photon: {failed}", err=True)
        status = failed.exit_status
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
