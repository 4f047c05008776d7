"""Manifests have the documented fields and types, and contain everything that they refer to."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from slipstream.cli import main
from slipstream.cluster.kubernetes import ANY_INTERFACE, Manifest, Options, dump, manifests, read_patches, secret
from slipstream.cluster.recipe import Recipe, read_recipe, sbatch_script
from slipstream.configs.base import ConfigError
from slipstream.configs.load import load
from slipstream.generators.__main__ import ignored_settings, split_id
from slipstream.runtime.credentials import TOKEN_VARIABLE
from tests.cases import cases
from tests.runs import exit_code
from tests.unit.slipstream.cluster import kubernetes_fields as fields

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


SPREAD = (
    "name=mine_x",
    "learner.num_ranks=4",
    "learner.device=cuda",
    "cluster.learner={machines: 2, cpus: 8}",
    "cluster.interface=10.0.0.0/8",
    "cluster.trusted_network=true",
    "generators.count=3",
    "generators.autoscale.max=5",
    "cluster.generator={cpus: 4, labels: {accelerator: H100}}",
    "generators.reward.function=my_reward.py:score",
)
OPTIONS = Options("registry/slipstream:gpu", claim="shared", ray_version="2.60.0")


def recipe_of(kind: str, *overrides: str) -> Recipe:
    return read_recipe(list(overrides), kind="ray" if kind == "rayjob" else "local", interface=ANY_INTERFACE)


def written(kind: str, *overrides: str, options: Options = OPTIONS, patches: Sequence[Manifest] = ()) -> Manifest:
    """The first manifest as Kubernetes reads it."""
    return yaml.safe_load(dump(manifests(recipe_of(kind, *overrides), kind, options, patches=patches)[0]))


def jobset(*overrides: str, **more: Any) -> Any:
    return msgspec.convert(written("jobset", *overrides, **more), fields.JobSet)


def rayjob(*overrides: str, **more: Any) -> Any:
    return msgspec.convert(written("rayjob", *overrides, **more), fields.RayJob)


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


def with_resources(node: Any) -> list[Any]:
    """Whatever becomes a container, at any depth, including the autoscaler of KubeRay."""
    if isinstance(node, list):
        return [found for each in node for found in with_resources(each)]
    if not isinstance(node, dict):
        return []
    own = [container for key in ("containers", "initContainers") for container in node.get(key) or []]
    own += [node["autoscalerOptions"]] if "autoscalerOptions" in node else []
    return own + with_resources([*node.values()])


@pytest.mark.parametrize("make", [jobset, rayjob])
def test_every_reference_leads_somewhere_and_no_container_has_more_rights_or_fewer_resources_than_it_needs(make):
    kind = make.__name__
    documents = [yaml.safe_load(dump(each)) for each in manifests(recipe_of(kind, *SPREAD), kind, OPTIONS)]
    resources = [container["resources"] for container in with_resources(documents)]
    assert len(resources) == 5
    # A namespace with a quota admits no container without these.
    assert all({"cpu", "memory"} <= set(each[bound]) for each in resources for bound in ("requests", "limits"))
    document = make(*SPREAD)
    own = secret(recipe_of("jobset", *SPREAD), "t" * 43)
    assert NAME.fullmatch(document.metadata.name)
    tokens = set()
    for name, pod in pods_of(document).items():
        security = pod.spec.security_context
        assert (security.run_as_non_root, security.seccomp_profile.type) == (True, "RuntimeDefault")
        assert security.run_as_user == 1000 == security.fs_group, "the user of the Dockerfile"
        assert security.fs_group_change_policy == "OnRootMismatch"
        assert pod.spec.termination_grace_period_seconds == 180
        tolerated = [each.key for each in pod.spec.tolerations]
        assert tolerated == (["nvidia.com/gpu"] if name in ("core", "head", "ranks", "generators") else [])
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
            assert all(re.fullmatch("[1-9][0-9]*(Mi)?", amount) for amount in container.resources.limits.values())
            mounted = {mount.name: mount.mount_path for mount in container.volume_mounts}
            assert (set(mounted), mounted["shared-memory"]) == (set(volumes), "/dev/shm")
            assert container.working_dir in {mount.mount_path for mount in container.volume_mounts}
            ports = [port.name for port in container.ports]
            assert len(ports) == len(set(ports)) == len({port.container_port for port in container.ports})
            assert all(len(port) <= 15 and NAME.fullmatch(port) for port in ports)
            probes = filter(None, (container.startup_probe, container.liveness_probe, container.readiness_probe))
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
    assert (run.name, run.resume, run.cluster.learner.machines) == ("mine_x", "auto", 2)
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
    assert (run.cluster.kind, run.resume, run.generator_gpus) == ("ray", "auto", 1)
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


@pytest.mark.parametrize("make", [jobset, rayjob])
def test_memory_follows_the_settings_and_grows_with_gpus_without_them(make):
    def mib(*overrides: str) -> dict[str, int]:
        pods = pods_of(make("name=mine", *overrides))
        sums = {name: [int(each.resources.limits["memory"][:-2]) for each in containers_of(pod)
                       if each.name != "prepare"] for name, pod in pods.items()}  # fmt: skip
        return {name: sum(sums[name]) for name in sums if name != "submitter"}

    own = mib("cluster.learner.memory_gib=100", "cluster.generator.memory_gib=20")
    assert [*own.values()] == [100 * 1024, 20 * 1024]
    assert [*mib("learner.device=cuda").values()] == [80 * 1024, 80 * 1024]


@pytest.mark.parametrize("make", [jobset, rayjob])
def test_options_reach_every_pod_and_secrets_only_the_roles_that_need_them(make):
    secrets = {"secrets": ["store", "aws"], "generator_secrets": ["hub"], "pull_secrets": ["registry"]}
    places = {"node_selector": {"pool": "gpu"}, "tolerations": ["team=rl:NoSchedule", "spot"]}
    options = OPTIONS._replace(namespace="research", service_account="trainer", **secrets, **places)
    document = make(*SPREAD, options=options)
    assert document.metadata.namespace == "research"
    secrets = {"submitter": [], "generators": ["hub"]}
    for name, pod in pods_of(document).items():
        spec = pod.spec
        assert ([each.name for each in spec.image_pull_secrets], spec.service_account_name) == (["registry"], "trainer")
        assert spec.node_selector["pool"] == "gpu"
        own = [fields.Toleration("team", "Equal", "rl", "NoSchedule"), fields.Toleration("spot", "Exists")]
        assert spec.tolerations[:2] == own
        for container in containers_of(pod):
            given = [each.secret_ref.name for each in container.env_from]
            assert given == secrets.get(name, ["store", "aws"])


@pytest.mark.parametrize(("kind", "container"), [("jobset", "broker"), ("rayjob", "ray-head")])
def test_the_exporter_listens_behind_a_service(kind: str, container: str):
    recipe = recipe_of(kind, "name=mine", "metrics.prometheus_port=9400")
    job, service = manifests(recipe, kind, OPTIONS)
    exposed = [each for each in recipe.settings if each.startswith(("metrics.", "cluster."))]
    assert load(exposed).metrics_host == "0.0.0.0"
    (port,) = service["spec"]["ports"]
    pods = pods_of(msgspec.convert(job, fields.JobSet if kind == "jobset" else fields.RayJob))
    chosen = [pod for pod in pods.values() if service["spec"]["selector"].items() <= pod.metadata.labels.items()]
    found = [(each.name, own) for pod in chosen for each in containers_of(pod) for own in each.ports]
    served = [name for name, own in found if (own.name, own.container_port) == (port["targetPort"], 9400)]
    assert (port["port"], served) == (9400, [container])


def test_a_patch_changes_what_no_option_does(tmp_path):
    file = tmp_path / "patch.yaml"
    file.write_text("""
kind: Pod
metadata: {annotations: {sidecar.istio.io/inject: "false"}}
spec: {priorityClassName: high}
---
kind: JobSet
spec:
  ttlSecondsAfterFinished: 60
  failurePolicy: null
  replicatedJobs:
    - name: generators
      template: {spec: {template: {spec: {containers: [{name: generator, env: [{name: EXTRA, value: "1"}]}]}}}}
""")
    document = written("jobset", "name=mine", patches=read_patches(file))
    assert document["spec"]["ttlSecondsAfterFinished"] == 60
    assert "failurePolicy" not in document["spec"]
    core, generators = (job["template"]["spec"]["template"] for job in document["spec"]["replicatedJobs"])
    for pod in (core, generators):
        assert pod["spec"]["priorityClassName"] == "high"
        assert pod["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    (container,) = generators["spec"]["containers"]
    assert {"EXTRA", "HOME"} < {each["name"] for each in container["env"]}
    assert container["image"] == OPTIONS.image
    # Of the same document, only that which the patch names differs.
    plain = written("jobset", "name=mine")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert core["spec"]["containers"] == plain["spec"]["containers"]


@cases(
    "content, sentence",
    ("[1, 2", "--patch must be a readable YAML file"),
    ("- 1", "--patch must hold mappings"),
    ("kind: Deployment", r"a document of --patch must have the kind JobSet \| Pod, got Deployment"),
    (None, "--patch must be a readable YAML file"),
)
def test_an_unfit_patch_is_refused(content: str | None, sentence: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "patch.yaml").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        written("jobset", "name=mine", patches=read_patches(tmp_path / "patch.yaml"))


@cases(
    "overrides, sentence",
    (["name=1st"], "name must begin with a letter and have <= 40 characters, got '1st'"),
    ([f"name={'n' * 41}"], "name must begin with a letter and have <= 40 characters"),
    (["cluster.learner.memory_gib=5", "name=mine"], "cluster.learner.memory_gib must be > 5, got 5"),
)
def test_a_run_that_cannot_be_placed_is_refused(overrides: list[str], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        written("jobset", *overrides)


def install(folder: Path, program: str, script: str) -> None:
    (folder / program).write_text(f"#!/bin/bash\n{script}")
    (folder / program).chmod(0o755)


KUBECTL = """
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
    assert exit_code(*call) == 2
    assert "error: kubectl must be installed to start the run, got none: run this where" in capsys.readouterr().err
    main([*call, "--print"])
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["kind"] == "JobSet"
    assert "without --claim and storage.uri, what the run writes is lost" in printed.err
    main([*call, "--print", "--claim=shared", "--namespace=research"])
    printed = capsys.readouterr()
    assert "note: the embedded store writes to the claim shared." in printed.err
    assert "kubectl --namespace=research create secret" in printed.out
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, "kubectl", KUBECTL)
    main(call)
    main(call)
    documents: list[Any] = [each for each in yaml.safe_load_all((tmp_path / "documents").read_text()) if each]
    assert [each["kind"] for each in documents] == ["Secret", "JobSet", "JobSet"]
    token = documents[0]["stringData"]["token"]
    assert len(token) >= 32
    assert token not in (tmp_path / "calls").read_text() + str(documents[1:]) + "".join(capsys.readouterr())


JOB = (
    "name=mine",
    "learner.num_ranks=16",
    "learner.device=cuda",
    "cluster.learner={machines: 2, cpus: 32}",
    "cluster.interface=10.0.0.0/8",
    "cluster.trusted_network=true",
    "generators.count=4",
    "cluster.generator={cpus: 7.5, labels: {kind: h100}}",
)


def script(*overrides: str, **more: object) -> str:
    return sbatch_script(read_recipe(list(overrides), kind="local"), python="/opt/a b/python", **more)  # type: ignore[arg-type]


def options_of(text: str) -> tuple[list[str], list[str]]:
    """The options of the core and of the generators."""
    options = re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)
    at = options.index("hetjob")
    return options[:at], options[at + 1 :]


def variable(text: str, name: str) -> list[str]:
    (value,) = re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)
    return shlex.split(value.removeprefix("(").removesuffix(")"))


def test_a_job_asks_for_nodes_and_tasks_each_with_own_options_and_its_roles_get_the_settings_of_the_run():
    text = script(*JOB, options=["--partition=gpu"])
    for checker in (["bash", "-n"], ["shellcheck", "--shell=bash", "-"]):
        if shutil.which(checker[0]):
            assert subprocess.run(checker, input=text, text=True, check=False).returncode == 0
    core, generators = options_of(text)
    nodes = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32", "--gpus-per-node=8"]
    tasks = ["--ntasks=4", "--cpus-per-task=8", "--gpus-per-task=1", "--constraint=h100"]
    assert core[-6:] == [*nodes, "--partition=gpu"]
    assert {"--job-name=mine", "--requeue", "--open-mode=append", "--signal=B:USR1@180"} <= set(core)
    assert generators == [*tasks, "--partition=gpu"]
    assert variable(text, "core") == ["--het-group=0", *nodes]
    assert variable(text, "generators") == ["--het-group=1", *tasks]
    assert variable(text, "python") == ["/opt/a b/python"]
    assert (variable(text, "meet_from"), variable(text, "meet_ports")) == (["20500"], ["500"])
    sizes = ("cluster.learner.memory_gib=512", "cluster.generator.memory_gib=60")
    text = script(*JOB, *sizes, core_options=["--partition=h200"], generator_options=["--partition=l40s"])
    core, generators = options_of(text)
    assert {"--partition=h200", "--mem=524288M"} <= set(core)
    assert {"--partition=l40s", "--mem-per-cpu=7680M"} <= set(generators)
    assert "--mem=524288M" in variable(text, "core")
    assert "--partition=l40s" not in core
    text = script(*JOB, "data.train='it is $HOME \"here\".jsonl'", "model.path=models/mine")
    run = load(variable(text, "settings"))
    assert (run.name, run.resume, run.cluster.kind) == ("mine", "auto", "local")
    assert run.data.train == 'it is $HOME "here".jsonl'
    assert variable(text, "own") == ["model.path=models/mine", "name=mine"]
    assert "resume=true" in variable(script(*JOB, "resume=true"), "settings")


def test_without_print_the_script_is_submitted_from_its_input(tmp_path, monkeypatch, capsys):
    call = ["launch", "slurm", *JOB]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exit_code(*call) == 2
    assert "error: sbatch must be installed to start the run, got none: run this where" in capsys.readouterr().err
    main([*call, "--print"])
    printed = capsys.readouterr().out
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(tmp_path, "sbatch", "cat >submitted; echo Submitted batch job 7")
    main(call)
    assert capsys.readouterr().out == "Submitted batch job 7\n"
    assert (tmp_path / "submitted").read_text() == printed
    install(tmp_path, "sbatch", "echo 'no such partition' >&2; exit 3")
    assert exit_code(*call) == 1
    assert "no such partition" in capsys.readouterr().err
