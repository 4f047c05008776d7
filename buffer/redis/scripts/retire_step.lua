-- Retires the groups of a step covered by a checkpoint; groups that may be used again stay.
-- Keys: used:<step>, used_steps, commit_fences, reusable, and as end_group of prelude.lua
-- Arguments: step
-- Returns: number retired
-- Atomic because a group must be recognized as finished from the moment its record is gone.
if not run_exists() then return NORUN end
allow_when_full()
local step, list, retired = ARGV[2], key('used:' .. ARGV[2]), 0
local groups = redis.call('LRANGE', list, 0, -1)
-- The checkpoint makes the commit final: only a replaced learner could repeat it.
redis.call('HDEL', key('commit_fences'), step)
-- Empty the list first, then add the groups that stay: `end_group` requires a group to be in no list.
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
