-- Reads the input of an audit.
-- Keys: run, counters, done, leases, returned, ready, claims, claimed:*, used_steps, used:*, group:*, payloads:*,
--   outcome_members, ledger
-- Arguments: none
-- Returns: next_ordinal, max_uses, archived_step, accepted, done, {{state, {group, members, payloads, ...}}, ...},
--   outcome_members, ledger
-- Atomic because a group that moves during the read would be found twice, or not at all. It reads every group, which is
-- acceptable because audits run only on request.
if not run_exists() then return NORUN end
allow_when_full()

local function sorted(name) return redis.call('ZRANGE', key(name), 0, -1) end

local function listed(steps, list)
  local groups = {}
  for _, step in ipairs(sorted(steps)) do
    for _, group in ipairs(redis.call('LRANGE', key(list .. step), 0, -1)) do groups[#groups + 1] = group end
  end
  return groups
end

local function with_sizes(state, groups)
  local sized = {}
  for _, group in ipairs(groups) do
    sized[#sized + 1] = group
    sized[#sized + 1] = tonumber(redis.call('HGET', key('group:' .. group), 'members') or 0)
    sized[#sized + 1] = redis.call('HLEN', key('payloads:' .. group))
  end
  return {state, sized}
end

local states = {with_sizes('leased', sorted('leases')), with_sizes('returned', sorted('returned')),
  with_sizes('ready', sorted('ready')), with_sizes('claimed', listed('claims', 'claimed:')),
  with_sizes('used', listed('used_steps', 'used:'))}
local run = redis.call('HMGET', key('run'), 'next_ordinal', 'max_uses', 'archived_step')
return {tonumber(run[1]), tonumber(run[2]), tonumber(run[3] or 0),
  tonumber(redis.call('HGET', key('counters'), 'accepted') or 0), redis.call('GET', key('done')) or '', states,
  redis.call('HGETALL', key('outcome_members')), redis.call('HVALS', key('ledger'))}
