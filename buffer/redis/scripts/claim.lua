-- Claims groups for a step.
-- Keys: ready, reusable, used:*, claims, claim_fences, claimed:<step>, run, group:*
-- Arguments: step, lease_ms, groups...
-- Returns: fence, and summed over the groups: members, in_flight, publish, arrived; nothing when a group has moved
--   since it was sampled, or the step has a claim again
-- Atomic because a group must be claimed once, and the fence must grow with the claim.
if not run_exists() then return NORUN end
allow_when_full()
local step, deadline, sums = ARGV[2], now() + tonumber(ARGV[3]), {0, 0, 0, 0}
if redis.call('ZSCORE', key('claims'), step) then return {} end
-- All groups are checked before the first is moved: a claim of some of them would be neither refused nor whole.
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
-- A new fence even for the same step: it tells this claim from those that lapsed, whose holders may still be at work.
local fence = redis.call('HINCRBY', key('run'), 'fence', 1)
redis.call('HSET', key('claim_fences'), step, fence)
return {fence, unpack(sums)}
