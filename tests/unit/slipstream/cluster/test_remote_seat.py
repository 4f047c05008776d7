"""A seat elsewhere is placed, started, watched and given up by what its cluster answers; the clock is passed in."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.cluster.remote_seat import UNWATCHED_S, RemoteSeat, SeatAwayError, SeatLostError
from slipstream.cluster.role_process import RoleDiedError, RoleProcess
from slipstream.cluster.seat import SpreadSeat
from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import SeatConfig
from tests.cases import cases

LOST, REFUSED = -9, 2
NEEDS = SeatConfig(cpus=4, labels={"accelerator": "H100"})


class FakeCluster:
    """A scripted cluster that records its calls."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.is_free = False
        self.answers: deque[Any] = deque()
        """Answers to the calls that wait for one; an exception is raised, None: not there yet."""

    def request(self, name: str, bundles: list[dict[str, float]], *, labels: list[dict[str, str]]) -> str:
        self.asked.append(("request", name, bundles, labels))
        return f"group of {name}"

    def is_placed(self, group: str) -> bool:
        return self.is_free

    def release(self, group: str) -> None:
        self.asked.append("release")

    def host(self, name: str, group: str, *, gpus: int) -> str:
        self.asked.append(("host", group, gpus))
        return "host"

    def call(self, host: str, method: str, *arguments: Any) -> str:
        self.asked.append((method, *arguments))
        if method == "kill":
            self.answers.append((LOST, b""))
        return method

    def answer(self, call: str) -> Any:
        if call == "close":
            return True
        answer = self.answers.popleft() if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self, host: str) -> None:
        self.asked.append("end")

    def offers(self) -> str:
        return "10.0.0.1 with 1 of 8 CPU, 0 of 0 GPU free"


class Scene:
    """A seat, its cluster and its clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.cluster = FakeCluster()
        self.log = folder / "generator-1.log"
        self.seat = self.make(self.log)

    def make(self, log: Path) -> RemoteSeat:
        limits = {"needs": NEEDS, "gpus": 1, "timeout_s": 600.0, "clock": lambda: self.now}
        return RemoteSeat("generator-1", log, cluster=self.cluster, **limits)

    def start(self) -> None:
        self.seat.start(["slipstream.generators"], variables={"TOKEN": "secret"})

    def poll(self, *answers: Any) -> int | None:
        """Poll once for each answer, and return what the last poll does."""
        self.cluster.answers.extend(answers)
        for _ in answers:
            code = self.seat.poll()
        return code

    def run(self) -> None:
        """Bring the role to the point where it runs."""
        self.start()
        self.cluster.is_free = True
        assert self.seat.poll() is None
        assert self.poll((77, "10.0.0.1")) is None


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_role_is_placed_started_and_watched_to_its_end(scene: Scene):
    scene.start()
    assert scene.seat.poll() is None
    assert (scene.seat.pid, scene.seat.place) == (None, "waits for a place with 4 CPU, 1 GPU, label accelerator=H100")
    scene.cluster.is_free = True
    assert scene.seat.poll() is None
    assert scene.seat.place == "has a place, and starts there"
    assert scene.poll(None, (77, "10.0.0.1")) is None
    assert (scene.seat.pid, scene.seat.place) == (77, "pid 77 on 10.0.0.1")
    assert scene.poll((None, b"one\n"), (None, b""), (0, b"two\n")) == 0
    assert scene.log.read_text() == "one\ntwo\n"
    assert scene.seat.poll() == 0
    order = ("start", ["slipstream.generators"], {"TOKEN": "secret"})
    request = ("request", "generator-1", [{"CPU": 4.0, "GPU": 1.0}], [{"accelerator": "H100"}])
    host = ("host", "group of generator-1", 1)
    assert scene.cluster.asked == [request, host, order, ("look", 0), ("look", 4), ("look", 4)]
    scene.seat.stop(ends_at=0.0)
    assert scene.cluster.asked[-3:] == [("close",), "end", "release"]


def test_a_place_that_is_not_found_is_named_with_what_the_machines_offer(scene: Scene):
    scene.start()
    scene.now = 21.0
    assert scene.seat.poll() is None
    assert scene.seat.place.endswith("; the cluster has 10.0.0.1 with 1 of 8 CPU, 0 of 0 GPU free")
    scene.now = 601.0
    assert scene.seat.poll() == REFUSED
    assert scene.log.read_text() == (
        "error: generator-1 needs a machine with 4 CPU, 1 GPU, label accelerator=H100 free, and got none within "
        "broker.join_timeout_s (600 s); the cluster has 10.0.0.1 with 1 of 8 CPU, 0 of 0 GPU free: change "
        "cluster.generator, ask for fewer generators, or add machines.\n"
    )
    assert scene.cluster.asked[-1] == "release"


def test_a_role_reports_each_step_to_its_place_once_and_is_not_restarted_without_one(scene: Scene, tmp_path: Path):
    role = RoleProcess("generator-1", [], logs=tmp_path, seat=scene.make)
    role.start()
    assert not role.is_running
    assert role.poll() == []
    scene.cluster.is_free = True
    assert role.poll() == ["generator-1: has a place, and starts there"]
    scene.cluster.answers.append((77, "10.0.0.1"))
    assert role.poll() == ["generator-1: pid 77 on 10.0.0.1"]
    assert (role.is_running, role.poll()) == (True, [])
    scene.cluster.is_free = False
    role = RoleProcess("generator-1", [], logs=tmp_path, seat=scene.make)
    role.start()
    scene.now = 601.0
    with pytest.raises(RoleDiedError, match=r"^generator-1: generator-1 needs a machine with 4 CPU"):
        role.poll()


def test_a_role_that_has_ended_starts_again_in_its_place_unless_that_is_lost(scene: Scene):
    scene.run()
    assert scene.poll((75, b"fell\n")) == 75
    scene.start()
    assert scene.seat.pid is None
    assert scene.poll((78, "10.0.0.1"), (None, b"up\n")) is None
    assert scene.log.read_text() == "fell\nup\n"
    assert [each for each in scene.cluster.asked if each[0] in ("request", "look")][2:] == [("look", 5), ("look", 8)]
    assert scene.poll(SeatLostError("the worker died")) == LOST
    assert scene.log.read_text().endswith("up\nthe place of generator-1 is lost: the worker died\n")
    assert scene.cluster.asked[-2:] == ["end", "release"]
    scene.start()
    assert scene.cluster.asked[-1][0] == "request"


def test_a_cut_is_no_loss_until_it_lasts_longer_than_the_role_does_except_during_its_start(scene: Scene):
    scene.start()
    scene.cluster.is_free = True
    scene.seat.poll()
    assert scene.poll(SeatAwayError("unavailable")) == LOST
    scene.run()
    scene.now = UNWATCHED_S - 1
    assert scene.poll(SeatAwayError(), SeatAwayError()) is None
    assert scene.poll((None, b"back\n")) is None
    scene.now = 2 * UNWATCHED_S
    assert scene.poll(SeatAwayError()) == LOST
    assert f"it has not answered for {UNWATCHED_S:g} s" in scene.log.read_text()


def test_a_stop_takes_back_a_request_and_kills_a_role_that_does_not_end_in_time(scene: Scene):
    scene.start()
    scene.seat.terminate()
    scene.seat.stop(ends_at=0.0)
    assert scene.cluster.asked[1:] == ["release"]
    assert scene.seat.poll() is None
    scene.run()
    scene.seat.terminate()
    scene.seat.stop(ends_at=0.0)
    assert scene.seat.poll() == LOST
    assert [each[0] for each in scene.cluster.asked[-4:-2]] == ["kill", "close"]
    assert scene.cluster.asked[-2:] == ["end", "release"]


class FakeSeat:
    """A seat with a scripted end."""

    def __init__(self, number: int) -> None:
        self.pid, self.place = 70 + number, f"pid {70 + number}"
        self.code: int | None = None
        self.asked: list[str] = []
        self.variables: dict[str, str] = {}

    def start(self, arguments: Sequence[str], *, variables: Mapping[str, str]) -> None:
        self.asked.append(" ".join(arguments))
        self.variables = dict(variables)

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked.append("terminate")

    def stop(self, *, ends_at: float) -> None:
        self.asked.append("stop")


@pytest.fixture
def spread() -> SimpleNamespace:
    """A seat of three parts."""
    made = SimpleNamespace(now=0.0, parts=[FakeSeat(number) for number in range(3)])
    ports = iter(("20999", "20998"))
    meet = lambda: {"MASTER_ADDR": "10.0.0.5", "MASTER_PORT": next(ports)}  # noqa: E731
    made.seat = SpreadSeat(made.parts, meet=meet, clock=lambda: made.now)
    made.seat.start(["learner"], variables={"A": "b"})
    return made


def test_each_part_has_its_number_and_all_meet_on_the_first_and_hear_of_the_end(spread):
    common = {"A": "b", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "20999"}
    assert [part.variables for part in spread.parts] == [common | {"NODE_RANK": str(number)} for number in range(3)]
    assert (spread.seat.pid, spread.seat.place) == (70, "pid 70, and pid 71, and pid 72")
    assert spread.seat.poll() is None
    spread.seat.start(["learner", "resume=true"], variables={})
    # The port of before may still be held by what is left of the first start.
    assert {part.variables["MASTER_PORT"] for part in spread.parts} == {"20998"}
    spread.seat.terminate()
    spread.seat.stop(ends_at=5.0)
    assert all(part.asked[2:] == ["terminate", "stop"] for part in spread.parts)


@cases("codes, code", ((0, 0, 0), 0), ((None, -9, None), -9), ((75, 2, None), 2), ((75, 0, 75), 75), ((0, 0, None), 0))
def test_when_a_part_has_ended_the_others_do_and_a_verdict_outweighs_their_loss(spread, codes, code):
    for part, code_of_part in zip(spread.parts, codes, strict=True):
        part.code = code_of_part
    if None in codes:
        assert spread.seat.poll() is None
        spread.now = 19.9
        assert spread.seat.poll() is None, "each may tell its own reason"
        spread.now = 20.0
    assert spread.seat.poll() == code
    assert spread.seat.poll() == code
    assert all(part.asked == ["learner", "stop"] for part in spread.parts)


@pytest.fixture
def ray_seats():
    return pytest.importorskip("slipstream.cluster.ray_seats")


def test_a_ray_without_tokens_or_a_head_that_asks_for_none_is_refused(ray_seats, monkeypatch):
    for known in ("2.52.0", "3.0.0.dev0"):
        ray_seats._check_version(known)
    with pytest.raises(ConfigError, match=r"^Ray must be 2.52 or newer with cluster.kind=ray, got 2.9.3"):
        ray_seats._check_version("2.9.3")
    for loopback in ("127.0.0.1:6379", "localhost:6379", "[::1]:6379"):
        ray_seats._check_access(loopback)
    # What a process without a token finds: an answer, or a refusal.
    answered = "import os; assert os.environ['RAY_AUTH_MODE'] == 'disabled'"
    for mode in ("disabled", "", "token"):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        monkeypatch.setattr(ray_seats, "_PROBE", answered)
        with pytest.raises(ConfigError, match=r"^Ray's head at 10.0.0.1:6379 must require a token, got answers"):
            ray_seats._check_access("10.0.0.1:6379")
    monkeypatch.setattr(ray_seats, "_PROBE", f"{answered}; raise SystemExit(1)")
    ray_seats._check_access("10.0.0.1:6379")


def test_messages_of_ray_fill_a_log_instead_of_the_terminal(ray_seats, tmp_path, capsys):
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
