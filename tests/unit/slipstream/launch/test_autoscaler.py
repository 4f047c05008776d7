"""One generator more or less, by what each side waited since the last change; each change says why."""

import pytest

from slipstream.configs.generators import AutoscaleConfig
from slipstream.launch.scaling import Autoscaler, Change
from tests.fakes import FakeClock

CONFIG = AutoscaleConfig(min=1, max=3, more_above=0.3, fewer_below=0.5, settle_s=60.0)


def rows(*, waited_s: float, worked_s: float, count: int = 6) -> list[dict[str, float]]:
    return [{"learner/wait_s": waited_s, "learner/train_s": worked_s, "learner/publish_s": 0.0}] * count


def observe(
    scaler: Autoscaler,
    new_rows: list[dict[str, float]],
    *,
    busy: float | None = 1.0,
    is_starving: bool = False,
    target: int = 1,
    num_ready: int | None = None,
) -> Change | None:
    return scaler.observe(
        new_rows,
        busy=busy,
        is_starving=is_starving,
        num_ready=target if num_ready is None else num_ready,
        target=target,
    )


def decide(
    *,
    config: AutoscaleConfig = CONFIG,
    waited_s: float = 0.0,
    worked_s: float = 1.0,
    busy: float | None = 1.0,
    target: int = 2,
    num_ready: int | None = None,
) -> Change | None:
    clock = FakeClock()
    scaler = Autoscaler(config, clock=clock)
    clock.now += 60
    return observe(scaler, rows(waited_s=waited_s, worked_s=worked_s), busy=busy, target=target, num_ready=num_ready)


def test_a_waiting_learner_gets_one_generator_more_and_the_reason_has_the_numbers():
    change = decide(waited_s=0.4, worked_s=0.6)
    assert (change.target, change.reason) == (3, "the learner waited 40% of the last 60 s for groups, above 30%")
    assert decide(waited_s=0.3, worked_s=0.7) is None


def test_idle_generators_become_one_less_and_the_reason_has_the_numbers():
    change = decide(busy=0.4)
    assert (change.target, change.reason) == (
        1,
        "the generators used 40% of their capacity in the last 60 s, below 50%",
    )
    assert decide(busy=0.5) is None
    assert decide(busy=None) is None


def test_the_remaining_generators_must_be_able_to_do_the_work():
    assert decide(busy=0.49, target=3).target == 2
    eager = AutoscaleConfig(min=1, max=3, fewer_below=0.9, settle_s=60.0)
    assert decide(config=eager, busy=0.8, target=3) is None
    assert decide(config=eager, busy=0.6, target=3).target == 2
    assert decide(config=eager, busy=0.6, target=3, num_ready=2) is None


@pytest.mark.parametrize(("waited_s", "busy", "count"), [(9.0, 1.0, 3), (0.0, 0.0, 1)])
def test_the_bounds_are_kept(waited_s: float, busy: float, count: int):
    assert decide(waited_s=waited_s, busy=busy, target=count) is None


def test_idle_generators_do_not_scale_down_while_the_learner_waits():
    assert decide(waited_s=0.9, worked_s=0.1, busy=0.1).target == 3


@pytest.mark.parametrize("waited_s", [0.31, 0.9])
def test_at_max_a_waiting_learner_prevents_oscillation(waited_s: float):
    assert decide(waited_s=waited_s, worked_s=1 - waited_s, busy=0.1, target=3) is None
    assert decide(waited_s=0.3, worked_s=0.7, busy=0.1, target=3).target == 2


def test_below_min_the_target_returns_to_min():
    change = decide(config=AutoscaleConfig(min=3, max=4, settle_s=60.0), waited_s=0.9, worked_s=0.1, target=1)
    assert (change.target, change.reason) == (3, "generators.autoscale.min is 3")


def test_every_change_starts_a_new_window():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    waiting = rows(waited_s=0.9, worked_s=0.1)
    clock.now += 59
    assert observe(scaler, waiting) is None
    clock.now += 1
    assert observe(scaler, []).target == 2
    clock.now += 60
    assert observe(scaler, [], target=2) is None
    assert observe(scaler, rows(waited_s=0, worked_s=1), target=2) is None


def test_without_a_step_a_starving_learner_has_waited_all_the_time():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    clock.now += 61
    change = observe(scaler, [], is_starving=True)
    assert (change.target, change.reason) == (2, "the learner waited 100% of the last 61 s for groups, above 30%")


def test_without_a_step_the_share_of_starving_observations_counts():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    for is_starving in (False, False, False, True):
        assert observe(scaler, [], is_starving=is_starving) is None
    clock.now += 60
    change = observe(scaler, [], is_starving=True)
    assert (change.target, change.reason) == (2, "the learner waited 40% of the last 60 s for groups, above 30%")


def test_waits_of_earlier_windows_do_not_count():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    clock.now += 60
    assert observe(scaler, rows(waited_s=0.0, worked_s=100.0)) is None
    clock.now += 60
    assert observe(scaler, rows(waited_s=0.4, worked_s=0.6)).target == 2


def test_slow_steps_are_measured_for_longer():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    for _ in range(4):
        clock.now += 60
        assert observe(scaler, rows(waited_s=9.0, worked_s=1.0, count=1), is_starving=True) is None
    clock.now += 60
    change = observe(scaler, rows(waited_s=9.0, worked_s=1.0, count=1), is_starving=True)
    assert change.reason == "the learner waited 90% of the last 300 s for groups, above 30%"


def test_a_new_window_discards_the_measurements():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    clock.now += 59
    assert observe(scaler, rows(waited_s=9.0, worked_s=1.0), is_starving=True) is None
    scaler.start_window()
    clock.now += 59
    assert observe(scaler, []) is None
    clock.now += 1
    assert observe(scaler, rows(waited_s=0.0, worked_s=1.0)) is None


def test_too_few_steps_decide_nothing():
    clock = FakeClock()
    scaler = Autoscaler(CONFIG, clock=clock)
    clock.now += 60
    few = rows(waited_s=9.0, worked_s=1.0, count=4)
    assert observe(scaler, few) is None
