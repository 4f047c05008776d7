-- Extends the leases that the owner still holds.
-- Keys: group:*, leases, evaluation_leases, leases_of:<owner>
-- Arguments: owner, lease_ms, lease ids...
-- Returns: number renewed
-- Atomic because a lease must not be renewed after it was given to another owner in between.
if not run_exists() then return NORUN end
allow_when_full()
local owner, deadline, renewed = ARGV[2], now() + tonumber(ARGV[3]), 0
for i = 4, #ARGV do
  local group = leased_group(ARGV[i])
  -- `leased_group` compares the attempt: a prompt that was leased again is not extended by its former holder.
  if group and redis.call('SISMEMBER', key('leases_of:' .. owner), group) == 1 then
    redis.call('ZADD', leases_key(group), deadline, group)
    renewed = renewed + 1
  end
end
return renewed
