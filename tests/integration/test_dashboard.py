"""`slipstream watch` in headless Chromium, driven by Playwright, on a live run and on finished runs."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from slipstream.buffer.redis.embedded import EmbeddedRedis
from slipstream.buffer.redis.run_store import open_run_store
from slipstream.buffer.role_reports import LAUNCHER
from slipstream.buffer.store import GENERATORS
from slipstream.configs.run import RunConfig
from slipstream.observe.dashboard.guard import TOKEN_VARIABLE
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_finished, make_run, write_archive
from tests.contract.stores import lease, make_ready, open_run
from tests.recorded_run import append_rows, make_row, record_run
from tests.runs import ROOT

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser is driven by playwright, which is not here")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on PATH")]

TOKEN = "a-token-of-thirty-two-characters-"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FLAGS += ("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
MARKUP = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
LONG = 20_000
DEADLINE_S = 20.0
PAGES = ("", "/pipeline", "/trajectories", "/events", "/settings")


class LiveRun:
    """A run folder with a real store; its roles are threads that report, die, and answer on command.

    Life: start -> (step | kill | end of the store)* -> stop.
    """

    def __init__(self, runs_dir: Path, config: RunConfig, *, steps: int) -> None:
        self.path = record_run(runs_dir, config.name, steps=steps)
        (self.path / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        (self.path / "summary.json").unlink()
        self.steps = steps
        self._folder = RunFolder(config)
        self._folder.lock()
        self.server = EmbeddedRedis(self._folder.store, max_memory_mib=64)
        self.server.start(timeout_s=20)
        self.store = open_run_store(self.server.url, config.name, timeout_s=5)
        open_run(self.store, config_json=msgspec.json.encode(config).decode())
        self.store.set_phase("training")
        make_ready(self.store, 3)
        lease(self.store, 1)
        self.alive = {"broker", "learner", LAUNCHER, "generator-0", "generator-1"}
        self.running = 40
        self.requests: list[str] = []
        self._target, self._answer = 2, {"answered": "", "refusal": ""}
        self._ending = Event()
        self._thread = Thread(target=self._report, daemon=True)
        self._thread.start()

    def _report(self) -> None:
        while not self._ending.wait(0.2):
            if LAUNCHER in self.alive:
                self._take_requests()
            for name in sorted(self.alive):
                self.store.report_role(name, self._gauges(name))

    def _take_requests(self) -> None:
        for subject, value in self.store.take_requests("launcher").items():
            number, _, request_id = value.partition(" ")
            self.requests.append(f"{subject} {number}")
            if subject == GENERATORS:
                self._target, self._answer = int(number), {"answered": request_id, "refusal": ""}
        self.requests += self.store.take_requests("broker")

    def _gauges(self, name: str) -> dict[str, Any]:
        where = {"state": "ready", "host": "node-1", "pid": 4711, "reason": ""}
        if name == LAUNCHER:
            return where | {"role": LAUNCHER, "restarts": {}, "generators_target": self._target, **self._answer}
        if not name.startswith("generator"):
            return where | {"role": name, "version": self.steps, "tokens": 5.0 * self.steps, "tokens_per_s": 4900.0}
        rates = {"version": 0, "tokens": 9.0 * self.steps, "tokens_per_s": 2600.0}
        return where | rates | {"role": "generator", "running": self.running, "max_concurrency": 64, "kv_usage": 0.42}

    def step(self, **values: Any) -> int:
        """Make a step and return its number."""
        self.steps += 1
        append_rows(self.path, make_row(self.steps, **values))
        return self.steps

    def kill(self, name: str) -> None:
        """Silence a role."""
        self.alive.discard(name)

    def release(self) -> None:
        """Release the run, as its launcher does when it dies."""
        self._folder.unlock()

    def kill_store(self) -> None:
        self._ending.set()
        self._thread.join(timeout=10)
        self.server.stop()

    def stop(self) -> None:
        self.kill_store()
        self.store.close()
        self.release()


@pytest.fixture(scope="module")
def runs_dir() -> Iterator[Path]:
    # A short path, because socket paths are limited in length.
    folder = Path(tempfile.mkdtemp(prefix="slip-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def run(runs_dir: Path) -> Iterator[LiveRun]:
    config = make_run(name="mine", runs_dir=str(runs_dir), broker={"peer_timeout_s": 1.5}, learner={"max_steps": 200})
    live = LiveRun(runs_dir, config, steps=60)
    live.store.record_event("generator-0", f"died: {MARKUP}")
    yield live
    live.stop()


@pytest.fixture(scope="module")
def address(runs_dir: Path, run: LiveRun) -> Iterator[str]:
    """Address printed by `slipstream watch`."""
    done = record_run(runs_dir, "done", steps=40, seed=3)
    write_archive(done / "archive", [make_finished(str(number), members=4) for number in range(30)])
    record_run(runs_dir, "long", steps=0)
    append_rows(
        runs_dir / "long", *({**make_row(step), "learner/by_lag/0/mismatch_k3": MARKUP} for step in range(1, LONG + 1))
    )
    server = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "watch", f"runs_dir={runs_dir}", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=runs_dir,
        env={**os.environ, "PYTHONPATH": str(ROOT), TOKEN_VARIABLE: TOKEN},
    )
    assert server.stdout
    yield server.stdout.readline().split(": ", 1)[1].strip()
    server.terminate()
    server.wait(timeout=10)


class Watched:
    """A browser page with its requests and complaints."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.root = address.split("/?")[0]
        self.hosts: set[str] = set()
        self.complaints: list[str] = []
        page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._hear(message))

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.root}{path}", wait_until="domcontentloaded")

    def text(self, selector: str = "main") -> str:
        return self.page.evaluate("selector => document.querySelector(selector)?.innerText ?? ''", selector)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        # Not wait_for_function, which evaluates strings: the pages' policy forbids that.
        ends_at = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < ends_at, f"{what}; the page shows: {self.text()[:1500]}; {self.complaints}"
            self.page.wait_for_timeout(50)

    def shows(self, *words: str, selector: str = "main") -> None:
        self.until(lambda: all(word in self.text(selector) for word in words), f"{words} must appear")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, address: str) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=list(FLAGS), color_scheme="light"
        )
        page = context.new_page()
        page.goto(address)
        # The token leaves the address immediately.
        page.wait_for_url(lambda url: "token" not in url)
        page.close()
        yield context
        context.close()


@pytest.fixture
def watched(browser: Any, address: str) -> Iterator[Watched]:
    page = browser.new_page()
    page.set_viewport_size({"width": 1280, "height": 900})
    found = Watched(page, address)
    yield found
    page.close()
    assert found.complaints == []
    assert found.hosts == {urlsplit(address).netloc}, "pages make no requests to other hosts"


def drawn_charts(watched: Watched) -> int:
    """Charts with more than one color."""
    return watched.page.evaluate(
        """() => [...document.querySelectorAll('.chart canvas')].filter((canvas) => {
            const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size > 3;
        }).length"""
    )


def test_the_page_of_a_run_draws_its_charts_and_a_step_appears_while_it_is_open(watched: Watched, run: LiveRun):
    watched.open("/runs/mine")
    watched.until(lambda: drawn_charts(watched) >= 8, "charts must be drawn")
    watched.shows("training", f"step {run.steps} of 200", "Held-out accuracy", "monitored at step", "Nobody waits")
    step = run.step(**{"learner/ess": 0.2})
    watched.shows(f"step {step} of 200", "learner/ess is 0.2", "healthy >= 0.3")
    watched.page.click("text=learner/ess")
    watched.shows("effective sample size")
    assert watched.page.evaluate("document.querySelector('tr.chosen').id") == "learner/ess"


def test_a_finished_run_shows_the_accuracy_of_its_final_evaluation(watched: Watched):
    watched.open("/runs/done")
    watched.shows("0.710", "final evaluation, 512 prompts")


def test_twenty_thousand_steps_are_drawn_and_markup_of_a_run_stays_text(watched: Watched):
    watched.open("/runs/long")
    watched.until(lambda: drawn_charts(watched) >= 6, "charts must be drawn")
    watched.shows("step 20,000")
    watched.open("/runs/mine/events")
    watched.shows(MARKUP)
    assert watched.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert watched.page.title() != "hacked"


def test_settings_show_their_origin_and_runs_are_compared_in_curves_values_and_settings(watched: Watched):
    watched.open("/runs/done/settings")
    watched.shows("learner.max_steps", "command line", "not recorded")
    watched.page.select_option("select[aria-label='compare with']", "mine")
    watched.until(lambda: "model.path" not in watched.text(), "equal settings must disappear")
    watched.shows("broker.peer_timeout_s", "seed")
    watched.open("/")
    watched.shows("mine", "done", "long")
    for name in ("mine", "done"):
        watched.page.check(f"input[aria-label='compare {name}']")
    watched.page.click("button:has-text('Compare 2')")
    watched.until(lambda: drawn_charts(watched) >= 4, "charts must be drawn")
    watched.shows("Settings that differ", "broker.peer_timeout_s", "summary: accuracy_sampled")


def test_the_pipeline_opens_at_a_click_and_scales_and_drains(watched: Watched, run: LiveRun):
    watched.open("/runs/mine/pipeline")
    watched.shows("generator-0", "40 of 64 in flight", "cache 42 %", "ready groups")
    watched.page.click("g[aria-label='Store']")
    watched.shows("MiB of 64 MiB", "for the archive")
    watched.page.focus("g[aria-label='Generators']")
    watched.page.keyboard.press("Enter")
    watched.page.fill("input[aria-label='number of generators']", "3")
    watched.page.click("button:has-text('Scale')")
    watched.until(lambda: "generators 3" in run.requests, "the launcher must be asked")
    watched.shows("3, kept by the launcher", "changes from 2 to 3")
    drain = watched.page.query_selector("tr:has-text('generator-1') button")
    run.running = 41
    watched.shows("41 of 64 in flight", "41 / 64", "changes from 2 to 3")
    assert drain.is_visible(), "the button that was about to be pressed must stay"
    for label in ("Drain", "Drain it?"):
        watched.page.click(f"tr:has-text('generator-1') button:has-text('{label}')")
    watched.until(lambda: any("generator-1" in each for each in run.requests), "the broker must be asked")
    watched.page.click("g[aria-label='Learner']")
    watched.page.click("button:has-text('Pause')")
    watched.shows("pauses before its next step")


def test_a_trajectory_opens_with_its_group_token_by_token(watched: Watched):
    watched.open("/runs/done/trajectories")
    watched.shows("1 to 50 of 120")
    watched.page.keyboard.press("n")
    watched.shows("51 to 100 of 120")
    watched.page.fill("input[aria-label='conditions']", "group=7 reward>=0")
    watched.page.keyboard.press("Enter")
    watched.shows("1 to 4 of 4, 120 stored")
    watched.page.click("tbody tr:nth-child(2)")
    watched.shows("group 7", "4 members", "step 1", "assistant")
    assert watched.page.evaluate("document.querySelectorAll('.member').length") == 4
    watched.page.click("button[data-name='logprob']")
    colored = "document.querySelectorAll('.tokens span[style*=background]').length"
    watched.until(lambda: watched.page.evaluate(colored) > 3, "tokens must be colored")
    watched.page.keyboard.press("Escape")
    watched.shows("120 stored")


def test_no_page_scrolls_sideways_on_a_phone(watched: Watched):
    watched.page.set_viewport_size({"width": 360, "height": 740})
    pages = [f"/runs/done{page}" for page in PAGES]
    for path in ("/", "/compare?runs=mine,done", "/metrics", *pages, "/runs/mine/pipeline"):
        watched.open(path)
        watched.until(lambda: len(watched.text()) > 60, "the page must appear")
        watched.page.wait_for_timeout(150)
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 360, path


def test_dark_and_light_follow_the_system_until_one_is_chosen_by_the_keyboard(watched: Watched):
    def ground() -> str:
        return watched.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")

    watched.open("/runs/done")
    watched.shows("Held-out accuracy")
    light = ground()
    watched.page.emulate_media(color_scheme="dark")
    dark = ground()
    assert dark != light
    watched.page.keyboard.press("t")
    watched.until(lambda: ground() == light, "t must switch the theme")
    watched.page.keyboard.press("2")
    watched.until(lambda: watched.page.url.endswith("/runs/done/pipeline"), "2 must open the second page")
    watched.page.keyboard.press("t")
    watched.page.evaluate("localStorage.removeItem('theme')")


def test_the_page_keeps_working_while_every_role_and_then_the_store_dies(watched: Watched, run: LiveRun):
    watched.open("/runs/mine/pipeline")
    for name in ("generator-0", "generator-1", "learner", "broker"):
        run.kill(name)
        watched.shows(name)
        watched.until(
            lambda name=name: re.search(rf"{name}\s+silent", watched.text("table")), f"{name} must be shown as silent"
        )
    watched.page.keyboard.press("1")
    watched.shows("all roles for the broker")
    run.kill_store()
    watched.shows("no store answered")
    step = run.step()
    watched.shows(f"step {step} of 200")
    run.release()
    watched.shows("stopped", "The run is over")
