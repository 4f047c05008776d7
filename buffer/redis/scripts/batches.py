"""Scripts on claims, commits and retirement."""

from slipstream.buffer.redis.scripts.prelude import END_GROUP, RING_BELL, script

# A group's ready sequence never changes, so it comes back to its old place in the order. `steps` are those that trained
# on it, as "3,17".
_PLACES = """
local function steps_of(group) return redis.call('HGET', key('group:' .. group), 'steps') or '' end
local function last_of(steps) return string.match(steps, '(%d+)$') end
local function count(steps) return select(2, string.gsub(steps, '%d+', '')) end
local function make_reusable(group, sequence) redis.call('ZADD', key('reusable'), sequence, group) end

-- Into the place where it waits to be drawn: used before (again, unless it has been let go), or ready.
local function put(group, is_let_go)
  local f = redis.call('HMGET', key('group:' .. group), 'sequence', 'steps')
  local sequence, steps = f[1], f[2] or ''
  if steps ~= '' then
    redis.call('RPUSH', key('used:' .. last_of(steps)), group)
    redis.call('ZADD', key('used_steps'), last_of(steps), last_of(steps))
    if not is_let_go then make_reusable(group, sequence) end
  else
    redis.call('ZADD', key('ready'), sequence, group)
  end
end

-- Out of the place where it waits to be drawn.
local function take(group)
  redis.call('ZREM', key('reusable'), group)
  if redis.call('ZREM', key('ready'), group) == 1 then return end
  redis.call('LREM', key('used:' .. last_of(steps_of(group))), 1, group)
end

local function put_all(list)
  local groups = redis.call('LRANGE', list, 0, -1)
  redis.call('DEL', list)
  for _, group in ipairs(groups) do put(group) end
  return #groups
end
local function release(step)
  redis.call('ZREM', key('claims'), step)
  redis.call('HDEL', key('claim_fences'), step)
  return put_all(key('claimed:' .. step))
end
"""

# The claim was not brought to its end: its groups may be drawn again, but for those that were tried too often. One that
# was trained on before is no poison, and is only let go.
_FAIL_CLAIM = """
local function fail_claim(step, max_attempts)
  local list, tired = key('claimed:' .. step), {}
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if redis.call('HINCRBY', key('group:' .. group), 'claim_attempts', 1) >= tonumber(max_attempts) then
      redis.call('LREM', list, 1, group)
      if steps_of(group) ~= '' then
        put(group, true)
      else
        end_group(group, 'quarantined', 'claim_attempts')
        tired[#tired + 1] = group
      end
    end
  end
  return release(step), tired
end
"""

# Atomic because groups must not be in no place between claim and queue. step, number wanted -> the run's step, number
# ready, the wanted number of groups that became ready first.
RELEASE_CLAIM = script(
    _PLACES,
    """
release(ARGV[2])
return {tonumber(redis.call('HGET', key('run'), 'step')), redis.call('ZCARD', key('ready')),
  redis.call('ZRANGE', key('ready'), 0, ARGV[3] - 1)}
""",
)

# Atomic because a draw must be made from what is there at one instant. It reads every group that may be drawn, which
# pacing and `reuse.max_groups` bound.
# -> groups that ever became ready, uses, ready, reusable; these as texts, because a client takes ten times as long over
# thousands of small answers: for each group, separated by `;`,
# `id sequence oldest_version answered reward_sum reward_squares`.
QUEUE = script(
    """
local function candidates(place)
  local found = {}
  for _, group in ipairs(redis.call('ZRANGE', key(place), 0, -1)) do
    local facts = redis.call('HMGET', key('group:' .. group), 'sequence', 'oldest', 'answered', 'reward_sum',
      'reward_squares')
    found[#found + 1] = group .. ' ' .. table.concat(facts, ' ')
  end
  return table.concat(found, ';')
end
local run = redis.call('HMGET', key('run'), 'ready_sequence', 'uses')
return {tonumber(run[1]), tonumber(run[2]), candidates('ready'), candidates('reusable')}
"""
)

# Atomic because a group must not be drawn while it leaves the queue. One that has moved since is skipped.
# number expired, groups (expired, then released)...
SIFT = script(
    END_GROUP,
    """
local num_expired = tonumber(ARGV[2])
local function expire(group)
  if redis.call('ZREM', key('ready'), group) == 1 then end_group(group, 'expired', 'on_stale') end
end
for i = 3, #ARGV do
  if i - 2 <= num_expired then expire(ARGV[i]) else redis.call('ZREM', key('reusable'), ARGV[i]) end
end
""",
)

# Atomic because a group must be claimed once, and the fence must grow with the claim.
# step, lease_ms, groups... -> fence, and summed over the groups: members, in_flight, publish, arrived; nothing when one
# of them has moved since it was drawn, or the step has a claim again.
CLAIM = script(
    _PLACES,
    """
local step, sums = ARGV[2], {0, 0, 0, 0}
if redis.call('ZSCORE', key('claims'), step) then return {} end
for i = 4, #ARGV do
  if not (redis.call('ZSCORE', key('ready'), ARGV[i]) or redis.call('ZSCORE', key('reusable'), ARGV[i])) then
    return {}
  end
end
for i = 4, #ARGV do
  local group = ARGV[i]
  take(group)
  redis.call('RPUSH', key('claimed:' .. step), group)
  local f = redis.call('HMGET', key('group:' .. group), 'members', 'in_flight', 'publish', 'arrived')
  for place = 1, 4 do sums[place] = sums[place] + (tonumber(f[place]) or 0) end
end
redis.call('ZADD', key('claims'), now() + tonumber(ARGV[3]), step)
local fence = redis.call('HINCRBY', key('run'), 'fence', 1)
redis.call('HSET', key('claim_fences'), step, fence)
return {fence, unpack(sums)}
""",
)

# Atomic because a claim that lapses in between must not be revived. step, fence, lease_ms -> 1 | 0.
RENEW_CLAIM = script(
    """
if redis.call('HGET', key('claim_fences'), ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('ZADD', key('claims'), now() + tonumber(ARGV[4]), ARGV[2])
return 1
"""
)

# Atomic because a group must be in the claim or over; one that was trained on before is let go.
# step, fence, reason, groups... -> number rejected; -1 when stale.
REJECT = script(
    _PLACES,
    END_GROUP,
    """
if redis.call('HGET', key('claim_fences'), ARGV[2]) ~= ARGV[3] then return -1 end
local rejected = 0
for i = 5, #ARGV do
  if redis.call('LREM', key('claimed:' .. ARGV[2]), 1, ARGV[i]) == 1 then
    if steps_of(ARGV[i]) ~= '' then put(ARGV[i], true) else end_group(ARGV[i], 'rejected', ARGV[4]) end
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
    _PLACES,
    """
local step, fence = ARGV[2], ARGV[3]
local run, counters = key('run'), key('counters')
local max_uses, fresh, used = tonumber(redis.call('HGET', run, 'max_uses')), 0, 0
local function use(group)
  local group_key = key('group:' .. group)
  local f = redis.call('HMGET', group_key, 'steps', 'members', 'tokens', 'sequence')
  local steps = f[1] or ''
  used = used + 1
  if steps == '' then fresh = fresh + 1 end
  steps = steps == '' and step or steps .. ',' .. step
  redis.call('HSET', group_key, 'steps', steps)
  redis.call('HINCRBY', counters, 'trained', f[2])
  redis.call('HINCRBY', counters, 'trained_tokens', f[3] or 0)
  if count(steps) < max_uses then make_reusable(group, f[4]) end
end
local newest = tonumber(redis.call('HGET', key('run'), 'step'))
if redis.call('HGET', key('commit_fences'), step) == fence then return {1, tonumber(step)} end
if redis.call('HGET', key('claim_fences'), step) ~= fence then return {0, newest} end
if tonumber(step) ~= newest + 1 then return {1, newest} end
redis.call('ZREM', key('claims'), step)
redis.call('HDEL', key('claim_fences'), step)
for _, group in ipairs(redis.call('LRANGE', key('claimed:' .. step), 0, -1)) do use(group) end
redis.call('HINCRBY', run, 'uses', used)
redis.call('HSET', key('consumed_at'), step, redis.call('HINCRBY', run, 'consumed', fresh))
if redis.call('EXISTS', key('claimed:' .. step)) == 1 then
  redis.call('RENAME', key('claimed:' .. step), key('used:' .. step))
end
redis.call('ZADD', key('used_steps'), step, step)
redis.call('HSET', key('commit_fences'), step, fence)
redis.call('HSET', key('ledger'), step, ARGV[4])
redis.call('HSET', run, 'step', step, 'stepped_at', now(), 'learner_fence', fence)
return {1, tonumber(step)}
""",
)

# Atomic because a pointer must not outlive the steps it covers, nor the learner that made them. When the run ends,
# nothing is used again.
# pointer's step, fence, pointer -> the run's step, the fence that was wanted.
SET_CHECKPOINT = script(
    """
local step = tonumber(redis.call('HGET', key('run'), 'step'))
local fence = tonumber(redis.call('HGET', key('run'), 'learner_fence') or 0)
if tonumber(ARGV[2]) > step or tonumber(ARGV[3]) ~= fence then return {step, fence} end
redis.call('HSET', key('run'), 'checkpoint', ARGV[4])
if redis.call('HGET', key('run'), 'phase') == 'finishing' then
  redis.call('DEL', key('reusable'))
end
return {step, fence}
"""
)

# Atomic because a group must be recognised as over from the instant its record is gone. Those that may be used again
# stay. step -> number retired.
RETIRE_STEP = script(
    END_GROUP,
    """
local step, list, retired = ARGV[2], key('used:' .. ARGV[2]), 0
local groups = redis.call('LRANGE', list, 0, -1)
redis.call('HDEL', key('commit_fences'), step)
redis.call('DEL', list)
for _, group in ipairs(groups) do
  if redis.call('ZSCORE', key('reusable'), group) then
    redis.call('RPUSH', list, group)
  else
    end_group(group, 'retired', '')
    retired = retired + 1
  end
end
if retired == #groups then redis.call('ZREM', key('used_steps'), step) end
return retired
""",
)

# Atomic because step, versions, ledger and groups must go back together, and the learner of before goes with them.
# to_step, to_version, max_attempts -> number ready again.
ROLL_BACK = script(
    _PLACES,
    END_GROUP,
    _FAIL_CLAIM,
    RING_BELL,
    """
local returned, to_step, run = 0, tonumber(ARGV[2]), key('run')
-- Forget that steps after `to_step` trained on the group.
local function unuse(group)
  local group_key, kept = key('group:' .. group), {}
  local f = redis.call('HMGET', group_key, 'steps', 'members', 'tokens')
  local uses = 0
  for step in string.gmatch(f[1] or '', '%d+') do
    if tonumber(step) <= to_step then kept[#kept + 1] = step else uses = uses + 1 end
  end
  redis.call('HSET', group_key, 'steps', table.concat(kept, ','))
  redis.call('HINCRBY', run, 'uses', -uses)
  redis.call('HINCRBY', key('counters'), 'trained', -uses * f[2])
  redis.call('HINCRBY', key('counters'), 'trained_tokens', -uses * (f[3] or 0))
end
for _, step in ipairs(redis.call('ZRANGE', key('claims'), 0, -1)) do
  returned = returned + fail_claim(step, ARGV[4])
end
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('used_steps'), '(' .. ARGV[2], '+inf')) do
  local list = key('used:' .. step)
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    redis.call('ZREM', key('reusable'), group)
    unuse(group)
  end
  redis.call('ZREM', key('used_steps'), step)
  redis.call('HDEL', key('commit_fences'), step)
  returned = returned + put_all(list)
end
for step = to_step + 1, tonumber(redis.call('HGET', run, 'step')) do
  redis.call('HDEL', key('ledger'), string.format('%d', step))
  redis.call('HDEL', key('consumed_at'), string.format('%d', step))
end
local consumed = redis.call('HGET', key('consumed_at'), ARGV[2]) or 0
redis.call('HSET', run, 'step', ARGV[2], 'version', ARGV[3], 'consumed', consumed, 'consumed_by_version', consumed)
redis.call('HSET', run, 'learner_fence', redis.call('HINCRBY', run, 'fence', 1))
ring_bell()
return returned
""",
)

# Atomic because a claim found lapsed must not be committed before it is taken back.
# max_attempts -> [step, number ready again, [quarantined group, ...]], ...
REAP_CLAIMS = script(
    _PLACES,
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
