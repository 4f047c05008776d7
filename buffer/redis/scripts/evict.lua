-- Removes groups from the queue: stale ones expire, released ones are not used again.
-- Keys: ready, reusable, and as end_group of prelude.lua
-- Arguments: number of expiring groups, groups (first those that expire, then those released)...
-- Returns: nothing
-- Atomic because a group must not be claimed while it leaves the queue; one that moved since the queue was read is
-- skipped.
if not run_exists() then return NORUN end
allow_when_full()
local num_expired = tonumber(ARGV[2])
for i = 3, #ARGV do
  if i - 2 > num_expired then
    redis.call('ZREM', key('reusable'), ARGV[i])
  elseif redis.call('ZREM', key('ready'), ARGV[i]) == 1 then
    end_group(ARGV[i], 'expired', 'on_stale')
  end
end
