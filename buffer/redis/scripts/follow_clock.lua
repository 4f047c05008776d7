-- Corrects deadlines after the clock has jumped.
-- Keys: leases, evaluation_leases, claims, open
-- Arguments: the chief's fence, ms that it jumped forward, or 0; longest lease in ms, longest claim in ms
-- Returns: nothing
-- Atomic because a deadline that is renewed in between must not be moved twice.
if not run_exists() then return NORUN end
if not is_chief(ARGV[2]) then return STALE end
allow_when_full()
local at, jump, longest_lease, longest_claim = now(), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local function follow(name, longest)
  local latest = at + longest
  -- Without a jump forward, only deadlines that a clock set back has put too far ahead.
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key(name), jump > 0 and '-inf' or '(' .. latest, '+inf')) do
    local deadline = tonumber(redis.call('ZSCORE', key(name), member)) + jump
    redis.call('ZADD', key(name), math.min(deadline, latest), member)
  end
end

follow('leases', longest_lease)
follow('evaluation_leases', longest_lease)
follow('claims', longest_claim)
follow('open', 0)
