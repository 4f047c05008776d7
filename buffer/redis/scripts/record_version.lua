-- Records a set of weights.
-- Keys: versions, version_steps
-- Arguments: encoded VersionEntry, version, step
-- Returns: nothing
-- Atomic because a repeat after a lost answer must not record it twice.
if not run_exists() then return NORUN end
allow_when_full()
if redis.call('LINDEX', key('versions'), -1) ~= ARGV[2] then redis.call('RPUSH', key('versions'), ARGV[2]) end
redis.call('HSET', key('version_steps'), ARGV[3], ARGV[4])
