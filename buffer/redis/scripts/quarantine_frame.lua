-- Keeps the first bytes of a rejected frame.
-- Keys: quarantine, refused
-- Arguments: reason, MessagePack of [reason, first bytes], maximum frames kept
-- Returns: nothing
-- Atomic because the list must stay capped.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('LPUSH', key('quarantine'), ARGV[3])
redis.call('LTRIM', key('quarantine'), 0, ARGV[4] - 1)
redis.call('HINCRBY', key('refused'), ARGV[2], 1)
