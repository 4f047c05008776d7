-- Stores trajectories; a group that becomes complete is made ready, or rejected by the run's filter.
-- Keys: run, guests, group:*, payloads:*, open, ready, leases, returned, counters, done
-- Arguments: the guest that wrote them or '', (header, payload)...; a header is MessagePack of [id, group, index,
--   group_size, oldest_version, newest_version, checksum, attempt, written_tokens, reward, 1 if it has a reward, 1 if
--   it is correct, 1 if it is greedy], all as text: one argument, because thirteen small ones cost client and server as
--   much as thirteen small commands
-- Returns: one word each, separated by spaces: inserted | ready (inserted, and its group became ready) | duplicate |
--   superseded | the reason of a refusal
-- Atomic because exactly one of two copies of a trajectory, or of two answers for one index, may be stored, and the
-- member that completes a group must make it ready. Several trajectories share a call, because the call itself costs as
-- much as storing one.
if not run_exists() then return NORUN end

-- Fields of a group that are summed over its members, for sampling, filter and accounting.
local SUMS = {'members', 'oldest', 'tokens', 'bytes', 'answered', 'reward_sum', 'reward_squares', 'in_flight',
  'publish', 'arrived', 'sampled', 'correct', 'least', 'most'}

local versions = redis.call('HMGET', key('run'), 'announced_version', 'version')
local announced_version, applied_version = tonumber(versions[1]), tonumber(versions[2])
local guest = ARGV[2]
local is_quarantined = guest ~= '' and redis.call('HEXISTS', key('guests'), guest) == 1

-- Counters are summed over all trajectories of a call and written once.
local counted = {}
local function count(counter, number) counted[counter] = (counted[counter] or 0) + number end

-- A finished group leaves one bit. The bound keeps a forged id from growing the bitmap.
local function is_done(group)
  local ordinal = string.match(group, '^%d+$') and tonumber(group)
  if not ordinal or ordinal >= tonumber(redis.call('HGET', key('run'), 'next_ordinal')) then return false end
  return redis.call('GETBIT', key('done'), ordinal) == 1
end

-- A group's record is read and written once per call, because its members usually arrive together.
local records = {}
local function record_of(group)
  if records[group] then return records[group] end
  local f = redis.call('HMGET', key('group:' .. group), 'size', 'attempt', 'purpose', 'outcome', 'closed', 'owner',
    'baseline', unpack(SUMS))
  local record = {size = f[1], attempt = f[2], purpose = f[3], outcome = f[4], closed = f[5], owner = f[6],
    baseline = f[7], sums = {}, added = {}, fields = {}}
  for i, name in ipairs(SUMS) do record.sums[name] = tonumber(f[7 + i]) end
  records[group] = record
  return record
end

local function add_field(record, name, value)
  record.added[name] = value
  table.insert(record.fields, name)
  table.insert(record.fields, value)
end

-- Also drops the cached record, which is read again when needed.
local function write_record(group)
  local record = records[group]
  records[group] = nil
  if #record.fields == 0 then return end
  for name, sum in pairs(record.sums) do add_field(record, name, sum) end
  redis.call('HSET', key('group:' .. group), unpack(record.fields))
end

-- Why a trajectory is not stored, or nil. `checksum`: of the trajectory stored under the same id; `taken_by`: id of the
-- trajectory stored at the same index.
local function objection_to(new, group, checksum, taken_by)
  if checksum then return checksum == new.checksum and 'duplicate' or 'content_conflict' end
  if taken_by or group.outcome or group.closed then return 'superseded' end
  if group.purpose ~= 'train' then return is_done(new.group) and 'superseded' or 'unknown_group' end
  if group.size ~= new.size or tonumber(new.index) >= tonumber(new.size) then return 'group_size' end
  local is_baseline = group.baseline == '1' and tonumber(new.index) == tonumber(new.size) - 1
  if (new.greedy == '1') ~= is_baseline then return 'baseline' end
  if tonumber(new.attempt) > tonumber(group.attempt) then return 'unknown_lease' end
  if tonumber(new.version) > announced_version then return 'future_version' end
  if is_quarantined then return 'guest_quarantined' end
end

local function add_to_sums(sums, new, payload)
  local function add(name, more) sums[name] = (sums[name] or 0) + more end
  local oldest = tonumber(new.oldest)
  local answered, reward = tonumber(new.answered), tonumber(new.reward)
  if answered == 1 then
    sums.least = math.min(reward, sums.least or reward)
    sums.most = math.max(reward, sums.most or reward)
  end
  -- A greedy member is a baseline: its reward counts only for least and most, not for means.
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
  -- Lag of the oldest token. Versions up to the one applied by all generators count as in flight, those from there to
  -- the announced one as publishing, and those after the arrival as time in the queue.
  local applied = math.max(oldest, applied_version)
  add('in_flight', applied - oldest)
  add('publish', math.max(0, announced_version - applied))
  add('arrived', math.max(announced_version, applied))
  count('accepted_tokens', new.written)
  count('payload_bytes', #payload)
end

-- Returns 'ready', or 'inserted' if the filter rejects the group.
local function complete(group, record)
  local members = record.sums.members
  end_lease(group, record.owner)
  measure(group, record.sums.answered, record.sums.correct)
  local reason = rejection_reason(record.sums)
  if reason then
    -- `end_group` subtracts all members from `open_members`, so add this one; a group of one was never open.
    if members > 1 then count('open_members', 1) end
    -- Write first: `end_group` reads members and tokens from the stored record, and may delete it.
    write_record(group)
    end_group(group, 'rejected', reason)
    return 'inserted'
  end
  count('open_members', 1 - members)
  make_ready(group)
  return 'ready'
end

local function insert_one(new, payload)
  local record, at, sum = record_of(new.group), 'at:' .. new.index, 'sum:' .. new.id
  local f = redis.call('HMGET', key('group:' .. new.group), sum, at)
  local objection = objection_to(new, record, record.added[sum] or f[1], record.added[at] or f[2])
  if objection then
    if objection == 'duplicate' then count('duplicates', 1) end
    if objection == 'superseded' then
      count('superseded', 1)
      count('superseded_tokens', new.written)
    end
    return objection
  end
  redis.call('HSET', key('payloads:' .. new.group), new.index, payload)
  add_field(record, at, new.id)
  add_field(record, sum, new.checksum)
  if guest ~= '' then add_field(record, 'guest:' .. guest, 1) end
  add_to_sums(record.sums, new, payload)
  count('accepted', 1)
  if record.sums.members == tonumber(record.size) then return complete(new.group, record) end
  if record.sums.members == 1 then redis.call('ZADD', key('open'), now(), new.group) end
  count('open_members', 1)
  return 'inserted'
end

local answers = {}
for i = 3, #ARGV, 2 do
  local h = cmsgpack.unpack(ARGV[i])
  local new = {id = h[1], group = h[2], index = h[3], size = h[4], oldest = h[5], version = h[6], checksum = h[7],
    attempt = h[8], written = h[9], reward = h[10], answered = h[11], correct = h[12], greedy = h[13]}
  answers[#answers + 1] = insert_one(new, ARGV[i + 1])
end
for group in pairs(records) do write_record(group) end
for counter, number in pairs(counted) do redis.call('HINCRBY', key('counters'), counter, number) end
return table.concat(answers, ' ')
