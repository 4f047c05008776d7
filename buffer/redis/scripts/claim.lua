-- Claims groups for a step.
-- Keys: ready, reusable, used:*, claims, claim_fences, claimed:<step>, run, group:*
-- Arguments: step, lease_ms, groups...
-- Returns: fence, and sums over the groups: members, in_flight, publish, arrived; nothing if a group has moved since it
--   was sampled, or the step has another claim
-- Atomic because a group must be claimed once, and the fence must grow with the claim.
if not run_exists() then return NORUN end
allow_when_full()
local step, deadline, sums = ARGV[2], now() + tonumber(ARGV[3]), {0, 0, 0, 0}
if redis.call('ZSCORE', key('claims'), step) then return {} end
-- Check all groups before moving the first, because a partial claim must not exist.
for i = 4, #ARGV do
  if not (redis.call('ZSCORE', key('ready'), ARGV[i]) or redis.call('ZSCORE', key('reusable'), ARGV[i])) then
    return {}
  end
end
for i = 4, #ARGV do
  local group = ARGV[i]
  dequeue(group)
  redis.call('RPUSH', key('claimed:' .. step), group)
  local f = redis.call('HMGET', key('group:' .. group), 'members', 'in_flight', 'publish', 'arrived')
  for n = 1, 4 do sums[n] = sums[n] + (tonumber(f[n]) or 0) end
end
redis.call('ZADD', key('claims'), deadline, step)
-- A new fence even for the same step, to tell it from lapsed claims with holders that may still be working.
local fence = redis.call('HINCRBY', key('run'), 'fence', 1)
redis.call('HSET', key('claim_fences'), step, fence)
return {fence, unpack(sums)}
