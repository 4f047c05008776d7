-- Opens an evaluation: its answers are leased before training prompts.
-- Keys: evaluation:<id>, group:<id>:*, evaluation_pending, run
-- Arguments: evaluation id, purpose, version, its first sequence, answers (row, or row.sample)...
-- Returns: nothing
-- Atomic because an evaluation must be opened once, with all of its answers.
if not run_exists() then return NORUN end
allow_when_full()
local id, purpose = ARGV[2], ARGV[3]
local evaluation = key('evaluation:' .. id)
if redis.call('EXISTS', evaluation) == 1 then return end
redis.call('HSET', evaluation, 'purpose', purpose, 'version', ARGV[4], 'num_asked', #ARGV - 5,
  'num_answered', 0, 'num_correct', 0, 'num_failed', 0)
for i = 6, #ARGV do
  local group = id .. ':' .. ARGV[i]
  local number = redis.call('HINCRBY', key('run'), 'evaluation_sequence', 1)
  local sequence = string.format('%.0f', tonumber(ARGV[5]) + number)
  redis.call('HSET', key('group:' .. group), 'attempt', 0, 'purpose', purpose, 'size', 1, 'sequence', sequence)
  redis.call('ZADD', key('evaluation_pending'), sequence, group)
end
