"""What Spark sees of the registry is what the registry holds. Over real gRPC."""

import time

import pytest

from idregistry.client import RegistryAt
from photon.core.columns import pack_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import IdPacker, Token
from tests.certificates import Authority
from tests.spark.kit import RealRegistry

pytestmark = pytest.mark.spark

HOUR_US = 3_600_000_000
EAST, WEST = Token("10.0.0.1:70", 3, 1_700_000_000_000_001), Token("[::1]:7", (1 << 64) - 5, -8)


@pytest.fixture(scope="module")
def registry(registry):
    registry.commit([f"e{n}" for n in range(500)], EAST)
    registry.commit([f"w{n}" for n in range(300)], WEST, 5 * HOUR_US + 3)
    return registry


def packed(*ids):
    column = IdPacker().pack(list(ids))
    return [column[at : at + 16] for at in range(0, len(column), 16)]


def test_every_id_is_there_once_with_what_its_token_says(session, registry):
    from spark.registered import registered, unsigned

    rows = registered(session, registry.at).collect()
    assert len(rows) == 800
    found = {bytes(row.id): row for row in rows}
    assert len(found) == 800
    for token, name, count, time_us in ((EAST, "e", 500, 0), (WEST, "w", 300, 5 * HOUR_US)):
        for key in packed(*(f"{name}{n}" for n in range(count))):
            row = found[key]
            assert bytes(row.token) == token.pack()
            told = Token(row.address, unsigned(row.incarnation), row.token_us)
            assert (told, row.time_us) == (token, time_us)
    assert {row.shard for row in rows} == {0, 1, 2}


def test_an_export_is_the_registry_as_it_was(session, registry, tmp_path):
    from spark.registered import read_export, registered, write_export

    before_us = time.time_ns() // 1000
    write_export(session, registry.at, str(tmp_path / "export[1]"))
    now = registered(session, registry.at)
    export = read_export(session, str(tmp_path / "export[1]"))
    assert export.ids.exceptAll(now).count() == 0
    assert now.exceptAll(export.ids).count() == 0
    assert before_us <= export.began_us <= time.time_ns() // 1000
    assert export.boundaries.keys() == {0, 1, 2}


@pytest.mark.usefixtures("on_session")
def test_the_command_keeps_an_export_and_overwrites_none(session, registry, tmp_path, photon):
    from spark.registered import check_export, read_export

    directory = str(tmp_path / "kept")
    arguments = ["registry", "export", directory, "--registry", registry.address]
    assert photon(*arguments)[::2] == (0, "")
    check_export(directory)
    assert read_export(session, directory).ids.count() >= 800
    for more, message in ((), "is there already"), (("--scan-timeout", "3601"), "--scan-timeout"):
        status, _, errors = photon(*arguments, *more)
        assert (status, message in errors) == (2, True)
    with pytest.raises(UsageError, match="no whole export"):
        check_export(str(tmp_path / "none"))


def test_what_was_acknowledged_before_a_scan_is_in_it(session, registry):
    from spark.registered import registered

    for n in range(3):
        ids = [f"now{n}-{k}" for k in range(20)]
        registry.commit(ids, EAST, 77)
        held = {bytes(row.id) for row in registered(session, registry.at).select("id").collect()}
        assert held.issuperset(packed(*ids))
    column = b"".join(packed(*ids))
    assert set(registry.client.lookup(column, pack_times([77] * 20))) == {1}


def test_a_scan_that_takes_longer_than_it_may_ends(session, registry, tmp_path):
    from spark.registered import boundaries, registered
    from spark.session import SparkFailedError, spark_failures

    with pytest.raises(UnavailableError):
        boundaries(registry.at, 1e-6)
    with pytest.raises(SparkFailedError), spark_failures():
        registered(session, registry.at, 1e-6).collect()


def test_a_registry_that_does_not_answer_is_told_in_a_line(session):
    from spark import registered as module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ASK_TIMEOUT_S", 0.5)
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
            module.registered(session, RegistryAt(("127.0.0.1:1",)))


@pytest.mark.usefixtures("on_session")
def test_executors_ask_through_tls_what_answers_nobody_without(session, tmp_path, monkeypatch, photon):
    from spark import registered as module

    tls = Authority(tmp_path / "ca").issue("node", tls_name="photon")
    secured = RealRegistry(tmp_path / "registry", tls=tls)
    try:
        secured.commit(["a", "b"], EAST)
        assert {bytes(row.id) for row in module.registered(session, secured.at).collect()} == {
            *packed("a", "b")
        }
        asked = b"".join(packed("a", "c")), pack_times([2, 2])
        assert [module.absent(secured.at, *asked)] == packed("c")
        (tmp_path / "photon.toml").write_text(
            f'replicas.r0 = {{ datacenter = "east", grpc = "{secured.address}", raft = "127.0.0.1:1" }}\n'
            f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n'
        )
        said = photon("registry", "export", tmp_path / "kept", "--config", tmp_path / "photon.toml")
        assert said[1] == f"2 ids in {tmp_path / 'kept'}\n"
        monkeypatch.setattr(module, "ASK_TIMEOUT_S", 1.0)
        with pytest.raises(UnavailableError):
            module.registered(session, RegistryAt((secured.address,)))
    finally:
        secured.close()
