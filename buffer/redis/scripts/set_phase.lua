-- Sets the phase of the run and its reason.
-- Keys: run
-- Arguments: phase, detail
-- Returns: nothing
-- Atomic because the run must exist: a phase alone would look like a run.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('HSET', key('run'), 'phase', ARGV[2], 'detail', ARGV[3])
