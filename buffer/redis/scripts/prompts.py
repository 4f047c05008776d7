"""Scripts on prompt leases."""

from slipstream.buffer.redis.scripts.prelude import END_GROUP, RING_BELL, script
from slipstream.buffer.redis.scripts.trajectories import MAKE_COMPLETE

_LEASES_OF_KIND = """
local function leases_holding(group)
  return key(string.find(group, ':', 1, true) and 'evaluation_leases' or 'leases')
end
"""

# A lease ended without completing its group. Evaluation rows are asked again without limit: who opened the evaluation
# has a deadline of its own.
_GIVE_BACK = (
    _LEASES_OF_KIND
    + END_GROUP
    + """
local function give_back(group, max_attempts, reason)
  local fields = redis.call('HMGET', key('group:' .. group), 'attempt', 'owner', 'sequence')
  redis.call('ZREM', leases_holding(group), group)
  redis.call('SREM', key('leases_of:' .. fields[2]), group)
  local attempts = redis.call('HINCRBY', key('group:' .. group), 'attempt', 1)
  local fate = 'returned'
  if string.find(group, ':', 1, true) then
    redis.call('ZADD', key('evaluation_pending'), fields[3], group)
  elseif attempts < tonumber(max_attempts) then
    redis.call('ZADD', key('returned'), group, group)
  else
    end_group(group, 'quarantined', 'lease_attempts: ' .. reason)
    fate = 'quarantined'
  end
  return {group, fields[1], fields[2], fate}
end
"""
)

# "17-2" is the lease of group 17 at attempt 2 (`make_lease_id`); nil when that is not the lease the group has now.
_LEASED_GROUP = """
local function leased_group(lease)
  local group, attempt = string.match(lease, '^(.*)%-(%d+)$')
  if not group or not redis.call('ZSCORE', leases_holding(group), group) then return nil end
  if redis.call('HGET', key('group:' .. group), 'attempt') ~= attempt then return nil end
  return group
end
"""

# Atomic because a prompt must go to one generator only and the admission limit must hold between concurrent askers.
# owner, max_groups, group_size, lease_ms, admission_limit, '1' when it has a baseline
# -> [group, attempt, purpose, [missing index, ...]], ...
LEASE = script(
    _LEASES_OF_KIND,
    """
local run, owner, room, group_size = key('run'), ARGV[2], tonumber(ARGV[3]), ARGV[4]
local deadline, limit, leased = now() + tonumber(ARGV[5]), tonumber(ARGV[6]), {}
local function hand_out(group)
  local group_key, missing = key('group:' .. group), {}
  redis.call('HSET', group_key, 'owner', owner)
  redis.call('ZADD', leases_holding(group), deadline, group)
  redis.call('SADD', key('leases_of:' .. owner), group)
  local fields = redis.call('HMGET', group_key, 'attempt', 'purpose', 'size')
  for index = 0, fields[3] - 1 do
    if redis.call('HEXISTS', group_key, 'at:' .. index) == 0 then missing[#missing + 1] = index end
  end
  leased[#leased + 1] = {group, fields[1], fields[2], missing}
end
local function hand_out_waiting(queue)
  if #leased >= room then return end
  for _, group in ipairs(redis.call('ZRANGE', key(queue), 0, room - #leased - 1)) do
    redis.call('ZREM', key(queue), group)
    hand_out(group)
  end
end
local phase = redis.call('HGET', run, 'phase')
if phase ~= 'finished' and phase ~= 'failed' then hand_out_waiting('evaluation_pending') end
if phase ~= 'starting' and phase ~= 'training' then return leased end
hand_out_waiting('returned')
while #leased < room and tonumber(redis.call('HGET', run, 'admitted')) < limit do
  redis.call('HINCRBY', run, 'admitted', 1)
  local group = string.format('%d', redis.call('HINCRBY', run, 'next_ordinal', 1) - 1)
  redis.call('HSET', key('group:' .. group), 'attempt', 0, 'purpose', 'train', 'size', group_size,
    'members', 0, 'claim_attempts', 0, 'baseline', ARGV[7])
  hand_out(group)
end
return leased
""",
)

# Atomic because a lease must not be renewed after it was given to another owner in between.
# owner, lease_ms, lease ids... -> number renewed.
RENEW_LEASES = script(
    _LEASES_OF_KIND,
    _LEASED_GROUP,
    """
local deadline, renewed = now() + tonumber(ARGV[3]), 0
for i = 4, #ARGV do
  local group = leased_group(ARGV[i])
  if group and redis.call('SISMEMBER', key('leases_of:' .. ARGV[2]), group) == 1 then
    redis.call('ZADD', leases_holding(group), deadline, group)
    renewed = renewed + 1
  end
end
return renewed
""",
)

# Atomic because a prompt must be in exactly one of leased, returned and quarantined.
# max_attempts, reason, owner (empty: whoever it is), lease ids... -> number returned.
RETURN_LEASES = script(
    _GIVE_BACK,
    _LEASED_GROUP,
    """
local returned, owner = 0, ARGV[4]
for i = 5, #ARGV do
  local group = leased_group(ARGV[i])
  if group and (owner == '' or redis.call('SISMEMBER', key('leases_of:' .. owner), group) == 1) then
    give_back(group, ARGV[2], ARGV[3])
    returned = returned + 1
  end
end
return returned
""",
)

# Atomic for the same reason. max_attempts, reason, owner -> number returned.
RETURN_LEASES_OF = script(
    _GIVE_BACK,
    """
local groups = redis.call('SMEMBERS', key('leases_of:' .. ARGV[4]))
for _, group in ipairs(groups) do give_back(group, ARGV[2], ARGV[3]) end
return #groups
""",
)

# Atomic because a lease found lapsed must not be renewed or completed before it is taken back.
# max_attempts, kind ('leases' | 'evaluation_leases'), at most -> [group, attempt, owner, fate], ...
REAP_LEASES = script(
    _GIVE_BACK,
    """
local events = {}
for _, group in ipairs(redis.call('ZRANGEBYSCORE', key(ARGV[3]), '-inf', now(), 'LIMIT', 0, ARGV[4])) do
  events[#events + 1] = give_back(group, ARGV[2], 'lapsed')
end
return events
""",
)

# Atomic because a member that arrives in between must find the group waiting, or over.
# ms since the first member came, fewest members to train on (0 = the group is over), at most
# -> [group, members, size], ...
REAP_GROUPS = script(
    END_GROUP,
    RING_BELL,
    MAKE_COMPLETE,
    """
local events, fewest = {}, tonumber(ARGV[3])
local function complete_short(group, members, size, sums)
  local flaw = flaw_of(sums)
  if flaw then return end_group(group, 'rejected', flaw) end
  redis.call('HSET', key('group:' .. group), 'closed', 1)
  redis.call('HINCRBY', key('counters'), 'open_members', 0 - members)
  redis.call('HINCRBY', key('counters'), 'short_members', size - members)
  make_ready(group)
end
for _, group in ipairs(redis.call('ZRANGEBYSCORE', key('open'), '-inf', now() - ARGV[2], 'LIMIT', 0, ARGV[4])) do
  local f = redis.call('HMGET', key('group:' .. group), 'members', 'size', 'owner', 'sampled', 'answered', 'correct',
    'least', 'most')
  local members, size = tonumber(f[1]), tonumber(f[2])
  if tonumber(f[4]) >= fewest then
    leave_leases(group, f[3])
    if fewest == 0 then
      end_group(group, 'expired', 'group_deadline')
    else
      complete_short(group, members, size, {answered = tonumber(f[5]), correct = tonumber(f[6]),
        least = tonumber(f[7] or nil), most = tonumber(f[8] or nil)})
    end
    events[#events + 1] = {group, members, size}
  end
end
return events
""",
)
