"""Fields of Kubernetes' Pod, of JobSet v1alpha2 and of KubeRay's RayJob v1 that the manifests use, with their types."""

import msgspec
from msgspec import field


class Fields(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """An object that refuses fields of other names."""


class KeyRef(Fields):
    name: str
    key: str


class ValueFrom(Fields):
    secret_key_ref: KeyRef


class Variable(Fields):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Port(Fields):
    name: str
    container_port: int


class Capabilities(Fields):
    drop: list[str]


class ContainerSecurity(Fields):
    allow_privilege_escalation: bool
    capabilities: Capabilities


class Resources(Fields):
    requests: dict[str, str]
    limits: dict[str, str]


class Mount(Fields):
    name: str
    mount_path: str


class Socket(Fields):
    port: str


class Probe(Fields):
    tcp_socket: Socket
    period_seconds: int
    failure_threshold: int


class Container(Fields):
    name: str
    image: str
    working_dir: str
    env: list[Variable]
    resources: Resources
    security_context: ContainerSecurity
    volume_mounts: list[Mount]
    command: list[str] = []
    ports: list[Port] = []
    restart_policy: str = ""
    startup_probe: Probe | None = None
    liveness_probe: Probe | None = None


class Claim(Fields):
    claim_name: str


class EmptyDir(Fields):
    medium: str = ""
    size_limit: str = ""


class Volume(Fields):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None


class Seccomp(Fields):
    type: str


class PodSecurity(Fields):
    run_as_non_root: bool
    run_as_user: int
    run_as_group: int
    fs_group: int
    seccomp_profile: Seccomp


class PodSpec(Fields):
    security_context: PodSecurity
    containers: list[Container]
    volumes: list[Volume]
    init_containers: list[Container] = []
    restart_policy: str = "Always"
    automount_service_account_token: bool = True
    node_selector: dict[str, str] = {}


class Metadata(Fields):
    labels: dict[str, str]
    name: str = ""


class Pod(Fields):
    metadata: Metadata
    spec: PodSpec


class JobSpec(Fields):
    completions: int
    parallelism: int
    completion_mode: str
    backoff_limit: int
    template: Pod


class JobTemplate(Fields):
    spec: JobSpec


class ReplicatedJob(Fields):
    name: str
    replicas: int
    template: JobTemplate


class Network(Fields):
    enable_dns_hostnames: bool = field(name="enableDNSHostnames")
    subdomain: str
    publish_not_ready_addresses: bool


class SuccessPolicy(Fields):
    operator: str
    target_replicated_jobs: list[str]


class FailurePolicy(Fields):
    max_restarts: int


class JobSetSpec(Fields):
    network: Network
    success_policy: SuccessPolicy
    failure_policy: FailurePolicy
    ttl_seconds_after_finished: int
    replicated_jobs: list[ReplicatedJob]


class JobSet(Fields):
    api_version: str
    kind: str
    metadata: Metadata
    spec: JobSetSpec


class Auth(Fields):
    mode: str


class Autoscaler(Fields):
    security_context: ContainerSecurity


class Head(Fields):
    ray_start_params: dict[str, str]
    template: Pod


class Workers(Fields):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: Pod
    labels: dict[str, str] = {}


class RayCluster(Fields):
    ray_version: str
    auth_options: Auth
    enable_in_tree_autoscaling: bool
    autoscaler_options: Autoscaler
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayJobSpec(Fields):
    entrypoint: str
    shutdown_after_job_finishes: bool
    ttl_seconds_after_finished: int
    backoff_limit: int
    submitter_pod_template: Pod
    ray_cluster_spec: RayCluster


class RayJob(Fields):
    api_version: str
    kind: str
    metadata: Metadata
    spec: RayJobSpec
