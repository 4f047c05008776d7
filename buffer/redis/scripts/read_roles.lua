-- Reads the gauges of all roles.
-- Keys: roles, role_times, role_progress_times
-- Arguments: none
-- Returns: each of the keys as {name, value, ...}
-- Atomic because gauges and times belong together. Not a transaction, because Redis refuses even read-only ones while
-- memory is full, and the learner reads the roles before it can make room.
if not run_exists() then return NORUN end
return {
  redis.call('HGETALL', key('roles')),
  redis.call('HGETALL', key('role_times')),
  redis.call('HGETALL', key('role_progress_times')),
}
