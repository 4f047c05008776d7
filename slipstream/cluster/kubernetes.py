"""Kubernetes manifests: a JobSet with roles as containers, or a RayJob where Ray places roles."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache, partial
from math import ceil
from pathlib import Path
from types import MappingProxyType
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
_BASE_GIB, _GPU_GIB = 16, 64
"""Memory of a machine, and what each GPU adds."""
_BROKER_GIB, _SUBMITTER_GIB = 4, 1
_GPU = "nvidia.com/gpu"
_NOTHING: tuple[object, ...] = (None, "", [], {})
_LIST_KEYS = ("mountPath", "groupName", "name")
"""Fields that identify a list's items: the first that all have."""


class Options(NamedTuple):
    """Cluster resources of the pods.

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
    """A valid Kubernetes name. Raises ConfigError."""
    name = re.sub(r"[^a-z0-9-]", "-", recipe.run.name.lower()).strip("-")
    is_fit = re.match("[a-z]", name) is not None and len(name) <= _MAX_NAME
    must = f"begin with a letter and have <= {_MAX_NAME} characters"
    why = "Kubernetes derives host names from it; choose another with name=NAME"
    require(is_fit, "name", must, got=repr(recipe.run.name), why=why)
    return name


def secret(recipe: Recipe, token: str) -> Manifest:
    """The token's Secret."""
    return _fill("secret", name=secret_name(recipe), run=object_name(recipe), token=token)


def manifests(recipe: Recipe, kind: Kind, options: Options, *, patches: Sequence[Manifest] = ()) -> list[Manifest]:
    """The run's job, and a Service with `metrics.prometheus_port`. Raises ConfigError.

    `patches`: merged into the document of the same kind, or for kind Pod into every pod.
    """
    port, name = recipe.run.metrics.prometheus_port, object_name(recipe)
    job = _Job(recipe, options, [patch for patch in patches if patch.get("kind") == "Pod"])
    documents = [job.jobset() if kind == "jobset" else job.rayjob()]
    if port is not None:
        documents.append(_fill("metrics", name=f"{name}-metrics", run=name, port=port))
    own = {str(each["kind"]): each for each in documents}
    for patch in patches:
        target, kinds = patch.get("kind"), [*own, "Pod"]
        must, why = f"have the kind {' | '.join(kinds)}", "it is merged into that one"
        require(target in kinds, "a document of --patch", must, got=target, why=why)
        if target in own:
            own[target].update(merged(own[target], patch))
    for each in documents if options.namespace else ():
        each["metadata"]["namespace"] = options.namespace
    return documents


def read_patches(file: Path) -> list[Manifest]:
    """Documents of a YAML file. Raises ConfigError."""
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
    """Encode a manifest as YAML."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)


@cache
def _template() -> dict[str, Manifest]:
    found: dict[str, Manifest] = yaml.safe_load(Path(__file__).with_name("manifests.yaml").read_text("utf-8"))
    return found


def _fill(section: str, **values: Any) -> Manifest:
    """Section of manifests.yaml with its `$name` replaced, without empty fields."""
    filled: Manifest = _filled(_template()[section], values)
    return filled


def _filled(node: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(node, dict):
        filled = {key: _filled(each, values) for key, each in node.items()}
        return {key: each for key, each in filled.items() if not (_is_name(node[key]) and each in _NOTHING)}
    if isinstance(node, list):
        parts = (_filled(each, values) if _is_name(each) else [_filled(each, values)] for each in node)
        return [each for part in parts for each in part]
    return values.get(node[1:]) if _is_name(node) else node


def _is_name(node: Any) -> bool:
    return isinstance(node, str) and node.startswith("$")


class _Size(NamedTuple):
    cpus: int
    memory_gib: float
    gpus: int = 0


def _size_of(machine: LearnerMachinesConfig | SeatConfig, *, gpus: int) -> _Size:
    return _Size(ceil(machine.cpus), machine.memory_gib or _BASE_GIB + _GPU_GIB * gpus, gpus)


class _Job:
    def __init__(self, recipe: Recipe, options: Options, patches: Sequence[Manifest]) -> None:
        self._recipe, self._options, self._patches = recipe, options, patches
        self._run, self._cluster, self._ports = recipe.run, recipe.run.cluster, recipe.run.cluster.port_range
        self._name = object_name(recipe)
        # JOBSET-JOB-INDEX-INDEX.SUBDOMAIN
        self._core_host = f"{self._name}-core-0-0.{self._name}"
        metrics = recipe.run.metrics.prometheus_port
        self._metrics = {"metrics": metrics} if metrics else {}
        self._core = _size_of(self._cluster.learner, gpus=self._run.learner_gpus)

    def jobset(self) -> Manifest:
        """A pod for broker, store, and first ranks; one per further machine; one per generator."""
        machines = self._cluster.learner.machines
        jobs = [_fill("job", name="core", pods=1, pod=self._core_pod())]
        if machines > 1:
            start = 'export NODE_RANK=$((JOB_COMPLETION_INDEX + 1)); exec "$@"'
            command = ["bash", "-c", start, "ranks", *self._role("learner")]
            variables, secrets = self._ranks_variables(), self._options.secrets
            learner = self._container("learner", command, size=self._core, secrets=secrets, variables=variables)
            jobs.append(_fill("job", name="ranks", pods=machines - 1, pod=self._role_pod("ranks", learner)))
        jobs.append(_fill("job", name="generators", pods=self._run.generators.count, pod=self._generator_pod()))
        return _fill("jobset", name=self._name, run=self._name, jobs=jobs)

    def _core_pod(self) -> Manifest:
        core, store = self._cluster.learner, self._run.buffer.store
        broker_gib = _BROKER_GIB + (store.max_memory_mib / 1024 if isinstance(store, EmbeddedRedisConfig) else 0)
        # The broker needs one core.
        size = _Size(max(1, self._core.cpus - 1), self._core.memory_gib - broker_gib, self._core.gpus)
        must, why = f"be > {broker_gib:g}", "broker and store need that much"
        require(size.memory_gib > 0, "cluster.learner.memory_gib", must, got=core.memory_gib, why=why)
        make = ["python", "-m", "slipstream", "prepare", *self._recipe.settings]
        fill = partial(self._container, secrets=self._options.secrets)
        prepare = fill("prepare", make, size=size._replace(gpus=0))
        ports = {"broker": self._ports[0]} | self._metrics
        broker = fill("broker", self._role("broker"), size=_Size(1, broker_gib), ports=ports, has_token=True)
        ports, variables = {"weights": self._ports[1]}, self._ranks_variables()
        if core.machines > 1:
            ports["meeting"], variables["NODE_RANK"] = self._ports[-1], "0"
        learner = fill("learner", self._role("learner"), size=size, ports=ports, variables=variables, has_token=True)
        return self._role_pod("core", learner | _fill("ready"), before=[prepare, broker | _fill("sidecar")])

    def _generator_pod(self) -> Manifest:
        start = 'exec "$@" --id "generator-$JOB_COMPLETION_INDEX"'
        address = f"broker.address=tcp://{self._core_host}:{self._ports[0]}"
        module = ["python", "-m", "slipstream.generators"]
        command = ["bash", "-c", start, "generator", *module, *self._recipe.own, address]
        size = _size_of(self._cluster.generator, gpus=self._run.generator_gpus)
        fill = partial(self._container, secrets=self._options.generator_secrets, has_token=True)
        ports, variables = {"weights": self._ports[0]}, {"OMP_NUM_THREADS": str(size.cpus)}
        container = fill("generator", command, size=size, ports=ports, variables=variables)
        return self._role_pod("generators", container | _fill("ready"), labels=self._cluster.generator.labels)

    def _role(self, role: str) -> list[str]:
        return ["python", "-m", f"slipstream.{role}", *self._recipe.settings]

    def _ranks_variables(self) -> dict[str, str]:
        machines, ranks = self._cluster.learner.machines, self._run.learner.num_ranks
        # A process in a container would use all cores of the node.
        threads = {"OMP_NUM_THREADS": str(max(1, self._core.cpus * machines // ranks))}
        meeting = {"MASTER_ADDR": self._core_host, "MASTER_PORT": str(self._ports[-1])}
        return threads | (meeting if machines > 1 else {})

    def rayjob(self) -> Manifest:
        size, secrets = self._core, self._options.secrets
        ports = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "broker": self._ports[0]}
        ports |= {"weights": self._ports[1]} | self._metrics
        head = self._container("ray-head", size=size, secrets=secrets, ports=ports, has_token=True)
        submitter = self._container("ray-job-submitter", size=_Size(1, _SUBMITTER_GIB), secrets=())
        values: dict[str, Any] = {"name": self._name, "run": self._name, "ray_version": self._options.ray_version}
        values["command"] = shlex.join(["python", "-m", "slipstream", "run", *self._recipe.settings])
        values["is_autoscaled"] = self._run.generators.autoscale is not None
        values |= {"submitter": self._pod("submitter", submitter, restart="Never"), "head": self._pod("core", head)}
        generator, count, scale = self._cluster.generator, self._run.generators.count, self._run.generators.autoscale
        secrets, ports = self._options.generator_secrets, {"weights": self._ports[0]}
        own = _size_of(generator, gpus=self._run.generator_gpus)
        pod = self._pod("generators", self._container("ray-worker", size=own, secrets=secrets, ports=ports))
        sizes = {"count": count, "least": scale.min if scale else count, "most": scale.max if scale else count}
        workers = [_fill("workers", name="generators", pod=pod, labels=dict(generator.labels), **sizes)]
        if further := self._cluster.learner.machines - 1:
            ranks = self._pod("ranks", self._container("ray-worker", size=self._core, secrets=self._options.secrets))
            workers.insert(0, _fill("workers", name="ranks", pod=ranks, **dict.fromkeys(sizes, further)))
        return _fill("rayjob", workers=workers, **values)

    def _container(
        self,
        name: str,
        command: Sequence[str] = (),
        *,
        size: _Size,
        secrets: Sequence[str],
        ports: Mapping[str, int] = MappingProxyType({}),
        variables: Mapping[str, str] = MappingProxyType({}),
        has_token: bool = False,
    ) -> Manifest:
        token = _fill("token", variable=TOKEN_VARIABLE, secret=secret_name(self._recipe))
        amounts = {"cpu": str(size.cpus), "memory": f"{ceil(size.memory_gib * 1024)}Mi"}
        return _fill(
            "container",
            name=name,
            image=self._options.image,
            # Escape $(NAME), which Kubernetes would expand.
            command=[word.replace("$(", "$$(") for word in command],
            variables=[{"name": key, "value": value} for key, value in variables.items()],
            token=[token] if has_token else [],
            secrets=[{"secretRef": {"name": each}} for each in secrets],
            ports=[{"name": key, "containerPort": port} for key, port in ports.items()],
            amounts=amounts | ({_GPU: str(size.gpus)} if size.gpus else {}),
        )

    def _role_pod(self, component: str, container: Manifest, **more: Any) -> Manifest:
        return self._pod(component, container, restart="OnFailure", is_account_mounted=False, **more)

    def _pod(
        self, component: str, container: Manifest, *, labels: Mapping[str, str] = MappingProxyType({}), **more: Any
    ) -> Manifest:
        """`labels`: of its node; `more`: values of the template."""
        options = self._options
        claim = {"persistentVolumeClaim": {"claimName": options.claim}} if options.claim else {"emptyDir": {}}
        tolerations: list[Manifest] = []
        for taint in options.tolerations:
            name, _, effect = taint.partition(":")
            key, has_value, value = name.partition("=")
            matched = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
            tolerations.append({"key": key} | matched | ({"effect": effect} if effect else {}))
        if _GPU in container["resources"]["limits"]:
            tolerations.append({"key": _GPU, "operator": "Exists", "effect": "NoSchedule"})
        pod = _fill(
            "pod",
            run=self._name,
            component=component,
            stop_timeout_s=STOP_TIMEOUT_S,
            node_selector={**options.node_selector, **labels},
            tolerations=tolerations,
            pull_secrets=[{"name": each} for each in options.pull_secrets],
            service_account=options.service_account,
            containers=[container],
            workspace=[{"name": "workspace"} | claim],
            **more,
        )
        for patch in self._patches:
            pod = merged(pod, {key: value for key, value in patch.items() if key in ("metadata", "spec")})
        return pod
