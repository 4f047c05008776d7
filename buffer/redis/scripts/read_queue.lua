-- Reads every group that may be sampled.
-- Keys: run, ready, reusable, group:*
-- Arguments: none
-- Returns: groups that ever became ready, uses, ready candidates, reusable candidates. Candidates are one text, each
--   `id sequence oldest_version answered reward_sum reward_squares`, separated by `;`, because a client takes ten times
--   as long to parse thousands of small answers
-- Atomic because a sample needs a consistent queue. It reads every group in the queue, which pacing and
-- `reuse.max_groups` bound.
if not run_exists() then return NORUN end
allow_when_full()

local function candidates(queue)
  local found = {}
  for _, group in ipairs(redis.call('ZRANGE', key(queue), 0, -1)) do
    local f = redis.call('HMGET', key('group:' .. group), 'sequence', 'oldest', 'answered', 'reward_sum',
      'reward_squares')
    found[#found + 1] = group .. ' ' .. table.concat(f, ' ')
  end
  return table.concat(found, ';')
end

local f = redis.call('HMGET', key('run'), 'ready_sequence', 'uses')
return {tonumber(f[1]), tonumber(f[2]), candidates('ready'), candidates('reusable')}
