-- Leases prompts: open evaluations first, then returned prompts, then new ones that the curriculum does not skip.
-- Keys: run, success, curriculum, done, group:*, leases, evaluation_leases, leases_of:<owner>, evaluation_pending, returned
-- Arguments: owner, max_groups, group_size, lease_ms, admission_limit, '1' if a group has a greedy baseline, minimum
--   and maximum sequence of evaluation rows, maximum number of rows leased ahead of training prompts; for the upcoming
--   prompts the first ordinal, one text with '1' for each that is explored or else '0', and their rows...
-- Returns: {group, attempt, purpose, {missing index, ...}}, ...
-- Atomic because a prompt must go to one generator only, and concurrent callers share the admission limit.
if not run_exists() then return NORUN end
allow_when_full()
local run, owner, room, group_size = key('run'), ARGV[2], tonumber(ARGV[3]), ARGV[4]
local deadline, limit, baseline, leased = now() + tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], {}

local function hand_out(group)
  local group_key, missing = key('group:' .. group), {}
  redis.call('HSET', group_key, 'owner', owner)
  redis.call('ZADD', leases_key(group), deadline, group)
  redis.call('SADD', key('leases_of:' .. owner), group)
  local f = redis.call('HMGET', group_key, 'attempt', 'purpose', 'size')
  for index = 0, f[3] - 1 do
    if redis.call('HEXISTS', group_key, 'at:' .. index) == 0 then missing[#missing + 1] = index end
  end
  leased[#leased + 1] = {group, f[1], f[2], missing}
end

local function hand_out_waiting(queue, first, last, count)
  if count <= 0 then return end
  for _, group in ipairs(redis.call('ZRANGEBYSCORE', key(queue), first, last, 'LIMIT', 0, count)) do
    redis.call('ZREM', key(queue), group)
    hand_out(group)
  end
end

local phase = redis.call('HGET', run, 'phase')
local trains, is_over = phase == 'starting' or phase == 'training', phase == 'finished' or phase == 'failed'
if limit < 0 then trains = false end
local function hand_out_rows(count)
  if not is_over then hand_out_waiting('evaluation_pending', ARGV[8], ARGV[9], count) end
end

local curriculum = curriculum_of_run()
local function is_skipped(row, place)
  local flaw = curriculum and row and flaw_of(success_of(row), curriculum)
  if not flaw then return false end
  local is_explored = string.sub(ARGV[12], place, place) == '1'
  redis.call('HINCRBY', key('curriculum'), is_explored and 'explored' or 'skipped_' .. flaw, 1)
  return not is_explored
end

hand_out_rows(math.min(tonumber(ARGV[10]), room * group_size))
-- A row is one answer, so one group's slot holds as many rows as the group has members.
room = room + #leased - math.ceil(#leased / group_size)
if trains then hand_out_waiting('returned', '-inf', '+inf', room - #leased) end
while trains and #leased < room and tonumber(redis.call('HGET', run, 'admitted')) < limit do
  local group = string.format('%d', redis.call('HINCRBY', run, 'next_ordinal', 1) - 1)
  local place = group - ARGV[11] + 1
  local row = place > 0 and ARGV[12 + place]
  if not is_skipped(row, place) then
    redis.call('HINCRBY', run, 'admitted', 1)
    redis.call('HSET', key('group:' .. group), 'attempt', 0, 'purpose', 'train', 'size', group_size,
      'members', 0, 'claim_attempts', 0, 'baseline', baseline)
    if row then redis.call('HSET', key('group:' .. group), 'row', row) end
    hand_out(group)
  else
    -- Finished without ever being leased, so it is accounted for like any other prompt.
    redis.call('SETBIT', key('done'), group, 1)
  end
end
-- Leftover room goes to evaluations.
hand_out_rows((room - #leased) * group_size)
return leased
