-- Ends groups that have waited too long for their last members: they become ready without them, or expire.
-- Keys: open, group:*, leases, returned, ready, counters
-- Arguments: the chief's fence, ms since the first member arrived, sampled members needed to train on (0: the group
--   expires), maximum number of groups
-- Returns: {group, members, size}, ...
-- Atomic because a member that arrives in between must find the group either open or ended.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local events, fewest = {}, tonumber(ARGV[4])

local function complete_short(group, members, size, sums)
  measure(group, sums.answered, sums.correct)
  local reason = rejection_reason(sums)
  if reason then return end_group(group, 'rejected', reason) end
  redis.call('HSET', key('group:' .. group), 'closed', 1)
  redis.call('HINCRBY', key('counters'), 'open_members', 0 - members)
  redis.call('HINCRBY', key('counters'), 'short_members', size - members)
  make_ready(group)
end

-- The limit counts groups that end: those with too few sampled members stay, and must not hide younger ones.
for _, group in ipairs(redis.call('ZRANGEBYSCORE', key('open'), '-inf', now() - ARGV[3])) do
  if #events == tonumber(ARGV[5]) then break end
  local f = redis.call('HMGET', key('group:' .. group), 'members', 'size', 'owner', 'sampled', 'answered', 'correct',
    'least', 'most')
  local members, size = tonumber(f[1]), tonumber(f[2])
  if tonumber(f[4]) >= fewest then
    end_lease(group, f[3])
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
