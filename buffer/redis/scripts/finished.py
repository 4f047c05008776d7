"""Scripts on groups that are over, and on the books."""

from slipstream.buffer.redis.scripts.prelude import DROP_RECORD, script

# Atomic because a group must be in the list as long as its record is there. group ids... -> number forgotten.
FORGET = script(
    DROP_RECORD,
    """
local forgotten = 0
for i = 2, #ARGV do
  if redis.call('ZREM', key('finished'), ARGV[i]) == 1 then
    drop_record(ARGV[i])
    forgotten = forgotten + 1
  end
end
return forgotten
""",
)

# Atomic because a group that moves while it is looked for would be found twice, or not at all. It reads every group
# once, which an audit may: it is asked for by a person.
# -> next_ordinal, max_uses, accepted, done, [place, [group, members, payloads, ...]]..., outcome_members, ledger.
SNAPSHOT = script(
    """
local function with_sizes(place, groups)
  local sized = {}
  for _, group in ipairs(groups) do
    sized[#sized + 1] = group
    sized[#sized + 1] = tonumber(redis.call('HGET', key('group:' .. group), 'members') or 0)
    sized[#sized + 1] = redis.call('HLEN', key('payloads:' .. group))
  end
  return {place, sized}
end
local function all(steps, list)
  local groups = {}
  for _, step in ipairs(redis.call('ZRANGE', key(steps), 0, -1)) do
    for _, group in ipairs(redis.call('LRANGE', key(list .. step), 0, -1)) do groups[#groups + 1] = group end
  end
  return groups
end
local function members(name) return redis.call('ZRANGE', key(name), 0, -1) end
local places = {with_sizes('leased', members('leases')), with_sizes('returned', members('returned')),
  with_sizes('ready', members('ready')),
  with_sizes('claimed', all('claims', 'claimed:')), with_sizes('used', all('used_steps', 'used:'))}
local run = redis.call('HMGET', key('run'), 'next_ordinal', 'max_uses')
return {tonumber(run[1]), tonumber(run[2]), tonumber(redis.call('HGET', key('counters'), 'accepted') or 0),
  redis.call('GET', key('done')) or '', places,
  redis.call('HGETALL', key('outcome_members')), redis.call('HVALS', key('ledger'))}
"""
)
