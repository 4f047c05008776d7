"""Trajectories of a run's archive, through the dashboard."""

import pytest

from tests.builders import make_finished, write_archive
from tests.recorded_run import record_run
from tests.unit.slipstream.observe.dashboard.test_app import make_client


@pytest.fixture
def client(tmp_path):
    folder = record_run(tmp_path)
    write_archive(folder / "archive", [make_finished(str(number), members=4) for number in range(20)])
    return make_client(tmp_path)


def rows(client, query=""):
    return client.get(f"/api/runs/mine/trajectories?{query}").json()


def test_a_page_of_the_list_tells_how_many_there_are_and_what_cannot_be_read(tmp_path, client):
    found = rows(client)
    assert (found["num_rows"], found["num_stored"], len(found["rows"]), found["notes"]) == (80, 80, 50, [])
    assert len(rows(client, "start=50")["rows"]) == 30
    # A run that was killed may have more in its store.
    (tmp_path / "mine" / "summary.json").unlink()
    assert "slipstream view" in rows(client)["notes"][0]


def test_a_list_is_filtered_and_sorted(client):
    assert [row["group_id"] for row in rows(client, "where=group%3D7")["rows"]] == ["7"] * 4
    assert rows(client, "where=step%3E%3D2")["num_rows"] == 0
    indices = [row["index"] for row in rows(client, "sort=index&descending=1")["rows"]]
    assert indices == sorted(indices, reverse=True)


@pytest.mark.parametrize("query", ["where=rewrd%3E1", "sort=nothing", "start=-1", "start=x", "where=outcome%3Dnone"])
def test_a_question_that_makes_no_sense_is_one_sentence(client, query):
    answer = client.get(f"/api/runs/mine/trajectories?{query}")
    assert (answer.status_code, answer.text.count("\n")) == (400, 1)


def test_a_group_is_shown_token_by_token_with_the_step_that_trained_on_it(client):
    members = client.get("/api/runs/mine/groups/7").json()
    assert [each["row"]["index"] for each in members] == [0, 1, 2, 3]
    first = members[0]
    assert first["uses"][0]["step"] == 1
    assert len(first["numbers"]["logprob"]) == len(first["token_ids"])
    assert client.get("/api/runs/mine/groups/77").status_code == 404


def test_a_run_that_archived_nothing_and_has_no_store_is_one_sentence(tmp_path):
    record_run(tmp_path, "bare", mode="serial", weights={"transport": "memory"})
    answer = make_client(tmp_path).get("/api/runs/bare/trajectories")
    assert answer.status_code in (400, 503)
    assert answer.text.count("\n") == 1
