"""Guard: who gets an answer of the dashboard, and what a page of it may do."""

import re

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from slipstream.configs.base import ConfigError
from slipstream.observe.dashboard.guard import _MAX_SESSIONS, KEY_HEADER, TOKEN_VARIABLE, Guard, find_token
from slipstream.runtime.credentials import is_loopback

TOKEN = "a-token-of-sixteen-and-more"
COOKIE = "slipstream-8420"


def make_client(*, is_in: bool = True, base_url: str = "http://localhost:8420") -> TestClient:
    async def answer(request):
        return PlainTextResponse(request.method)

    routes = [Route("/", answer), Route("/api/runs", answer), Route("/act", answer, methods=["POST"])]
    guard = Middleware(Guard, token=TOKEN, hosts=("localhost", "127.0.0.1", "::1"), cookie=COOKIE)
    client = TestClient(Starlette(routes=routes, middleware=[guard]), base_url=base_url, follow_redirects=False)
    if is_in:
        enter(client)
    return client


def enter(client: TestClient) -> str:
    """Open the printed address; returns the key that its page keeps."""
    return re.search('name="key" content="([^"]+)"', client.get(f"/?token={TOKEN}").text)[1]


@pytest.mark.parametrize("host", ["localhost:8420", "127.0.0.1:9000", "LOCALHOST", "[::1]:8420"])
def test_a_request_to_a_name_of_this_machine_is_answered(host):
    assert make_client().get("/", headers={"host": host}).status_code == 200


OTHERS = ["evil.example", "evil.example:8420", "localhost.evil.example", "[::2]:8420", "", "127.0.0.1.nip.io"]


@pytest.mark.parametrize("host", OTHERS)
def test_a_request_to_any_other_name_is_a_bad_one_even_with_the_token(host):
    assert make_client().get("/", headers={"host": host}).status_code == 400
    assert make_client(is_in=False).get(f"/?token={TOKEN}", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("cookie", [None, "", "wrong", TOKEN, TOKEN + "x", "\x7f"])
def test_without_a_session_nothing_is_shown_not_even_what_there_is(cookie):
    client = make_client(is_in=False)
    if cookie is not None:
        client.cookies.set(COOKIE, cookie)
    assert {client.get(path).status_code for path in ("/", "/nowhere", "/static/app.js", "/api/runs")} == {401}
    assert client.post("/act").status_code == 401


def test_the_printed_address_starts_one_of_few_sessions_and_leads_to_an_address_without_the_token():
    client = make_client(is_in=False)
    first, second = client.get(f"/?token={TOKEN}"), client.get(f"/?token={TOKEN}")
    assert first.status_code == 200
    session, *attributes = first.headers["set-cookie"].split("; ")
    assert session.startswith(f"{COOKIE}=")
    assert session != second.headers["set-cookie"].split("; ")[0], "each session has its own random id"
    assert {"httponly", "samesite=strict", "path=/"} <= {each.lower() for each in attributes}
    assert '<script src="/static/enter.js">' in first.text
    assert TOKEN not in first.text + str(first.headers)
    for path in (f"/act?token={TOKEN}", "/?token=wrong", f"/?token={TOKEN}x"):
        answer = make_client(is_in=False).get(path)
        assert (answer.status_code, "set-cookie" in answer.headers) == (401, False), "no other address and token does"
    client = make_client()
    oldest = client.cookies[COOKIE]
    for _ in range(_MAX_SESSIONS):
        assert client.get("/").status_code == 200
        enter(client)
    assert client.get("/").status_code == 200
    client.cookies.clear()
    assert client.get("/", headers={"cookie": f"{COOKIE}={oldest}"}).status_code == 401


def test_the_cookie_alone_which_other_ports_receive_shows_nothing_of_a_run():
    client = make_client(is_in=False)
    key = enter(client)
    assert {client.get(path).status_code for path in ("/api/runs", "/api/runs?key=", "/api/runs?key=wrong")} == {403}
    assert client.get("/api/runs", headers={KEY_HEADER: key}).status_code == 200
    assert client.get(f"/api/runs?key={key}").status_code == 200
    client.cookies.clear()
    assert client.get("/api/runs", headers={KEY_HEADER: key}).status_code == 401


@pytest.mark.parametrize("client", [make_client(), make_client(is_in=False)])
def test_every_answer_forbids_foreign_code_frames_and_referrers(client):
    headers = client.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "changed",
    [
        {KEY_HEADER: ""},
        {KEY_HEADER: "0" * 64},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_the_dashboard_may_act_and_one_of_another_site_not_although_the_browser_has_the_cookie(changed):
    client = make_client()
    own = {KEY_HEADER: enter(client), "origin": "http://localhost:8420", "sec-fetch-site": "same-origin"}
    assert client.post("/act", headers=own).text == "POST"
    assert client.post("/act", headers={KEY_HEADER: own[KEY_HEADER]}).status_code == 200
    assert client.post("/act", headers=own | changed).status_code == 403


def test_a_token_of_the_users_own_is_taken_out_of_the_environment_and_else_every_start_has_its_own(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert find_token(is_open=False) == TOKEN
    first, second = find_token(is_open=True), find_token(is_open=True)
    assert len({TOKEN, first, second}) == 3
    assert len(first) >= 32


@pytest.mark.parametrize(
    ("token", "is_open"), [("x" * 15, False), ("x" * 31, True), ("x" * 20 + " y", False), ("x" * 20 + ";", False)]
)
def test_a_token_that_can_be_guessed_or_is_no_cookie_is_refused_without_being_shown(monkeypatch, token, is_open):
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE) as refused:
        find_token(is_open=is_open)
    assert token not in str(refused.value)


@pytest.mark.parametrize(
    ("host", "is_private"),
    [("127.0.0.1", True), ("127.0.0.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("node", False)],
)
def test_loopback_addresses_are_known(host, is_private):
    assert is_loopback(host) == is_private
