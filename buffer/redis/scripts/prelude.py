"""What every script begins with.

Arguments of every script: KEYS[1] is the run's key prefix, from which a script builds the keys it needs (one hash tag,
so one slot also on a cluster); ARGV[1] is the time in milliseconds in tests and empty otherwise.
"""


# @@ Every Lua script the store runs, one file per noun, each a named constant that says why it must be atomic.
#
# Keys (all begin with the run's hash tag `{run}:`, so that they share a slot):
#
#     run                 hash    layout, config_json, num_rows, seed, phase, detail, step, stepped_at, version,
#                                 announced_version, checkpoint, fence, learner_fence, next_ordinal, admitted, consumed,
#                                 consumed_by_version, uses, max_uses, keeps_finished, sequences (ready, finished,
#                                 evaluation), filter, filter_low, filter_high
#     counters            hash    accepted, duplicates, superseded, open_members, short_members, payload_bytes, trained,
#                                 tokens accepted, superseded, wasted and trained, metrics
#     refused             hash    reason -> trajectories
#     group:<id>          hash    attempt, size, baseline ('1': its last member is greedy), purpose, members, owner,
#                                 sequence, claim_attempts, steps ("3,17"), closed (made ready short of members),
#                                 outcome, reason; sums over members (`_ADD_UP`);
#                                 at:<index> -> trajectory id, sum:<trajectory id> -> checksum
#     payloads:<id>       hash    index -> encoded trajectory
#     leases              zset    training group -> deadline       evaluation_leases  zset  row group -> deadline
#     leases_of:<owner>   set     groups                           returned           zset  group -> ordinal
#     open                zset    group short of members -> ms of its first
#     ready               zset    group -> ready sequence
#     reusable            zset    group in a used:<step> that may be drawn again -> ready sequence
#     bell                list    at most one ring, for `wait_ready`
#     claims              zset    step -> deadline                 claim_fences       hash  step -> fence
#     claimed:<step>      list    groups                           used:<step>        list  groups
#     used_steps          zset    step -> step                     commit_fences      hash  step -> fence
#     versions            list    encoded VersionEntry             version_steps      hash  version -> step
#     consumed_at         hash    step -> groups first trained on up to it
#     ledger              hash    step -> encoded StepEntry        done             bitmap  ordinals of groups over
#     finished            zset    group that is over -> sequence   outcomes           hash  outcome -> groups
#     outcome_members     hash    outcome -> trajectories          reasons            hash  outcome: reason -> groups
#     evaluation:<id>     hash    the EvaluationResult             evaluation_pending zset  row group -> sequence
#     answers:<id>        set     rows answered, until complete    quarantine         list  refused frames
#     roles, role_times   hash    newest gauges, and when (1024)   metrics            list  newest rows
#     role_marks, role_progress_times  hash  how far each role was, and when it was last farther
#     events              list    what happened to roles, newest 256
#     launcher_requests, broker_requests  hash  subject -> value, until taken

_COMMON = """
local prefix = KEYS[1]
local function key(name) return prefix .. name end
local function now()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
"""

_NEEDS_RUN = """
if redis.call('EXISTS', key('run')) == 0 then return redis.error_reply('NORUN') end
"""

# Redis refuses the first write of a script when memory is full, unless that write can only free memory; later writes
# pass. Whatever empties the store, or is small and bounded, must go on when it is full, so it begins with such a write.
_RUNS_WHEN_FULL = """
redis.call('DEL', prefix)
"""

DROP_RECORD = """
local function drop_record(group)
  -- Not `-bytes`: of nothing that is "-0", which is no integer to Redis.
  local bytes = redis.call('HGET', key('group:' .. group), 'bytes') or 0
  redis.call('HINCRBY', key('counters'), 'payload_bytes', 0 - bytes)
  redis.call('UNLINK', key('group:' .. group), key('payloads:' .. group))
end
"""

# A group is over; it has left every other place already. Its ordinal is marked in the same instant, so that a late
# answer is known for what it is when the record is gone.
END_GROUP = (
    DROP_RECORD
    + """
local function end_group(group, outcome, reason)
  local group_key, counters = key('group:' .. group), key('counters')
  local f = redis.call('HMGET', group_key, 'members', 'size', 'tokens', 'closed')
  local members = tonumber(f[1])
  redis.call('SETBIT', key('done'), group, 1)
  redis.call('HINCRBY', key('outcomes'), outcome, 1)
  redis.call('HINCRBY', key('outcome_members'), outcome, members)
  if redis.call('ZREM', key('open'), group) == 1 then redis.call('HINCRBY', counters, 'open_members', -members) end
  if f[4] then redis.call('HINCRBY', counters, 'short_members', members - f[2]) end
  if outcome ~= 'retired' then
    redis.call('HINCRBY', key('reasons'), outcome .. ': ' .. reason, 1)
    redis.call('HINCRBY', counters, 'wasted_tokens', f[3] or 0)
    redis.call('HINCRBY', key('run'), 'admitted', -1)
  end
  if members > 0 and redis.call('HGET', key('run'), 'keeps_finished') == '1' then
    redis.call('HSET', group_key, 'outcome', outcome, 'reason', reason)
    redis.call('ZADD', key('finished'), redis.call('HINCRBY', key('run'), 'finished_sequence', 1), group)
  else
    drop_record(group)
  end
end
"""
)

RING_BELL = """
local function ring_bell()
  redis.call('LPUSH', key('bell'), 1)
  redis.call('LTRIM', key('bell'), 0, 0)
end
"""


def script(*parts: str, needs_run: bool = True, runs_when_full: bool = True) -> str:
    """A whole script out of the common beginning, the shared functions it uses, and its body."""
    beginning = [_COMMON]
    if needs_run:
        beginning.append(_NEEDS_RUN)
    if runs_when_full:
        beginning.append(_RUNS_WHEN_FULL)
    return "".join([*beginning, *parts])
