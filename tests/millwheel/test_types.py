"""A user's type checker: it passes what is right, and names the line of what is not."""

import re
from pathlib import Path

import pytest
from mypy import api

from millwheel.testing import run
from tests.millwheel import typed
from tests.millwheel.running import ROOT
from tests.millwheel.topologies import SECOND

RIGHT = Path(typed.__file__).read_text("utf-8")
PRODUCED = "misc|arg-type|call-overload"
WRONG = {
    "ctx.produce(VISITS, ctx.state)": ("ctx.produce(VISITS, ctx.state.pages)", PRODUCED),
    "{ctx.key: ctx.state.pages}": ("{ctx.key: ctx.key}", PRODUCED),
    "ctx.state.pages += 1": ("ctx.state.page += 1", "attr-defined"),
    "Timer, ctx: Context[Visit]) -> None:\n        ctx.produce(VISITS": (
        "Timer, ctx: Context[Visit]) -> None:\n        ctx.produce(VISIT",
        "name-defined",
    ),
    'set_timer("end", ctx.state.end + 1_800_000_000)': ('set_timer("end", "tomorrow")', "arg-type"),
    "INPUT, VISITS, BY_USER": ('INPUT, "visits", BY_USER', "arg-type"),
    'Logs("logs/*", "ts")': ('Logs("logs/*", "ts", unit="minutes")', "arg-type"),
}


@pytest.mark.timeout(300)
def test_mypy_passes_what_is_right_and_names_the_line_of_what_is_wrong(tmp_path, monkeypatch):
    """All in one run: mypy reads numpy each time."""
    (tmp_path / "right.py").write_text(RIGHT)
    wanted = set()
    for number, (was, (now, code)) in enumerate(WRONG.items()):
        assert RIGHT.count(was) == 1
        (tmp_path / f"wrong{number}.py").write_text(RIGHT.replace(was, now))
        line = RIGHT[: RIGHT.index(was)].count("\n") + 1 + was.count("\n")
        wanted.add((f"wrong{number}.py", line, code))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    options = ["--strict", "--config-file", str(ROOT / "setup.cfg"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, errors, _ = api.run([*options, *map(str, sorted(tmp_path.glob("*.py")))])
    assert errors == ""
    found = re.findall(r"(\w+\.py):(\d+): error: .*\[(\S+)\]$", said, re.M)
    assert len(found) == len(wanted), said
    for file, line, code in wanted:
        assert any((file, str(line)) == one[:2] and re.fullmatch(code, one[2]) for one in found), said


def test_a_stream_is_named_by_itself_or_by_its_name():
    lines = [{"user": "ann", "ts": second * SECOND} for second in range(3)]
    found = run(typed.TOPOLOGY, {"clicks": lines}, workers=2, seed=1)
    assert found["visits"] == [{"pages": 3, "end": 2 * SECOND}]
    assert found["by-user"] == [{"ann": 3}]
    assert found["untyped"] == ["by its name"]
    assert found["dead-letters"] == []
