"""The page's example, as it stands there."""

import re
from collections import Counter
from pathlib import Path

from millwheel.testing import in_order, oracle, run
from tests.millwheel.topologies import SECOND

PAGE = Path(__file__).parents[2] / "docs" / "millwheel.md"


def topology_of(module):
    (code,) = re.findall(rf"```python\n(# {module}\.py.*?)```", PAGE.read_text("utf-8"), re.S)
    names = {"__name__": module}
    exec(compile(code, str(PAGE), "exec"), names)
    return names["TOPOLOGY"]


def test_a_page_that_is_counted_in_parts_is_counted_right():
    topology, minute = topology_of("parts"), 60 * SECOND
    lines = [
        {"page": "home" if n % 10 else f"page{n % 7}", "id": f"c{n}", "ts_us": n * SECOND} for n in range(600)
    ]
    counted = Counter((line["page"], line["ts_us"] // minute * minute + minute) for line in lines)
    wanted = [{"page": page, "end_us": end, "count": n} for (page, end), n in counted.items()]
    for found in (oracle(topology, {"clicks": lines}), run(topology, {"clicks": lines}, workers=3, seed=5)):
        assert in_order(found) == in_order({"counts": wanted, "dead-letters": []})


def test_the_example_finds_long_visits():
    topology = topology_of("visits")
    lines = [{"user": "ann", "ts_us": minute * 60 * SECOND} for minute in range(0, 100, 10)]
    lines += [{"user": "bob", "ts_us": minute * 60 * SECOND} for minute in range(0, 300, 40)]
    wanted = [
        {
            "user": "ann",
            "visit": {"key": "ann", "start_us": 0, "end_us": 90 * 60 * SECOND, "count": 10},
            "so_far": 1,
        }
    ]
    assert oracle(topology, {"clicks": lines})["long"] == wanted
    assert run(topology, {"clicks": lines}, workers=3, seed=7)["long"] == wanted
