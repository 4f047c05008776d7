"""Scripts on evaluations and on what people watch."""

from slipstream.buffer.redis.scripts.prelude import script

# Atomic because an evaluation must be opened once, with all of its rows.
# evaluation id, purpose, version, rows...
OPEN_EVALUATION = script(
    """
local id = ARGV[2]
local evaluation = key('evaluation:' .. id)
if redis.call('EXISTS', evaluation) == 1 then return end
redis.call('HSET', evaluation, 'purpose', ARGV[3], 'version', ARGV[4], 'num_prompts', #ARGV - 4,
  'num_answered', 0, 'num_correct', 0, 'num_failed', 0)
for i = 5, #ARGV do
  local group = id .. ':' .. ARGV[i]
  local sequence = redis.call('HINCRBY', key('run'), 'evaluation_sequence', 1)
  redis.call('HSET', key('group:' .. group), 'attempt', 0, 'purpose', ARGV[3], 'size', 1, 'sequence', sequence)
  redis.call('ZADD', key('evaluation_pending'), sequence, group)
end
"""
)

# Atomic because the counts must reconcile with each other. -> numbers in the order of `redis_store.watching`.
COUNTS = script(
    """
local function total(steps, list)
  local groups = 0
  for _, step in ipairs(redis.call('ZRANGE', key(steps), 0, -1)) do
    groups = groups + redis.call('LLEN', key(list .. step))
  end
  return groups
end
local function field(hash, name) return tonumber(redis.call('HGET', key(hash), name) or 0) end
return {field('run', 'admitted'), redis.call('ZCARD', key('leases')), redis.call('ZCARD', key('returned')),
  redis.call('ZCARD', key('open')), redis.call('ZCARD', key('ready')),
  total('claims', 'claimed:'), total('used_steps', 'used:'), redis.call('ZCARD', key('reusable')),
  field('counters', 'accepted'), field('counters', 'duplicates'), field('counters', 'superseded'),
  redis.call('ZCARD', key('finished')), field('counters', 'open_members'), field('counters', 'short_members'),
  field('counters', 'payload_bytes'), field('counters', 'accepted_tokens'), field('counters', 'superseded_tokens'),
  field('counters', 'wasted_tokens'), field('counters', 'trained'), field('counters', 'trained_tokens'),
  field('run', 'ready_sequence'),
  redis.call('HGETALL', key('refused')), redis.call('HGETALL', key('outcomes')),
  redis.call('HGETALL', key('outcome_members')), redis.call('HGETALL', key('reasons'))}
""",
    runs_when_full=False,
)

# Atomic because a group must not be counted while it moves. -> oldest version, number of ready groups, ...
READY_VERSIONS = script(
    """
local counts, answer = {}, {}
for _, group in ipairs(redis.call('ZRANGE', key('ready'), 0, -1)) do
  local oldest = redis.call('HGET', key('group:' .. group), 'oldest')
  counts[oldest] = (counts[oldest] or 0) + 1
end
for version, count in pairs(counts) do
  answer[#answer + 1] = version
  answer[#answer + 1] = tostring(count)
end
return answer
""",
    runs_when_full=False,
)

# Atomic because gauges and their times are read together, and no more roles may stay than the cap.
# role id, gauges, progress mark or '', cap.
REPORT_ROLE = script(
    """
local function longest_unheard()
  local heard, oldest, least = redis.call('HGETALL', key('role_times')), nil, nil
  for i = 1, #heard, 2 do
    local role, at = heard[i], tonumber(heard[i + 1])
    if role ~= ARGV[2] and (least == nil or at < least or (at == least and role < oldest)) then
      oldest, least = role, at
    end
  end
  return oldest
end
redis.call('HSET', key('roles'), ARGV[2], ARGV[3])
redis.call('HSET', key('role_times'), ARGV[2], now())
while redis.call('HLEN', key('roles')) > tonumber(ARGV[5]) do
  local forgotten = longest_unheard()
  for _, hash in ipairs({'roles', 'role_times', 'role_marks', 'role_progress_times'}) do
    redis.call('HDEL', key(hash), forgotten)
  end
end
if ARGV[4] ~= '' and redis.call('HGET', key('role_marks'), ARGV[2]) ~= ARGV[4] then
  redis.call('HSET', key('role_marks'), ARGV[2], ARGV[4])
  redis.call('HSET', key('role_progress_times'), ARGV[2], now())
end
"""
)

# Atomic because the time must be the store's, and the list must not grow past its cap. role id, text, cap.
NOTE_EVENT = script(
    """
redis.call('RPUSH', key('events'), cmsgpack.pack({now(), ARGV[2], ARGV[3]}))
redis.call('LTRIM', key('events'), -ARGV[4], -1)
"""
)

# Atomic because a run that is not open must not be asked for anything. key, subject, value.
REQUEST = script(
    """
redis.call('HSET', key(ARGV[2]), ARGV[3], ARGV[4])
"""
)

# Atomic because a request that comes between reading and deleting must not be lost. key.
TAKE_REQUESTS = script(
    """
local taken = redis.call('HGETALL', key(ARGV[2]))
if #taken > 0 then redis.call('DEL', key(ARGV[2])) end
return taken
"""
)

# Atomic because a row's number is its place in the list. row, cap.
APPEND_METRICS = script(
    """
redis.call('RPUSH', key('metrics'), ARGV[2])
redis.call('LTRIM', key('metrics'), -ARGV[3], -1)
redis.call('HINCRBY', key('counters'), 'metrics', 1)
"""
)

# Atomic because rows may be appended (and dropped) between reading the number and the rows.
# after -> rows ever appended, rows.
METRICS_AFTER = script(
    """
local appended = tonumber(redis.call('HGET', key('counters'), 'metrics') or 0)
local first = appended - redis.call('LLEN', key('metrics'))
return {appended, redis.call('LRANGE', key('metrics'), math.max(0, ARGV[2] - first), -1)}
""",
    runs_when_full=False,
)
