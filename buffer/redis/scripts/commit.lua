-- Commits a claim: its groups are used, and the run moves to the claim's step.
-- Keys: run, claims, claim_fences, claimed:<step>, used:<step>, used_steps, commit_fences, ledger, consumed_at,
--   reusable, counters, group:*
-- Arguments: step, fence, encoded StepEntry
-- Returns: 1 if the claim is live or committed, else 0; the newest step, which is the claim's own if it was committed
-- Atomic because a lapsed claim must never commit, and the run's step and ledger must move with the groups. Repeating
-- an accepted commit is accepted, because its answer may have been lost.
if not run_exists() then return NORUN end
allow_when_full()
local step, fence, entry = ARGV[2], ARGV[3], ARGV[4]
local run, counters, fresh, used = key('run'), key('counters'), 0, 0
local max_uses = tonumber(redis.call('HGET', run, 'max_uses'))

local function use(group)
  local group_key = key('group:' .. group)
  local f = redis.call('HMGET', group_key, 'steps', 'members', 'tokens', 'sequence')
  local steps = f[1] or ''
  used = used + 1
  if steps == '' then fresh = fresh + 1 end
  steps = steps == '' and step or steps .. ',' .. step
  redis.call('HSET', group_key, 'steps', steps)
  redis.call('HINCRBY', counters, 'trained', f[2])
  redis.call('HINCRBY', counters, 'trained_tokens', f[3] or 0)
  local _, num_uses = string.gsub(steps, '%d+', '')
  if num_uses < max_uses and not quarantined_author(group) then make_reusable(group, f[4]) end
end

local newest = tonumber(redis.call('HGET', run, 'step'))
-- The order of the checks matters. First a repeat: its claim is gone, so the fence check would refuse it. Then the
-- fence, so that a lapsed claim is reported as such. Then the step: steps are committed without gaps, because a
-- checkpoint of step N covers every group used up to N. `newest` tells the caller that this is not the next one.
if redis.call('HGET', key('commit_fences'), step) == fence then return {1, tonumber(step)} end
if redis.call('HGET', key('claim_fences'), step) ~= fence then return {0, newest} end
if tonumber(step) ~= newest + 1 then return {1, newest} end
redis.call('ZREM', key('claims'), step)
redis.call('HDEL', key('claim_fences'), step)
for _, group in ipairs(redis.call('LRANGE', key('claimed:' .. step), 0, -1)) do use(group) end
redis.call('HINCRBY', run, 'uses', used)
redis.call('HSET', key('consumed_at'), step, redis.call('HINCRBY', run, 'consumed', fresh))
-- A claim with all groups rejected has no list.
if redis.call('EXISTS', key('claimed:' .. step)) == 1 then
  redis.call('RENAME', key('claimed:' .. step), key('used:' .. step))
end
redis.call('ZADD', key('used_steps'), step, step)
redis.call('HSET', key('commit_fences'), step, fence)
redis.call('HSET', key('ledger'), step, entry)
-- Only the holder of this fence may record a checkpoint from now on.
redis.call('HSET', run, 'step', step, 'stepped_at', now(), 'learner_fence', fence)
return {1, tonumber(step)}
