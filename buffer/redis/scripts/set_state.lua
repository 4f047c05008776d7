-- Sets fields of the run's state.
-- Keys: run
-- Arguments: field, value, ...
-- Returns: nothing
-- Atomic because the run must exist: a phase alone would look like a run.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('HSET', key('run'), unpack(ARGV, 2))
