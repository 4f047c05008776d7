-- Reads the metrics rows after the first N.
-- Keys: metrics, counters
-- Arguments: rows to skip, counted from the first ever appended
-- Returns: number of rows ever appended, {row, ...}
-- Atomic because rows may be appended (and dropped) between reading the number and the rows.
if not run_exists() then return NORUN end
local appended = tonumber(redis.call('HGET', key('counters'), 'metrics') or 0)
local first = appended - redis.call('LLEN', key('metrics'))
return {appended, redis.call('LRANGE', key('metrics'), math.max(0, ARGV[2] - first), -1)}
