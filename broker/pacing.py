"""Pacing: how many training prompts may ever have been admitted, given what the learner has consumed."""

from configs.run import RunConfig


def admission_limit(run: RunConfig, *, version: int) -> int:
    """Groups that may have been admitted in all while `version` is the newest committed policy version.

    limit = min((max_lag + version + 1) * groups_per_version, max_steps * groups_per_step)

    With max_lag = 0 exactly one version's worth of groups is out at a time: the synchronous run. Groups that fall out
    (quarantine) are taken off `admitted` by the store, which gives their budget back.

    Source: AReaL, arXiv:2505.24298, section 5.1.
    Differs: never admits more than the run will consume, so that the last steps leave nothing unused.
    """
    paced = (run.buffer.staleness.max_lag + version + 1) * run.groups_per_version
    return min(paced, run.learner.max_steps * run.learner.groups_per_step)
