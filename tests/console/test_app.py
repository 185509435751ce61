"""The console's addresses: three answers at each, and nothing for strangers."""

import contextlib
import hashlib
import http.client
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("uvicorn", reason="the console extra is not installed")
import uvicorn

import photon.console
from photon.console.app import BODY_BYTES_MAX, STREAMS_MAX, Audit, make_app
from photon.core.errors import UnavailableError, UsageError
from tests.waiting import wait_until

HOST = "127.0.0.1"


class Told:
    """Stands for Pages: each says its name and what it was asked."""

    def __init__(self):
        self.error = None
        self.times = 0

    def __getattr__(self, name):
        def tell(query):
            if self.error is not None:
                raise self.error
            self.times += 1
            return {"page": name, "query": dict(query), "history": {"times": [float(self.times)]}}

        return tell


@contextlib.contextmanager
def served(app):
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.force_exit = server.should_exit = True
        thread.join()


@pytest.fixture
def console(tmp_path):
    done, told = [], Told()

    def act(asked):
        if asked.get("wrong"):
            raise UsageError("no such datacenter")
        done.append(asked)
        return {"told": "done"}

    audit = tmp_path / "console.jsonl"
    with served(make_app(told, [HOST], {"kill": act}, Audit(audit))) as port:
        yield SimpleNamespace(port=port, done=done, told=told, audit=audit)


def ask(console, method="GET", path="/", body=None, **headers):
    connection = http.client.HTTPConnection(HOST, console.port, timeout=20)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return SimpleNamespace(status=answer.status, headers=answer.headers, data=data)


def token_of(console):
    page = ask(console, accept="text/html").data.decode()
    return page.partition('name="photon-token" content="')[2].partition('"')[0]


def test_each_address_answers_a_browser_with_the_page_and_a_program_with_json(console):
    for path, name in (
        ("/", "now"),
        ("/event", "event"),
        ("/dead-letters", "dead_letters"),
        ("/members", "members"),
    ):
        page = ask(console, path=f"{path}?id=a", accept="text/html,*/*")
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b"/static/console.js" in page.data
        for told in (
            ask(console, path=f"{path}?id=a"),
            ask(console, path=f"{path}?id=a&format=json", accept="text/html"),
        ):
            assert json.loads(told.data)["page"] == name
            assert json.loads(told.data)["query"] == {"id": "a"}


@pytest.mark.parametrize(("error", "status"), [(UnavailableError("away"), 503), (UsageError("which?"), 400)])
def test_what_can_not_be_told_is_told_with_a_status(console, error, status):
    console.told.error = error
    told = ask(console)
    assert (told.status, json.loads(told.data)) == (status, {"error": str(error)})


def test_a_listener_is_told_again_and_of_a_history_what_is_new(console, monkeypatch):
    monkeypatch.setattr("photon.console.app.EVERY_S", 0.01)
    connection = http.client.HTTPConnection(HOST, console.port, timeout=20)
    connection.request("GET", "/", headers={"Accept": "text/event-stream"})
    answer = connection.getresponse()
    told = []
    while len(told) < 3:
        line = answer.readline()
        if line.startswith(b"data: "):
            told.append(json.loads(line[6:])["query"])
    connection.close()
    assert told == [{}, {"after": "1.0"}, {"after": "2.0"}]


def test_listeners_are_bounded_and_who_leaves_makes_room(console, monkeypatch):
    monkeypatch.setattr("photon.console.app.EVERY_S", 0.05)
    held = []
    for _ in range(STREAMS_MAX):
        connection = http.client.HTTPConnection(HOST, console.port, timeout=20)
        connection.request("GET", "/", headers={"Accept": "text/event-stream"})
        assert connection.getresponse().status == 200
        held.append(connection)
    assert ask(console, accept="text/event-stream").status == 503
    assert ask(console).status == 200
    for connection in held:
        connection.sock.close()
        connection.close()

    def has_room():
        connection = http.client.HTTPConnection(HOST, console.port, timeout=20)
        connection.request("GET", "/", headers={"Accept": "text/event-stream"})
        status = connection.getresponse().status
        connection.close()
        return status == 200

    wait_until(has_room)


def test_a_name_that_it_does_not_serve_is_refused(console):
    assert ask(console, host="photon.evil.test").status == 400
    assert ask(console, host=f"{HOST}:{console.port}").status == 200


def test_no_other_site_may_read_or_frame_what_is_served(console):
    for path in ("/", "/static/console.js"):
        headers = ask(console, path=path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["access-control-allow-origin"] is None


def test_other_sites_may_link_to_it_and_make_it_do_nothing(console):
    image = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
    assert ask(console, path="/event?id=a", **image).status == 403
    assert console.told.times == 0
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert ask(console, path="/event?id=a", accept="text/html", **link).status == 200
    assert ask(console, path="/event?id=a", sec_fetch_site="same-origin", sec_fetch_mode="cors").status == 200


def test_what_is_too_long_is_refused(console):
    assert ask(console, path="/event?id=" + "a" * 100_000).status in (400, 414, 431)
    assert ask(console, path="/", x_long="a" * 100_000).status in (400, 431)
    assert ask(console).status == 200


def test_what_is_vendored_is_what_its_checksums_say():
    static = Path(photon.console.__file__).with_name("static")
    for line in (static / "CHECKSUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest


def test_an_action_is_done_for_our_own_page_and_noted_before_and_after(console):
    token = token_of(console)
    own = f"http://{HOST}:{console.port}"
    done = ask(console, "POST", "/actions/kill", b'{"datacenter": "east"}', x_photon_token=token, origin=own)
    assert (done.status, json.loads(done.data)) == (200, {"told": "done"})
    wrong = ask(console, "POST", "/actions/kill", b'{"wrong": 1}', x_photon_token=token)
    assert (wrong.status, json.loads(wrong.data)) == (400, {"error": "no such datacenter"})
    assert console.done == [{"datacenter": "east"}]
    noted = [json.loads(line) for line in console.audit.read_text().splitlines()]
    assert [(row["action"], row.get("asked"), row.get("status")) for row in noted] == [
        ("kill", {"datacenter": "east"}, None),
        ("kill", None, 200),
        ("kill", {"wrong": 1}, None),
        ("kill", None, 400),
    ]


def test_forged_huge_and_malformed_requests_do_nothing(console):
    token = token_of(console)
    body = b'{"datacenter": "east"}'
    assert ask(console, "POST", "/actions/kill", body).status == 403
    assert ask(console, "POST", "/actions/kill", body, x_photon_token="guess").status == 403
    assert ask(console, "POST", "/actions/kill", body, x_photon_token="gu\xe9ss").status == 403
    evil = {"x_photon_token": token, "origin": "http://evil.test"}
    assert ask(console, "POST", "/actions/kill", body, **evil).status == 403
    for data in (b"x" * (BODY_BYTES_MAX + 1), b"[]", b"{", b"[" * 10_000, b""):
        assert ask(console, "POST", "/actions/kill", data, x_photon_token=token).status == 400
    assert ask(console, "GET", "/actions/kill", x_photon_token=token).status == 405
    assert ask(console, "POST", "/actions/burn", body, x_photon_token=token).status == 404
    assert console.done == [] and not console.audit.exists()


def test_without_actions_it_only_reads_and_gives_no_token(tmp_path):
    with served(make_app(Told(), [HOST], {}, Audit(tmp_path / "audit"))) as port:
        console = SimpleNamespace(port=port)
        assert token_of(console) == ""
        refused = ask(console, "POST", "/actions/kill", b"{}", x_photon_token="")
        assert (refused.status, "--allow-actions" in refused.data.decode()) == (403, True)
