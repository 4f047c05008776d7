"""Fields of Kubernetes' Pod, of JobSet v1alpha2 and of KubeRay's RayJob v1 that the manifests use, with their types."""

from typing import Any

from msgspec import defstruct, field


def record(texts: str = "", *, numbers: str = "", **fields: Any) -> Any:
    """An object that refuses fields of other names: texts, numbers, and those with a type, or a type and a default."""
    fields |= dict.fromkeys(texts.split(), str) | dict.fromkeys(numbers.split(), int)
    given = [(name, *each) if isinstance(each, tuple) else (name, each) for name, each in fields.items()]
    given.sort(key=len)
    return defstruct("Record", given, forbid_unknown_fields=True, rename="camel")


Strings = dict[str, str]
Resources = record(requests=Strings, limits=Strings)
Probe = record(numbers="period_seconds failure_threshold", tcp_socket=record("port")) | None
SecretKey = record(secret_key_ref=record("name key")) | None
Variable = record("name", value=(str | None, None), value_from=(SecretKey, None))
Capabilities = record(drop=list[str])
ContainerSecurity = record(allow_privilege_escalation=bool, capabilities=Capabilities)
Container = record(
    "name image working_dir",
    env=list[Variable],
    resources=Resources,
    security_context=ContainerSecurity,
    volume_mounts=list[record("name mount_path")],
    command=(list[str], []),
    env_from=(list[record(secret_ref=record("name"))], []),
    ports=(list[record("name", numbers="container_port")], []),
    restart_policy=(str, ""),
    **dict.fromkeys(("startup_probe", "liveness_probe", "readiness_probe"), (Probe, None)),
)
EmptyDir, Claim = record(medium=(str, ""), size_limit=(str, "")), record("claim_name")
Volume = record("name", empty_dir=(EmptyDir | None, None), persistent_volume_claim=(Claim | None, None))
Ids = "run_as_user run_as_group fs_group"
PodSecurity = record("fs_group_change_policy", numbers=Ids, run_as_non_root=bool, seccomp_profile=record("type"))
Toleration = record("key operator", value=(str, ""), effect=(str, ""))
PodSpec = record(
    numbers="termination_grace_period_seconds",
    security_context=PodSecurity,
    containers=list[Container],
    volumes=list[Volume],
    init_containers=(list[Container], []),
    restart_policy=(str, "Always"),
    automount_service_account_token=(bool, True),
    node_selector=(Strings, {}),
    tolerations=(list[Toleration], []),
    image_pull_secrets=(list[record("name")], []),
    service_account_name=(str, ""),
    priority_class_name=(str, ""),
)
Metadata = record(labels=Strings, name=(str, ""), namespace=(str, ""), annotations=(Strings, {}))
Pod = record(metadata=Metadata, spec=PodSpec)
JobSpec = record("completion_mode", numbers="completions parallelism backoff_limit", template=Pod)
ReplicatedJob = record("name", numbers="replicas", template=record(spec=JobSpec))
DnsNames = (bool, field(name="enableDNSHostnames"))
Network = record("subdomain", publish_not_ready_addresses=bool, enable_dns_hostnames=DnsNames)
JobSetSpec = record(
    numbers="ttl_seconds_after_finished",
    network=Network,
    success_policy=record("operator", target_replicated_jobs=list[str]),
    failure_policy=record(numbers="max_restarts"),
    replicated_jobs=list[ReplicatedJob],
)
JobSet = record("api_version kind", metadata=Metadata, spec=JobSetSpec)
Replicas = "replicas min_replicas max_replicas"
Workers = record("group_name", numbers=Replicas, ray_start_params=Strings, template=Pod, labels=(Strings, {}))
RayCluster = record(
    "ray_version",
    auth_options=record("mode"),
    enable_in_tree_autoscaling=bool,
    autoscaler_options=record(security_context=ContainerSecurity, resources=Resources),
    head_group_spec=record(ray_start_params=Strings, template=Pod),
    worker_group_specs=list[Workers],
)
RayJobSpec = record(
    "entrypoint",
    numbers="ttl_seconds_after_finished backoff_limit",
    shutdown_after_job_finishes=bool,
    submitter_pod_template=Pod,
    ray_cluster_spec=RayCluster,
)
RayJob = record("api_version kind", metadata=Metadata, spec=RayJobSpec)
