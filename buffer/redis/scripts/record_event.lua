-- Appends an event.
-- Keys: events
-- Arguments: role id, text, maximum events kept
-- Returns: nothing
-- Atomic because the time must be the store's, and the list must stay capped.
if not run_exists() then return NORUN end
allow_when_full()
redis.call('RPUSH', key('events'), cmsgpack.pack({now(), ARGV[2], ARGV[3]}))
redis.call('LTRIM', key('events'), -ARGV[4], -1)
