"""Scripts on arriving trajectories. The only ones that carry a payload: it and its place must appear together."""

from buffer.redis_scripts.prelude import RING_BELL, script

_ANSWERS = """
local function refuse(reason) return {'refused', reason, 0} end
local function count(outcome, counter)
  redis.call('HINCRBY', key('counters'), counter, 1)
  return {outcome, '', 0}
end
local function is_from_the_future(version)
  return tonumber(version) > tonumber(redis.call('HGET', key('run'), 'announced_version'))
end
"""

# A group that is over leaves one bit behind. The bound keeps a made-up id from stretching the bitmap.
_IS_DONE = """
local function is_done(group)
  local ordinal = string.match(group, '^%d+$') and tonumber(group)
  if not ordinal or ordinal >= tonumber(redis.call('HGET', key('run'), 'next_ordinal')) then return false end
  return redis.call('GETBIT', key('done'), ordinal) == 1
end
"""

# Atomic because of two copies of one trajectory, and of two answers for one place, exactly one may be stored, and the
# member that completes a group must make it ready in the same instant.
# id, group, index, group_size, newest_version, checksum, payload -> outcome, reason, group_is_ready.
INSERT = script(
    _ANSWERS,
    _IS_DONE,
    RING_BELL,
    """
local id, group, index, size, checksum = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[7]
local group_key = key('group:' .. group)
local fields = redis.call('HMGET', group_key, 'sum:' .. id, 'at:' .. index, 'size', 'owner', 'purpose')
if fields[1] == checksum then return count('duplicate', 'duplicates') end
if fields[1] then return refuse('content_conflict') end
if fields[2] or is_done(group) then return count('superseded', 'superseded') end
if fields[5] ~= 'train' then return refuse('unknown_group') end
if fields[3] ~= size or tonumber(index) >= tonumber(size) then return refuse('group_size') end
if is_from_the_future(ARGV[6]) then return refuse('future_version') end
redis.call('HSET', group_key, 'at:' .. index, id, 'sum:' .. id, checksum)
redis.call('HSET', key('payloads:' .. group), index, ARGV[8])
redis.call('HINCRBY', key('counters'), 'accepted', 1)
local members = redis.call('HINCRBY', group_key, 'members', 1)
if members < tonumber(size) then
  redis.call('SADD', key('open'), group)
  redis.call('HINCRBY', key('counters'), 'open_members', 1)
  return {'inserted', '', 0}
end
redis.call('SREM', key('open'), group)
redis.call('HINCRBY', key('counters'), 'open_members', 1 - members)
redis.call('ZREM', key('leases'), group)
redis.call('SREM', key('leases_of:' .. fields[4]), group)
redis.call('ZREM', key('returned'), group)
local sequence = redis.call('HINCRBY', key('run'), 'ready_sequence', 1)
redis.call('HSET', group_key, 'sequence', sequence)
redis.call('ZADD', key('ready'), sequence, group)
ring_bell()
return {'inserted', '', 1}
""",
    runs_when_full=False,
)

# Atomic because each row must count once, whoever answers it. The payload is not kept.
# group, evaluation id, row, newest_version, reward, is_correct, is_failed, purpose -> outcome, reason, is_complete.
INSERT_EVALUATION = script(
    _ANSWERS,
    """
local group, row = ARGV[2], ARGV[4]
local evaluation, answers = key('evaluation:' .. ARGV[3]), key('answers:' .. ARGV[3])
local asked, answered, purpose = unpack(redis.call('HMGET', evaluation, 'num_prompts', 'num_answered', 'purpose'))
if purpose ~= ARGV[9] then return refuse('unknown_group') end
if asked == answered or redis.call('SISMEMBER', answers, row) == 1 then return {'duplicate', '', 0} end
local owner = redis.call('HGET', key('group:' .. group), 'owner')
if redis.call('EXISTS', key('group:' .. group)) == 0 then return refuse('unknown_group') end
if is_from_the_future(ARGV[5]) then return refuse('future_version') end
redis.call('SADD', answers, row)
redis.call('HINCRBY', evaluation, 'num_correct', ARGV[7])
redis.call('HINCRBY', evaluation, 'num_failed', ARGV[8])
redis.call('HINCRBYFLOAT', evaluation, 'reward_sum', ARGV[6])
redis.call('ZREM', key('evaluation_leases'), group)
redis.call('ZREM', key('evaluation_pending'), group)
if owner then redis.call('SREM', key('leases_of:' .. owner), group) end
redis.call('DEL', key('group:' .. group))
if redis.call('HINCRBY', evaluation, 'num_answered', 1) < tonumber(asked) then return {'inserted', '', 0} end
redis.call('DEL', answers)
return {'inserted', '', 1}
""",
)

# Atomic because the list must stay capped. reason, entry, cap.
QUARANTINE_FRAME = script(
    """
redis.call('LPUSH', key('quarantine'), ARGV[3])
redis.call('LTRIM', key('quarantine'), 0, ARGV[4] - 1)
redis.call('HINCRBY', key('refused'), ARGV[2], 1)
"""
)
