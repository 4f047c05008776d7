"""Admission: how many training prompts may be in flight."""

import sys

from slipstream.buffer.accounting import StoreCounts
from slipstream.buffer.records import RunState
from slipstream.configs.buffer import CapacityConfig
from slipstream.configs.run import RunConfig


def admission_limit(run: RunConfig, *, consumed: int) -> int:
    """Maximum of `StoreCounts.admitted`, given the groups `consumed` by the committed version.

    limit = min(consumed + (target_lag + 1) * groups_per_version, max_steps * claimed_groups_per_step)

    `target_lag` defaults to max_lag; 0 is the synchronous run, with one version's worth of groups in flight. Groups
    that end without a step (rejected, expired, quarantined) return their budget: the store subtracts them from
    `admitted`. Both counters live in the store, so a restarted broker neither bursts nor starves.

    Source: AReaL, arXiv:2505.24298, section 5.1. Its version * groups_per_version equals `consumed` without reuse.
    Differs: Reused groups add no budget. The limit never exceeds the run's total consumption, so no group is left
        unused. A replay admits none: its groups are already stored.
    """
    if run.mode == "replay":
        return 0
    paced = consumed + int(run.staleness.window * run.groups_per_version)
    return min(paced, run.learner.max_steps * run.claimed_groups_per_step)


def pacing_reason(state: RunState) -> str:
    """Reason of a generator that waits for the learner."""
    return f"pacing: the learner is at version {state.version} and must consume before more prompts are admitted"


def admission_reason(run: RunConfig, *, state: RunState, counts: StoreCounts) -> str:
    """Reason that no new training prompt can be admitted; empty if one can."""
    if state.phase not in ("starting", "training"):
        return f"the run is {state.phase}"
    if reason := capacity_reason(run.buffer.capacity, counts):
        return reason
    return pacing_reason(state) if counts.admitted >= admission_limit(run, consumed=state.consumed) else ""


def oldest_version(run: RunConfig, *, committed: int) -> int:
    """Oldest version for which training prompts are leased; older tokens would be stale on arrival."""
    return committed - run.staleness.max_lag


def weights_reason(run: RunConfig, *, version: int, committed: int) -> str:
    """Reason that a generator at this version gets no training prompts; empty if it does, or has no version (-1)."""
    if version < 0 or version >= oldest_version(run, committed=committed):
        return ""
    max_lag = run.staleness.max_lag
    return f"weights: holds version {version}, {committed} is committed and staleness.max_lag is {max_lag}"


def capacity_reason(capacity: CapacityConfig, counts: StoreCounts) -> str:
    """Capacity limit that is reached; empty if the store has room."""
    if capacity.max_groups is not None and counts.outstanding >= capacity.max_groups:
        limit = f"buffer.capacity.max_groups is {capacity.max_groups}"
        return f"capacity: {counts.outstanding} groups are outstanding, {limit}"
    stored_mib = counts.payload_bytes / 2**20
    if capacity.max_mib is not None and stored_mib >= capacity.max_mib:
        return f"capacity: {stored_mib:.1f} MiB are stored, buffer.capacity.max_mib is {capacity.max_mib}"
    return ""


def capacity_limit(capacity: CapacityConfig, counts: StoreCounts) -> int:
    """Maximum of `StoreCounts.admitted` within the store's capacity."""
    if capacity_reason(capacity, counts):
        return counts.admitted
    if capacity.max_groups is None:
        return sys.maxsize
    return counts.admitted + capacity.max_groups - counts.outstanding
