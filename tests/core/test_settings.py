"""photon.toml: every mistake is one line that names file, key and mend; what makes events the same."""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.errors import SettingsError
from photon.core.settings import (
    IDENTITY_DIGEST_BYTES,
    Settings,
    identity_digest,
    identity_settings,
    load_settings,
    parse_settings,
    to_document,
)


def refusal(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_settings(tomllib.loads(text), "photon.toml")
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_a_file_the_defaults_hold() -> None:
    assert load_settings(None) == parse_settings({}) == Settings()


def test_settings_are_read_from_their_sections(tmp_path: Path) -> None:
    path = tmp_path / "photon.toml"
    path.write_text(
        '[primary]\nid = "span"\n[foreign]\ntime_unit = "ns"\n[registry]\nshards = 4\n'
        "[joiner]\nfsync = false\n"
        "[logs]\nscan_interval_s = 2\n"
    )
    settings = load_settings(path)
    assert (settings.primary.id, settings.foreign.time_unit) == ("span", "ns")
    assert (settings.registry.shards, settings.joiner.fsync) == (4, False)
    assert settings.logs.scan_interval_s == 2.0 and type(settings.logs.scan_interval_s) is float
    assert settings.dispatcher == Settings().dispatcher


def test_settings_come_back_from_the_document_handed_to_another_process() -> None:
    settings = parse_settings({"registry": {"shards": 3}, "adapter": {"use": "mine:Adapter"}})
    assert parse_settings(to_document(settings)) == settings


def test_settings_cannot_be_changed_once_read() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().logs.chunk_bytes = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[registry]\nshard = 4", "unknown setting 'registry.shard'; did you mean 'registry.shards'?"),
        (
            "[foreign]\ntimeunit = 's'",
            "unknown setting 'foreign.timeunit'; did you mean 'foreign.time_unit'?",
        ),
        ("[regsitry]\nshards = 4", "unknown section 'regsitry'; did you mean 'registry'?"),
        ("[zzz]", "unknown section 'zzz'; known are: primary, foreign, ids, logs"),
        ("[adapter]\nqqqq = 1", "unknown setting 'adapter.qqqq'; known are: use"),
        ("registry = 4", "'registry' must be a section: write [registry]"),
        ("[[registry]]\nshards = 4", "'registry' must be a section: write [registry]"),
        ("[registry]\nshards = '4'", "'registry.shards' must be a whole number, not '4'"),
        ("[registry]\nshards = 4.0", "'registry.shards' must be a whole number, not 4.0"),
        ("[registry]\nshards = true", "'registry.shards' must be a whole number, not True"),
        ("[registry]\nshards = [4]", "'registry.shards' must be a whole number, not [4]"),
        ("[joiner]\nfsync = 1", "'joiner.fsync' must be true or false, not 1"),
        ("[logs]\nscan_interval_s = '1'", "'logs.scan_interval_s' must be a number, not '1'"),
        ("[logs]\nscan_interval_s = true", "'logs.scan_interval_s' must be a number, not True"),
        ("[primary]\nid = 5", "'primary.id' must be a string, not 5"),
        ("[primary]\nid = ''", "'primary.id' must not be empty"),
        ("[registry]\nshards = 0", "'registry.shards' must be from 1 to 4096, not 0"),
        ("[registry]\nshards = 5000", "'registry.shards' must be from 1 to 4096, not 5000"),
        ("[logs]\nchunk_bytes = 1", "'logs.chunk_bytes' must be from 4096 to 67108864, not 1"),
        ("[logs]\nscan_interval_s = nan", "'logs.scan_interval_s' must be from 0.01 to 3600, not nan"),
        ("[logs]\nscan_interval_s = inf", "'logs.scan_interval_s' must be from 0.01 to 3600, not inf"),
        ("[foreign]\ntime_unit = 'min'", "'foreign.time_unit' must be one of s, ms, us, ns, rfc3339, not"),
        ("[registry]\nreplicas = 4", "'registry.replicas' must be odd"),
        ("[dispatcher]\nretry_delay_ms_max = 1", "'dispatcher.retry_delay_ms_max' is below"),
        (f"[ids]\nkey = '{'k' * 65}'", "'ids.key' must be at most 64 bytes"),
        (f"[ids]\nkey = '{'é' * 33}'", "'ids.key' must be at most 64 bytes"),
        ("[foreign]\nprimary_id = 'id'", "must name different fields"),
        ("[foreign]\ntime = 'primary_id'", "must name different fields"),
        ("[foreign]\ntime = 'a\"b'", "'foreign.time' must have no quotes, backslashes or control characters"),
        ("[foreign]\nid = 'a.'", "'foreign.id': field path 'a.' has an empty part"),
        ("[primary]\nid = '.a'", "'primary.id': field path '.a' has an empty part"),
        ("[foreign]\nid = 'a.b'\nprimary_id = 'a'", "'foreign.id' lies within 'foreign.primary_id'"),
        ('[joiner]\noutput_roots = ["a", "b\\u0000c"]', "'joiner.output_roots' must have no NUL character"),
        ('[tls]\ncert = "a\\u0000"\nkey = "k"\nca = "c"', "'tls.cert' must have no NUL character"),
        ("[adapter]\nfield = 'id'", "'adapter.field' is 'id', which is the field of 'foreign.id'"),
        (
            "[adapter]\nfield = 'ctx'\n[foreign]\nprimary_id = 'ctx.query'",
            "is the field of 'foreign.primary_id'",
        ),
        ("[adapter]\nfield = 'a.b'\n[foreign]\ntime = 'a..b'", "is the field of 'foreign.time'"),
        ('[primary]\nid = "a\\nb"', "'primary.id' must have no quotes, backslashes or control characters"),
    ],
)
def test_a_mistake_is_told_in_one_line_with_its_mend(text: str, said: str) -> None:
    message = refusal(text)
    assert message.startswith("photon.toml: ") and said in message


def test_the_ends_of_a_range_are_allowed() -> None:
    for shards in (1, 4096):
        assert parse_settings({"registry": {"shards": shards}}).registry.shards == shards


def test_no_adapter_is_an_empty_name() -> None:
    assert parse_settings({"adapter": {"use": ""}}).adapter.use == ""


@pytest.mark.parametrize(
    "text", [b"[registry\n", b"shards = \n", b"a = 1\na = 2\n", b"\xff\xfe", b"[a]\nb = '''\n"]
)
def test_a_file_that_is_no_toml_is_told_in_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "photon.toml"
    path.write_bytes(text)
    with pytest.raises(SettingsError, match="not valid TOML") as caught:
        load_settings(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(SettingsError, match=r"cannot be read .*; name an existing file"):
            load_settings(path)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
sections = [field.name for field in dataclasses.fields(Settings)]


@given(
    st.dictionaries(
        st.sampled_from(sections) | st.text(max_size=5),
        scalars
        | st.dictionaries(st.sampled_from(["id", "time", "shards", "replicas", "x"]), scalars, max_size=3),
        max_size=3,
    )
)
def test_any_document_is_settings_or_one_line(document: dict[str, object]) -> None:
    try:
        settings = parse_settings(document)
    except SettingsError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(settings, Settings)


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("ids", "key", "another"),
        ("ids", "key", "Photon"),
        ("foreign", "id", "event_id"),
        ("foreign", "primary_id", "query_id"),
        ("foreign", "time", "time"),
        ("foreign", "time_unit", "ms"),
    ],
)
def test_whatever_makes_another_id_or_time_of_an_event_makes_another_digest(
    table: str, name: str, value: str
) -> None:
    assert identity_digest(parse_settings({table: {name: value}})) != identity_digest(Settings())


def test_what_may_differ_between_machines_makes_no_other_digest() -> None:
    may_differ = {"registry": {"lease_s": 3.0}, "primary": {"id": "query"}, "logs": {"chunk_bytes": 8192}}
    assert identity_digest(parse_settings(may_differ)) == identity_digest(Settings())


def test_values_do_not_flow_into_one_another() -> None:
    one = parse_settings({"foreign": {"id": "a", "primary_id": "b"}})
    other = parse_settings({"foreign": {"id": "b", "primary_id": "a"}})
    assert identity_digest(one) != identity_digest(other)


def test_the_key_itself_is_not_told() -> None:
    settings = parse_settings({"ids": {"key": "a secret"}})
    assert "a secret" not in repr(identity_settings(settings))
    assert len(identity_digest(settings)) == IDENTITY_DIGEST_BYTES


def test_registries_that_were_founded_by_an_older_version_know_the_digest() -> None:
    """If this fails, joiners of this version are refused by every registry there is: mend the code."""
    assert identity_digest(Settings()).hex() == "544b164b3baa4a5c176e99ebe4194141"
    set_ = parse_settings({"ids": {"key": "clé"}, "foreign": {"id": "event", "time_unit": "ms"}})
    assert identity_digest(set_).hex() == "ff9a4b021fd1381f572166f3185281e9"


REPLICAS = {f"r{n}": {"datacenter": "east", "grpc": f"r{n}:7400", "raft": f"r{n}:7401"} for n in range(3)}


@pytest.mark.parametrize(
    ("document", "days"),
    [
        ({}, 0.0),
        ({"replicas": REPLICAS}, 3.0),
        ({"replicas": REPLICAS, "registry": {"retention_days": 0}}, 0.0),
        ({"replicas": REPLICAS, "registry": {"shards": 2}}, 3.0),
    ],
)
def test_a_system_of_machines_forgets_old_ids_unless_told_otherwise(document, days):
    settings = parse_settings(document)
    assert settings.registry.retention_days == days
    assert parse_settings(to_document(settings)) == settings
