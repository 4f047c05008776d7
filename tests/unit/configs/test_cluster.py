"""Settings of several machines: what no machine could use is refused in one sentence."""

import re

import pytest

from slipstream.configs.base import ConfigError
from slipstream.configs.cluster import PLACE
from slipstream.configs.load import config_hash, identity, load


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ("cluster.interface=10.0.0.5/8", "an IPv4 network such as 10.0.0.0/8, got '10.0.0.5/8': 10.0.0.5/8 has host"),
        ("cluster.interface=eth0", "an IPv4 network such as 10.0.0.0/8, got 'eth0'"),
        ("cluster.interface=fd00::/8", "an IPv4 network such as 10.0.0.0/8, got 'fd00::/8'"),
        ("cluster.ports=any", "FIRST-LAST within 1024-65535, such as 20000-20999, got any:"),
        ("cluster.ports=20999-20000", "FIRST-LAST within 1024-65535, such as 20000-20999, got 20999-20000:"),
        ("cluster.ports=80-90", "FIRST-LAST within 1024-65535, such as 20000-20999, got 80-90:"),
        ("cluster.ports=60000-70000", "FIRST-LAST within 1024-65535, such as 20000-20999, got 60000-70000:"),
        ("cluster.trusted_network=true", "false without cluster.interface, got True: there is no network to trust."),
    ],
)
def test_what_no_machine_could_use_is_refused(overrides: str, sentence: str) -> None:
    key = overrides.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{re.escape(key)} must be {re.escape(sentence)}"):
        load([overrides])


RAY = ("cluster.kind=ray", "cluster.interface=10.0.0.0/8")
TWO, TRUSTED = "cluster.learner.machines=2", "cluster.trusted_network=true"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (RAY[:1], "cluster.interface must be set with cluster.kind=ray"),
        (["experiment=digits_serial", *RAY], "cluster.kind must be local with mode=serial, got ray"),
        (
            [*RAY, "learner.num_ranks=3", TWO, TRUSTED],
            "cluster.learner.machines must divide learner.num_ranks (3), got",
        ),
        (
            [*RAY, "learner.num_ranks=2", TWO],
            "cluster.trusted_network must be true with cluster.learner.machines=2, got",
        ),
    ],
)
def test_a_run_that_ray_could_not_place_is_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}"):
        load(list(overrides))


def test_a_run_that_ray_can_place_and_that_listens_beyond_loopback() -> None:
    assert list(load(["cluster.ports=20000-20000"]).cluster.port_range) == [20000]
    assert not load(["cluster.interface=127.0.0.0/8"]).cluster.is_open
    assert load(["cluster.interface=10.0.0.0/8"]).cluster.is_open
    run = load([*RAY, "cluster.generator={cpus: 8, labels: {shelf: a}}"])
    assert (run.cluster.generator.labels, run.learner_gpus, run.generator_gpus) == ({"shelf": "a"}, 0, 0)
    ranks = ("learner.num_ranks=4", TWO, TRUSTED, "learner.device=cuda")
    run = load([*RAY, *ranks, "generators/engine=vllm", "generators.engine.tensor_parallel_size=2"])
    assert (run.learner_gpus, run.generator_gpus) == (2, 2)


GUESTS = "cluster.untrusted_generators.names=[alice]"


def test_the_place_and_the_guests_of_a_run_are_no_part_of_its_identity() -> None:
    elsewhere = [
        "resume=true",
        "runs_dir=elsewhere",
        "storage.uri=s3://bucket/runs",
        "cluster.interface=10.0.0.0/8",
        "broker.address=tcp://10.0.0.5:20000",
        "broker.shards=2",
        "broker.token_file=token",
        "weights.fetch_address=tcp://10.0.0.5:20001",
        "buffer/store=redis",
        "buffer.store.url=rediss://store:6380/0",
        "logging.backends=[tensorboard]",
        "metrics.prometheus_port=9400",
    ]
    keys = {override.partition("=")[0].replace("/", ".") for override in elsewhere}
    assert keys | {"cluster", "logging", "metrics", "storage"} >= set(PLACE)
    here, there = load([]), load(elsewhere)
    assert not here.cluster.is_open
    assert config_hash(load([GUESTS])) == config_hash(here)
    assert identity(here) == identity(there)
    assert config_hash(here) == config_hash(there) != config_hash(load(["broker.lease_s=60"]))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ([f"{GUESTS[:-7]}[a/b]"], f"{GUESTS[:-8]} must have names of 1 to 64 letters, digits, _ and -, "),
        ([GUESTS, "generators.sampling.temperature=0.7"], "empty with generators.sampling.temperature=0.7, got"),
        ([GUESTS, "generators.sampling.top_p=0.9"], "must be empty with generators.sampling.top_p=0.9, got"),
        ([GUESTS, "generators.sampling.min_p=0.1"], "must be empty with generators.sampling.min_p=0.1, got"),
        ([GUESTS, "generators.sampling.stop=[x]"], "must be empty with generators.sampling.stop, stop_token_ids, or"),
        ([GUESTS, "algorithm/advantage=remax"], "must be empty with algorithm/advantage=remax, got"),
        ([GUESTS, "generators/agent=custom", "generators.agent.function=a:b"], "an agent that is not single_turn, got"),
        ([GUESTS, "experiment=digits_serial"], "must be empty with mode=serial, got"),
    ],
)
def test_guests_whose_answers_could_not_be_checked_are_refused(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(overrides)
