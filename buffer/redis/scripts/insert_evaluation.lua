-- Counts an answer to a row of an evaluation; its payload is not stored.
-- Keys: evaluation:<id>, answers:<id>, group:<id>:<row>, evaluation_leases, evaluation_pending, leases_of:*
-- Arguments: group, evaluation id, row, newest_version, '1' if right, '1' if the reward failed, purpose, attempt
-- Returns: a word as insert.lua does; ready for the last row of the evaluation
-- Atomic because each row must count once, whoever answers it.
if not run_exists() then return NORUN end
allow_when_full()
local group, row, is_correct, is_failed = ARGV[2], ARGV[4], ARGV[6], ARGV[7]
local evaluation, answers = key('evaluation:' .. ARGV[3]), key('answers:' .. ARGV[3])
local asked, answered, purpose = unpack(redis.call('HMGET', evaluation, 'num_prompts', 'num_answered', 'purpose'))
if purpose ~= ARGV[8] then return 'unknown_group' end
-- Before the row is looked up: the record of an answered row is gone, and a repeat of its answer must be acknowledged.
if asked == answered or redis.call('SISMEMBER', answers, row) == 1 then return 'duplicate' end
local owner, attempt = unpack(redis.call('HMGET', key('group:' .. group), 'owner', 'attempt'))
if not attempt then return 'unknown_group' end
if tonumber(ARGV[9]) > tonumber(attempt) then return 'unknown_lease' end
if tonumber(ARGV[5]) > tonumber(redis.call('HGET', key('run'), 'announced_version')) then return 'future_version' end
redis.call('SADD', answers, row)
redis.call('HINCRBY', evaluation, 'num_correct', is_correct)
redis.call('HINCRBY', evaluation, 'num_failed', is_failed)
redis.call('ZREM', key('evaluation_leases'), group)
redis.call('ZREM', key('evaluation_pending'), group)
if owner then redis.call('SREM', key('leases_of:' .. owner), group) end
redis.call('DEL', key('group:' .. group))
if redis.call('HINCRBY', evaluation, 'num_answered', 1) < tonumber(asked) then return 'inserted' end
redis.call('DEL', answers)
return 'ready'
