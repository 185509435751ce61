"""The page's example, as it stands there."""

import re
from pathlib import Path

from millwheel.testing import oracle, run
from tests.millwheel.topologies import SECOND

PAGE = Path(__file__).parents[2] / "docs" / "millwheel.md"


def test_the_example_finds_long_visits():
    (code,) = re.findall(r"```python\n(# visits\.py.*?)```", PAGE.read_text("utf-8"), re.S)
    names = {"__name__": "visits"}
    exec(compile(code, str(PAGE), "exec"), names)
    lines = [{"user": "ann", "ts_us": minute * 60 * SECOND} for minute in range(0, 100, 10)]
    lines += [{"user": "bob", "ts_us": minute * 60 * SECOND} for minute in range(0, 300, 40)]
    wanted = [
        {
            "user": "ann",
            "visit": {"key": "ann", "start_us": 0, "end_us": 90 * 60 * SECOND, "count": 10},
            "so_far": 1,
        }
    ]
    assert oracle(names["TOPOLOGY"], {"clicks": lines})["long"] == wanted
    assert run(names["TOPOLOGY"], {"clicks": lines}, workers=3, seed=7)["long"] == wanted
