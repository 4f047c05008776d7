-- Counts an evaluation answer, which is finished at once and stays stored for the archive.
-- Keys: evaluation:<id>, answers:<id>, group:<id>:<answer>, payloads:<id>:<answer>, finished, counters,
--   evaluation_leases, evaluation_pending, leases_of:*
-- Arguments: group, evaluation id, answer (row, or row.sample), newest_version, '1' if correct, '1' if its reward
--   failed, purpose, attempt, oldest_version, encoded EvaluationAnswer, encoded trajectory
-- Returns: a word as in insert.lua; ready for the last answer of the evaluation
-- Atomic because each answer must count once, whoever sends it.
if not run_exists() then return NORUN end
allow_when_full()
-- The learner reads the answers within seconds.
local DAY_S = 86400
local group, answer, is_correct, is_failed = ARGV[2], ARGV[4], ARGV[6], ARGV[7]
local evaluation, answers = key('evaluation:' .. ARGV[3]), key('answers:' .. ARGV[3])
local asked, answered, purpose, version =
  unpack(redis.call('HMGET', evaluation, 'num_asked', 'num_answered', 'purpose', 'version'))
if purpose ~= ARGV[8] then return 'unknown_group' end
-- Check before looking up the group: after an answer is stored its group is gone, and a repeat must be acknowledged.
if asked == answered or redis.call('HEXISTS', answers, answer) == 1 then return 'duplicate' end
local owner, attempt = unpack(redis.call('HMGET', key('group:' .. group), 'owner', 'attempt'))
if not attempt then return 'unknown_group' end
if tonumber(ARGV[9]) > tonumber(attempt) then return 'unknown_lease' end
if tonumber(ARGV[5]) > tonumber(redis.call('HGET', key('run'), 'announced_version')) then return 'future_version' end
if ARGV[5] ~= version or ARGV[10] ~= version then return 'other_version' end
redis.call('HSET', answers, answer, ARGV[11])
redis.call('HINCRBY', evaluation, 'num_correct', is_correct)
redis.call('HINCRBY', evaluation, 'num_failed', is_failed)
redis.call('ZREM', key('evaluation_leases'), group)
redis.call('ZREM', key('evaluation_pending'), group)
if owner then redis.call('SREM', key('leases_of:' .. owner), group) end
if redis.call('HGET', key('run'), 'keeps_finished') == '1' then
  redis.call('HSET', key('group:' .. group), 'outcome', 'evaluated', 'bytes', #ARGV[12])
  redis.call('HINCRBY', key('counters'), 'payload_bytes', #ARGV[12])
  redis.call('HSET', key('payloads:' .. group), 0, ARGV[12])
  redis.call('ZADD', key('finished'), redis.call('HINCRBY', key('run'), 'finished_sequence', 1), group)
else
  redis.call('DEL', key('group:' .. group))
end
if redis.call('HINCRBY', evaluation, 'num_answered', 1) < tonumber(asked) then return 'inserted' end
redis.call('EXPIRE', answers, DAY_S)
return 'ready'
