-- Deletes groups that are finished and archived.
-- Keys: finished, group:*, payloads:*, counters
-- Arguments: the chief's fence, groups...
-- Returns: number deleted
-- Atomic because a group must be in the list exactly as long as its record is stored.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local forgotten = 0
for i = 3, #ARGV do
  if redis.call('ZREM', key('finished'), ARGV[i]) == 1 then
    drop_record(ARGV[i])
    forgotten = forgotten + 1
  end
end
return forgotten
