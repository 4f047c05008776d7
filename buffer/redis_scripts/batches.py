"""Scripts on claims, commits and retirement."""

from buffer.redis_scripts.prelude import END_GROUP, RING_BELL, script

# A group's ready sequence never changes, so it comes back to its old place in the order.
_MAKE_READY = """
local function make_ready(list)
  local groups = redis.call('LRANGE', list, 0, -1)
  for _, group in ipairs(groups) do
    redis.call('ZADD', key('ready'), redis.call('HGET', key('group:' .. group), 'sequence'), group)
  end
  redis.call('DEL', list)
  return #groups
end
local function release(step)
  redis.call('ZREM', key('claims'), step)
  redis.call('HDEL', key('claim_fences'), step)
  return make_ready(key('claimed:' .. step))
end
"""

# The claim was not brought to its end: its groups are ready again, but for those that were tried too often.
_FAIL_CLAIM = """
local function fail_claim(step, max_attempts)
  local list, tired = key('claimed:' .. step), {}
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if redis.call('HINCRBY', key('group:' .. group), 'claim_attempts', 1) >= tonumber(max_attempts) then
      redis.call('LREM', list, 1, group)
      end_group(group, 'quarantined', 'claim_attempts')
      tired[#tired + 1] = group
    end
  end
  return release(step), tired
end
"""

# Atomic because groups must not be in no place between claim and ready. step -> the run's step, number ready then.
RELEASE_CLAIM = script(
    _MAKE_READY,
    """
release(ARGV[2])
return {tonumber(redis.call('HGET', key('run'), 'step')), redis.call('ZCARD', key('ready'))}
""",
)

# Atomic because a group must be claimed once, and the fence must grow with the claim.
# step, lease_ms, number of ready groups the ranks were drawn for, ranks... -> fence, group ids...; nothing when there
# are fewer by now, or the step has a claim again.
CLAIM = script(
    """
local step, groups = ARGV[2], {}
if redis.call('ZCARD', key('ready')) < tonumber(ARGV[4]) or redis.call('ZSCORE', key('claims'), step) then return {} end
for i = 5, #ARGV do groups[#groups + 1] = redis.call('ZRANGE', key('ready'), ARGV[i], ARGV[i])[1] end
for _, group in ipairs(groups) do
  redis.call('ZREM', key('ready'), group)
  redis.call('RPUSH', key('claimed:' .. step), group)
end
redis.call('ZADD', key('claims'), now() + tonumber(ARGV[3]), step)
local fence = redis.call('HINCRBY', key('run'), 'fence', 1)
redis.call('HSET', key('claim_fences'), step, fence)
table.insert(groups, 1, fence)
return groups
"""
)

# Atomic because a claim that lapses in between must not be revived. step, fence, lease_ms -> 1 | 0.
RENEW_CLAIM = script(
    """
if redis.call('HGET', key('claim_fences'), ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('ZADD', key('claims'), now() + tonumber(ARGV[4]), ARGV[2])
return 1
"""
)

# Atomic because a group must be in the claim or over. step, fence, reason, groups... -> number rejected; -1 when stale.
REJECT = script(
    END_GROUP,
    """
if redis.call('HGET', key('claim_fences'), ARGV[2]) ~= ARGV[3] then return -1 end
local rejected = 0
for i = 5, #ARGV do
  if redis.call('LREM', key('claimed:' .. ARGV[2]), 1, ARGV[i]) == 1 then
    end_group(ARGV[i], 'rejected', ARGV[4])
    rejected = rejected + 1
  end
end
return rejected
""",
)

# Atomic because a lapsed claim must never commit, and the run's step and its ledger must move with its groups. A repeat
# of the commit that was accepted is accepted: its answer may have got lost. step, fence, ledger entry -> whether the
# claim is live, the newest step: the claim's when it was committed.
COMMIT = script(
    """
local step, fence = ARGV[2], ARGV[3]
local newest = tonumber(redis.call('HGET', key('run'), 'step'))
if redis.call('HGET', key('commit_fences'), step) == fence then return {1, tonumber(step)} end
if redis.call('HGET', key('claim_fences'), step) ~= fence then return {0, newest} end
if tonumber(step) ~= newest + 1 then return {1, newest} end
redis.call('ZREM', key('claims'), step)
redis.call('HDEL', key('claim_fences'), step)
for _, group in ipairs(redis.call('LRANGE', key('claimed:' .. step), 0, -1)) do
  redis.call('HSET', key('group:' .. group), 'steps', step)
end
if redis.call('EXISTS', key('claimed:' .. step)) == 1 then
  redis.call('RENAME', key('claimed:' .. step), key('used:' .. step))
end
redis.call('ZADD', key('used_steps'), step, step)
redis.call('HSET', key('commit_fences'), step, fence)
redis.call('HSET', key('ledger'), step, ARGV[4])
redis.call('HSET', key('run'), 'step', step)
return {1, tonumber(step)}
"""
)

# Atomic because a pointer must not outlive the steps it covers. pointer's step, pointer -> the run's step.
SET_CHECKPOINT = script(
    """
local step = tonumber(redis.call('HGET', key('run'), 'step'))
if tonumber(ARGV[2]) <= step then redis.call('HSET', key('run'), 'checkpoint', ARGV[3]) end
return step
"""
)

# Atomic because a group must be recognised as over from the instant its record is gone. step -> number retired.
RETIRE_STEP = script(
    END_GROUP,
    """
local step = ARGV[2]
local groups = redis.call('LRANGE', key('used:' .. step), 0, -1)
redis.call('ZREM', key('used_steps'), step)
redis.call('HDEL', key('commit_fences'), step)
for _, group in ipairs(groups) do end_group(group, 'retired', '') end
redis.call('DEL', key('used:' .. step))
return #groups
""",
)

# Atomic because step, versions, ledger and groups must go back together.
# to_step, to_version, max_attempts -> number ready again.
ROLL_BACK = script(
    _MAKE_READY,
    END_GROUP,
    _FAIL_CLAIM,
    RING_BELL,
    """
local returned = 0
for _, step in ipairs(redis.call('ZRANGE', key('claims'), 0, -1)) do
  returned = returned + fail_claim(step, ARGV[4])
end
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('used_steps'), '(' .. ARGV[2], '+inf')) do
  for _, group in ipairs(redis.call('LRANGE', key('used:' .. step), 0, -1)) do
    redis.call('HDEL', key('group:' .. group), 'steps')
  end
  returned = returned + make_ready(key('used:' .. step))
  redis.call('ZREM', key('used_steps'), step)
  redis.call('HDEL', key('commit_fences'), step)
end
for step = ARGV[2] + 1, tonumber(redis.call('HGET', key('run'), 'step')) do
  redis.call('HDEL', key('ledger'), string.format('%d', step))
end
redis.call('HSET', key('run'), 'step', ARGV[2], 'version', ARGV[3])
ring_bell()
return returned
""",
)

# Atomic because a claim found lapsed must not be committed before it is taken back.
# max_attempts -> [step, number ready again, [quarantined group, ...]], ...
REAP_CLAIMS = script(
    _MAKE_READY,
    END_GROUP,
    _FAIL_CLAIM,
    RING_BELL,
    """
local events = {}
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('claims'), '-inf', now())) do
  local num_ready, tired = fail_claim(step, ARGV[2])
  events[#events + 1] = {step, num_ready, tired}
  ring_bell()
end
return events
""",
)
