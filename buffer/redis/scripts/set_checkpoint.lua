-- Points the run at a durable checkpoint. While the run is finishing, groups are not used again.
-- Keys: run, reusable
-- Arguments: the pointer's step, fence of the learner, encoded CheckpointPointer
-- Returns: the run's step, the fence of the newest learner
-- Atomic because a pointer must not outlive the steps it covers, or the learner that made them.
if not run_exists() then return NORUN end
allow_when_full()
local run = key('run')
local step = tonumber(redis.call('HGET', run, 'step'))
local fence = tonumber(redis.call('HGET', run, 'learner_fence') or 0)
-- Two refusals: the pointer covers steps that are not committed here (the store lost its last seconds), or another
-- learner has committed or rolled back since. The caller tells them apart by the returned values.
if tonumber(ARGV[2]) > step or tonumber(ARGV[3]) ~= fence then return {step, fence} end
redis.call('HSET', run, 'checkpoint', ARGV[4], 'checkpoint_step', ARGV[2])
if redis.call('HGET', run, 'phase') == 'finishing' then redis.call('DEL', key('reusable')) end
return {step, fence}
