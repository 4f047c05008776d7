-- Quarantines a guest: none of its trajectories are stored any longer, and no group with its members is claimed again.
-- Keys: guests, ready, open, leases, leases_of:*, returned, reusable, and as end_group of prelude.lua
-- Arguments: guest, reason
-- Returns: number of groups quarantined
-- Atomic because no group may become ready, or be claimed, between banning the guest and ending its groups.
if not run_exists() then return NORUN end
allow_when_full()
local ended = 0
redis.call('HSETNX', key('guests'), ARGV[2], ARGV[3])
for _, queue in ipairs({'ready', 'open', 'reusable'}) do
  for _, group in ipairs(redis.call('ZRANGE', key(queue), 0, -1)) do
    local f = redis.call('HMGET', key('group:' .. group), 'guest:' .. ARGV[2], 'owner')
    if f[1] and queue == 'reusable' then redis.call('ZREM', key(queue), group) end
    if f[1] and queue ~= 'reusable' then
      redis.call('ZREM', key('ready'), group)
      end_lease(group, f[2])
      end_group(group, 'quarantined', 'guest: ' .. ARGV[2])
      ended = ended + 1
    end
  end
end
return ended
