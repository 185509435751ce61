"""Each ready-made computation as a command: what it writes is what its class does in a topology of Python."""

import json
import random
import re
import shlex
from pathlib import Path

import pytest

from millwheel import Input, Logs, LogSink, Stream, Topology, TopologyError, node
from millwheel.ready import Attribution, Sessions, Unmatched, WindowCounts, Zeitgeist
from millwheel.testing import in_order, oracle, run
from millwheel.topology import load_topology
from photon.cli.millwheel import _because, group
from photon.cluster import wheels
from photon.cluster.begun import READY
from photon.core.errors import UsageError
from tests.millwheel.running import ROOT
from tests.millwheel.topologies import SECOND, clicks

CLICKS = Input("a", "user", None)
OUT = {"out": LogSink("out")}


def one(computation, *inputs):
    logs = {read.stream: Logs("*", "ts") for read in inputs}
    return Topology(logs, {"it": node(computation, *inputs, Stream("out"))}, OUT)


def spiking(dice):
    lines = [
        {"user": user, "ts": second * SECOND + dice.randrange(SECOND)}
        for second in range(60)
        for user in ("even", "odd")
        for _ in range(50 if (user, second // 3) == ("odd", 15) else 10)
    ]
    return sorted(lines, key=lambda line: line["ts"])


def of_users(dice, count=150):
    return sorted(clicks(dice, count, users=6, seconds=100), key=lambda line: line["ts"])


DICE = random.Random(4)
ONE = {"a": of_users(DICE)}
TWO = {"a": of_users(DICE), "b": [{"who": line["user"], "at": line["ts"]} for line in of_users(DICE)]}
COMMANDS = {
    "windows --window 10s": (one(WindowCounts("out", 10), CLICKS), ONE),
    "windows --window 1m --every 20s": (one(WindowCounts("out", 60, 20), CLICKS), ONE),
    "sessions --gap 2500ms": (one(Sessions("out", 2.5), CLICKS), ONE),
    "zeitgeist --learn 30 --sigmas 4 --row 2": (
        Topology(
            {"a": Logs("*", "ts")},
            {
                "windows": node(WindowCounts("windows", 1), CLICKS, Stream("windows")),
                "it": node(Zeitgeist("out", 1, 30, 4, 2), Input("windows"), Stream("out")),
            },
            OUT,
        ),
        {"a": spiking(DICE)},
    ),
    "unmatched --asking-key user --answer-key who --answer-time at --after 0.1h": (
        one(Unmatched("out", "a", 360), Input("a", "user"), Input("b", "who", None)),
        {"a": [{"user": f"u{n}", "ts": n} for n in range(9)], "b": [{"who": "u3", "at": 5}]},
    ),
    "attribution --key user --conversion-key who --conversion-time at --lookback 3s": (
        one(Attribution("out", "a", 3), Input("a", "user"), Input("b", "who")),
        TWO,
    ),
}
PLACES = {"unmatched": ("--asking", "--answers"), "attribution": ("--touches", "--conversions")}


def oracle_of(topology, lines):
    """With the times of `b`, which are under another name."""
    logs = dict(topology.injectors) | ({"b": Logs("*", "at")} if "b" in lines else {})
    return oracle(Topology(logs, topology.computations, topology.sinks), lines)["out"]


def told_of(counts):
    """The summary of a run that has ended."""
    return {
        "dead_letters": 0,
        "lost_records": 0,
        "timers": 0,
        "counts": counts,
        "ended": True,
        "seconds": 0,
        "restarts": 0,
        "sinks": [],
    }


@pytest.fixture
def asked(monkeypatch):
    """What was asked to run, in place of runs."""
    runs = []

    class Run:
        stalled = None

        def __init__(self, name, work, workers, follow, _tell, stores=(), config=None, **_more):
            runs.append((load_topology(name), work, workers, follow, stores, config))

        def run(self):
            return told_of({})

    monkeypatch.setattr(wheels, "WheelRun", Run)
    return runs


def arguments(words, lines):
    """All that the command is given, and the names of its logs."""
    command, *given = words.split()
    places = PLACES.get(command, ("--input",))
    given += [word for place, name in zip(places, lines, strict=True) for word in (place, f"logs/{name}*")]
    given += ["--time", "ts", "--work", "work", "--workers", "2", "--json"]
    given += [] if "--key" in given or command == "unmatched" else ["--key", "user"]
    return [command, *given]


@pytest.mark.parametrize("late", [5, 6])
def test_a_run_whose_records_came_mostly_late_says_so(asked, capsys, monkeypatch, late):
    counts = {"windows": {"records": 10, "late": late}}
    monkeypatch.setattr(wheels.WheelRun, "run", lambda _: told_of(counts))
    words, (_, lines) = next(iter(COMMANDS.items()))
    assert group.main(arguments(words, lines), standalone_mode=False) == 0
    said = capsys.readouterr().err
    assert ("most records of 'windows' came late" in said) == (late > 5)


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_runs_what_its_class_does_in_a_topology(asked, words):
    topology, lines = COMMANDS[words]
    assert group.main(arguments(words, lines), standalone_mode=False) == 0
    (made, *_), (sink,) = asked[0], asked[0][0].sinks
    found = run(made, dict(zip(made.injectors, lines.values(), strict=True)), workers=2)
    wanted = oracle_of(topology, lines)
    assert len(wanted) > 1
    assert in_order({"out": found[sink]}) == in_order({"out": wanted})


def test_a_command_writes_what_its_topology_does(system):
    words = list(COMMANDS)[-1]
    topology, lines = COMMANDS[words]
    for name, of_name in lines.items():
        system.write(f"{name}.jsonl", of_name)
    assert json.loads(system.ask(*arguments(words, lines)))["ended"]
    found = [
        json.loads(line) for path in (system.directory / "work/out").glob("*.jsonl") for line in path.open()
    ]
    assert in_order({"out": found}) == in_order({"out": oracle_of(topology, lines)})


def test_how_logs_are_read_is_the_commands_to_say(asked):
    words = "--input a* --input b* --time at.s --unit s --lateness 1m --late drop --out mine --follow "
    words += "--sink file:///a/b --sink file:///c --config its.toml"
    given = "--key user --window 1s --work work --workers 3 --json"
    assert group.main(["windows", *words.split(), *given.split()], standalone_mode=False) == 0
    ((topology, *how),) = asked
    assert how == [Path("work"), 3, True, (), Path("its.toml")]
    assert topology.injectors == {"records": Logs(("a*", "b*"), "at.s", "s", lateness_s=60)}
    assert topology.computations["count"].late == "drop"
    assert topology.sinks == {"windows": LogSink("mine", publish=("file:///a/b", "file:///c"))}


def test_the_pages_commands_are_such(asked):
    page = (ROOT / "docs" / "millwheel.md").read_text("utf-8").replace("\\\n", "")
    lines = [line for line in page.splitlines() if re.match("photon millwheel .*--time", line)]
    for line in lines:
        assert group.main(shlex.split(line)[2:], standalone_mode=False) == 0
    assert [next(iter(topology.sinks)) for topology, *_ in asked] == [
        "windows",
        "sessions",
        "anomalies",
        "unmatched",
        "attributed",
        "windows",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("windows --key user --window soon", "'soon' is no duration"),
        ("windows --key user --window 3s --every 2s", "is no multiple"),
        ("windows --key a. --window 3s", "'a.' has an empty part"),
        ("windows --window 3s", "Missing option '--key'"),
        ("sessions --key user --gap 0s", "must be more than 0"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(refused, tmp_path, words, message):
    work = tmp_path / "work"
    given = [*words.split(), "--input", tmp_path / "*", "--time", "ts", "--work", work]
    assert message in refused("millwheel", *given)
    assert not work.exists()


def test_paths_that_match_nothing_are_no_run_that_is_done(refused, tmp_path):
    given = [
        "--key",
        "user",
        "--gap",
        "3s",
        "--input",
        "nothing*",
        "--time",
        "ts",
        "--work",
        tmp_path / "work",
    ]
    assert "no log matches 'nothing*'; check the paths" in refused("millwheel", "sessions", *given)


def test_a_topology_that_takes_arguments_says_which_one_is_wrong():
    name = "millwheel.ready.topologies:windows"
    with pytest.raises(TopologyError, match="no_such"):
        load_topology(f'{name} {{"no_such": 1}}')
    with pytest.raises(TopologyError, match=r"not a millwheel\.Topology"):
        load_topology(name)


def test_why_names_the_silent_file_that_is_waited_for():
    held = {"name": "clicks", "worker": 0, "held_by": "injector", "least_far": ["b"], "quiet": ["a"]}
    said = _because(held)
    assert (
        said == 'clicks: worker 0, its logs (read to its end and silent, and silent="hold" waits for it: a)'
    )
    assert "read least far: b" in _because(held | {"quiet": []})


def test_a_module_that_exits_is_no_topology(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exits.py").write_text("import sys\nsys.exit()\n")
    with pytest.raises(TopologyError, match="'exits:T' can't be loaded: SystemExit"):
        load_topology("exits:T")


def test_a_work_directory_goes_on_only_with_what_it_was_begun_with(system):
    """Counts of one length of window mean nothing in windows of another."""

    def written():
        return sorted(
            line for path in (system.directory / "work/out").glob("*.jsonl") for line in path.open("rb")
        )

    system.write("a.jsonl", ONE["a"])
    given = ["--input", "logs/a*", "--key", "user", "--time", "ts", "--work", "work"]
    system.ask("windows", "--window", "10s", *given)
    first = written()
    assert "work was begun with length_s 10.0, now 5.0" in system.refused("windows", "--window", "5s", *given)
    assert "begun by another command" in system.refused("sessions", "--gap", "5s", *given)
    for sinks in (["a"], ["a", "b"], []):  # may be others
        to = [word for sink in sinks for word in ("--sink", f"file://{system.directory}/{sink}")]
        system.ask("windows", "--window", "10s", "--workers", "2", *to, *given)
        assert written() == first
    for sink in ("a", "b"):
        published = (system.directory / sink).glob("*/*.jsonl")
        assert sorted(line for path in published for line in path.open("rb")) == first


def test_a_run_that_is_refused_lets_the_work_directory_go(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(length_s):
        logs = {"paths": ["logs/*"], "time": "ts"}
        given = {
            "logs": logs,
            "key": "user",
            "sink": {"directory": "out"},
            "late": "drop",
            "length_s": length_s,
        }
        name = f"{READY}windows {json.dumps(given)}"
        return wheels.WheelRun(name, tmp_path / "work", 1, True, lambda _: None)

    run(10)._let_go()
    for _ in range(2):
        with pytest.raises(UsageError, match="work was begun with length_s 10, now 5"):
            run(5)
