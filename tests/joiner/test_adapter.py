"""Adapters: the default splice, users' code, and what goes wrong with it (paper 3.3.1)."""

import collections
import json
import re
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from joiner.adapter import (
    REASON_CHARS_MAX,
    Adapter,
    BatchAdapter,
    Event,
    Skip,
    load_adapter,
    splice,
    splice_column,
)
from photon.core.columns import join_lines, split_lines
from photon.core.errors import AdapterError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(st.text(max_size=6), JSON, min_size=1, max_size=4)
SPACE = st.sampled_from([None, (",", ":"), (" , ", " : ")])


def encoded(value, separators, ascii_only):
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")


PAIRS = [(b'{"id":"q1"}', b'{"id":"c1"}'), (b'{"id":"q2"}', b'{"id":"c2"}'), (b'{"id":"q3"}', b'{"id":"c3"}')]
PRIMARIES = [primary for primary, _ in PAIRS]
FOREIGN = join_lines([foreign for _, foreign in PAIRS])


def joined_by(join):
    adapter = type("Given", (Adapter,), {"join": lambda self, primary, foreign: join(primary, foreign)})()
    return BatchAdapter(adapter).join(PRIMARIES, FOREIGN)


def default_line(row):
    return splice(Event(PAIRS[row][0]), Event(PAIRS[row][1]))


@given(st.lists(st.tuples(OBJECT, OBJECT), max_size=5), SPACE, st.booleans())
def test_the_default_line_is_the_foreign_object_with_the_primary_added(pairs, separators, ascii_only):
    primaries = [encoded(primary, separators, ascii_only) for primary, _ in pairs]
    foreign = [encoded(event, separators, ascii_only) for _, event in pairs]
    lines = split_lines(splice_column(primaries, join_lines(foreign)))
    for (primary, event), line, raw in zip(pairs, lines, foreign, strict=True):
        assert json.loads(line.decode("utf-8", "surrogatepass")) == {**event, "primary": primary}
        assert line.startswith(raw[:-1])


def test_the_default_adapter_keeps_every_byte():
    primary = '{ "id" : "q", "n": 1.50, "t": "caf\\u00e9 é" }'.encode()
    foreign = b'{"zeta":1e3,"id":"c","list":[1, 2],"brace":"}"}'
    adapted = BatchAdapter(Adapter()).join([primary], foreign + b"\n")
    assert adapted.lines == foreign[:-1] + b',"primary":' + primary + b"}\n"
    assert (adapted.rows, adapted.skipped, adapted.failed) == (None, {}, {})


@pytest.mark.parametrize("foreign", [b'{"a":1}\n{"b":2} \n', b'{"a":1}\n', b'{"a":1}\n{"b":2}'])
def test_foreign_lines_that_are_not_in_form_are_refused_whole(foreign):
    with pytest.raises(ValueError, match="expected 2 foreign events"):
        splice_column([b"{}", b"{}"], foreign)


def test_an_adapter_may_leave_change_or_skip_each_event():
    def join(primary, foreign):
        match foreign.data["id"]:
            case "c1":
                return None
            case "c2":
                return {**foreign.data, "query": primary.data["id"]}
            case _:
                return Skip("not paid")

    adapted = joined_by(join)
    assert adapted.rows == [0, 1]
    assert split_lines(adapted.lines) == [default_line(0), b'{"id":"c2","query":"q2"}']
    assert adapted.skipped == {2: "not paid"}


def test_an_adapter_may_return_the_bytes_of_a_line():
    adapted = joined_by(lambda primary, foreign: b' {"made": true}\n')
    assert (adapted.rows, adapted.lines) == (None, b'{"made": true}\n' * 3)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (b'{"a":1}\n{"b":2}', "several lines"),
        (b"[1]", "no JSON object"),
        (b'{"a":1} {"b":2}', "no JSON object"),
        (b'{"a":"\xff"}', "no JSON object"),
        (b"", "no JSON object"),
        ('{"a":1}', "returned str"),
        ({"when": object()}, "no JSON"),
        (7, "returned int"),
    ],
)
def test_what_is_no_joined_line_fails_the_event_and_says_why(result, reason):
    adapted = joined_by(lambda _primary, foreign: result if b"c2" in foreign.raw else None)
    assert adapted.rows == [0, 2]
    assert split_lines(adapted.lines) == [default_line(0), default_line(2)]
    assert list(adapted.failed) == [1]
    assert reason in adapted.failed[1]
    assert "\n" not in adapted.failed[1]


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text either")


class Stop(BaseException):
    """Not even an Exception."""


RAISED = [ValueError("bad\namount"), SystemExit(3), RecursionError(), Unprintable(), Stop("now")]


@pytest.mark.parametrize("error", [*RAISED, GeneratorExit(), StopIteration(5), KeyboardInterrupt()])
def test_whatever_an_adapter_raises_fails_that_event_alone(error):
    def join(_primary, foreign):
        if b"c1" in foreign.raw:
            raise error

    adapted = joined_by(join)
    assert adapted.rows == [1, 2]
    assert adapted.failed[0].startswith("adapter raised ")
    assert type(error).__name__ in adapted.failed[0]
    assert "test_adapter.py:" in adapted.failed[0]
    assert "\n" not in adapted.failed[0]


def spoil_data(primary, foreign):
    foreign.data["id"] = primary.data["id"] = "spoilt"


def spoil_raw(primary, foreign):
    primary.raw, foreign.raw = b"not\njson", b"{"


@pytest.mark.parametrize("join", [spoil_data, spoil_raw])
def test_changing_an_event_changes_no_line(join):
    assert split_lines(joined_by(join).lines) == [default_line(row) for row in range(3)]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the user's into the current directory; its name."""

    def write(source, name="users_adapters"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    for name in [n for n in sys.modules if n.startswith("users_")]:
        del sys.modules[name]


def test_an_adapter_is_loaded_from_the_current_directory(module):
    module("""
        from joiner.adapter import Adapter, Skip
        class Mine(Adapter):
            def join(self, primary, foreign):
                return Skip("mine")
    """)
    adapted = BatchAdapter(load_adapter(MINE)).join(PRIMARIES, FOREIGN)
    assert adapted.skipped == dict.fromkeys(range(3), "mine")


MINE = "users_adapters:Mine"
CLASS = "from joiner.adapter import Adapter\nclass Mine(Adapter):\n  "


@pytest.mark.parametrize(
    ("use", "source", "message"),
    [
        ("users_adapters", "", "not of the form 'module:Class'"),
        ("users_nothing:Mine", "", "no module 'users_nothing'"),
        (MINE, "import users_missing_part", "importing 'users_adapters' raised ModuleNotFound"),
        (MINE, "def broken(:", "importing 'users_adapters' raised SyntaxError"),
        (MINE, "", "has no 'Mine'; check the class's name"),
        (MINE, "class Mine: pass", "'Mine' is no adapter; make it a subclass of photon.Adapter"),
        (MINE, "Mine = 3", "'Mine' is no adapter"),
        (MINE, f"{CLASS}def __init__(self, x): pass", "Mine() raised TypeError"),
        (MINE, "import sys\nsys.exit()", "raised SystemExit (users_adapters.py:2); mend"),
        (MINE, f"{CLASS}def __init__(self): raise SystemExit(7)", "Mine() raised SystemExit: 7"),
        (
            MINE,
            f"import sys\n{CLASS}def __setattr__(self, name, value): sys.exit()",
            "setting splice_field raised SystemExit",
        ),
    ],
)
def test_an_adapter_that_cannot_be_loaded_is_told_with_what_where_and_how_to_mend(
    module, use, source, message
):
    module(source)
    with pytest.raises(AdapterError) as told:
        load_adapter(use)
    assert message in str(told.value)
    assert str(told.value).startswith(f"adapter.use = '{use}': ")
    assert "\n" not in str(told.value)


def test_the_field_of_the_primary_event_can_be_named(module):
    field = 'us"er\n'
    adapter = load_adapter("", field)
    assert json.loads(BatchAdapter(adapter).join([b'{"id":1}'], b'{"a":2}\n').lines) == {
        "a": 2,
        field: {"id": 1},
    }
    module("""
        from joiner.adapter import Adapter, splice
        class Mine(Adapter):
            def join(self, primary, foreign):
                return splice(primary, foreign, self.splice_field) if b"x" in foreign.raw else None
    """)
    own = BatchAdapter(load_adapter("users_adapters:Mine", "user"))
    joined = own.join([b'{"id":1}'] * 2, b'{"a":2}\n{"x":2}\n')
    assert joined.lines == b'{"a":2,"user":{"id":1}}\n{"x":2,"user":{"id":1}}\n'


def test_without_settings_the_default_is_taken_and_its_field_is_primary():
    assert splice_column([b"{}"], b'{"a":1}\n') == b'{"a":1,"primary":{}}\n'
    assert load_adapter("").splice_field == "primary"
    assert type(load_adapter("")) is Adapter


class Odd:
    def __str__(self):
        raise ValueError("odd")


def test_a_reason_or_mapping_that_raises_stays_with_its_event():
    class Broken(collections.UserDict):
        def __iter__(self):
            raise OSError("disk")

    for result in (Skip(Odd()), Broken(a=1), {"a": Odd()}, {Odd(): 1}):
        adapted = joined_by(lambda _primary, foreign, result=result: result if b"c2" in foreign.raw else None)
        assert adapted.rows == [0, 2]
        assert re.search("ValueError: odd|OSError: disk|no JSON", adapted.failed[1])


@pytest.mark.parametrize("lone", ["\ud800", "x" * 499 + "\udfff" * 600])
def test_every_reason_can_be_written_down(lone):
    """A lone surrogate is text that no encoding carries: the answer to the dispatcher would never leave."""

    def raising(_primary, _foreign):
        raise ValueError(lone)

    for join in (raising, lambda _primary, _foreign: Skip(lone)):
        adapted = joined_by(join)
        reasons = adapted.skipped | adapted.failed
        assert len(reasons) == len(PRIMARIES)
        for reason in reasons.values():
            assert len(reason.encode()) <= REASON_CHARS_MAX
    assert joined_by(lambda _primary, _foreign: Skip("at \ud800")).skipped[0] == "at \\ud800"


def test_the_reason_is_the_last_line_of_the_traceback_and_the_line_of_the_users_code(module):
    module("""
        import json
        from joiner.adapter import Adapter
        class Mine(Adapter):
            def join(self, primary, foreign):
                if b"c1" in foreign.raw:
                    return self.missing(primary)
                return json.loads("{") if b"c2" in foreign.raw else foreign.data["no"]
            def missing(self, primary):
                return primary.data["paid"]
    """)
    reasons = BatchAdapter(load_adapter(MINE)).join(PRIMARIES, FOREIGN).failed
    assert reasons[0] == "adapter raised KeyError: 'paid' (users_adapters.py:10)"
    assert reasons[1].startswith("adapter raised json.decoder.JSONDecodeError: Expecting property name")
    assert "(users_adapters.py:8, in decoder.py:" in reasons[1]
    assert reasons[2] == "adapter raised KeyError: 'no' (users_adapters.py:8)"
