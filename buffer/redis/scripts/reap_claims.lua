-- Takes back lapsed claims.
-- Keys: claims, bell, and as fail_claim of prelude.lua
-- Arguments: the chief's fence, max_attempts
-- Returns: {step, number of groups back in the queue, {quarantined group, ...}}, ...
-- Atomic because a claim found lapsed must not be committed before it is taken back.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local events = {}
for _, step in ipairs(redis.call('ZRANGEBYSCORE', key('claims'), '-inf', now())) do
  local num_ready, quarantined = fail_claim(step, ARGV[3])
  events[#events + 1] = {step, num_ready, quarantined}
  ring_bell()
end
return events
