-- Returns the prompts of lapsed leases.
-- Keys: leases or evaluation_leases, and as return_lease of prelude.lua
-- Arguments: the chief's fence, max_attempts, 'leases' | 'evaluation_leases', maximum number of leases
-- Returns: {group, attempt, owner, 'returned' | 'quarantined'}, ...
-- Atomic because a lease found lapsed must not be renewed or completed before it is taken back.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local events = {}
for _, group in ipairs(redis.call('ZRANGEBYSCORE', key(ARGV[4]), '-inf', now(), 'LIMIT', 0, ARGV[5])) do
  events[#events + 1] = return_lease(group, ARGV[3], 'lapsed')
end
return events
