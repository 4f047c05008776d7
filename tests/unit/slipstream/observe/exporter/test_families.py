from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from slipstream.buffer.accounting import StoreMemory
from slipstream.configs.run import RunConfig
from slipstream.observe.exporter.families import FAMILIES, Context, family_of, metrics_of, unreachable
from tests.builders import make_run
from tests.fakes import make_reports, status_of

ROW = {
    "step": 3, "time_s": 4.0, "learner/reward_mean": 0.5, "learner/wait_s": 1.0, "learner/train_s": 1.0,
    "learner/publish_s": 0.0, "lag/mean": 1.5, "lag/histogram": {"0": 5, "2": 7},
    "learner/by_lag/4-7/mismatch_k3": 0.25, "learner/by_source/gsm8k/reward_mean": 0.75, "eval/accuracy_greedy": 0.5,
    "eval/pass@2_aime": 0.25, "eval/by_source/math/accuracy_greedy": 0.125,
    "times": {"steps": 3, "step_s": 0.5, "roles": [{"role": "learner", "count": 1, "shares": {"waiting": 0.25}}]},
}  # fmt: skip


def scraped(metrics: list[Metric]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name, as Prometheus reads them."""
    text = generate_latest(SimpleNamespace(collect=lambda: metrics)).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


@pytest.fixture
def run() -> RunConfig:
    return make_run(staleness={"max_lag": 6}, generators={"count": 2})


def test_a_run_is_scraped_with_its_name_on_every_sample(run):
    logger = {"role": "logger", "state": "ready", "sent": 7, "dropped": 2, "failed": 0, "lost": 0, "queued": 1}
    reports = make_reports() | {"logger-wandb": (0.5, logger)}
    roles = {name: gauges for name, (_, gauges) in reports.items()}
    status = msgspec.structs.replace(status_of(reports, rows=(ROW,)), memory=StoreMemory(10, 100))
    found = scraped(metrics_of(status, Context(run, roles, 3.5, 70.0, 4096)))
    assert {labels["run"] for samples in found.values() for labels, _ in samples} == {"test"}

    for expected, metric, labels in (
        (1, "up", {}),
        (6, "max_lag", {}),
        (3.5, "arrival_age_seconds", {}),
        (70, "checkpoint_age_seconds", {}),
        (4096, "disk_free_bytes", {}),
        (1, "generators_alive", {}),
        (2, "generators_target", {}),
        (100, "store_memory_limit_bytes", {}),
        (1, "phase", {"phase": "training"}),
        (0, "role_up", {"name": "generator-1"}),
        (2, "role_restarts_total", {"name": "generator-0"}),
        (1, "role_waiting", {"name": "generator-0", "waits_for": "prompts"}),
        (2, "logger_entries_total", {"name": "logger-wandb", "outcome": "dropped"}),
        (0.5, "learner_reward_mean", {}),
        (7, "lag_tokens", {"lag": "2"}),
        (0.25, "learner_by_lag_mismatch_k3", {"lag": "4-7"}),
        (0.75, "learner_by_source_reward_mean", {"source": "gsm8k"}),
        (0.5, "eval_accuracy", {"set": "greedy"}),
        (0.25, "eval_pass_at_2", {"set": "aime"}),
        (0.125, "eval_by_source_accuracy", {"source": "math", "set": "greedy"}),
        (0.25, "time_share", {"role": "learner", "phase": "waiting"}),
        (0, "refused_frames_total", {"reason": ""}),
    ):
        samples = [number for given, number in found[f"slipstream_{metric}"] if labels.items() <= given.items()]
        assert samples == [expected], metric


def test_a_label_of_a_stranger_stays_a_label_names_follow_from_keys_and_a_silent_store_is_a_metric(run):
    name = 'gen"} evil 1\n# HELP x'
    roles = {name: {"role": "generator", "state": "ready"}}
    found = scraped(metrics_of(status_of({name: (0.1, roles[name])}), Context(run, roles, 0.0, 0.0, 0)))
    assert [labels["name"] for labels, _ in found["slipstream_role_up"]] == [name]
    assert "slipstream_store_memory_limit_bytes" not in found
    assert scraped(unreachable("mine")) == {"slipstream_up": [({"run": "mine"}, 0.0)]}
    assert family_of("learner/ess")[0].full_name == "slipstream_learner_ess"
    assert family_of("eval/version") == (family_of("eval/version")[0], {})
    assert FAMILIES["refused_frames"].full_name == "slipstream_refused_frames_total"


def test_what_is_told_of_single_groups_makes_no_labels(run):
    status = status_of({})
    reasons = {f"quarantined: lease_attempts: {n}-0-0 was refused: too_long": 1 for n in range(5)} | {"expired: x": 2}
    counts = msgspec.structs.replace(status.counts, reasons=reasons)
    found = scraped(metrics_of(msgspec.structs.replace(status, counts=counts), Context(run, {}, 0.0, 0.0, 0)))
    ends = {(each["outcome"], each["reason"]): n for each, n in found["slipstream_group_ends_total"]}
    assert ends == {("quarantined", "lease_attempts"): 5, ("expired", "x"): 2, ("retired", ""): 0}
