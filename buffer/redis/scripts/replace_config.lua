-- Replaces the run's config, unless another role changed it in the meantime.
-- Keys: run
-- Arguments: expected config_json, replacement
-- Returns: 1 if replaced, else 0
-- Atomic because the config may replace only the one that it was compared with.
if not run_exists() then return NORUN end
allow_when_full()
if redis.call('HGET', key('run'), 'config_json') ~= ARGV[2] then return 0 end
redis.call('HSET', key('run'), 'config_json', ARGV[3])
return 1
