"""Scripts on arriving trajectories. The only ones that carry a payload: it and its place must appear together."""

from slipstream.buffer.redis.scripts.prelude import END_GROUP, RING_BELL, script

_IS_FROM_THE_FUTURE = """
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

# Counted over all trajectories of a call and written once.
_TALLY = """
local tallied = {}
local function tally(counter, number) tallied[counter] = (tallied[counter] or 0) + number end
local function write_tally()
  for counter, number in pairs(tallied) do redis.call('HINCRBY', key('counters'), counter, number) end
end
"""

# Why a trajectory is not to be stored, or nil. `group` is the record of its group, `checksum` that of what is stored
# under its id, `taken_by` the id at its place.
_JUDGE = """
local versions = redis.call('HMGET', key('run'), 'announced_version', 'version')
local announced_version, adopted_version = tonumber(versions[1]), tonumber(versions[2])
local function judge(group, new, checksum, taken_by)
  if checksum then return checksum == new.checksum and 'duplicate' or 'content_conflict' end
  if taken_by or group.outcome or group.closed then return 'superseded' end
  if group.purpose ~= 'train' then return is_done(new.group) and 'superseded' or 'unknown_group' end
  if group.size ~= new.size or tonumber(new.index) >= tonumber(new.size) then return 'group_size' end
  local is_baseline = group.baseline == '1' and tonumber(new.index) == tonumber(new.size) - 1
  if (new.greedy == '1') ~= is_baseline then return 'baseline' end
  if tonumber(new.attempt) > tonumber(group.attempt) then return 'unknown_lease' end
  if tonumber(new.version) > announced_version then return 'future_version' end
end
"""

# Of a group of which no more is wanted: it leaves its lease, and is rejected for its flaw or made ready.
# `buffer/sampling.py` says the same in Python.
MAKE_COMPLETE = """
local function leave_leases(group, owner)
  redis.call('ZREM', key('leases'), group)
  redis.call('SREM', key('leases_of:' .. owner), group)
  redis.call('ZREM', key('returned'), group)
end
local function flaw_of(sums)
  local f = redis.call('HMGET', key('run'), 'filter', 'filter_low', 'filter_high')
  local kind, low, high = f[1], tonumber(f[2]), tonumber(f[3])
  if kind == 'none' then return nil end
  if sums.answered == 0 then return 'no_reward' end
  if kind == 'zero_signal' then return sums.most - sums.least < low and 'zero_signal' or nil end
  local share = sums.correct / sums.answered
  if share <= low then return 'too_hard' end
  if share >= high then return 'too_easy' end
end
local function make_ready(group)
  redis.call('ZREM', key('open'), group)
  local sequence = redis.call('HINCRBY', key('run'), 'ready_sequence', 1)
  redis.call('HSET', key('group:' .. group), 'sequence', sequence)
  redis.call('ZADD', key('ready'), sequence, group)
  ring_bell()
end
"""

# The record of a group is read once in a call, and what the call adds to it is written once: its members mostly come
# together. What draws and books need of a group is summed over its members.
_RECORDS = """
local ADDED_UP = {'members', 'oldest', 'tokens', 'bytes', 'answered', 'reward_sum', 'reward_squares', 'in_flight',
  'publish', 'arrived', 'sampled', 'correct', 'least', 'most'}
local records = {}
local function record_of(group)
  if records[group] then return records[group] end
  local f = redis.call('HMGET', key('group:' .. group), 'size', 'attempt', 'purpose', 'outcome', 'closed', 'owner',
    'baseline', unpack(ADDED_UP))
  local record = {size = f[1], attempt = f[2], purpose = f[3], outcome = f[4], closed = f[5], owner = f[6],
    baseline = f[7], sums = {}, added = {}, fields = {}}
  for i, name in ipairs(ADDED_UP) do record.sums[name] = tonumber(f[7 + i]) end
  records[group] = record
  return record
end
local function add_field(record, name, value)
  record.added[name] = value
  table.insert(record.fields, name)
  table.insert(record.fields, value)
end
-- It is read anew when the group comes up again.
local function write_record(group)
  local record = records[group]
  records[group] = nil
  if #record.fields == 0 then return end
  for name, sum in pairs(record.sums) do add_field(record, name, sum) end
  redis.call('HSET', key('group:' .. group), unpack(record.fields))
end
local function write_records()
  for group in pairs(records) do write_record(group) end
end
"""

# Lag is that of the oldest token: up to the version all generators had adopted it grew in flight, up to the announced
# one in publishing, and what is yet to come will be waiting.
_ADD_UP = """
local function add_up(sums, new, payload)
  local function add(name, more) sums[name] = (sums[name] or 0) + more end
  local oldest = tonumber(new.oldest)
  local adopted = math.max(oldest, adopted_version)
  local answered, reward = tonumber(new.answered), tonumber(new.reward)
  if answered == 1 then
    sums.least = math.min(reward, sums.least or reward)
    sums.most = math.max(reward, sums.most or reward)
  end
  -- A greedy member counts in no mean.
  local sampled = new.greedy == '1' and 0 or 1
  answered = sampled * answered
  sums.oldest = math.min(oldest, sums.oldest or oldest)
  add('members', 1)
  add('tokens', new.written)
  add('bytes', #payload)
  add('sampled', sampled)
  add('answered', answered)
  add('correct', answered * new.correct)
  add('reward_sum', answered * reward)
  add('reward_squares', answered * reward * reward)
  add('in_flight', adopted - oldest)
  add('publish', math.max(0, announced_version - adopted))
  add('arrived', math.max(announced_version, adopted))
  tally('accepted_tokens', new.written)
  tally('payload_bytes', #payload)
end
"""

_INSERT_ONE = """
local function insert_one(new, payload)
  local record, at, sum = record_of(new.group), 'at:' .. new.index, 'sum:' .. new.id
  local f = redis.call('HMGET', key('group:' .. new.group), sum, at)
  local objection = judge(record, new, record.added[sum] or f[1], record.added[at] or f[2])
  if objection then
    if objection == 'duplicate' then tally('duplicates', 1) end
    if objection == 'superseded' then
      tally('superseded', 1)
      tally('superseded_tokens', new.written)
    end
    return objection
  end
  redis.call('HSET', key('payloads:' .. new.group), new.index, payload)
  add_field(record, at, new.id)
  add_field(record, sum, new.checksum)
  add_up(record.sums, new, payload)
  tally('accepted', 1)
  local members = record.sums.members
  if members == tonumber(record.size) then
    leave_leases(new.group, record.owner)
    local flaw = flaw_of(record.sums)
    if flaw then
      -- One more, and `end_group` takes all of them off; a group of one never was open.
      if members > 1 then tally('open_members', 1) end
      write_record(new.group)
      end_group(new.group, 'rejected', flaw)
      return 'inserted'
    end
    tally('open_members', 1 - members)
    make_ready(new.group)
    return 'ready'
  end
  if members == 1 then redis.call('ZADD', key('open'), now(), new.group) end
  tally('open_members', 1)
  return 'inserted'
end
"""

# Atomic because of two copies of one trajectory, and of two answers for one place, exactly one may be stored, and the
# member that completes a group must make it ready in the same instant. Several trajectories in one call because the
# call itself costs as much as storing one.
# (MessagePack of [id, group, index, group_size, oldest_version, newest_version, checksum, attempt, written_tokens,
# reward, 1 if it was answered, 1 if it is right, 1 if it is greedy], all as text; payload)... -> one word each,
# separated by spaces: inserted | ready (inserted, and its group is complete and not rejected) | duplicate |
# superseded | why it is refused. One argument rather than thirteen, because each costs client and server as much as a
# small command.
INSERT = script(
    _IS_DONE,
    END_GROUP,
    RING_BELL,
    _TALLY,
    _JUDGE,
    MAKE_COMPLETE,
    _RECORDS,
    _ADD_UP,
    _INSERT_ONE,
    """
local answers = {}
for i = 2, #ARGV, 2 do
  local h = cmsgpack.unpack(ARGV[i])
  local new = {id = h[1], group = h[2], index = h[3], size = h[4], oldest = h[5], version = h[6], checksum = h[7],
    attempt = h[8], written = h[9], reward = h[10], answered = h[11], correct = h[12], greedy = h[13]}
  answers[#answers + 1] = insert_one(new, ARGV[i + 1])
end
write_records()
write_tally()
return table.concat(answers, ' ')
""",
    runs_when_full=False,
)

# Atomic because each row must count once, whoever answers it. The payload is not kept.
# group, evaluation id, row, newest_version, is_correct, is_failed, purpose, attempt -> a word as with INSERT, ready
# for the last row of the evaluation.
INSERT_EVALUATION = script(
    _IS_FROM_THE_FUTURE,
    """
local group, row = ARGV[2], ARGV[4]
local evaluation, answers = key('evaluation:' .. ARGV[3]), key('answers:' .. ARGV[3])
local asked, answered, purpose = unpack(redis.call('HMGET', evaluation, 'num_prompts', 'num_answered', 'purpose'))
if purpose ~= ARGV[8] then return 'unknown_group' end
if asked == answered or redis.call('SISMEMBER', answers, row) == 1 then return 'duplicate' end
local owner, attempt = unpack(redis.call('HMGET', key('group:' .. group), 'owner', 'attempt'))
if not attempt then return 'unknown_group' end
if tonumber(ARGV[9]) > tonumber(attempt) then return 'unknown_lease' end
if is_from_the_future(ARGV[5]) then return 'future_version' end
redis.call('SADD', answers, row)
redis.call('HINCRBY', evaluation, 'num_correct', ARGV[6])
redis.call('HINCRBY', evaluation, 'num_failed', ARGV[7])
redis.call('ZREM', key('evaluation_leases'), group)
redis.call('ZREM', key('evaluation_pending'), group)
if owner then redis.call('SREM', key('leases_of:' .. owner), group) end
redis.call('DEL', key('group:' .. group))
if redis.call('HINCRBY', evaluation, 'num_answered', 1) < tonumber(asked) then return 'inserted' end
redis.call('DEL', answers)
return 'ready'
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
