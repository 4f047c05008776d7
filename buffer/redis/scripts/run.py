"""Scripts on the run itself."""

from slipstream.buffer.redis.scripts.prelude import script

# Atomic because two roles may open one run at the same time, and exactly one may create it.
# config_json, num_rows, seed, layout, keeps_finished, max_uses, filter, its low and high bound
# -> the stored config_json, num_rows, seed, layout.
OPEN_RUN = script(
    """
local run = key('run')
if redis.call('EXISTS', run) == 0 then
  redis.call('HSET', run, 'config_json', ARGV[2], 'num_rows', ARGV[3], 'seed', ARGV[4], 'layout', ARGV[5],
    'keeps_finished', ARGV[6], 'finished_sequence', 0,
    'phase', 'starting', 'detail', '', 'step', 0, 'version', 0, 'announced_version', 0,
    'max_uses', ARGV[7], 'consumed', 0, 'consumed_by_version', 0, 'uses', 0, 'next_ordinal', 0, 'admitted', 0,
    'ready_sequence', 0, 'evaluation_sequence', 0, 'fence', 0,
    'filter', ARGV[8], 'filter_low', ARGV[9], 'filter_high', ARGV[10])
end
return redis.call('HMGET', run, 'config_json', 'num_rows', 'seed', 'layout')
""",
    needs_run=False,
)

# Atomic because the config may only replace the one it was compared with. expected, replacement -> 1 | 0.
REPLACE_CONFIG = script(
    """
if redis.call('HGET', key('run'), 'config_json') ~= ARGV[2] then return 0 end
redis.call('HSET', key('run'), 'config_json', ARGV[3])
return 1
"""
)

# Atomic because a phase and its reason are read together. phase, detail.
SET_PHASE = script("redis.call('HSET', key('run'), 'phase', ARGV[2], 'detail', ARGV[3])")

# Atomic because versions only grow, also when two roles report at the same time, and what the learner has consumed must
# move with the version that it is in. version, '1' when committed too.
RAISE_VERSION = script(
    """
local run, version = key('run'), tonumber(ARGV[2])
local function raise(field)
  if tonumber(redis.call('HGET', run, field)) >= version then return false end
  redis.call('HSET', run, field, version)
  return true
end
raise('announced_version')
if ARGV[3] == '1' and raise('version') then
  local step = redis.call('HGET', key('version_steps'), version) or redis.call('HGET', run, 'step')
  redis.call('HSET', run, 'consumed_by_version', redis.call('HGET', key('consumed_at'), step) or 0)
end
"""
)

# Atomic because the run must exist, and a repeat after a lost answer must not enter it twice. entry, version, step.
RECORD_VERSION = script(
    """
if redis.call('LINDEX', key('versions'), -1) ~= ARGV[2] then redis.call('RPUSH', key('versions'), ARGV[2]) end
redis.call('HSET', key('version_steps'), ARGV[3], ARGV[4])
"""
)
