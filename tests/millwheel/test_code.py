"""Workers run the code that was read at the start or at the last deploy, whatever its files hold by then."""

import shutil
import sys

import msgspec
import pytest

from millwheel.code import FILE, load, load_kept
from millwheel.topology import TopologyError

VISITS = """from dataclasses import dataclass
from pathlib import Path
from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node
from lonely.parts import FACTOR
from .names import STREAM, Whole

class Scaled(Computation["Whole"]):
    state = Whole
    def process_record(self, record, ctx):
        from . import rates
        import constants
        return [FACTOR, rates.RATE, constants.LIMIT, Path(__file__).with_name("data").read_text()]

TOPOLOGY = Topology(
    injectors={"clicks": Logs("logs/*", time="ts")},
    computations={"scaled": node(Scaled(), Input("clicks", key="user"), Stream(STREAM))},
)
"""
FILES = {
    "shop/__init__.py": "",
    "shop/names.py": "from msgspec import Struct\nSTREAM = 'first'\nclass Whole(Struct):\n  n: 'int' = 0\n",
    "shop/visits.py": VISITS,
    "shop/rates.py": "RATE = 2\n",
    "shop/data": "beside",
    "lonely/parts.py": "FACTOR = 1\n",
    "constants.py": "LIMIT = 3\n",
    "time.py": "raise ValueError('never imported')\n",
}
NAME = "shop.visits:TOPOLOGY"


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for what in ("path", "meta_path"):
        monkeypatch.setattr(sys, what, [*getattr(sys, what)])
    before = {*sys.modules}
    yield tmp_path
    forget(before)


def forget(before):
    for name in {*sys.modules} - before:
        del sys.modules[name]


def does(topology):
    return topology.computations["scaled"].computation.process_record(None, None)


def test_code_stays_what_it_was_when_files_are_edited_broken_and_deleted(place):
    before = {*sys.modules}
    _, code = load(NAME)
    (place / FILE).write_bytes(code)
    for name, text in FILES.items():
        if name.endswith(".py"):
            (place / name).write_text(text.replace("first", "other").replace(" = ", " = 10 * ") + "\n(")
    (place / "constants.py").unlink()
    shutil.rmtree(place / "lonely")
    forget(before)
    topology = load_kept(NAME, place)
    assert [stream.name for stream in topology.computations["scaled"].streams] == ["first"]
    assert does(topology) == [1, 2, 3, "beside"]


def test_a_load_has_the_code_as_it_is_now(place):
    first, _ = load(NAME)
    (place / "lonely/parts.py").write_text("FACTOR = 9\n")  # as long, in the same second
    (place / "shop/names.py").write_text(FILES["shop/names.py"].replace("first", "other"))
    second, _ = load(NAME)
    assert [one.computations["scaled"].streams[0].name for one in (first, second)] == ["first", "other"]
    assert [does(one)[0] for one in (first, second)] == [1, 9]


def test_of_what_is_ready_made_no_code_is_kept(place):
    logs = '{"paths": "logs/*", "time": "ts", "unit": "us", "lateness_s": 0}'
    given = (
        f'{{"logs": {logs}, "key": "user", "sink": {{"directory": "out"}}, "late": "process", "length_s": 1}}'
    )
    _, code = load(f"millwheel.ready.topologies:windows {given}")
    assert msgspec.msgpack.decode(code) == {}


def refuses(_):
    raise TopologyError("state of it is no int")


@pytest.mark.parametrize(
    ("text", "check", "said"), [("(", lambda _: None, "SyntaxError"), ("", refuses, "state")]
)
def test_what_is_refused_leaves_loaded_what_was_loaded(place, text, check, said):
    load(NAME)
    before = {name: module for name, module in sys.modules.items() if name.startswith(("shop", "lonely"))}
    (place / "shop/names.py").write_text(FILES["shop/names.py"] + text)
    with pytest.raises(TopologyError, match=said):
        load(NAME, check)
    assert len(before) == 5
    assert all(sys.modules[name] is module for name, module in before.items())
