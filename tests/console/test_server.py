"""Where a console serves, and to whom."""

import http.client
import json
import signal
import socket
import ssl

import pytest

pytest.importorskip("uvicorn", reason="the console extra is not installed")

from photon.cluster.topology import topology_of
from photon.console.server import Console, replaying
from photon.core.errors import AddressInUseError, UsageError
from photon.core.fates import Fate
from photon.core.settings import parse_settings
from photon.logs.writer import DeadLetter, dead_letter_lines
from tests.certificates import Authority
from tests.ports import free_ports
from tests.system import start_photon
from tests.waiting import wait_until


def system(tmp_path, tls=None):
    replicas = {name: {"datacenter": "east", "grpc": f"{name}:1", "raft": f"{name}:2"} for name in "abc"}
    here = {
        "primary": ["q"],
        "foreign": ["c"],
        "eventstores": ["e:1"],
        "joiners": ["j:1"],
        "dispatchers": ["d:1"],
    }
    document = {
        "system": {"out": str(tmp_path / "out"), "work": str(tmp_path / "work")},
        "replicas": replicas,
        "datacenters": {"east": here},
    }
    if tls is not None:
        document["tls"] = {"cert": str(tls.cert), "key": str(tls.key), "ca": str(tls.ca)}
    return topology_of(parse_settings(document))


@pytest.fixture
def console(tmp_path):
    made = []

    def start(topology, or_any=False, port=None):
        listen = f"127.0.0.1:{port or free_ports(1)[0]}"
        made.append(Console(topology, tmp_path, listen, or_any, ask=False))
        made[-1].start()
        return made[-1], int(made[-1].url.rstrip("/").rpartition(":")[2])

    yield start
    for one in made:
        one.stop()


def test_it_serves_this_machine_and_none_other_without_tls(tmp_path, console):
    for listen in ("0.0.0.0:7480", "10.0.0.1:7480", "photon.example:7480"):
        with pytest.raises(UsageError, match="this machine only"):
            Console(system(tmp_path), tmp_path, listen)
    one, port = console(system(tmp_path))
    assert one.url == f"http://127.0.0.1:{port}/"
    with pytest.raises(AddressInUseError, match=str(port)):
        Console(system(tmp_path), tmp_path, f"127.0.0.1:{port}")
    _, another = console(system(tmp_path), True, port)  # as `photon dev`
    assert another not in (0, port)


def test_with_tls_only_who_has_a_certificate_of_the_ca_is_answered(tmp_path, console):
    authority = Authority(tmp_path / "ca")
    tls = authority.issue("node")
    one, port = console(system(tmp_path, tls))
    assert one.url.startswith("https://")

    def ask(with_certificate):
        context = ssl.create_default_context(cafile=tls.ca)
        context.check_hostname = False
        if with_certificate:
            context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
        connection.request("GET", "/")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    assert ask(True) == (503, {"error": "no process was asked yet; again in a moment"})
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        ask(False)
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        plain.settimeout(20)
        assert b"200" not in plain.recv(100)


def test_letters_are_replayed_once_and_counted_before(tmp_path):
    topology = system(tmp_path)
    letters = topology.dead_letters_directory("east")
    letters.mkdir(parents=True)
    rows = [DeadLetter(Fate.UNJOINABLE, f"gone {n}", b'{"id": "c%d"}' % n, "c.jsonl", n) for n in range(5)]
    rows += [DeadLetter(Fate.MALFORMED, "no id", b"{}", "c.jsonl", 9)]
    (letters / "foreign-000000.jsonl").write_bytes(dead_letter_lines(rows))
    said = []
    act = replaying(topology, said.append)
    with pytest.raises(UsageError, match="run elsewhere"):
        act({"datacenter": "east"})
    inbox = topology.pipelines[0].home("dispatcher") / "inbox"
    inbox.mkdir(parents=True)
    assert act({"datacenter": "east", "reason": "gone 3", "dry_run": True}) == {"would_replay": 1}
    assert list(inbox.iterdir()) == []
    assert act({"datacenter": "east", "reason": "gone 3"}) == {"replayed": 1}
    assert act({"datacenter": "east", "dry_run": True}) == {"would_replay": 4}
    assert act({"datacenter": "east", "rate": 3}) == {"replayed": 4, "rate": 3}
    wait_until(lambda: said == ["dead letters of east: 4 were replayed"])
    assert act({"datacenter": "east", "fate": "malformed"}) == {"replayed": 1}
    assert act({"datacenter": "east"}) == {"replayed": 0}
    lines = {line for path in inbox.iterdir() for line in path.read_text().splitlines()}
    assert lines == {*(f'{{"id": "c{n}"}}' for n in range(5)), "{}"}
    for rate in (0, -1, "5", 1.5):
        with pytest.raises(UsageError, match="rate is a whole number"):
            act({"datacenter": "east", "rate": rate})
    for wrong in (
        {"datacenter": "mars"},
        {"datacenter": "east", "fate": "joined"},
        {"datacenter": "east", "reason": 5},
    ):
        with pytest.raises(UsageError, match="name a datacenter"):
            act(wrong)


def test_it_ends_well_when_it_is_asked_to_as_every_role_does(tmp_path):
    config = tmp_path / "photon.toml"
    config.write_text(
        f'[system]\nout = "{tmp_path}/out"\nwork = "{tmp_path}/work"\n'
        '[replicas.r0]\ndatacenter = "east"\ngrpc = "127.0.0.1:1"\nraft = "127.0.0.1:2"\n'
        '[datacenters.east]\nprimary = ["q"]\nforeign = ["c"]\n'
        'eventstores = ["127.0.0.1:3"]\njoiners = ["127.0.0.1:4"]\ndispatchers = ["127.0.0.1:5"]\n'
    )
    made = start_photon("console", "--config", config, "--listen", f"127.0.0.1:{free_ports(1)[0]}")
    assert made.stdout.readline().startswith("console: http")
    made.send_signal(signal.SIGTERM)
    said = made.communicate(timeout=60)
    assert (made.returncode, said) == (0, ("", ""))
