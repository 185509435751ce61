"""The console in a real browser, on a real system: every page, an event explained, a datacenter killed."""

import json
import os
import re
import shutil
import signal

import pytest

from tests.millwheel.running import System
from tests.ports import paired_ports
from tests.system import PHOTON, Processes, photon
from tests.waiting import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
OVER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SCREENSHOTS = os.environ.get("PHOTON_SCREENSHOTS")
"""A directory: the pages are kept there; docs/console.md shows two of them."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt install chromium"),
]


class Dev(Processes):
    """`photon dev` with two datacenters, and some lines that are no events."""

    def __init__(self, root):
        super().__init__(root)
        self.address, self.out = f"127.0.0.1:{paired_ports(1)[0]}", root / "out"
        self.work = self.out / ".photon"
        self.launch(
            "dev",
            [
                *PHOTON,
                "dev",
                "--out",
                str(self.out),
                "--listen",
                self.address,
                "--millwheel",
                "--queries-per-s",
                "200",
                "--clicks-per-s",
                "60",
                "--for",
                "900s",
            ],
        )
        for name in ("east", "west"):
            clicks = self.work / f"logs-{name}" / "clicks"
            wait_until(clicks.is_dir, what=self.told)
            (clicks / "broken.jsonl").write_bytes(b"".join(b'{"no": "id", "n": %d}\n' % n for n in range(60)))
        wait_until(lambda: any(self.joined()), what=self.told)

    def joined(self):
        for path in sorted((self.out / "joined").glob("*/*.jsonl")):
            for line in path.read_bytes().splitlines():
                yield json.loads(line)["id"]


@pytest.fixture(scope="module")
def dev(tmp_path_factory):
    made = Dev(tmp_path_factory.mktemp("dev"))
    yield made
    made.signal(signal.SIGTERM, "dev")
    try:
        assert made.process("dev").wait(60) == 0, made.told()
    finally:
        made.kill()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield made
        made.close()


SHAPES = [(1200, "light"), pytest.param((320, "dark"), marks=pytest.mark.soak)]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"{shape[0]}px-{shape[1]}")
def page(request, browser, dev):
    width, colours = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=colours)
    page = context.new_page()
    wrong = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_default_timeout(30_000)
    page.at = lambda path: page.goto(f"http://{dev.address}{path}")
    yield page
    name = re.sub(r"\W+", "-", request.node.name.partition("[")[0].removeprefix("test_"))
    if SCREENSHOTS and width == 1200:
        page.screenshot(path=f"{SCREENSHOTS}/{name}.png")
    over = [page.evaluate(OVER)]
    page.set_viewport_size({"width": 320, "height": 900})
    page.emulate_media(color_scheme="dark")
    over.append(page.evaluate(OVER))
    context.close()
    assert wrong == [] and max(over) <= 0


def shows(page, text, exact=False):
    sync_api.expect(page.get_by_text(text, exact=exact).first).to_be_visible()


def test_now(page):
    page.at("/")
    shows(page, re.compile("all well: 11 processes answer"))
    for title in ("Joined a second", "Events that wait", "Latency: from the line read", "Processes"):
        shows(page, title)
    sync_api.expect(page.get_by_text("adds up", exact=True)).to_have_count(2)
    shows(page, re.compile(r"half below \d+ ms"))
    assert page.locator("#slot-charts canvas").count() == 4


def test_event(page, dev):
    event_id = next(dev.joined())
    page.at("/event")
    page.get_by_label("Id of a foreign event").fill(event_id)
    page.keyboard.press("Enter")
    shows(page, f"{event_id}: joined")
    shows(page, "the event's own time")
    shows(page, re.compile("registered by joiner-"))
    assert f"id={event_id.replace(':', '%3A')}" in page.url
    page.at("/event?id=<script>alert(1)</script>")
    shows(page, "<script>alert(1)</script>: not seen")


def test_waiting(page):
    page.at("/waiting")
    shows(page, re.compile(r"east: \d+ events wait"))
    shows(page, "has read all primary logs")


def test_dead_letters(page):
    page.at("/dead-letters")
    page.get_by_role("link", name=re.compile("no foreign event|lacks|missing|field|id")).first.click()
    sync_api.expect(page.get_by_role("heading", name="Letters", exact=True)).to_be_visible()
    shows(page, '{"no": "id", "n": 0}')
    page.get_by_role("link", name="next page").click()
    shows(page, '{"no": "id", "n": 55}')
    page.get_by_role("button", name="How many would be replayed").click()
    shows(page, re.compile(r"east: 60 would be tried again"))


def test_dead_letters_are_replayed_at_a_rate(page, dev):
    name = {1200: "east", 320: "west"}[page.viewport_size["width"]]
    page.at(f"/dead-letters?datacenter={name}&fate=malformed")
    page.get_by_label("events a second").fill("20")
    page.get_by_role("button", name="Replay what is shown").click()
    shows(page, f"{name}: 60 are tried again, 20 a second")
    wait_until(lambda: f"dead letters of {name}: 60 were replayed" in dev.said("dev"), what=dev.told)


def test_registry(page):
    page.at("/registry")
    shows(page, "every shard and the directory have a quorum")
    for text in ("registry-r0", "leads the directory", "version of the configuration", "set main"):
        shows(page, text)


def test_members(page):
    page.at("/members")
    for text in ("eventstore-east", "dispatcher-west", "Shares of the logs"):
        shows(page, text)


def test_millwheel(page, dev):
    """A graph with rates, and what holds a stage; a worker is killed by a click and comes back."""
    page.at("/millwheel")
    graph = page.get_by_role("region", name="graph")
    for name in ("records", "count", "detect", "sink anomalies"):
        sync_api.expect(graph.get_by_text(name, exact=True)).to_be_visible()
    sync_api.expect(graph.get_by_text(re.compile(r"^[1-9]\d*/s$")).first).to_be_visible()
    sync_api.expect(graph.get_by_text(re.compile(r"[\d.]+ s behind")).first).to_be_visible()
    graph.get_by_role("link", name="what holds detect").press("Enter")
    shows(page, "What holds detect")
    before = restarts(page)
    page.get_by_role("button", name="Kill worker 1", exact=True).click()
    shows(page, "worker 1 is killed")
    wait_until(lambda: restarts(page) == before + 1, what=dev.told)


def restarts(page):
    return int(re.search(r"2 workers, (\d+) restarts", page.content())[1])


def test_a_datacenter_is_killed_frozen_and_restored_by_clicks_and_nothing_is_lost(page, dev):
    page.at("/")
    for act, does in (("Kill", "killed"), ("Freeze", "frozen"), ("Fill the disk of", "full")):
        page.get_by_role("button", name=f"{act} west", exact=True).focus()
        page.keyboard.press("Enter")
        shows(page, f"datacenter west is {does}")
        shows(page, re.compile("NOT WELL: .*west"))
        if SCREENSHOTS:
            page.screenshot(path=f"{SCREENSHOTS}/{does}-{page.viewport_size['width']}.png")
        page.get_by_role("button", name="Restore west", exact=True).click()
        shows(page, "datacenter west is restored")
        shows(page, re.compile("all well: 11 processes answer"))
    shows(page, re.compile(r"ok: [\d,]+ joined lines, each event once, each with its own primary"))
    noted = [json.loads(line) for line in (dev.work / "console.jsonl").read_text().splitlines()]
    acts = [row["action"] for row in noted if "asked" in row]
    assert acts[-6:] == ["kill", "restore", "freeze", "restore", "fill", "restore"]


def test_a_link_is_cut_slowed_down_and_mended_by_clicks(page):
    page.at("/")
    page.get_by_label("Link between").select_option("east and west")
    page.get_by_role("button", name="Cut").click()
    shows(page, "Links: east and west: cut")
    page.get_by_label("by ms a round trip").fill("250")
    page.get_by_role("button", name="Slow down").click()
    shows(page, "Links: east and west: slower by 250 ms")
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/links-{page.viewport_size['width']}.png")
    page.get_by_role("button", name="Mend").click()
    sync_api.expect(page.get_by_text("Links: east")).to_have_count(0)
    shows(page, "the link between east and west is mended")


def test_a_console_of_its_own_shows_the_same_run_and_one_of_millwheel_and_only_reads(dev, browser, tmp_path):
    wheel, own = System(tmp_path), Processes(dev.work)
    listen = f"127.0.0.1:{paired_ports(1)[0]}"
    wheel.write("clicks.jsonl", [{"user": "u", "ts": n * 1_000_000, "what": "w"} for n in range(20)])
    running = wheel.start("--follow", told=tmp_path / "told")
    try:
        wait_until(wheel.is_up)
        shown = ["--work", str(dev.work), "--millwheel", str(tmp_path / "work"), "--listen", listen]
        own.launch("console", [*PHOTON, "console", *shown])
        wait_until(lambda: f"http://{listen}/" in own.said("console"), what=own.told)
        page = browser.new_page()
        page.goto(f"http://{listen}/")
        shows(page, re.compile("all well: 11 processes answer"))
        assert page.get_by_role("button").count() == 0
        page.goto(f"http://{listen}/millwheel")
        assert page.get_by_role("button").count() == 0
        page.get_by_role("link", name="totals", exact=True).click()
        shows(page, "What holds totals")
        shows(page, re.compile("held by|file|input|timer"))
        running.send_signal(signal.SIGTERM)
        running.wait(60)
        page.reload()
        sync_api.expect(page.get_by_role("alert")).to_be_visible()
        page.close()
    finally:
        running.kill()
        own.kill()
    listening = photon("console", "--work", dev.work, "--listen", "0.0.0.0:7999")
    assert (listening.returncode, "serves this machine only" in listening.stderr) == (2, True)
