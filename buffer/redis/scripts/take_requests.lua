-- Takes requests addressed to a role.
-- Keys: launcher_requests, broker_requests or learner_requests
-- Arguments: the key's name, subjects... (none: all)
-- Returns: subject, value, ...
-- Atomic because a request that arrives between reading and deleting must not be lost, and only one of several brokers
--   may take it.
if not run_exists() then return NORUN end
allow_when_full()
local stored, taken, wanted = redis.call('HGETALL', key(ARGV[2])), {}, {}
for i = 3, #ARGV do wanted[ARGV[i]] = true end
for i = 1, #stored, 2 do
  if #ARGV == 2 or wanted[stored[i]] then
    taken[#taken + 1], taken[#taken + 2] = stored[i], stored[i + 1]
    redis.call('HDEL', key(ARGV[2]), stored[i])
  end
end
return taken
