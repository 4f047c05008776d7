-- Announces a version, and commits it if asked; lower versions have no effect.
-- Keys: run, version_steps, consumed_at
-- Arguments: version, '1' to commit it
-- Returns: nothing
-- Atomic because versions only grow, even if two roles report at the same time, and `consumed_by_version`, from which
-- pacing counts, must move with the committed version.
if not run_exists() then return NORUN end
allow_when_full()
local run, version, is_committed = key('run'), tonumber(ARGV[2]), ARGV[3] == '1'

local function raise(field)
  local before = tonumber(redis.call('HGET', run, field))
  if before >= version then return nil end
  redis.call('HSET', run, field, version)
  return before
end

raise('announced_version')
local before = is_committed and raise('version')
if before then
  -- Only later versions can still be committed; a rollback records its own again.
  for each = before, version - 1 do redis.call('HDEL', key('version_steps'), string.format('%d', each)) end
  local step = redis.call('HGET', key('version_steps'), version) or redis.call('HGET', run, 'step')
  redis.call('HSET', run, 'consumed_by_version', redis.call('HGET', key('consumed_at'), step) or 0)
end
