-- Deletes entries of the step ledger that the archive holds.
-- Keys: run, ledger, consumed_at, version_steps
-- Arguments: the chief's fence, the newest archived step, its encoded StepEntry, most steps to delete
-- Returns: number deleted
-- Atomic because the ledger must continue after `archived_step`, which tells readers where the archived part ends.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local run, ledger, step = key('run'), key('ledger'), tonumber(ARGV[3])
local f = redis.call('HMGET', run, 'archived_step', 'checkpoint_step', 'version')
local from, checkpoint = tonumber(f[1] or 0), tonumber(f[2] or 0)
-- A resume may undo the steps after the checkpoint. Another entry of that step means that the store lost its last
-- seconds and the archive holds steps of a future that did not happen here.
if step > checkpoint or redis.call('HGET', ledger, ARGV[3]) ~= ARGV[4] then return 0 end
local last = math.min(step, from + tonumber(ARGV[5]))
-- A rollback needs the count at the checkpoint, and versions that will be committed include at least this step.
local published = tonumber(redis.call('HGET', key('version_steps'), f[3]) or 0)
for each = from + 1, last do
  redis.call('HDEL', ledger, string.format('%d', each))
  if each < published and each ~= checkpoint then redis.call('HDEL', key('consumed_at'), string.format('%d', each)) end
end
redis.call('HSET', run, 'archived_step', string.format('%d', last))
return last - from
