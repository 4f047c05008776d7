-- Stores the newest gauges of a role; above the cap, the role that was not heard of for longest is forgotten.
-- Keys: roles, role_times, role_marks, role_progress_times
-- Arguments: role id, encoded gauges, progress mark or '', most roles kept
-- Returns: nothing
-- Atomic because gauges and their times are read together, and no more roles may stay than the cap.
if not run_exists() then return NORUN end
allow_when_full()
local role, gauges, mark, most = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])

local function longest_silent()
  local times, found, earliest = redis.call('HGETALL', key('role_times')), nil, nil
  for i = 1, #times, 2 do
    local name, at = times[i], tonumber(times[i + 1])
    if name ~= role and (earliest == nil or at < earliest or (at == earliest and name < found)) then
      found, earliest = name, at
    end
  end
  return found
end

redis.call('HSET', key('roles'), role, gauges)
redis.call('HSET', key('role_times'), role, now())
while redis.call('HLEN', key('roles')) > most do
  local forgotten = longest_silent()
  for _, hash in ipairs({'roles', 'role_times', 'role_marks', 'role_progress_times'}) do
    redis.call('HDEL', key(hash), forgotten)
  end
end
if mark ~= '' and redis.call('HGET', key('role_marks'), role) ~= mark then
  redis.call('HSET', key('role_marks'), role, mark)
  redis.call('HSET', key('role_progress_times'), role, now())
end
