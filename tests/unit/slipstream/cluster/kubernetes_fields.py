"""Fields of Kubernetes' Pod, of JobSet v1alpha2 and of KubeRay's RayJob v1 that the manifests use, with their types."""

from typing import Any

from msgspec import defstruct, field


def record(**fields: Any) -> Any:
    """An object that refuses fields of other names; each has a type, or a type and a default."""
    given = [(name, *each) if isinstance(each, tuple) else (name, each) for name, each in fields.items()]
    return defstruct("Record", given, forbid_unknown_fields=True, rename="camel")


Strings = dict[str, str]
Socket = record(port=str)
Resources = record(requests=Strings, limits=Strings)
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
    resources=Resources,
    security_context=ContainerSecurity,
    volume_mounts=list[record(name=str, mount_path=str)],
    command=(list[str], []),
    env_from=(list[record(secret_ref=record(name=str))], []),
    ports=(list[record(name=str, container_port=int)], []),
    restart_policy=(str, ""),
    startup_probe=(Probe | None, None),
    liveness_probe=(Probe | None, None),
    readiness_probe=(Probe | None, None),
)
EmptyDir, Claim = record(medium=(str, ""), size_limit=(str, "")), record(claim_name=str)
Volume = record(name=str, empty_dir=(EmptyDir | None, None), persistent_volume_claim=(Claim | None, None))
PodSecurity = record(
    run_as_non_root=bool,
    run_as_user=int,
    run_as_group=int,
    fs_group=int,
    fs_group_change_policy=str,
    seccomp_profile=record(type=str),
)
Toleration = record(key=str, operator=str, value=(str, ""), effect=(str, ""))
PodSpec = record(
    security_context=PodSecurity,
    containers=list[Container],
    volumes=list[Volume],
    termination_grace_period_seconds=int,
    init_containers=(list[Container], []),
    restart_policy=(str, "Always"),
    automount_service_account_token=(bool, True),
    node_selector=(Strings, {}),
    tolerations=(list[Toleration], []),
    image_pull_secrets=(list[record(name=str)], []),
    service_account_name=(str, ""),
    priority_class_name=(str, ""),
)
Metadata = record(labels=Strings, name=(str, ""), namespace=(str, ""), annotations=(Strings, {}))
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
    autoscaler_options=record(security_context=ContainerSecurity, resources=Resources),
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
