-- Returns prompts to be leased again.
-- Keys: as return_lease of prelude.lua
-- Arguments: max_attempts, reason, owner (empty: any), lease ids...
-- Returns: number returned
-- Atomic because a prompt must be exactly one of leased, returned, and quarantined.
if not run_exists() then return NORUN end
allow_when_full()
local max_attempts, reason, owner, returned = ARGV[2], ARGV[3], ARGV[4], 0
for i = 5, #ARGV do
  local group = leased_group(ARGV[i])
  if group and (owner == '' or redis.call('SISMEMBER', key('leases_of:' .. owner), group) == 1) then
    return_lease(group, max_attempts, reason)
    returned = returned + 1
  end
end
return returned
