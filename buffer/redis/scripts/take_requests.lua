-- Takes requests to the launcher, the brokers or the learner.
-- Keys: launcher_requests, broker_requests or learner_requests
-- Arguments: the key's name, subjects... (none: all)
-- Returns: subject, value, ...
-- Atomic because a request that comes between reading and deleting must not be lost, and one that several brokers read
--   must be taken by one.
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
