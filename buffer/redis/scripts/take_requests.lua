-- Takes all requests to the launcher or the broker.
-- Keys: launcher_requests, broker_requests or learner_requests
-- Arguments: the key's name
-- Returns: subject, value, ...
-- Atomic because a request that comes between reading and deleting must not be lost.
if not run_exists() then return NORUN end
allow_when_full()
local taken = redis.call('HGETALL', key(ARGV[2]))
if #taken > 0 then redis.call('DEL', key(ARGV[2])) end
return taken
