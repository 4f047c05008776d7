"""Every Lua script the store runs, one file per noun, each a named constant that says why it must be atomic.

Keys (all begin with the run's hash tag `{run}:`, so that they share a slot):

    run                 hash    phase, step, version, announced_version, checkpoint, config, next_ordinal, admitted,
                                keeps_finished, sequences
    counters            hash    accepted, duplicates, superseded, open_members, metrics
    refused             hash    reason -> trajectories
    group:<id>          hash    attempt, size, purpose, members, owner, sequence, claim_attempts, steps, outcome,
                                reason; at:<index> -> trajectory id, sum:<trajectory id> -> checksum
    payloads:<id>       hash    index -> encoded trajectory
    leases              zset    training group -> deadline       evaluation_leases  zset  row group -> deadline
    leases_of:<owner>   set     groups                           returned           zset  group -> ordinal
    open                set     groups with a member missing     ready              zset  group -> ready sequence
    bell                list    at most one ring, for `wait_ready`
    claims              zset    step -> deadline                 claim_fences       hash  step -> fence
    claimed:<step>      list    groups                           used:<step>        list  groups
    used_steps          zset    step -> step                     commit_fences      hash  step -> fence
    versions            list    encoded VersionEntry
    ledger              hash    step -> encoded StepEntry        done             bitmap  ordinals of groups over
    finished            zset    group that is over -> sequence   outcomes           hash  outcome -> groups
    outcome_members     hash    outcome -> trajectories          reasons            hash  outcome: reason -> groups
    evaluation:<id>     hash    the EvaluationResult             evaluation_pending zset  row group -> sequence
    answers:<id>        set     rows answered, until complete    quarantine         list  refused frames
    roles, role_times   hash    newest gauges                    metrics            list  newest rows
"""
