-- Leaves a request for a role, replacing any on the same subject.
-- Keys: launcher_requests, broker_requests or learner_requests
-- Arguments: the key's name, subject, value
-- Returns: nothing
-- Atomic because a run that is not open must not receive requests.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('HSET', key(ARGV[2]), ARGV[3], ARGV[4])
