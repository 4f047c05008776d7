"""The dashboard's answers about recorded runs."""

import asyncio
import json
import re
import shutil
import threading
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from slipstream.configs.base import ConfigError
from slipstream.observe.dashboard import app as module_of_runs
from slipstream.observe.dashboard import viewed_run
from slipstream.observe.dashboard.app import Runs, make_app
from slipstream.observe.dashboard.guard import _MAX_SESSIONS, KEY_HEADER, TOKEN_VARIABLE, Guard, find_token
from slipstream.observe.dashboard.viewed_run import Feed, ViewedRun
from slipstream.observe.metrics_rows import read_tail
from slipstream.runtime.credentials import is_loopback
from slipstream.runtime.run_folder import RunFolder, is_held, list_runs
from tests.builders import make_finished, write_archive
from tests.cases import cases
from tests.recorded_run import append_rows, make_config, make_row, record_run

TOKEN = "a-token-of-sixteen-and-more"
SERIAL = {"mode": "serial", "weights": {"transport": "memory"}}
COOKIE = "slipstream-8420"


def make_client(runs_dir: Path, *names: str) -> TestClient:
    app = make_app(Runs([*names, f"runs_dir={runs_dir}"]), token=TOKEN, hosts=["testserver"], cookie="watch")
    client = TestClient(app, raise_server_exceptions=False)
    client.headers[KEY_HEADER] = enter(client)
    return client


def enter(client: TestClient) -> str:
    """Open the printed address; returns the key that its page keeps."""
    return re.search('name="key" content="([^"]+)"', client.get(f"/?token={TOKEN}").text)[1]


@pytest.fixture
def client(tmp_path):
    record_run(tmp_path)
    return make_client(tmp_path)


def act(client, path, body):
    return client.post(path, content=json.dumps(body))


def test_every_page_is_the_same_shell_with_its_own_scripts_and_nothing_else_is_found(client):
    for path in ("/", "/compare", "/metrics", "/runs/mine", "/runs/mine/pipeline"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert '<script type="module" src="/static/app.js">' in answer.text
        assert "http" not in answer.text
        assert "style=" not in answer.text
    vendored = {"vendor/uPlot.iife.min.js": "uPlot", "vendor/uPlot.LICENSE": "MIT License"}
    for name, words in ({"app.js": "import", "style.css": ":root"} | vendored).items():
        answer = client.get(f"/static/{name}")
        assert (answer.status_code, words in answer.text) == (200, True), name
        assert answer.headers["cache-control"] == "no-cache"
    for path in (
        *("/runs/other", "/runs/mine/nothing", "/runs/..%2f..%2fetc", "/nothing"),
        *("/api/nothing", "/api/runs/other/series", "/api/runs/../mine"),
        *("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/nothing.js"),
    ):
        assert client.get(path).status_code == 404, path


def test_runs_are_listed_newest_first_and_as_they_begin_and_are_held(tmp_path, client):
    (line,) = client.get("/api/runs").json()
    assert (line["id"], line["phase"], line["step"], line["max_steps"]) == ("mine", "finished", 30, 40)
    assert line["accuracies"] == {"sampled": 0.71}, "of the final evaluation"
    record_run(tmp_path, "later", steps=0)
    assert [(each["id"], each["phase"], each["reward"]) for each in client.get("/api/runs").json()] == [
        ("later", "stopped", None),
        ("mine", "finished", pytest.approx(make_row(30)["learner/reward_mean"])),
    ]
    folder = RunFolder(make_config(tmp_path, "later"))
    folder.lock()
    assert client.get("/api/runs").json()[0]["phase"] == "running", "a process holds it"
    folder.unlock()


def test_named_runs_alone_are_shown_those_of_one_name_told_apart_and_deleted_ones_leave_the_list(tmp_path):
    first, second = record_run(tmp_path / "a"), record_run(tmp_path / "b")
    record_run(tmp_path / "a", "other")
    runs = Runs([str(first), str(second)])
    assert runs.ids() == ["mine", "mine.2"]
    assert (runs.reader("mine").folder, runs.reader("mine.2").folder) == (first, second)
    assert runs.reader("mine") is runs.reader("mine")
    assert runs.reader("other") is None
    for folder, left in (("a", ["mine.2"]), ("b", [])):
        shutil.rmtree(tmp_path / folder)
        assert [line.id for line in runs.lines()] == left
    with pytest.raises(ConfigError, match="mien"):
        Runs(["mien", f"runs_dir={tmp_path}"])
    assert make_client(tmp_path).get("/api/runs").json() == [], "a folder without runs waits for them"


def test_a_run_of_another_version_is_listed_with_what_is_known(tmp_path, client):
    path = record_run(tmp_path, "old") / "config.yaml"
    path.write_text("name: old\nno_such_field: 1\n")
    line = next(each for each in client.get("/api/runs").json() if each["id"] == "old")
    assert (line["max_steps"], line["mode"], line["step"]) == (None, "", 30)
    assert [row["key"] for row in client.get("/api/runs/old/settings").json()] == ["name", "no_such_field"]


def test_columns_are_those_that_were_asked_for_with_every_number_of_the_file(client, tmp_path):
    found = client.get("/api/runs/mine/series?keys=step,eval/accuracy_sampled,nothing").json()
    assert (found["position"], found["length"]) == ("0.30", 30)
    assert found["columns"]["step"] == list(range(1, 31))
    assert [index for index, value in enumerate(found["columns"]["eval/accuracy_sampled"]) if value] == [9, 19, 29]
    assert "nothing" not in found["columns"]
    assert "learner/entropy" in found["keys"]
    assert client.get(f"/api/runs/mine/series?keys={','.join('x' * 201)}").status_code == 400
    rows = [json.loads(line) for line in (tmp_path / "mine/metrics.jsonl").read_text().splitlines()]
    keys = {key for row in rows for key, value in row.items() if isinstance(value, int | float)}
    served = client.get("/api/runs/mine/series", params={"keys": ",".join(keys)}).json()["columns"]
    assert served.keys() == keys
    for key in keys:
        # Six digits are served.
        numbers = [row.get(key, float("nan")) for row in rows]
        found = [float("nan") if value is None else value for value in served[key]]
        assert found == pytest.approx(numbers, rel=5e-6, nan_ok=True)


def test_metrics_and_settings_have_meanings_and_the_summary_is_empty_before_the_end(client, tmp_path):
    meanings = {each["key"]: each for each in client.get("/api/meanings").json()}
    assert meanings["learner/ess"]["healthy"] == ">= 0.3"
    assert meanings["learner/wait_s"]["unit"] == "s"
    assert meanings["learner/stale_fraction"]["healthy"] == "near 0; <= 0.05, see pacing"
    assert "accuracy_before" not in meanings, "keys of the summary are none of a row"
    rows = {row["key"]: row for row in client.get("/api/runs/mine/settings").json()}
    steps = rows["learner.max_steps"]
    assert (steps["value"], steps["origin"]) == (40, "command line learner.max_steps=40")
    assert steps["meaning"]
    assert rows["seed"]["origin"] == "", "nothing was recorded of it"
    assert client.get("/api/runs/mine/summary").json()["accuracy_sampled"] == 0.71
    (tmp_path / "mine" / "summary.json").unlink()
    assert client.get("/api/runs/mine/summary").json() == {}


@cases(
    "path, body, code",
    *[("scale", body, 400) for body in ({}, {"generators": -1}, {"generators": "two"}, {"generators": 2, "a": 1})],
    ("scale", {"generators": 2}, 503),
    ("drain", {"generator": "generator-0"}, 503),
    ("drain", {"generator": "x" * 5000}, 413),
    ("pause", {"off": "yes"}, 400),
    ("pause", {"off": False}, 503),
)
def test_an_action_that_cannot_be_done_is_one_sentence(client, path, body, code):
    answer = act(client, f"/api/runs/mine/{path}", body)
    assert (answer.status_code, answer.text.count("\n")) == (code, 1), answer.text
    assert client.get(f"/api/runs/mine/{path}").status_code == 405, "acting has no GET"
    assert act(client, "/api/runs", {}).status_code == 405, "reading has no POST"


def test_rows_that_arrive_while_a_client_watches_are_sent_once_and_in_order(tmp_path):
    folder = record_run(tmp_path, steps=3)
    reader = Runs([f"runs_dir={tmp_path}"]).reader("mine")

    async def watch() -> list[tuple[str, list[int]]]:
        feed, found = Feed(reader), []
        await feed.refresh()
        append_rows(folder, make_row(4))
        messages = feed.messages("0.2", ending=anyio.Event())
        async for message in messages:
            if message["event"] == "rows":
                sent = json.loads(message["data"])
                found.append((message["id"], [row["step"] for row in sent["rows"]]))
                if len(found) == 1:
                    append_rows(folder, make_row(5), make_row(6))
                    await feed.refresh()
                else:
                    break
        await messages.aclose()
        await feed.close()
        return found

    assert asyncio.run(watch()) == [("0.4", [3, 4]), ("0.6", [5, 6])]


@pytest.mark.parametrize("position", ["7.2", "0.999999", "0.0", "x.y"])
def test_a_client_that_cannot_be_caught_up_starts_over_and_its_stream_ends_with_the_server(tmp_path, position):
    record_run(tmp_path, steps=300)
    feed = Feed(Runs([f"runs_dir={tmp_path}"]).reader("mine"))

    async def watch() -> list[str]:
        ending, events = anyio.Event(), []
        async with asyncio.timeout(30):
            async for message in feed.messages(position, ending=ending):
                events.append(message["event"])
                ending.set()
        await feed.close()
        return events

    assert asyncio.run(watch())[0] == "reset"


@pytest.fixture
def archived(tmp_path, client):
    write_archive(tmp_path / "mine/archive", [make_finished(str(number), members=4) for number in range(20)])
    return client


def test_a_list_is_paged_filtered_and_sorted_and_a_group_shown_token_by_token_with_its_step(tmp_path, archived):
    def trajectories(query=""):
        return archived.get(f"/api/runs/mine/trajectories?{query}").json()

    found = trajectories()
    assert (found["num_rows"], found["num_stored"], len(found["rows"]), found["notes"]) == (80, 80, 50, [])
    assert len(trajectories("start=50")["rows"]) == 30
    assert [row["group_id"] for row in trajectories("where=group%3D7")["rows"]] == ["7"] * 4
    assert trajectories("where=step%3E%3D2")["num_rows"] == 0
    indices = [row["index"] for row in trajectories("sort=index&descending=1")["rows"]]
    assert indices == sorted(indices, reverse=True)
    members = archived.get("/api/runs/mine/groups/7").json()
    assert [each["row"]["index"] for each in members] == [0, 1, 2, 3]
    first = members[0]
    assert first["uses"][0]["step"] == 1
    assert len(first["numbers"]["logprob"]) == len(first["token_ids"])
    assert archived.get("/api/runs/mine/groups/77").status_code == 404
    # A run that was killed may have more in its store.
    (tmp_path / "mine" / "summary.json").unlink()
    assert "slipstream view" in trajectories()["notes"][0]


def test_a_question_that_makes_no_sense_or_concerns_a_run_that_archived_nothing_is_one_sentence(tmp_path, archived):
    for query in ("where=rewrd%3E1", "sort=nothing", "start=-1", "start=x", "where=outcome%3Dnone"):
        answer = archived.get(f"/api/runs/mine/trajectories?{query}")
        assert (answer.status_code, answer.text.count("\n")) == (400, 1), query
    record_run(tmp_path, "bare", **SERIAL)
    answer = archived.get("/api/runs/bare/trajectories")
    assert (answer.status_code in (400, 503), answer.text.count("\n")) == (True, 1)


def polled(folder: Path) -> ViewedRun:
    reader = ViewedRun(folder, run_id="mine")
    reader.poll()
    return reader


def test_a_supervised_run_has_no_store_and_is_running_while_it_is_held(tmp_path):
    folder = record_run(tmp_path, steps=5, mode="sft", sft={"train_path": "demonstrations.jsonl"})
    (folder / "store").mkdir()
    view = polled(folder).view()
    assert (view.phase, view.status) == ("finished", None)
    assert "mode=sft has none" in view.problem
    assert list((folder / "store").iterdir()) == [], "no server was started"


def test_a_run_whose_process_is_gone_without_a_summary_has_stopped_until_it_is_resumed(tmp_path):
    folder = record_run(tmp_path, steps=5, **SERIAL)
    (folder / "summary.json").unlink()
    reader = polled(folder)
    assert not is_held(folder)
    assert not is_held(tmp_path / "nowhere")
    assert reader.view().phase == "stopped"
    held = RunFolder(make_config(tmp_path, **SERIAL))
    held.lock()
    append_rows(folder, make_row(6))
    reader.poll()
    view = reader.view()
    assert (view.phase, view.step, view.max_steps, view.status, view.is_live) == ("running", 6, 40, None, True)
    assert "mode=serial" in view.problem
    assert view.times["roles"][0]["role"] == "learner"
    assert view.lag_tokens == {"0": 210, "1": 420, "3": 90}
    held.unlock()
    assert reader.view().phase == "stopped"


def test_one_thread_at_a_time_reads_the_store(tmp_path, monkeypatch):
    # A page that is loaded again begins to read while the thread of the one before is still at it.
    reader = polled(record_run(tmp_path, steps=5))
    began, may_end, inside = threading.Event(), threading.Event(), []

    def read_store(*, is_live):
        inside.append(is_live)
        began.set()
        may_end.wait(10)
        inside.pop()

    monkeypatch.setattr(reader, "_read_store", read_store)
    threads = [threading.Thread(target=reader.view) for _ in range(2)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    threads[1].join(0.05)
    assert len(inside) == 1
    may_end.set()
    for thread in threads:
        thread.join(10)


def test_a_list_looks_for_runs_once_and_reads_a_file_that_is_as_before_once(tmp_path, monkeypatch):
    for name in ("mine", "yours", "theirs"):
        folder = record_run(tmp_path, name, steps=5, **SERIAL)
    looks, reads = [], []
    monkeypatch.setattr(module_of_runs, "list_runs", lambda path: looks.append(path) or list_runs(path))
    monkeypatch.setattr(viewed_run, "read_tail", lambda path: reads.append(path) or read_tail(path))
    assert len(Runs([f"runs_dir={tmp_path}"]).lines()) == 3
    assert (looks, len(reads)) == ([tmp_path], 3)
    reader = ViewedRun(folder, run_id="mine")
    assert (reader.line().step, reader.line().step, len(reads)) == (5, 5, 4)
    assert reader.line().accuracies == {"sampled": 0.71}, "of the final evaluation"
    reader.folder.joinpath("summary.json").unlink()
    append_rows(folder, make_row(6, **{"eval/accuracy_sampled": 0.4}))
    assert (reader.line().step, len(reads)) == (6, 5)
    assert reader.line().accuracies == {"sampled": 0.4}, "of the newest monitored one"


def test_a_warning_quotes_the_figures_of_the_run_and_a_rolled_back_run_is_judged_again(tmp_path):
    folder = record_run(tmp_path, steps=1, staleness={"max_lag": 7}, **SERIAL)
    append_rows(folder, make_row(2, **{"learner/ess": 0.1, "lag/mean": 2.5}))
    reader = polled(folder)
    (warning,) = reader.view().warnings
    assert warning.metric == "learner/ess"
    assert "staleness.max_lag (now 7, mean lag 2.5)" in warning.advice
    RunFolder(make_config(tmp_path, **SERIAL)).keep_metrics(up_to_step=1)
    reader.poll()
    assert reader.view().warnings == []


def make_guarded(*, is_in: bool = True, base_url: str = "http://localhost:8420") -> TestClient:
    async def answer(request):
        return PlainTextResponse(request.method)

    routes = [Route("/", answer), Route("/api/runs", answer), Route("/act", answer, methods=["POST"])]
    guard = Middleware(Guard, token=TOKEN, hosts=("localhost", "127.0.0.1", "::1"), cookie=COOKIE)
    client = TestClient(Starlette(routes=routes, middleware=[guard]), base_url=base_url, follow_redirects=False)
    if is_in:
        enter(client)
    return client


def test_only_requests_to_a_name_of_this_machine_are_answered_even_with_the_token():
    for host in ("localhost:8420", "127.0.0.1:9000", "LOCALHOST", "[::1]:8420"):
        assert make_guarded().get("/", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", "evil.example:8420", "localhost.evil.example", "[::2]:8420", "", "127.0.0.1.nip.io"):
        assert make_guarded().get("/", headers={"host": host}).status_code == 400, host
        assert make_guarded(is_in=False).get(f"/?token={TOKEN}", headers={"host": host}).status_code == 400, host
    assert all(map(is_loopback, ("127.0.0.1", "127.0.0.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "node")))


def test_without_a_session_nothing_is_shown_not_even_what_there_is():
    for cookie in (None, "", "wrong", TOKEN, TOKEN + "x", "\x7f"):
        client = make_guarded(is_in=False)
        if cookie is not None:
            client.cookies.set(COOKIE, cookie)
        assert {client.get(path).status_code for path in ("/", "/nowhere", "/static/app.js", "/api/runs")} == {401}
        assert client.post("/act").status_code == 401


def test_the_printed_address_starts_one_of_few_sessions_and_leads_to_an_address_without_the_token():
    client = make_guarded(is_in=False)
    first, second = client.get(f"/?token={TOKEN}"), client.get(f"/?token={TOKEN}")
    assert first.status_code == 200
    session, *attributes = first.headers["set-cookie"].split("; ")
    assert session.startswith(f"{COOKIE}=")
    assert session != second.headers["set-cookie"].split("; ")[0], "each session has its own random id"
    assert {"httponly", "samesite=strict", "path=/"} <= {each.lower() for each in attributes}
    assert '<script src="/static/enter.js">' in first.text
    assert TOKEN not in first.text + str(first.headers)
    for path in (f"/act?token={TOKEN}", "/?token=wrong", f"/?token={TOKEN}x"):
        answer = make_guarded(is_in=False).get(path)
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False), "no other address and token does"
    client = make_guarded()
    oldest = client.cookies[COOKIE]
    for _ in range(_MAX_SESSIONS):
        assert client.get("/").status_code == 200
        enter(client)
    assert client.get("/").status_code == 200
    client.cookies.clear()
    assert client.get("/", headers={"cookie": f"{COOKIE}={oldest}"}).status_code == 401


def test_the_cookie_alone_which_other_ports_receive_shows_nothing_of_a_run():
    client = make_guarded(is_in=False)
    key = enter(client)
    assert {client.get(path).status_code for path in ("/api/runs", "/api/runs?key=", "/api/runs?key=wrong")} == {403}
    assert client.get("/api/runs", headers={KEY_HEADER: key}).status_code == 200
    assert client.get(f"/api/runs?key={key}").status_code == 200
    client.cookies.clear()
    assert client.get("/api/runs", headers={KEY_HEADER: key}).status_code == 401


def test_every_answer_forbids_foreign_code_frames_and_referrers():
    for client in (make_guarded(), make_guarded(is_in=False)):
        headers = client.get("/").headers
        policy = headers["content-security-policy"]
        assert ("default-src 'self'" in policy, "frame-ancestors 'none'" in policy, "unsafe" in policy) == (1, 1, 0)
        assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
        assert headers["cache-control"] == "no-store"


def test_a_page_of_the_dashboard_may_act_and_one_of_another_site_not_although_the_browser_has_the_cookie():
    client = make_guarded()
    own = {KEY_HEADER: enter(client), "origin": "http://localhost:8420", "sec-fetch-site": "same-origin"}
    assert client.post("/act", headers=own).text == "POST"
    assert client.post("/act", headers={KEY_HEADER: own[KEY_HEADER]}).status_code == 200
    changes = [{KEY_HEADER: ""}, {KEY_HEADER: "0" * 64}]
    changes += [{"origin": origin} for origin in ("http://evil.example", "null", "http://localhost:9999")]
    changes += [{"sec-fetch-site": site} for site in ("cross-site", "same-site")]
    for changed in changes:
        assert client.post("/act", headers=own | changed).status_code == 403, changed


def test_a_token_of_the_users_own_is_used_once_and_one_that_can_be_guessed_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert find_token(is_open=False) == TOKEN
    first, second = find_token(is_open=True), find_token(is_open=True)
    assert len({TOKEN, first, second}) == 3
    assert len(first) >= 32
    for token, is_open in (("x" * 15, False), ("x" * 31, True), ("x" * 20 + " y", False), ("x" * 20 + ";", False)):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as refused:
            find_token(is_open=is_open)
        assert token not in str(refused.value)
