"""Guard: who gets an answer of the dashboard, and what a page of it may do."""

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from slipstream.broker.transport.endpoints import is_loopback
from slipstream.configs.base import ConfigError
from slipstream.dashboard.guard import CSRF_HEADER, TOKEN_VARIABLE, Guard, find_token

TOKEN = "a-token-of-sixteen-and-more"
COOKIE = "slipstream-8420"


def make_client(*, cookie: str | None = TOKEN, base_url: str = "http://localhost:8420") -> TestClient:
    async def answer(request):
        return PlainTextResponse(f"{request.method} {request.state.csrf}")

    routes = [Route("/", answer), Route("/act", answer, methods=["POST"])]
    guard = Middleware(Guard, token=TOKEN, hosts=("localhost", "127.0.0.1", "::1"), cookie=COOKIE)
    client = TestClient(Starlette(routes=routes, middleware=[guard]), base_url=base_url, follow_redirects=False)
    if cookie is not None:
        client.cookies.set(COOKIE, cookie)
    return client


@pytest.mark.parametrize("host", ["localhost:8420", "127.0.0.1:9000", "LOCALHOST", "[::1]:8420"])
def test_a_request_to_a_name_of_this_machine_is_answered(host):
    assert make_client().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "localhost.evil.example", "[::2]:8420", "", "127.0.0.1.nip.io"]
)
def test_a_request_to_any_other_name_is_a_bad_one_even_with_the_token(host):
    assert make_client().get("/", headers={"host": host}).status_code == 400
    assert make_client(cookie=None).get(f"/?token={TOKEN}", headers={"host": host}).status_code == 400


@pytest.mark.parametrize("cookie", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", "\x7f"])
def test_without_the_token_nothing_is_shown_not_even_what_there_is(cookie):
    client = make_client(cookie=cookie)
    assert {client.get(path).status_code for path in ("/", "/nowhere", "/static/app.js")} == {401}
    assert client.post("/act").status_code == 401


def test_the_address_that_was_printed_sets_the_cookie_and_leads_to_one_without_the_token():
    answer = make_client(cookie=None).get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    attributes = answer.headers["set-cookie"].lower().split("; ")
    assert attributes[0] == f"{COOKIE}={TOKEN}"
    assert {"httponly", "samesite=strict", "path=/"} <= set(attributes)
    assert 'content="0;url=/"' in answer.text
    assert TOKEN not in answer.text


@pytest.mark.parametrize("path", [f"/act?token={TOKEN}", "/?token=wrong", f"/?token={TOKEN}x"])
def test_no_other_address_and_no_other_token_does(path):
    answer = make_client(cookie=None).get(path)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("client", [make_client(), make_client(cookie=None)])
def test_every_answer_forbids_foreign_code_frames_and_referrers(client):
    headers = client.get("/").headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["referrer-policy"], headers["x-content-type-options"]) == ("no-referrer", "nosniff")
    assert headers["cache-control"] == "no-store"


def test_a_page_of_the_dashboard_may_act():
    client = make_client()
    csrf = client.get("/").text.split()[1]
    own = {CSRF_HEADER: csrf, "origin": "http://localhost:8420", "sec-fetch-site": "same-origin"}
    assert client.post("/act", headers=own).text.startswith("POST")
    assert client.post("/act", headers={CSRF_HEADER: csrf}).status_code == 200


@pytest.mark.parametrize(
    "changed",
    [
        {CSRF_HEADER: ""},
        {CSRF_HEADER: "0" * 64},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_may_not_act_although_the_browser_has_the_cookie(changed):
    client = make_client()
    own = {CSRF_HEADER: client.get("/").text.split()[1], "origin": "http://localhost:8420"}
    assert client.post("/act", headers=own | changed).status_code == 403


def test_every_start_has_a_token_of_its_own(monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    first, second = find_token(is_open=True), find_token(is_open=True)
    assert first != second
    assert len(first) >= 32


def test_a_token_of_the_users_own_is_taken_out_of_the_environment(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert find_token(is_open=False) == TOKEN
    assert find_token(is_open=False) != TOKEN


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
