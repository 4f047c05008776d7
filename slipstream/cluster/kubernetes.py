"""Kubernetes manifests: a JobSet with roles as containers, or a KubeRay RayJob where Ray places roles."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from slipstream.cluster.recipe import Recipe
from slipstream.configs.base import ConfigError
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
_RESTARTS = 6
"""Restarts of a container before its pod fails, and of all pods before the run fails."""
_START_S = 600
"""Limit for the broker to load the store and the data."""
_KEPT_S = 3600
"""Time before a finished job is deleted."""
_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_INSTANCE = "app.kubernetes.io/instance"
"""Label of all objects of a run."""


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


def manifest(recipe: Recipe, kind: Kind, *, image: str, claim: str | None, ray_version: str = "") -> Manifest:
    """Return a run's manifest. `claim`: PersistentVolumeClaim of every pod; None: empty volumes. Raises ConfigError."""
    pods = _Pods(recipe, image=image, claim=claim)
    return _jobset(recipe, pods) if kind == "jobset" else _rayjob(recipe, pods, ray_version=ray_version)


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
    def __init__(self, recipe: Recipe, *, image: str, claim: str | None) -> None:
        self._image = image
        self._claim = claim
        self._labels = {_INSTANCE: object_name(recipe)}
        self._token = {
            "name": TOKEN_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": secret_name(recipe), "key": SECRET_KEY}},
        }

    def container(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        cpus: int,
        gpus: int = 0,
        ports: Mapping[str, int] | None = None,
        variables: Mapping[str, str] | None = None,
        has_token: bool = False,
    ) -> Manifest:
        """KubeRay supplies a missing command."""
        amounts = {"cpu": str(cpus)} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
        given = {"HOME": _WORKSPACE} | dict(variables or {})
        variables_of_it: list[Manifest] = [{"name": key, "value": value} for key, value in given.items()]
        container: Manifest = {"name": name, "image": self._image, "workingDir": _WORKSPACE}
        # Escape $(NAME), which Kubernetes would expand.
        container |= {"command": [word.replace("$(", "$$(") for word in command]} if command else {}
        return container | {
            "env": [*variables_of_it, *([self._token] if has_token else [])],
            **({"ports": [{"name": key, "containerPort": port} for key, port in ports.items()]} if ports else {}),
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": _SECURITY,
            "volumeMounts": [{"name": volume, "mountPath": path} for volume, path in _VOLUMES.items()],
        }

    def pod(self, container: Manifest, **more: Any) -> Manifest:
        """`more`: further spec fields."""
        workspace = {"persistentVolumeClaim": {"claimName": self._claim}} if self._claim else {"emptyDir": {}}
        memory = {"emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}}
        spec = {
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **more,
            "containers": [container],
            "volumes": [{"name": "workspace", **workspace}, {"name": "shared-memory", **memory}],
        }
        return {"metadata": {"labels": self._labels}, "spec": spec}


# --- JobSet ----------------------------------------------------------------------------------------------------------
def _jobset(recipe: Recipe, pods: _Pods) -> Manifest:
    """One pod for broker, store, and first ranks; one per further machine of ranks; one per generator."""
    name, machines = object_name(recipe), recipe.run.cluster.core.machines
    jobs = [_job("core", 1, _core_pod(recipe, pods))]
    if machines > 1:
        start = 'export NODE_RANK=$((JOB_COMPLETION_INDEX + 1)); exec "$@"'
        command = ["bash", "-c", start, "ranks", *_role("learner", recipe)]
        gpus, variables = recipe.run.cluster.core.gpus, _ranks_variables(recipe)
        learner = pods.container("learner", command, cpus=recipe.core_cpus, gpus=gpus, variables=variables)
        jobs.append(_job("ranks", machines - 1, _role_pod(pods, learner)))
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
    core, ports = recipe.run.cluster.core, recipe.run.cluster.port_range
    broker = pods.container("broker", _role("broker", recipe), cpus=1, ports={"broker": ports[0]}, has_token=True)
    listens = {"tcpSocket": {"port": "broker"}}
    # A sidecar starts before the learner, restarts independently, and ends with it.
    broker |= {
        "restartPolicy": "Always",
        "startupProbe": listens | {"periodSeconds": 2, "failureThreshold": _START_S // 2},
        "livenessProbe": listens | {"periodSeconds": 10, "failureThreshold": 6},
    }
    prepare = pods.container("prepare", ["python", "-m", "slipstream", "prepare", *recipe.settings], cpus=1)
    learner = pods.container(
        "learner",
        _role("learner", recipe),
        # The broker needs one.
        cpus=max(1, recipe.core_cpus - 1),
        gpus=core.gpus,
        ports={"weights": ports[1]} | ({"meeting": ports[-1]} if core.machines > 1 else {}),
        variables=_ranks_variables(recipe) | ({"NODE_RANK": "0"} if core.machines > 1 else {}),
        has_token=True,
    )
    return _role_pod(pods, learner, initContainers=[prepare, broker])


def _generator_pod(recipe: Recipe, pods: _Pods) -> Manifest:
    generator, port = recipe.run.cluster.generator, recipe.run.cluster.port_range[0]
    start = 'exec "$@" --id "generator-$JOB_COMPLETION_INDEX"'
    role = ["python", "-m", "slipstream.generators", *recipe.own, f"broker.address=tcp://{_core_host(recipe)}:{port}"]
    container = pods.container(
        "generator",
        ["bash", "-c", start, "generator", *role],
        cpus=recipe.generator_cpus,
        gpus=generator.gpus,
        ports={"weights": port},
        variables={"OMP_NUM_THREADS": str(recipe.generator_cpus)},
        has_token=True,
    )
    selector = {"nodeSelector": dict(generator.labels)} if generator.labels else {}
    return _role_pod(pods, container, **selector)


def _role(role: str, recipe: Recipe) -> list[str]:
    return ["python", "-m", f"slipstream.{role}", *recipe.settings]


def _ranks_variables(recipe: Recipe) -> dict[str, str]:
    machines, ranks = recipe.run.cluster.core.machines, recipe.run.learner.num_ranks
    # By default, a process in a container uses all cores of its node.
    threads = {"OMP_NUM_THREADS": str(max(1, recipe.core_cpus * machines // ranks))}
    meeting = {"MASTER_ADDR": _core_host(recipe), "MASTER_PORT": str(recipe.run.cluster.port_range[-1])}
    return threads | (meeting if machines > 1 else {})


def _role_pod(pods: _Pods, container: Manifest, **more: Any) -> Manifest:
    return pods.pod(container, restartPolicy="OnFailure", automountServiceAccountToken=False, **more)


# --- RayJob ----------------------------------------------------------------------------------------------------------
def _rayjob(recipe: Recipe, pods: _Pods, *, ray_version: str) -> Manifest:
    cluster, ports = recipe.run.cluster, recipe.run.cluster.port_range
    own = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "broker": ports[0], "weights": ports[1]}
    head = pods.container("ray-head", cpus=recipe.core_cpus, gpus=cluster.core.gpus, ports=own, has_token=True)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(recipe, object_name(recipe)),
        "spec": {
            "entrypoint": shlex.join(["python", "-m", "slipstream", "run", *recipe.settings]),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": _KEPT_S,
            "backoffLimit": _RESTARTS,
            "submitterPodTemplate": pods.pod(pods.container("ray-job-submitter", cpus=1), restartPolicy="Never"),
            "rayClusterSpec": {
                "rayVersion": ray_version,
                # KubeRay makes Ray's own token and gives it to every pod.
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": recipe.run.generators.autoscale is not None,
                "autoscalerOptions": {"securityContext": _SECURITY},
                # Jobs are submitted to the dashboard, which Ray's token protects.
                "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": pods.pod(head)},
                "workerGroupSpecs": _workers(recipe, pods),
            },
        },
    }


def _workers(recipe: Recipe, pods: _Pods) -> list[Manifest]:
    cluster, count, scale = recipe.run.cluster, recipe.run.generators.count, recipe.run.generators.autoscale
    ranks = pods.container("ray-worker", cpus=recipe.core_cpus, gpus=cluster.core.gpus)
    lends = {"weights": cluster.port_range[0]}
    engine = pods.container("ray-worker", cpus=recipe.generator_cpus, gpus=cluster.generator.gpus, ports=lends)
    further = cluster.core.machines - 1
    groups = [_worker_group("ranks", pods.pod(ranks), further, least=further, most=further)] if further else []
    least, most = (scale.min, scale.max) if scale else (count, count)
    engines = _worker_group("generators", pods.pod(engine), count, least=least, most=most)
    return [*groups, engines | ({"labels": dict(cluster.generator.labels)} if cluster.generator.labels else {})]


def _worker_group(name: str, pod: Manifest, count: int, *, least: int, most: int) -> Manifest:
    size = {"replicas": count, "minReplicas": least, "maxReplicas": most}
    return {"groupName": name, **size, "rayStartParams": {}, "template": pod}
