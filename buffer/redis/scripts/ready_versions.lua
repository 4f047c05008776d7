-- Counts ready groups by the version of their oldest token.
-- Keys: ready, group:*
-- Arguments: none
-- Returns: version, number of groups, ...
-- Atomic because a group must not be counted while it moves.
if not run_exists() then return NORUN end
local counts, answer = {}, {}
for _, group in ipairs(redis.call('ZRANGE', key('ready'), 0, -1)) do
  local oldest = redis.call('HGET', key('group:' .. group), 'oldest')
  counts[oldest] = (counts[oldest] or 0) + 1
end
for version, count in pairs(counts) do
  answer[#answer + 1] = version
  answer[#answer + 1] = count
end
return answer
