"""Kubernetes manifests: a JobSet with roles as containers, or a KubeRay RayJob where Ray places roles."""

import re
import shlex
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from slipstream.cluster.recipe import STOP_TIMEOUT_S, Recipe
from slipstream.configs.base import ConfigError, require
from slipstream.configs.buffer import EmbeddedRedisConfig
from slipstream.configs.cluster import LearnerMachinesConfig, SeatConfig
from slipstream.runtime.credentials import TOKEN_VARIABLE

Kind = Literal["rayjob", "jobset"]
Manifest = dict[str, Any]

ANY_INTERFACE = "0.0.0.0/0"
"""For pods, which have only one address besides loopback."""
SECRET_KEY = "token"
_MAX_NAME = 40
"""JobSet and KubeRay append suffixes, and labels have at most 63 characters."""
_USER = 1000
_WORKSPACE = "/workspace"
_VOLUMES = {"workspace": _WORKSPACE, "shared-memory": "/dev/shm"}
_SHARED_MEMORY = "8Gi"
"""Counts toward the memory of the containers that fill it."""
_BASE_GIB, _GPU_GIB = 16, 64
"""Memory of a machine, and what each GPU adds."""
_BROKER_GIB, _SUBMITTER_GIB = 4, 1
_GPU = "nvidia.com/gpu"
_RESTARTS = 6
"""Restarts of a container before its pod fails, and of all pods before the run fails."""
_START_S = 600
"""Limit for the broker to load the store and the data."""
_KEPT_S = 3600
"""Time before a finished job is deleted."""
_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_INSTANCE = "app.kubernetes.io/instance"
"""Label of all objects of a run."""
_COMPONENT = "app.kubernetes.io/component"
_LIST_KEYS = ("mountPath", "groupName", "name")
"""Fields that identify an item of a list, the first that all items have."""


class Options(NamedTuple):
    """Cluster resources of the pods, besides the settings of the run.

    Example: Options("registry/slipstream:gpu", claim="shared", namespace="research", secrets=["aws"])
    """

    image: str
    claim: str | None = None
    """PersistentVolumeClaim of every pod; None: empty volumes."""
    ray_version: str = ""
    namespace: str = ""
    secrets: Sequence[str] = ()
    """Secrets of the core, whose keys become environment variables."""
    generator_secrets: Sequence[str] = ()
    pull_secrets: Sequence[str] = ()
    service_account: str = ""
    node_selector: Mapping[str, str] = {}
    tolerations: Sequence[str] = ()
    """Taints of nodes: KEY, KEY=VALUE, with or without :EFFECT."""


def secret_name(recipe: Recipe) -> str:
    """Name the token's Secret."""
    return f"{object_name(recipe)}-token"


def object_name(recipe: Recipe) -> str:
    """Return a valid Kubernetes name. Raises ConfigError."""
    name = re.sub(r"[^a-z0-9-]", "-", recipe.run.name.lower()).strip("-")
    if not re.match("[a-z]", name) or len(name) > _MAX_NAME:
        raise ConfigError(
            f"name must begin with a letter and have <= {_MAX_NAME} characters, got {recipe.run.name!r}: Kubernetes "
            "derives host names from it; choose another with name=..."
        )
    return name


def secret(recipe: Recipe, token: str) -> Manifest:
    """Return the token's Secret."""
    metadata = _metadata(recipe, secret_name(recipe))
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {SECRET_KEY: token}}


def manifests(recipe: Recipe, kind: Kind, options: Options, *, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """Return a run's job, and a Service with `metrics.prometheus_port`. Raises ConfigError.

    `patches`: documents merged into that of the same kind; those of kind Pod into every pod.
    """
    port = recipe.run.metrics.prometheus_port
    if port is not None and not recipe.run.metrics.is_open:
        recipe = recipe._replace(settings=[*recipe.settings, "metrics.prometheus_host=0.0.0.0"])
    pods = _Pods(recipe, options, [patch for patch in patches if patch.get("kind") == "Pod"])
    documents = [_jobset(recipe, pods) if kind == "jobset" else _rayjob(recipe, pods, ray_version=options.ray_version)]
    if port is not None:
        documents.append(_metrics_service(recipe, port))
    for patch in patches:
        others = [each for each in documents if each["kind"] == patch.get("kind")]
        must = f"have the kind {' | '.join(str(each['kind']) for each in documents)} | Pod"
        is_fit = bool(others) or patch.get("kind") == "Pod"
        require(is_fit, "a document of --patch", must, got=patch.get("kind"), why="it is merged into that one")
        for each in others:
            each.update(merged(each, patch))
    for each in documents if options.namespace else ():
        each["metadata"]["namespace"] = options.namespace
    return documents


def read_patches(file: Path) -> list[Manifest]:
    """Return the documents of a YAML file. Raises ConfigError."""
    try:
        documents = [each for each in yaml.safe_load_all(file.read_text("utf-8")) if each is not None]
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--patch must be a readable YAML file, got {file}: {' '.join(str(error).split())}") from None
    why = "it is merged into a manifest"
    require(all(isinstance(each, dict) for each in documents), "--patch", "hold mappings", got=str(file), why=why)
    return documents


def merged(document: Any, patch: Any) -> Any:
    """Merge as `kubectl patch` does: mappings by key, lists of named items by name; null removes, others replace."""
    if isinstance(document, dict) and isinstance(patch, dict):
        both = {key: merged(document.get(key), value) for key, value in patch.items()}
        return {key: value for key, value in (document | both).items() if value is not None}
    if isinstance(patch, dict):
        return merged({}, patch)
    if isinstance(document, list) and isinstance(patch, list):
        items = [*document, *patch]
        fits = (key for key in _LIST_KEYS if all(isinstance(each, dict) and key in each for each in items))
        if key := next(fits, ""):
            own = {each[key]: each for each in document}
            return [*(own | {each[key]: merged(own.get(each[key]), each) for each in patch}).values()]
    return patch


class _Dumper(yaml.SafeDumper):
    """Repeats values instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def dump(document: Manifest) -> str:
    """Return a manifest as YAML."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


def _metadata(recipe: Recipe, name: str) -> Manifest:
    return {"name": name, "labels": {"app.kubernetes.io/name": "slipstream", _INSTANCE: object_name(recipe)}}


class _Pods:
    def __init__(self, recipe: Recipe, options: Options, patches: Sequence[Manifest]) -> None:
        self._options = options
        self._patches = patches
        self._labels = {_INSTANCE: object_name(recipe)}
        self._token = {
            "name": TOKEN_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": secret_name(recipe), "key": SECRET_KEY}},
        }
        self.secrets, self.generator_secrets = options.secrets, options.generator_secrets

    def container(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        cpus: int,
        memory_gib: float,
        gpus: int = 0,
        ports: Mapping[str, int] | None = None,
        variables: Mapping[str, str] | None = None,
        has_token: bool = False,
        secrets: Sequence[str] = (),
    ) -> Manifest:
        """KubeRay supplies a missing command."""
        # A namespace with a quota rejects containers without requests or limits.
        amounts = {"cpu": str(cpus), "memory": f"{ceil(memory_gib * 1024)}Mi"} | ({_GPU: str(gpus)} if gpus else {})
        given = {"HOME": _WORKSPACE} | dict(variables or {})
        variables_of_it: list[Manifest] = [{"name": key, "value": value} for key, value in given.items()]
        container: Manifest = {"name": name, "image": self._options.image, "workingDir": _WORKSPACE}
        # Escape $(NAME), which Kubernetes would expand.
        container |= {"command": [word.replace("$(", "$$(") for word in command]} if command else {}
        return container | {
            "env": [*variables_of_it, *([self._token] if has_token else [])],
            **({"envFrom": [{"secretRef": {"name": each}} for each in secrets]} if secrets else {}),
            **({"ports": [{"name": key, "containerPort": port} for key, port in ports.items()]} if ports else {}),
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": _SECURITY,
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in _VOLUMES.items()],
        }

    def pod(self, component: str, container: Manifest, **more: Any) -> Manifest:
        """`more`: further spec fields."""
        options = self._options
        workspace = {"persistentVolumeClaim": {"claimName": options.claim}} if options.claim else {"emptyDir": {}}
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}
        selector = dict(options.node_selector) | more.pop("nodeSelector", {})
        tolerations = [_toleration(each) for each in options.tolerations]
        if _GPU in container["resources"]["limits"]:
            tolerations.append({"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
        placed = {
            "nodeSelector": selector,
            "tolerations": tolerations,
            "imagePullSecrets": [{"name": each} for each in options.pull_secrets],
            "serviceAccountName": options.service_account,
        }
        spec = {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                # Otherwise each start changes the owner of every file on the claim.
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "terminationGracePeriodSeconds": STOP_TIMEOUT_S,
            **{key: value for key, value in placed.items() if value},
            **more,
            "containers": [container],
            "volumes": [{"name": "workspace", **workspace}, {"name": "shared-memory", **memory}],
        }
        pod = {"metadata": {"labels": self._labels | {_COMPONENT: component}}, "spec": spec}
        for patch in self._patches:
            pod = merged(pod, {key: value for key, value in patch.items() if key in ("metadata", "spec")})
        return pod


def _toleration(taint: str) -> Manifest:
    name, _, effect = taint.partition(":")
    key, has_value, value = name.partition("=")
    matched = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
    return {"key": key} | matched | ({"effect": effect} if effect else {})


def _memory_gib(machine: LearnerMachinesConfig | SeatConfig) -> float:
    return machine.memory_gib or _BASE_GIB + _GPU_GIB * machine.gpus


def _metrics_service(recipe: Recipe, port: int) -> Manifest:
    """The exporter's port. `selector`: the pod of the broker, or of the launcher."""
    selector = {_INSTANCE: object_name(recipe), _COMPONENT: "core"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(recipe, f"{object_name(recipe)}-metrics"),
        "spec": {"selector": selector, "ports": [{"name": "metrics", "port": port, "targetPort": "metrics"}]},
    }


_READY = {"readinessProbe": {"tcpSocket": {"port": "weights"}, "periodSeconds": 10, "failureThreshold": 6}}
"""Shows which roles have loaded their model. Not a liveness probe, because the port may change with an epoch."""


# --- JobSet ----------------------------------------------------------------------------------------------------------
def _jobset(recipe: Recipe, pods: _Pods) -> Manifest:
    """One pod for broker, store, and first ranks; one per further machine of ranks; one per generator."""
    name, machines = object_name(recipe), recipe.run.cluster.learner.machines
    jobs = [_job("core", 1, _core_pod(recipe, pods))]
    if machines > 1:
        start = 'export NODE_RANK=$((JOB_COMPLETION_INDEX + 1)); exec "$@"'
        command = ["bash", "-c", start, "ranks", *_role("learner", recipe)]
        learner = pods.container(
            "learner",
            command,
            cpus=recipe.core_cpus,
            memory_gib=_memory_gib(recipe.run.cluster.learner),
            gpus=recipe.run.cluster.learner.gpus,
            variables=_ranks_variables(recipe),
            secrets=pods.secrets,
        )
        jobs.append(_job("ranks", machines - 1, _role_pod(pods, "ranks", learner)))
    jobs.append(_job("generators", recipe.run.generators.count, _generator_pod(recipe, pods)))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(recipe, name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["core"]},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "ttlSecondsAfterFinished": _KEPT_S,
            "replicatedJobs": jobs,
        },
    }


def _job(name: str, pods: int, template: Manifest) -> Manifest:
    count = {"completions": pods, "parallelism": pods, "completionMode": "Indexed", "backoffLimit": _RESTARTS}
    return {"name": name, "replicas": 1, "template": {"spec": count | {"template": template}}}


def _core_host(recipe: Recipe) -> str:
    """Name of the first pod: JOBSET-JOB-INDEX-INDEX.SUBDOMAIN."""
    name = object_name(recipe)
    return f"{name}-core-0-0.{name}"


def _core_pod(recipe: Recipe, pods: _Pods) -> Manifest:
    core, ports = recipe.run.cluster.learner, recipe.run.cluster.port_range
    store, metrics = recipe.run.buffer.store, recipe.run.metrics.prometheus_port
    broker_gib = _BROKER_GIB + (store.max_memory_mib / 1024 if isinstance(store, EmbeddedRedisConfig) else 0)
    learner_gib = _memory_gib(core) - broker_gib
    must, why = f"be > {broker_gib:g}", "broker and store need that much"
    require(learner_gib > 0, "cluster.learner.memory_gib", must, got=core.memory_gib, why=why)
    broker = pods.container(
        "broker",
        _role("broker", recipe),
        cpus=1,
        memory_gib=broker_gib,
        ports={"broker": ports[0]} | ({"metrics": metrics} if metrics else {}),
        has_token=True,
        secrets=pods.secrets,
    )
    listens = {"tcpSocket": {"port": "broker"}}
    # A sidecar starts before the learner, restarts independently, and ends with it.
    broker |= {
        "restartPolicy": "Always",
        "startupProbe": listens | {"periodSeconds": 2, "failureThreshold": _START_S // 2},
        "livenessProbe": listens | {"periodSeconds": 10, "failureThreshold": 6},
    }
    # The broker needs one core.
    cpus = max(1, recipe.core_cpus - 1)
    make = ["python", "-m", "slipstream", "prepare", *recipe.settings]
    prepare = pods.container("prepare", make, cpus=cpus, memory_gib=learner_gib, secrets=pods.secrets)
    learner = pods.container(
        "learner",
        _role("learner", recipe),
        cpus=cpus,
        memory_gib=learner_gib,
        gpus=core.gpus,
        ports={"weights": ports[1]} | ({"meeting": ports[-1]} if core.machines > 1 else {}),
        variables=_ranks_variables(recipe) | ({"NODE_RANK": "0"} if core.machines > 1 else {}),
        has_token=True,
        secrets=pods.secrets,
    )
    return _role_pod(pods, "core", learner | _READY, initContainers=[prepare, broker])


def _generator_pod(recipe: Recipe, pods: _Pods) -> Manifest:
    generator, port = recipe.run.cluster.generator, recipe.run.cluster.port_range[0]
    start = 'exec "$@" --id "generator-$JOB_COMPLETION_INDEX"'
    role = ["python", "-m", "slipstream.generators", *recipe.own, f"broker.address=tcp://{_core_host(recipe)}:{port}"]
    container = pods.container(
        "generator",
        ["bash", "-c", start, "generator", *role],
        cpus=recipe.generator_cpus,
        memory_gib=_memory_gib(generator),
        gpus=generator.gpus,
        ports={"weights": port},
        variables={"OMP_NUM_THREADS": str(recipe.generator_cpus)},
        has_token=True,
        secrets=pods.generator_secrets,
    )
    selector = {"nodeSelector": dict(generator.labels)} if generator.labels else {}
    return _role_pod(pods, "generators", container | _READY, **selector)


def _role(role: str, recipe: Recipe) -> list[str]:
    return ["python", "-m", f"slipstream.{role}", *recipe.settings]


def _ranks_variables(recipe: Recipe) -> dict[str, str]:
    machines, ranks = recipe.run.cluster.learner.machines, recipe.run.learner.num_ranks
    # By default, a process in a container uses all cores of its node.
    threads = {"OMP_NUM_THREADS": str(max(1, recipe.core_cpus * machines // ranks))}
    meeting = {"MASTER_ADDR": _core_host(recipe), "MASTER_PORT": str(recipe.run.cluster.port_range[-1])}
    return threads | (meeting if machines > 1 else {})


def _role_pod(pods: _Pods, component: str, container: Manifest, **more: Any) -> Manifest:
    return pods.pod(component, container, restartPolicy="OnFailure", automountServiceAccountToken=False, **more)


# --- RayJob ----------------------------------------------------------------------------------------------------------
def _rayjob(recipe: Recipe, pods: _Pods, *, ray_version: str) -> Manifest:
    cluster, ports = recipe.run.cluster, recipe.run.cluster.port_range
    memory_gib, metrics = _memory_gib(cluster.learner), recipe.run.metrics.prometheus_port
    own = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "broker": ports[0], "weights": ports[1]}
    own |= {"metrics": metrics} if metrics else {}
    head = pods.container(
        "ray-head",
        cpus=recipe.core_cpus,
        memory_gib=memory_gib,
        gpus=cluster.learner.gpus,
        ports=own,
        has_token=True,
        secrets=pods.secrets,
    )
    submitter = pods.container("ray-job-submitter", cpus=1, memory_gib=_SUBMITTER_GIB)
    autoscaler = {"cpu": "1", "memory": "1Gi"}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(recipe, object_name(recipe)),
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "slipstream", "run", *recipe.settings]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_S,
            "backoffLimit": _RESTARTS,
            "submitterPodTemplate": pods.pod("submitter", submitter, restartPolicy="Never"),
            "rayClusterSpec": {
                "rayVersion": ray_version,
                # KubeRay makes Ray's own token and gives it to every pod.
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": recipe.run.generators.autoscale is not None,
                "autoscalerOptions": {
                    "securityContext": _SECURITY,
                    "resources": {"requests": autoscaler, "limits": autoscaler},
                },
                # Jobs are submitted to the dashboard, which Ray's token protects.
                "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": pods.pod("core", head)},
                "workerGroupSpecs": _workers(recipe, pods),
            },
        },
    }


def _workers(recipe: Recipe, pods: _Pods) -> list[Manifest]:
    cluster, count, scale = recipe.run.cluster, recipe.run.generators.count, recipe.run.generators.autoscale
    ranks = pods.container(
        "ray-worker",
        cpus=recipe.core_cpus,
        memory_gib=_memory_gib(cluster.learner),
        gpus=cluster.learner.gpus,
        secrets=pods.secrets,
    )
    engine = pods.container(
        "ray-worker",
        cpus=recipe.generator_cpus,
        memory_gib=_memory_gib(cluster.generator),
        gpus=cluster.generator.gpus,
        ports={"weights": cluster.port_range[0]},
        secrets=pods.generator_secrets,
    )
    further = cluster.learner.machines - 1
    groups = [_worker_group("ranks", pods.pod("ranks", ranks), further, least=further, most=further)] if further else []
    least, most = (scale.min, scale.max) if scale else (count, count)
    engines = _worker_group("generators", pods.pod("generators", engine), count, least=least, most=most)
    return [*groups, engines | ({"labels": dict(cluster.generator.labels)} if cluster.generator.labels else {})]


def _worker_group(name: str, pod: Manifest, count: int, *, least: int, most: int) -> Manifest:
    size = {"replicas": count, "minReplicas": least, "maxReplicas": most}
    return {"groupName": name, **size, "rayStartParams": {}, "template": pod}
