"""Manifests have the documented fields and types, and contain everything that they refer to."""

import re
import shlex
from typing import Any

import msgspec
import pytest
import yaml

from slipstream.cli import main
from slipstream.cluster.kubernetes import ANY_INTERFACE, Kind, Manifest, dump, manifest, secret
from slipstream.cluster.recipe import Recipe, read_recipe
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.generators.__main__ import ignored_settings, split_id
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests.unit.slipstream.cluster import kubernetes_fields as fields

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


SPREAD = (
    "name=mine_x",
    "learner.num_ranks=4",
    "cluster.core={machines: 2, cpus: 8, gpus: 2}",
    "cluster.interface=10.0.0.0/8",
    "cluster.trusted_network=true",
    "generators.count=3",
    "generators.autoscale.max=5",
    "cluster.generator={cpus: 4, gpus: 1, labels: {accelerator: H100}}",
    "generators.reward.function=my_reward.py:score",
)


def recipe_of(kind: Kind, *overrides: str) -> Recipe:
    return read_recipe(list(overrides), kind="ray" if kind == "rayjob" else "local", interface=ANY_INTERFACE)


def written(kind: Kind, *overrides: str) -> Manifest:
    """The manifest as Kubernetes reads it."""
    recipe, image = recipe_of(kind, *overrides), "registry/slipstream:gpu"
    made = manifest(recipe, kind, image=image, claim="shared", ray_version="2.60.0")
    return yaml.safe_load(dump(made))


def jobset(*overrides: str) -> Any:
    return msgspec.convert(written("jobset", *overrides), fields.JobSet)


def rayjob(*overrides: str) -> Any:
    return msgspec.convert(written("rayjob", *overrides), fields.RayJob)


def pods_of(document: Any) -> dict[str, Any]:
    if document.kind == "JobSet":
        return {job.name: job.template.spec.template for job in document.spec.replicated_jobs}
    cluster = document.spec.ray_cluster_spec
    workers = {each.group_name: each.template for each in cluster.worker_group_specs}
    return {"submitter": document.spec.submitter_pod_template, "head": cluster.head_group_spec.template} | workers


def containers_of(pod: Any) -> list[Any]:
    return [*pod.spec.init_containers, *pod.spec.containers]


def role_of(container: Any, module: str) -> list[str]:
    """Arguments of a role in the command of a container, as Kubernetes expands it."""
    words = [word.replace("$$(", "$(") for word in container.command]
    return words[words.index(module) + 1 :]


@pytest.mark.parametrize("make", [jobset, rayjob])
def test_every_reference_leads_somewhere_and_no_container_has_more_rights_or_fewer_resources_than_it_needs(make):
    document = make(*SPREAD)
    own = secret(recipe_of("jobset", *SPREAD), "t" * 43)
    assert NAME.fullmatch(document.metadata.name)
    tokens = set()
    for name, pod in pods_of(document).items():
        security = pod.spec.security_context
        assert (security.run_as_non_root, security.seccomp_profile.type) == (True, "RuntimeDefault")
        assert security.run_as_user == 1000 == security.fs_group, "the user of the Dockerfile"
        memory = next(volume.empty_dir for volume in pod.spec.volumes if volume.name == "shared-memory")
        assert memory.medium == "Memory"
        gpus = {"core": "2", "head": "2", "ranks": "2", "generators": "1"}.get(name)
        assert pod.spec.containers[0].resources.limits.get("nvidia.com/gpu") == gpus
        volumes = [volume.name for volume in pod.spec.volumes]
        assert all((each.empty_dir is None) != (each.persistent_volume_claim is None) for each in pod.spec.volumes)
        # By this label all that belongs to a run is found.
        assert pod.metadata.labels["app.kubernetes.io/instance"] == document.metadata.name
        for container in containers_of(pod):
            assert container.security_context == fields.ContainerSecurity(False, fields.Capabilities(["ALL"]))
            assert container.resources.requests == container.resources.limits
            assert all(re.fullmatch("[1-9][0-9]*", amount) for amount in container.resources.limits.values())
            mounted = {mount.name: mount.mount_path for mount in container.volume_mounts}
            assert (set(mounted), mounted["shared-memory"]) == (set(volumes), "/dev/shm")
            assert container.working_dir in {mount.mount_path for mount in container.volume_mounts}
            ports = [port.name for port in container.ports]
            assert len(ports) == len(set(ports)) == len({port.container_port for port in container.ports})
            assert all(len(port) <= 15 and NAME.fullmatch(port) for port in ports)
            probes = filter(None, (container.startup_probe, container.liveness_probe))
            assert all(probe.tcp_socket.port in ports for probe in probes)
            assert all((each.value is None) != (each.value_from is None) for each in container.env)
            refs = {each.name: each.value_from.secret_key_ref for each in container.env if each.value_from}
            tokens |= set(refs)
            assert all((ref.name, ref.key) == (own["metadata"]["name"], *own["stringData"]) for ref in refs.values())
    assert tokens == {TOKEN_VARIABLE}


def test_a_jobset_starts_each_role_with_its_settings_where_the_others_find_it():
    document = jobset(*SPREAD)
    assert (document.api_version, document.kind) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    jobs = {job.name: job.template.spec for job in document.spec.replicated_jobs}
    sizes = {name: (job.completions, job.parallelism) for name, job in jobs.items()}
    assert sizes == {"core": (1, 1), "ranks": (1, 1), "generators": (3, 3)}
    assert all(job.completion_mode == "Indexed" for job in jobs.values())
    assert set(document.spec.success_policy.target_replicated_jobs) <= set(jobs)
    prepare, broker, learner = containers_of(jobs["core"].template)
    assert prepare.name == "prepare"
    assert broker.restart_policy == "Always", "a sidecar, which ends with the learner"
    settings = role_of(broker, "slipstream.broker")
    run = load(settings)
    assert (run.name, run.resume, run.cluster.core.machines) == ("mine_x", "auto", 2)
    (ranks,) = jobs["ranks"].template.spec.containers
    assert role_of(learner, "slipstream.learner") == role_of(ranks, "slipstream.learner") == settings
    host = "mine-x-core-0-0.mine-x"
    assert document.spec.network.subdomain == document.metadata.name == host.partition(".")[2]
    meeting = {"MASTER_ADDR": host, "MASTER_PORT": "20999", "OMP_NUM_THREADS": "4"}
    assert {each.name: each.value for each in ranks.env} == meeting | {"HOME": "/workspace"}
    given = {each.name: each.value for each in learner.env if each.value}
    assert given == given | meeting | {"NODE_RANK": "0"}
    assert {port.name: port.container_port for port in learner.ports} == {"weights": 20001, "meeting": 20999}
    (generator,) = jobs["generators"].template.spec.containers
    _, own = split_id([*role_of(generator, "slipstream.generators")])
    assert ignored_settings(own) == []
    assert own[-1] == f"broker.address=tcp://{host}:{broker.ports[0].container_port}"
    assert SPREAD[-1] in own, "code of the user's own is named on the generator's machine"
    assert jobs["generators"].template.spec.node_selector == {"accelerator": "H100"}
    assert all(LABEL.fullmatch(value) for value in jobs["generators"].template.spec.node_selector.values())


def test_a_rayjob_starts_the_run_on_a_head_that_is_its_core():
    document = rayjob(*SPREAD)
    assert (document.api_version, document.kind) == ("ray.io/v1", "RayJob")
    program, settings = shlex.split(document.spec.entrypoint)[:4], shlex.split(document.spec.entrypoint)[4:]
    assert program == ["python", "-m", "slipstream", "run"]
    run = load(settings)
    assert (run.cluster.kind, run.resume, run.cluster.generator.gpus) == ("ray", "auto", 1)
    cluster = document.spec.ray_cluster_spec
    assert (cluster.ray_version, cluster.auth_options.mode) == ("2.60.0", "token")
    assert cluster.enable_in_tree_autoscaling
    groups = cluster.worker_group_specs
    sizes = {each.group_name: (each.min_replicas, each.replicas, each.max_replicas) for each in groups}
    assert sizes == {"ranks": (1, 1, 1), "generators": (1, 3, 5)}
    assert groups[1].labels == {"accelerator": "H100"}
    for each in (cluster.head_group_spec.template, *(group.template for group in groups)):
        # KubeRay selects pods by these, and sets them.
        assert "app.kubernetes.io/name" not in each.metadata.labels
    assert not rayjob("name=mine").spec.ray_cluster_spec.enable_in_tree_autoscaling


def test_one_machine_needs_no_rendezvous_and_settings_reach_a_role_as_they_were_written():
    odd = "data.train='a $(HOME) b.jsonl'"
    pods = pods_of(jobset("name=mine", "experiment=digits_cpu", odd))
    assert list(pods) == ["core", "generators"]
    (learner,) = pods["core"].spec.containers
    assert not {"MASTER_ADDR", "NODE_RANK"} & {each.name for each in learner.env}
    assert load(role_of(learner, "slipstream.learner")).cluster.interface == ANY_INTERFACE
    assert odd in role_of(learner, "slipstream.learner")
    assert "$$(HOME)" in " ".join(learner.command)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["name=1st"], "name must begin with a letter and have <= 40 characters, got '1st'"),
        ([f"name={'n' * 41}"], "name must begin with a letter and have <= 40 characters"),
        (["experiment=digits_serial", "name=mine"], "cluster.kind must be local with mode=serial"),
        (["learner.device=cuda", "name=mine"], "cluster.core.gpus must be 1"),
    ],
)
def test_a_run_that_cannot_be_placed_is_refused(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        written("jobset", *overrides)


KUBECTL = """#!/bin/bash
echo "$*" >>calls
if [[ $1 == get ]]; then
    [[ -e made ]] && echo secret/mine-token
    exit 0
fi
{ cat; echo ---; } >>documents
touch made
"""


def test_kubectl_gets_the_secret_once_and_no_token_is_in_a_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    call = ["launch", "kubernetes", "--image=slipstream:cpu", "--kind=jobset", "name=mine"]
    with pytest.raises(SystemExit) as caught:
        main(call)
    assert caught.value.code == 2
    assert "error: kubectl must be installed to start the run, but is not: run this where" in capsys.readouterr().err
    main([*call, "--print"])
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["kind"] == "JobSet"
    assert "without --claim and storage_uri, what the run writes is lost" in printed.err
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    main(call)
    main(call)
    documents: list[Any] = [each for each in yaml.safe_load_all((tmp_path / "documents").read_text()) if each]
    assert [each["kind"] for each in documents] == ["Secret", "JobSet", "JobSet"]
    token = documents[0]["stringData"]["token"]
    assert len(token) >= 32
    assert token not in (tmp_path / "calls").read_text() + str(documents[1:]) + "".join(capsys.readouterr())
