-- Renews the leases that owners still hold, and stores the latest gauges of their roles. Above the cap, the role with
--   the oldest report is dropped.
-- Keys: group:*, leases, evaluation_leases, leases_of:<owner>, roles, role_times, role_marks, role_progress_times
-- Arguments: maximum roles kept, lease_ms, then for each role MessagePack of [role id, progress mark or '', owner or
--   '', [lease id, ...]], and its encoded gauges
-- Returns: number of leases renewed
-- Atomic because a lease must not be renewed after it was given to another owner, gauges and times are read together,
-- and the number of roles is capped. Many roles share a call, because a call costs more than a role.
if not run_exists() then return NORUN end
allow_when_full()
local most, at, renewed = tonumber(ARGV[2]), now(), 0
local deadline = at + tonumber(ARGV[3])

local function longest_silent(role)
  local times, found, earliest = redis.call('HGETALL', key('role_times')), nil, nil
  for i = 1, #times, 2 do
    local name, heard_at = times[i], tonumber(times[i + 1])
    if name ~= role and (earliest == nil or heard_at < earliest or (heard_at == earliest and name < found)) then
      found, earliest = name, heard_at
    end
  end
  return found
end

local function report(role, gauges, mark)
  redis.call('HSET', key('roles'), role, gauges)
  redis.call('HSET', key('role_times'), role, at)
  while redis.call('HLEN', key('roles')) > most do
    local forgotten = longest_silent(role)
    for _, hash in ipairs({'roles', 'role_times', 'role_marks', 'role_progress_times'}) do
      redis.call('HDEL', key(hash), forgotten)
    end
  end
  if mark ~= '' and redis.call('HGET', key('role_marks'), role) ~= mark then
    redis.call('HSET', key('role_marks'), role, mark)
    redis.call('HSET', key('role_progress_times'), role, at)
  end
end

for i = 4, #ARGV, 2 do
  local role, mark, owner, leases = unpack(cmsgpack.unpack(ARGV[i]))
  for _, lease in ipairs(leases) do
    local group = leased_group(lease)
    -- `leased_group` compares the attempt, so a former holder does not extend a prompt that was leased again.
    if group and redis.call('SISMEMBER', key('leases_of:' .. owner), group) == 1 then
      redis.call('ZADD', leases_key(group), deadline, group)
      renewed = renewed + 1
    end
  end
  report(role, ARGV[i + 1], mark)
end
return renewed
