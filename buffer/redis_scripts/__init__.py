"""Every Lua script the store runs, one file per noun, each a named constant that says why it must be atomic.

Keys (all begin with the run's hash tag `{run}:`, so that they share a slot):

    run                 hash    phase, step, version, announced_version, config, next_ordinal, admitted, sequences
    counters            hash    accepted, duplicates, superseded, retired, open_members, quarantined_members, metrics
    refused             hash    reason -> trajectories
    group:<id>          hash    attempt, size, purpose, members, owner, sequence, claim_attempts;
                                at:<index> -> trajectory id, sum:<trajectory id> -> checksum
    payloads:<id>       hash    index -> encoded trajectory
    leases              zset    training group -> deadline       evaluation_leases  zset  row group -> deadline
    leases_of:<owner>   set     groups                           returned           zset  group -> ordinal
    open                set     groups with a member missing     ready              zset  group -> ready sequence
    bell                list    at most one ring, for `wait_ready`
    claims              zset    step -> deadline                 claim_fences       hash  step -> fence
    claimed:<step>      list    groups                           used:<step>        list  groups
    used_steps          zset    step -> step                     commit_fences      hash  step -> fence
    done                bitmap  ordinals of retired groups       quarantined_groups hash  group -> reason
    evaluation:<id>     hash    the EvaluationResult             evaluation_pending zset  row group -> sequence
    answers:<id>        set     rows answered, until complete    quarantine         list  refused frames
    roles, role_times   hash    newest gauges                    metrics            list  newest rows
"""
