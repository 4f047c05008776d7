-- Shared beginning of every script: the loader prepends it to the script's text.
--
-- KEYS[1] is the prefix `{run}:` of the run's keys: one hash tag, so one slot even on a cluster. ARGV[1] is the time in
-- milliseconds in tests, and empty otherwise; the script's own arguments start at ARGV[2].
--
-- Keys, after the prefix:
--   run                 hash    layout, config_json, num_rows, seed, phase, detail, step, stepped_at, version,
--                               announced_version, checkpoint, checkpoint_step, archived_step (newest step whose ledger
--                               entry is in the archive only), fence, learner_fence, next_ordinal, admitted, consumed,
--                               consumed_by_version, target_lag, uses, max_uses, keeps_finished, sequences (ready,
--                               finished, evaluation), filter, filter_low, filter_high, curriculum (JSON, or empty)
--   counters            hash    accepted, duplicates, superseded, open_members, short_members, payload_bytes, trained,
--                               metrics, and tokens: accepted_, superseded_, wasted_, trained_tokens
--   refused             hash    reason -> trajectories
--   group:<id>          hash    attempt, size, baseline ('1': its last member is greedy), purpose, owner, sequence,
--                               claim_attempts, steps ("3,17"), closed (made ready while incomplete), outcome, reason,
--                               row (with a curriculum), guest:<name> (a guest wrote members);
--                               sums over its members (see insert.lua); at:<index> -> trajectory id,
--                               sum:<trajectory id> -> checksum
--   success             hash    row -> success rate, MessagePack of {answers, weighted answers, weighted correct ones}
--   curriculum          hash    skipped_too_easy, skipped_too_hard, explored, rows, rows_too_easy, rows_too_hard
--   payloads:<id>       hash    index -> encoded trajectory
--   leases              zset    training group -> deadline       evaluation_leases  zset  row group -> deadline
--   leases_of:<owner>   set     groups                           returned           zset  group -> ordinal
--   open                zset    incomplete group -> ms of its first member
--   ready               zset    group -> ready sequence
--   reusable            zset    group in a used:<step> that may be sampled again -> ready sequence
--   bell                list    at most one element, pushed when groups become ready, for `wait_ready`
--   claims              zset    step -> deadline                 claim_fences       hash  step -> fence
--   claimed:<step>      list    groups                           used:<step>        list  groups
--   used_steps          zset    step -> step                     commit_fences      hash  step -> fence
--   versions            list    encoded VersionEntry             version_steps      hash  version -> step
--   consumed_at         hash    step -> groups first trained on up to it
--   ledger              hash    step -> encoded StepEntry, after archived_step
--   done                bitmap  ordinals of finished groups
--   finished            zset    finished group -> sequence       outcomes           hash  outcome -> groups
--   outcome_members     hash    outcome -> trajectories          reasons            hash  outcome: reason -> groups
--   evaluation:<id>     hash    the EvaluationResult             evaluation_pending zset  row group -> sequence
--   answers:<id>        hash    answer -> encoded EvaluationAnswer, for a day after the last answer
--   quarantine          list    rejected frames
--   roles, role_times   hash    latest gauges, and their time    metrics            list  newest rows
--   role_marks, role_progress_times  hash  progress of each role, and when it last changed
--   events              list    newest events
--   guests              hash    quarantined guest -> reason
--   brokers, broker_deadlines  hash  broker -> encoded facts, and when it counts as gone
--   chief               hash    name, incarnation, fence, deadline of the broker that does the work shared by all
--   launcher_requests, broker_requests, learner_requests  hash  subject -> value, until taken

local prefix = KEYS[1]
local NORUN = redis.error_reply('NORUN')

local function key(name) return prefix .. name end

local function now()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Scripts are not rolled back: writes before an error stay. So every script makes all checks that can refuse it before
-- its first write.
local function run_exists() return redis.call('EXISTS', key('run')) == 1 end

-- While memory is full, Redis refuses a script's first write unless that command can only free memory; later writes
-- pass. Operations that free memory, or write little, must keep working, so they begin with such a command.
local function allow_when_full() redis.call('DEL', prefix) end

-- A chief operation passes its fence; '0' is accepted as long as the run has never had a chief.
local STALE = redis.error_reply('STALE')
local function is_chief(fence)
  local chief = redis.call('HMGET', key('chief'), 'fence', 'deadline')
  return not chief[1] or (chief[1] == fence and tonumber(chief[2]) > now())
end

-- --- finished groups ------------------------------------------------------------------------------------------------
local function drop_record(group)
  -- `0 - bytes`, because `-bytes` of 0 is "-0", which Redis does not accept as an integer.
  local bytes = redis.call('HGET', key('group:' .. group), 'bytes') or 0
  redis.call('HINCRBY', key('counters'), 'payload_bytes', 0 - bytes)
  redis.call('UNLINK', key('group:' .. group), key('payloads:' .. group))
end

-- Ends a group that the caller has removed from every queue, lease, and claim. Its ordinal is marked in the same
-- operation, so that a late answer is recognized after the record is gone.
local function end_group(group, outcome, reason)
  local group_key, counters = key('group:' .. group), key('counters')
  local f = redis.call('HMGET', group_key, 'members', 'size', 'tokens', 'closed')
  local members = tonumber(f[1])
  redis.call('SETBIT', key('done'), group, 1)
  redis.call('HINCRBY', key('outcomes'), outcome, 1)
  redis.call('HINCRBY', key('outcome_members'), outcome, members)
  if redis.call('ZREM', key('open'), group) == 1 then redis.call('HINCRBY', counters, 'open_members', -members) end
  if f[4] then redis.call('HINCRBY', counters, 'short_members', members - f[2]) end
  if outcome ~= 'retired' then
    redis.call('HINCRBY', key('reasons'), outcome .. ': ' .. reason, 1)
    redis.call('HINCRBY', counters, 'wasted_tokens', f[3] or 0)
    -- A group that was never trained on returns its pacing budget.
    redis.call('HINCRBY', key('run'), 'admitted', -1)
  end
  if members > 0 and redis.call('HGET', key('run'), 'keeps_finished') == '1' then
    redis.call('HSET', group_key, 'outcome', outcome, 'reason', reason)
    redis.call('ZADD', key('finished'), redis.call('HINCRBY', key('run'), 'finished_sequence', 1), group)
  else
    drop_record(group)
  end
end

-- --- curriculum -----------------------------------------------------------------------------------------------------
-- Factor on the weight of earlier answers with each later group of the row: half of a rate is its newest group.
local RATE_DECAY = 0.5

-- The run's CurriculumConfig; false without one.
local function curriculum_of_run()
  local rules = redis.call('HGET', key('run'), 'curriculum') or ''
  return rules ~= '' and cjson.decode(rules)
end

local function success_of(row) return cmsgpack.unpack(redis.call('HGET', key('success'), row) or '\147\0\0\0') end

-- The side of the band on which a row lies; nil inside the band, or with too few answers.
local function flaw_of(rate, curriculum)
  if rate[1] < curriculum.min_answers then return nil end
  local share = rate[3] / rate[2]
  if share < curriculum.low then return 'too_hard' end
  if share > curriculum.high then return 'too_easy' end
end

-- Adds a complete group to its row's success rate, before any filter.
local function measure(group, answered, correct)
  local row, curriculum = redis.call('HGET', key('group:' .. group), 'row'), curriculum_of_run()
  if not row or not curriculum or answered == 0 then return end
  local was = success_of(row)
  local is = {was[1] + answered, was[2] * RATE_DECAY + answered, was[3] * RATE_DECAY + correct}
  redis.call('HSET', key('success'), row, cmsgpack.pack(is))
  if was[1] == 0 then redis.call('HINCRBY', key('curriculum'), 'rows', 1) end
  for rate, change in pairs({[was] = -1, [is] = 1}) do
    local flaw = flaw_of(rate, curriculum)
    if flaw then redis.call('HINCRBY', key('curriculum'), 'rows_' .. flaw, change) end
  end
end

-- --- leases ---------------------------------------------------------------------------------------------------------
local function is_evaluation(group) return string.find(group, ':', 1, true) ~= nil end

local function leases_key(group) return key(is_evaluation(group) and 'evaluation_leases' or 'leases') end

-- Group of the lease "17-2": group 17 at attempt 2 (`make_lease_id`); nil unless it is the group's current lease.
local function leased_group(lease)
  local group, attempt = string.match(lease, '^(.*)%-(%d+)$')
  if not group or not redis.call('ZSCORE', leases_key(group), group) then return nil end
  if redis.call('HGET', key('group:' .. group), 'attempt') ~= attempt then return nil end
  return group
end

-- Ends the lease of an incomplete group. Evaluation rows can be leased without limit, because the role that opened the
-- evaluation has its own deadline. Returns {group, attempt, owner, 'returned' | 'quarantined'}.
local function return_lease(group, max_attempts, reason)
  local f = redis.call('HMGET', key('group:' .. group), 'attempt', 'owner', 'sequence')
  redis.call('ZREM', leases_key(group), group)
  redis.call('SREM', key('leases_of:' .. f[2]), group)
  local attempts = redis.call('HINCRBY', key('group:' .. group), 'attempt', 1)
  local fate = 'returned'
  if is_evaluation(group) then
    redis.call('ZADD', key('evaluation_pending'), f[3], group)
  elseif attempts < tonumber(max_attempts) then
    redis.call('ZADD', key('returned'), group, group)
  else
    end_group(group, 'quarantined', 'lease_attempts: ' .. reason)
    fate = 'quarantined'
  end
  return {group, f[1], f[2], fate}
end

-- --- groups that become complete ------------------------------------------------------------------------------------
local function ring_bell()
  redis.call('LPUSH', key('bell'), 1)
  redis.call('LTRIM', key('bell'), 0, 0)
end

local function end_lease(group, owner)
  redis.call('ZREM', key('leases'), group)
  redis.call('SREM', key('leases_of:' .. owner), group)
  redis.call('ZREM', key('returned'), group)
end

-- Why the run's filter rejects a group with these sums (`accounting.REJECTION_REASONS`); nil if it passes.
local function rejection_reason(sums)
  local f = redis.call('HMGET', key('run'), 'filter', 'filter_low', 'filter_high')
  local kind, low, high = f[1], tonumber(f[2]), tonumber(f[3])
  if kind == 'none' then return nil end
  if sums.answered == 0 then return 'no_reward' end
  if kind == 'zero_advantage' then return sums.most - sums.least < low and 'zero_advantage' or nil end
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

-- --- queue and claims -----------------------------------------------------------------------------------------------
-- The steps that trained on a group, as "3,17".
local function steps_of(group) return redis.call('HGET', key('group:' .. group), 'steps') or '' end

local function last_of(steps) return string.match(steps, '(%d+)$') end

local function make_reusable(group, sequence) redis.call('ZADD', key('reusable'), sequence, group) end

-- A quarantined guest that wrote members of the group, else nil.
local function quarantined_author(group)
  for _, guest in ipairs(redis.call('HKEYS', key('guests'))) do
    if redis.call('HEXISTS', key('group:' .. group), 'guest:' .. guest) == 1 then return guest end
  end
end

-- Puts a group back in the queue. Its ready sequence never changes, so it returns to its old position. A used group
-- that `is_released`, or that a quarantined guest wrote, is kept until a checkpoint covers it but not sampled again. An
-- unused group of a quarantined guest goes to quarantine. Returns whether the group is in the queue.
local function enqueue(group, is_released)
  local f = redis.call('HMGET', key('group:' .. group), 'sequence', 'steps')
  local sequence, steps, author = f[1], f[2] or '', quarantined_author(group)
  if steps ~= '' then
    redis.call('RPUSH', key('used:' .. last_of(steps)), group)
    redis.call('ZADD', key('used_steps'), last_of(steps), last_of(steps))
    if not (is_released or author) then make_reusable(group, sequence) end
  elseif author then
    end_group(group, 'quarantined', 'guest: ' .. author)
    return false
  else
    redis.call('ZADD', key('ready'), sequence, group)
  end
  return true
end

local function enqueue_all(list)
  local groups = redis.call('LRANGE', list, 0, -1)
  redis.call('DEL', list)
  local returned = 0
  for _, group in ipairs(groups) do
    if enqueue(group) then returned = returned + 1 end
  end
  return returned
end

local function dequeue(group)
  redis.call('ZREM', key('reusable'), group)
  if redis.call('ZREM', key('ready'), group) == 1 then return end
  redis.call('LREM', key('used:' .. last_of(steps_of(group))), 1, group)
end

local function release_claim(step)
  redis.call('ZREM', key('claims'), step)
  redis.call('HDEL', key('claim_fences'), step)
  return enqueue_all(key('claimed:' .. step))
end

-- Takes back an uncommitted claim. Groups that were claimed too often go to quarantine, because they may be crashing
-- their learners; those that were trained on before are only released.
-- Returns the number of groups back in the queue, and the quarantined groups.
local function fail_claim(step, max_attempts)
  local list, quarantined = key('claimed:' .. step), {}
  for _, group in ipairs(redis.call('LRANGE', list, 0, -1)) do
    if redis.call('HINCRBY', key('group:' .. group), 'claim_attempts', 1) >= tonumber(max_attempts) then
      redis.call('LREM', list, 1, group)
      if steps_of(group) ~= '' then
        enqueue(group, true)
      else
        end_group(group, 'quarantined', 'claim_attempts')
        quarantined[#quarantined + 1] = group
      end
    end
  end
  return release_claim(step), quarantined
end

