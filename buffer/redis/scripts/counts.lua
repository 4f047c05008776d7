-- Reads the store's counters.
-- Keys: run, counters, leases, returned, open, ready, reusable, finished, claims, claimed:*, used_steps, used:*,
--   refused, outcomes, outcome_members, reasons, curriculum
-- Arguments: none
-- Returns: name, number, name, number, ...; then refused, outcomes, outcome_members, reasons and curriculum
-- Atomic because the counts must reconcile.
if not run_exists() then return NORUN end

local function total(steps, list)
  local groups = 0
  for _, step in ipairs(redis.call('ZRANGE', key(steps), 0, -1)) do
    groups = groups + redis.call('LLEN', key(list .. step))
  end
  return groups
end

local function field(hash, name) return tonumber(redis.call('HGET', key(hash), name) or 0) end

local numbers = {'admitted', field('run', 'admitted'), 'became_ready', field('run', 'ready_sequence'),
  'claimed', total('claims', 'claimed:'), 'used', total('used_steps', 'used:'),
  'leased', redis.call('ZCARD', key('leases')), 'unarchived', redis.call('ZCARD', key('finished'))}
for _, name in ipairs({'returned', 'open', 'ready', 'reusable'}) do
  numbers[#numbers + 1] = name
  numbers[#numbers + 1] = redis.call('ZCARD', key(name))
end
for _, name in ipairs({'accepted', 'duplicates', 'superseded', 'open_members', 'short_members', 'payload_bytes',
  'accepted_tokens', 'superseded_tokens', 'wasted_tokens', 'trained', 'trained_tokens'}) do
  numbers[#numbers + 1] = name
  numbers[#numbers + 1] = field('counters', name)
end
return {numbers, redis.call('HGETALL', key('refused')), redis.call('HGETALL', key('outcomes')),
  redis.call('HGETALL', key('outcome_members')), redis.call('HGETALL', key('reasons')),
  redis.call('HGETALL', key('curriculum'))}
