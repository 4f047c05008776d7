-- Takes the run back to a checkpoint: groups that are claimed, or were used after it, become ready again.
-- Keys: run, claims, claim_fences, claimed:*, used:*, used_steps, commit_fences, reusable, ready, ledger, consumed_at,
--   counters, bell, group:*
-- Arguments: to_step, to_version, max_attempts
-- Returns: number of groups back in the queue, the new fence
-- Atomic because step, versions, ledger, and groups must go back together. The new fence locks out the previous
-- learner: its commits and checkpoints are rejected from now on.
if not run_exists() then return NORUN end
allow_when_full()
local run, to_step, max_attempts, returned = key('run'), tonumber(ARGV[2]), ARGV[4], 0

-- Removes the steps after `to_step` from the steps that trained on the group.
local function undo_uses(group)
  local group_key, kept, undone = key('group:' .. group), {}, 0
  local f = redis.call('HMGET', group_key, 'steps', 'members', 'tokens')
  for step in string.gmatch(f[1] or '', '%d+') do
    if tonumber(step) <= to_step then kept[#kept + 1] = step else undone = undone + 1 end
  end
  redis.call('HSET', group_key, 'steps', table.concat(kept, ','))
  redis.call('HINCRBY', run, 'uses', -undone)
  redis.call('HINCRBY', key('counters'), 'trained', -undone * f[2])
  redis.call('HINCRBY', key('counters'), 'trained_tokens', -undone * (f[3] or 0))
end

-- A live claim counts as an attempt, so a group that crashes every learner reaches quarantine. Claims come before used
-- steps, because a reused group goes back to `used:` of the last step that trained on it, which may be undone below.
for _, step in ipairs(redis.call('ZRANGE', key('claims'), 0, -1)) do
  returned = returned + fail_claim(step, max_attempts)
end
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('used_steps'), '(' .. ARGV[2], '+inf')) do
  local list = key('used:' .. step)
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    redis.call('ZREM', key('reusable'), group)
    undo_uses(group)
  end
  -- Delete the commit's fence too, so that a late repeat of that commit is not accepted.
  redis.call('ZREM', key('used_steps'), step)
  redis.call('HDEL', key('commit_fences'), step)
  -- After `undo_uses`: the remaining steps decide whether a group is ready or still used.
  returned = returned + enqueue_all(list)
end
for step = to_step + 1, tonumber(redis.call('HGET', run, 'step')) do
  redis.call('HDEL', key('ledger'), string.format('%d', step))
  redis.call('HDEL', key('consumed_at'), string.format('%d', step))
end
-- `announced_version` stays, because trajectories of undone versions may still arrive.
if to_step < tonumber(redis.call('HGET', run, 'archived_step') or 0) then
  redis.call('HSET', run, 'archived_step', ARGV[2])
end
local consumed = redis.call('HGET', key('consumed_at'), ARGV[2]) or 0
redis.call('HSET', run, 'step', ARGV[2], 'version', ARGV[3], 'consumed', consumed, 'consumed_by_version', consumed)
local fence = redis.call('HINCRBY', run, 'fence', 1)
redis.call('HSET', run, 'learner_fence', fence)
ring_bell()
return {returned, fence}
