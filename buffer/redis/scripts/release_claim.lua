-- Takes back an earlier claim of the step, and reads the data needed to claim the oldest groups.
-- Keys: run, claims, claim_fences, claimed:<step>, ready, used:*, used_steps, reusable
-- Arguments: step, number of groups to read
-- Returns: the run's step, number of ready groups, the groups that became ready first
-- Atomic because groups must be in either the claim or the queue.
if not run_exists() then return NORUN end
allow_when_full()
-- Before reading the queue, so that the groups of the earlier claim can be sampled again.
release_claim(ARGV[2])
return {tonumber(redis.call('HGET', key('run'), 'step')), redis.call('ZCARD', key('ready')),
  redis.call('ZRANGE', key('ready'), 0, ARGV[3] - 1)}
