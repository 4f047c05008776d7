"""Clusters that a run does not join."""

import threading
from types import SimpleNamespace

import pytest

from slipstream.configs.base import ConfigError

ray_seats = pytest.importorskip("slipstream.cluster.ray_seats")


def test_a_ray_without_tokens_is_refused():
    ray_seats._check_version("2.52.0")
    ray_seats._check_version("3.0.0.dev0")
    with pytest.raises(ConfigError, match=r"^Ray must be 2.52 or newer with cluster.kind=ray, got 2.9.3"):
        ray_seats._check_version("2.9.3")


@pytest.mark.parametrize("mode", ["disabled", "", "token"])
def test_a_head_that_others_reach_must_ask_for_a_token(mode: str, monkeypatch: pytest.MonkeyPatch):
    for loopback in ("127.0.0.1:6379", "localhost:6379", "[::1]:6379"):
        ray_seats._check_access(loopback)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    # What a process without a token finds: an answer, or a refusal.
    answered = "import os; assert os.environ['RAY_AUTH_MODE'] == 'disabled'"
    monkeypatch.setattr(ray_seats, "_PROBE", answered)
    with pytest.raises(ConfigError, match=r"^Ray's head at 10.0.0.1:6379 must require a token, got answers without"):
        ray_seats._check_access("10.0.0.1:6379")
    monkeypatch.setattr(ray_seats, "_PROBE", f"{answered}; raise SystemExit(1)")
    if mode == "token":
        ray_seats._check_access("10.0.0.1:6379")


def test_messages_of_ray_fill_a_log_instead_of_the_terminal(tmp_path, capsys):
    class Subscriber:
        messages = [{"job_id": None, "error_message": "Raylet is terminated.\n    [state-dump] NodeManager:"}]

        def subscribe(self) -> None: ...

        def poll(self) -> tuple[bytes, dict[str, object]]:
            if not self.messages:
                raise ConnectionError("closed")
            return b"", self.messages.pop()

    job = ray_seats.ray.JobID.from_int(1)
    connected = SimpleNamespace(gcs_error_subscriber=Subscriber(), current_job_id=job)
    with ray_seats._messages_in(tmp_path / "ray.log"):
        ray_seats.worker.listen_error_messages(connected, threading.Event())
    assert "[state-dump] NodeManager:" in (tmp_path / "ray.log").read_text()
    assert "state-dump" not in "".join(capsys.readouterr())
