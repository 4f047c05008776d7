-- Counts an answer of an evaluation; its payload is not stored.
-- Keys: evaluation:<id>, answers:<id>, group:<id>:<answer>, evaluation_leases, evaluation_pending, leases_of:*
-- Arguments: group, evaluation id, answer (row, or row.sample), newest_version, '1' if right, '1' if the reward failed, purpose, attempt
-- Returns: a word as insert.lua does; ready for the last answer of the evaluation
-- Atomic because each answer must count once, whoever gives it.
if not run_exists() then return NORUN end
allow_when_full()
local group, answer, is_correct, is_failed = ARGV[2], ARGV[4], ARGV[6], ARGV[7]
local evaluation, answers = key('evaluation:' .. ARGV[3]), key('answers:' .. ARGV[3])
local asked, answered, purpose = unpack(redis.call('HMGET', evaluation, 'num_asked', 'num_answered', 'purpose'))
if purpose ~= ARGV[8] then return 'unknown_group' end
-- Before the group is looked up: that of an answer that is in is gone, and a repeat of its answer must be acknowledged.
if asked == answered or redis.call('SISMEMBER', answers, answer) == 1 then return 'duplicate' end
local owner, attempt = unpack(redis.call('HMGET', key('group:' .. group), 'owner', 'attempt'))
if not attempt then return 'unknown_group' end
if tonumber(ARGV[9]) > tonumber(attempt) then return 'unknown_lease' end
if tonumber(ARGV[5]) > tonumber(redis.call('HGET', key('run'), 'announced_version')) then return 'future_version' end
redis.call('SADD', answers, answer)
redis.call('HINCRBY', evaluation, 'num_correct', is_correct)
redis.call('HINCRBY', evaluation, 'num_failed', is_failed)
redis.call('ZREM', key('evaluation_leases'), group)
redis.call('ZREM', key('evaluation_pending'), group)
if owner then redis.call('SREM', key('leases_of:' .. owner), group) end
redis.call('DEL', key('group:' .. group))
if redis.call('HINCRBY', evaluation, 'num_answered', 1) < tonumber(asked) then return 'inserted' end
redis.call('DEL', answers)
return 'ready'
