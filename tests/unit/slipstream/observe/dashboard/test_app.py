"""The dashboard's answers about recorded runs."""

import asyncio
import json
import re
from pathlib import Path

import anyio
import pytest
from starlette.testclient import TestClient

from slipstream.configs.base import ConfigError
from slipstream.observe.dashboard.app import Runs, make_app
from slipstream.observe.dashboard.feed import Feed
from slipstream.observe.dashboard.guard import KEY_HEADER
from slipstream.runtime.run_folder import RunFolder
from tests.builders import make_finished, write_archive
from tests.recorded_run import append_rows, make_config, make_row, record_run

TOKEN = "a-token-of-sixteen-and-more"


def make_client(runs_dir: Path, *names: str) -> TestClient:
    app = make_app(Runs([*names, f"runs_dir={runs_dir}"]), token=TOKEN, hosts=["testserver"], cookie="watch")
    client = TestClient(app, raise_server_exceptions=False)
    client.headers[KEY_HEADER] = re.search('name="key" content="([^"]+)"', client.get(f"/?token={TOKEN}").text)[1]
    return client


@pytest.fixture
def client(tmp_path):
    record_run(tmp_path)
    return make_client(tmp_path)


def act(client, path, body):
    return client.post(path, content=json.dumps(body))


@pytest.mark.parametrize("path", ["/", "/compare", "/metrics", "/runs/mine", "/runs/mine/pipeline"])
def test_every_page_is_the_same_shell_with_its_own_scripts_only(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert '<script type="module" src="/static/app.js">' in answer.text
    assert "http" not in answer.text
    assert "style=" not in answer.text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *[("app.js", "import"), ("style.css", ":root"), ("vendor/uPlot.iife.min.js", "uPlot")],
        ("vendor/uPlot.LICENSE", "MIT License"),
    ],
)
def test_the_files_of_the_pages_are_there_with_the_license_of_what_is_vendored(client, name, words):
    answer = client.get(f"/static/{name}")
    assert (answer.status_code, words in answer.text) == (200, True)
    assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path",
    [
        *["/runs/other", "/runs/mine/nothing", "/runs/..%2f..%2fetc", "/nothing"],
        *["/api/nothing", "/api/runs/other/series", "/api/runs/../mine"],
        *["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static/nothing.js"],
    ],
)
def test_what_there_is_not_is_not_found(client, path):
    assert client.get(path).status_code == 404


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


def test_named_runs_alone_are_shown_and_those_of_one_name_are_told_apart(tmp_path):
    first, second = record_run(tmp_path / "a"), record_run(tmp_path / "b")
    record_run(tmp_path / "a", "other")
    runs = Runs([str(first), str(second)])
    assert runs.ids() == ["mine", "mine.2"]
    assert (runs.reader("mine").folder, runs.reader("mine.2").folder) == (first, second)
    assert runs.reader("mine") is runs.reader("mine")
    assert runs.reader("other") is None
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


def test_every_documented_metric_and_every_setting_has_its_meaning_and_the_summary_is_empty_before_the_end(
    client, tmp_path
):
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


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        *[("scale", body, 400) for body in ({}, {"generators": -1}, {"generators": "two"}, {"generators": 2, "a": 1})],
        ("scale", {"generators": 2}, 503),
        ("drain", {"generator": "generator-0"}, 503),
        ("drain", {"generator": "x" * 5000}, 413),
        ("pause", {"off": "yes"}, 400),
        ("pause", {"off": False}, 503),
    ],
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


def trajectories(client, query=""):
    return client.get(f"/api/runs/mine/trajectories?{query}").json()


def test_a_page_of_the_list_tells_how_many_there_are_and_what_cannot_be_read(tmp_path, archived):
    found = trajectories(archived)
    assert (found["num_rows"], found["num_stored"], len(found["rows"]), found["notes"]) == (80, 80, 50, [])
    assert len(trajectories(archived, "start=50")["rows"]) == 30
    # A run that was killed may have more in its store.
    (tmp_path / "mine" / "summary.json").unlink()
    assert "slipstream view" in trajectories(archived)["notes"][0]


def test_a_list_is_filtered_and_sorted_and_a_group_shown_token_by_token_with_its_step(archived):
    assert [row["group_id"] for row in trajectories(archived, "where=group%3D7")["rows"]] == ["7"] * 4
    assert trajectories(archived, "where=step%3E%3D2")["num_rows"] == 0
    indices = [row["index"] for row in trajectories(archived, "sort=index&descending=1")["rows"]]
    assert indices == sorted(indices, reverse=True)
    members = archived.get("/api/runs/mine/groups/7").json()
    assert [each["row"]["index"] for each in members] == [0, 1, 2, 3]
    first = members[0]
    assert first["uses"][0]["step"] == 1
    assert len(first["numbers"]["logprob"]) == len(first["token_ids"])
    assert archived.get("/api/runs/mine/groups/77").status_code == 404


@pytest.mark.parametrize("query", ["where=rewrd%3E1", "sort=nothing", "start=-1", "start=x", "where=outcome%3Dnone"])
def test_a_question_that_makes_no_sense_is_one_sentence(archived, query):
    answer = archived.get(f"/api/runs/mine/trajectories?{query}")
    assert (answer.status_code, answer.text.count("\n")) == (400, 1)


def test_a_run_that_archived_nothing_and_has_no_store_is_one_sentence(tmp_path, client):
    record_run(tmp_path, "bare", mode="serial", weights={"transport": "memory"})
    answer = client.get("/api/runs/bare/trajectories")
    assert answer.status_code in (400, 503)
    assert answer.text.count("\n") == 1
