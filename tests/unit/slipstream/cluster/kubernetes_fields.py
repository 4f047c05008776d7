"""Fields of Kubernetes' Pod, of JobSet v1alpha2 and of KubeRay's RayJob v1 that the manifests use, with their types."""

from typing import Any

from msgspec import defstruct, field


def record(**fields: Any) -> Any:
    """An object that refuses fields of other names; each has a type, or a type and a default."""
    given = [(name, *each) if isinstance(each, tuple) else (name, each) for name, each in fields.items()]
    return defstruct("Record", given, forbid_unknown_fields=True, rename="camel")


Strings = dict[str, str]
Socket = record(port=str)
Probe = record(tcp_socket=Socket, period_seconds=int, failure_threshold=int)
Variable = record(
    name=str, value=(str | None, None), value_from=(record(secret_key_ref=record(name=str, key=str)) | None, None)
)
Capabilities = record(drop=list[str])
ContainerSecurity = record(allow_privilege_escalation=bool, capabilities=Capabilities)
Container = record(
    name=str,
    image=str,
    working_dir=str,
    env=list[Variable],
    resources=record(requests=Strings, limits=Strings),
    security_context=ContainerSecurity,
    volume_mounts=list[record(name=str, mount_path=str)],
    command=(list[str], []),
    ports=(list[record(name=str, container_port=int)], []),
    restart_policy=(str, ""),
    startup_probe=(Probe | None, None),
    liveness_probe=(Probe | None, None),
)
EmptyDir, Claim = record(medium=(str, ""), size_limit=(str, "")), record(claim_name=str)
Volume = record(name=str, empty_dir=(EmptyDir | None, None), persistent_volume_claim=(Claim | None, None))
PodSecurity = record(
    run_as_non_root=bool, run_as_user=int, run_as_group=int, fs_group=int, seccomp_profile=record(type=str)
)
PodSpec = record(
    security_context=PodSecurity,
    containers=list[Container],
    volumes=list[Volume],
    init_containers=(list[Container], []),
    restart_policy=(str, "Always"),
    automount_service_account_token=(bool, True),
    node_selector=(Strings, {}),
)
Metadata = record(labels=Strings, name=(str, ""))
Pod = record(metadata=Metadata, spec=PodSpec)
JobSpec = record(completions=int, parallelism=int, completion_mode=str, backoff_limit=int, template=Pod)
ReplicatedJob = record(name=str, replicas=int, template=record(spec=JobSpec))
Network = record(
    subdomain=str, publish_not_ready_addresses=bool, enable_dns_hostnames=(bool, field(name="enableDNSHostnames"))
)
JobSetSpec = record(
    network=Network,
    success_policy=record(operator=str, target_replicated_jobs=list[str]),
    failure_policy=record(max_restarts=int),
    ttl_seconds_after_finished=int,
    replicated_jobs=list[ReplicatedJob],
)
JobSet = record(api_version=str, kind=str, metadata=Metadata, spec=JobSetSpec)
Workers = record(
    group_name=str,
    replicas=int,
    min_replicas=int,
    max_replicas=int,
    ray_start_params=Strings,
    template=Pod,
    labels=(Strings, {}),
)
RayCluster = record(
    ray_version=str,
    auth_options=record(mode=str),
    enable_in_tree_autoscaling=bool,
    autoscaler_options=record(security_context=ContainerSecurity),
    head_group_spec=record(ray_start_params=Strings, template=Pod),
    worker_group_specs=list[Workers],
)
RayJobSpec = record(
    entrypoint=str,
    shutdown_after_job_finishes=bool,
    ttl_seconds_after_finished=int,
    backoff_limit=int,
    submitter_pod_template=Pod,
    ray_cluster_spec=RayCluster,
)
RayJob = record(api_version=str, kind=str, metadata=Metadata, spec=RayJobSpec)
