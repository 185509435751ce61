"""A command asks the registry of a run, whether that is on or over."""

import pickle
from types import SimpleNamespace

import pytest

from idregistry.client import RegistryAt
from photon.cluster.registry_access import Named, asked_registry, asking
from photon.core.errors import LockedError, UsageError
from photon.core.settings import parse_settings
from photon.rpc.network import Network
from tests.certificates import Authority
from tests.system import join, join_arguments, photon, write_logs

pytestmark = pytest.mark.cluster

CLICKS = 200


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The output of a run that is over: 200 clicks joined."""
    logs = write_logs(tmp_path_factory.mktemp("run"), CLICKS)
    assert join(logs, logs / "out")["joined"] == CLICKS
    return logs / "out"


def registered(registry):
    with registry.client(10.0) as client:
        shards = len(client.directory().leaders)
        return sum(len(part.ids) // 16 for shard in range(shards) for part in client.scan(shard, fresh=True))


@pytest.mark.long
def test_the_registry_of_a_run_that_is_over_is_started_for_the_time_being(out):
    work = out / ".photon"
    for _ in range(2):  # again, on other ports
        with asked_registry(Named(work)) as asked:
            assert asked.started
            assert registered(asked.registry) == CLICKS
            refused = photon(*join_arguments(out.parent, out))
            assert refused.returncode == 1
            assert "another photon runs on" in refused.stderr
            with pytest.raises(LockedError, match="another command"), asked_registry(Named(work)):
                pass
    assert not (work / "topology-registry.json").exists()
    logs = out.parent
    assert join(logs, out)["joined"] == CLICKS  # and a run goes on with it afterwards


def test_while_a_run_is_on_its_own_registry_is_named(out):
    from photon.cluster.topology import read_topology
    from photon.core.disk import DirectoryLock

    work = out / ".photon"
    with DirectoryLock(work), asked_registry(Named(work)) as asked:
        replicas = read_topology(work / "topology.json").replicas
        assert (asked.registry.addresses, asked.started) == (tuple(r.grpc for r in replicas), False)


@pytest.mark.parametrize(("work", "given"), [(False, None), (True, "127.0.0.1:1"), (False, ",")])
def test_a_registry_must_be_named_and_only_one(out, work, given):
    with pytest.raises(UsageError), asked_registry(Named(out / ".photon" if work else None, given)):
        pass


def test_settings_name_a_systems_registry_and_what_it_is_asked_with(tmp_path):
    tls = Authority(tmp_path / "ca").issue("node", tls_name="photon")
    files = {name: str(getattr(tls, name)) for name in ("cert", "key", "ca")}
    replicas = {f"r{n}": {"datacenter": "d", "grpc": f"r{n}:74", "raft": f"r{n}:75"} for n in range(3)}
    settings = parse_settings({"replicas": replicas, "tls": files, "datacenters": {"d": {}}})
    with asked_registry(Named(settings=settings)) as asked:
        assert asked.registry == RegistryAt(("r0:74", "r1:74", "r2:74"), Network(tls))
        assert pickle.loads(pickle.dumps(asked.registry)) == asked.registry
    with asked_registry(Named(addresses="a:1,b:2", settings=settings)) as asked:
        assert asked.registry == RegistryAt(("a:1", "b:2"), Network(tls))


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="topology"), asked_registry(Named(tmp_path)):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([], "photon: the registry does not answer yet (127.0.0.1:1); asking it for up to 30 s\n"),
        ([False], "photon: the registry has no leader yet; asking it for up to 30 s\n"),
        ([True], ""),
    ],
)
def test_who_asks_is_told_whom_it_waits_for_before_it_waits(monkeypatch, capsys, answers, told):
    if answers:
        directory = SimpleNamespace(led=answers[0])
        monkeypatch.setattr("idregistry.client.RegistryClient.directory", lambda _: directory)
    with asking(RegistryAt(("127.0.0.1:1",)), 30.0):
        assert capsys.readouterr().err == told
