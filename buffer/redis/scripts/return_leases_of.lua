-- Returns every prompt that an owner holds, to be leased again.
-- Keys: leases_of:<owner>, and as return_lease of prelude.lua
-- Arguments: max_attempts, reason, owner
-- Returns: number returned
-- Atomic because a prompt must be exactly one of leased, returned, and quarantined.
if not run_exists() then return NORUN end
allow_when_full()
local groups = redis.call('SMEMBERS', key('leases_of:' .. ARGV[4]))
for _, group in ipairs(groups) do return_lease(group, ARGV[2], ARGV[3]) end
return #groups
