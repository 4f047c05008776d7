-- Creates the run, or finds the existing one.
-- Keys: run
-- Arguments: config_json, num_rows, seed, layout, keeps_finished, max_uses, filter, filter_low, filter_high,
--   curriculum (see prelude.lua)
-- Returns: the stored config_json, num_rows, seed, layout
-- Atomic because two roles may open one run at the same time, and exactly one may create it.
allow_when_full()
if not run_exists() then
  redis.call('HSET', key('run'), 'config_json', ARGV[2], 'num_rows', ARGV[3], 'seed', ARGV[4], 'layout', ARGV[5],
    'keeps_finished', ARGV[6], 'max_uses', ARGV[7], 'filter', ARGV[8], 'filter_low', ARGV[9], 'filter_high', ARGV[10],
    'curriculum', ARGV[11],
    'phase', 'starting', 'detail', '', 'step', 0, 'version', 0, 'announced_version', 0,
    'consumed', 0, 'consumed_by_version', 0, 'uses', 0, 'next_ordinal', 0, 'admitted', 0,
    'ready_sequence', 0, 'evaluation_sequence', 0, 'finished_sequence', 0, 'fence', 0)
end
return redis.call('HMGET', key('run'), 'config_json', 'num_rows', 'seed', 'layout')
