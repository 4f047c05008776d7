"""Every Lua script the store runs, one file per noun, each a named constant that says why it must be atomic.

Keys (all begin with the run's hash tag `{run}:`, so that they share a slot):

    run                 hash    layout, config_json, num_rows, seed, phase, detail, step, stepped_at, version,
                                announced_version, checkpoint, fence, learner_fence, next_ordinal, admitted, consumed,
                                consumed_by_version, uses, max_uses, keeps_finished, sequences (ready, finished,
                                evaluation), filter, filter_low, filter_high
    counters            hash    accepted, duplicates, superseded, open_members, short_members, payload_bytes, trained,
                                tokens accepted, superseded, wasted and trained, metrics
    refused             hash    reason -> trajectories
    group:<id>          hash    attempt, size, baseline ('1': its last member is greedy), purpose, members, owner,
                                sequence, claim_attempts, leased_version, steps ("3,17"), demoted, closed (made ready
                                short of members), outcome, reason; sums over members (`_ADD_UP`);
                                at:<index> -> trajectory id, sum:<trajectory id> -> checksum
    payloads:<id>       hash    index -> encoded trajectory
    leases              zset    training group -> deadline       evaluation_leases  zset  row group -> deadline
    leases_of:<owner>   set     groups                           returned           zset  group -> ordinal
    open                zset    group short of members -> ms of its first
    ready               zset    group -> ready sequence          demoted            zset  group -> ready sequence
    reusable            zset    group, demoted or in a used:<step>, that may be drawn again -> ready sequence
    bell                list    at most one ring, for `wait_ready`
    claims              zset    step -> deadline                 claim_fences       hash  step -> fence
    claimed:<step>      list    groups                           used:<step>        list  groups
    used_steps          zset    step -> step                     commit_fences      hash  step -> fence
    versions            list    encoded VersionEntry             version_steps      hash  version -> step
    consumed_at         hash    step -> groups first trained on up to it
    ledger              hash    step -> encoded StepEntry        done             bitmap  ordinals of groups over
    finished            zset    group that is over -> sequence   outcomes           hash  outcome -> groups
    outcome_members     hash    outcome -> trajectories          reasons            hash  outcome: reason -> groups
    evaluation:<id>     hash    the EvaluationResult             evaluation_pending zset  row group -> sequence
    answers:<id>        set     rows answered, until complete    quarantine         list  refused frames
    roles, role_times   hash    newest gauges, and when (1024)   metrics            list  newest rows
    role_marks, role_progress_times  hash  how far each role was, and when it was last farther
    events              list    what happened to roles, newest 256
    launcher_requests, broker_requests  hash  subject -> value, until taken
"""
