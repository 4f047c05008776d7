"""Scripts on claims, commits and retirement."""

from buffer.redis_scripts.prelude import QUARANTINE_GROUP, RING_BELL, script

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

# Atomic because groups must not be in no place between claim and ready. step -> number ready then.
RELEASE_CLAIM = script(
    _MAKE_READY,
    """
release(ARGV[2])
return redis.call('ZCARD', key('ready'))
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

# Atomic because a lapsed claim must never commit, and the run's step must move with its groups. A repeat of the commit
# that was accepted is accepted: its answer may have got lost. step, fence -> 1 | 0.
COMMIT = script(
    """
local step, fence = ARGV[2], ARGV[3]
if redis.call('HGET', key('commit_fences'), step) == fence then return 1 end
if redis.call('HGET', key('claim_fences'), step) ~= fence then return 0 end
redis.call('ZREM', key('claims'), step)
redis.call('HDEL', key('claim_fences'), step)
for _, group in ipairs(redis.call('LRANGE', key('claimed:' .. step), 0, -1)) do
  redis.call('RPUSH', key('used:' .. step), group)
end
redis.call('DEL', key('claimed:' .. step))
redis.call('ZADD', key('used_steps'), step, step)
redis.call('HSET', key('commit_fences'), step, fence)
redis.call('HSET', key('run'), 'step', step)
return 1
"""
)

# Atomic because a group must be recognised as done from the instant its record is gone. step -> number retired.
RETIRE_STEP = script(
    """
local step = ARGV[2]
local groups = redis.call('LRANGE', key('used:' .. step), 0, -1)
redis.call('ZREM', key('used_steps'), step)
redis.call('HDEL', key('commit_fences'), step)
for _, group in ipairs(groups) do
  redis.call('SETBIT', key('done'), group, 1)
  redis.call('UNLINK', key('group:' .. group), key('payloads:' .. group))
end
redis.call('UNLINK', key('used:' .. step))
redis.call('HINCRBY', key('counters'), 'retired', #groups)
return #groups
"""
)

# Atomic because step, versions and groups must go back together. to_step, to_version -> number ready again.
ROLL_BACK = script(
    _MAKE_READY,
    RING_BELL,
    """
local returned = 0
for _, step in ipairs(redis.call('ZRANGE', key('claims'), 0, -1)) do returned = returned + release(step) end
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('used_steps'), '(' .. ARGV[2], '+inf')) do
  returned = returned + make_ready(key('used:' .. step))
  redis.call('ZREM', key('used_steps'), step)
  redis.call('HDEL', key('commit_fences'), step)
end
redis.call('HSET', key('run'), 'step', ARGV[2], 'version', ARGV[3], 'announced_version', ARGV[3])
ring_bell()
return returned
""",
)

# Atomic because a claim found lapsed must not be committed before it is taken back.
# max_attempts -> [step, number ready again, [quarantined group, ...]], ...
REAP_CLAIMS = script(
    _MAKE_READY,
    QUARANTINE_GROUP,
    RING_BELL,
    """
local events = {}
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('claims'), '-inf', now())) do
  local list, quarantined = key('claimed:' .. step), {}
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if redis.call('HINCRBY', key('group:' .. group), 'claim_attempts', 1) >= tonumber(ARGV[2]) then
      redis.call('LREM', list, 1, group)
      quarantine_group(group, 'claim_attempts')
      quarantined[#quarantined + 1] = group
    end
  end
  events[#events + 1] = {step, release(step), quarantined}
  ring_bell()
end
return events
""",
)
