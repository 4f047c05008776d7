-- Extends the lease of a claim.
-- Keys: claims, claim_fences
-- Arguments: step, fence, lease_ms
-- Returns: 1 if the claim is live, else 0
-- Atomic because a claim that lapses in between must not be revived.
if not run_exists() then return NORUN end
allow_when_full()
if redis.call('HGET', key('claim_fences'), ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('ZADD', key('claims'), now() + tonumber(ARGV[4]), ARGV[2])
return 1
