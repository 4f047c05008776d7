-- Removes groups from a claim; groups that were trained on before are released instead of rejected.
-- Keys: claim_fences, claimed:<step>, used:*, used_steps, and as end_group of prelude.lua
-- Arguments: step, fence, reason, groups...
-- Returns: number removed; -1 if the claim is not live
-- Atomic because a group must be either in the claim or ended.
if not run_exists() then return NORUN end
allow_when_full()
local step, fence, reason, removed = ARGV[2], ARGV[3], ARGV[4], 0
if redis.call('HGET', key('claim_fences'), step) ~= fence then return -1 end
for i = 5, #ARGV do
  if redis.call('LREM', key('claimed:' .. step), 1, ARGV[i]) == 1 then
    -- Already out of the claim, as `end_group` requires.
    if steps_of(ARGV[i]) ~= '' then enqueue(ARGV[i], true) else end_group(ARGV[i], 'rejected', reason) end
    removed = removed + 1
  end
end
return removed
