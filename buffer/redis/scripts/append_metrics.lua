-- Appends a row of metrics.
-- Keys: metrics, counters
-- Arguments: encoded row, maximum rows kept
-- Returns: nothing
-- Atomic because the total row count must move with the list.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('RPUSH', key('metrics'), ARGV[2])
redis.call('LTRIM', key('metrics'), -ARGV[3], -1)
redis.call('HINCRBY', key('counters'), 'metrics', 1)
