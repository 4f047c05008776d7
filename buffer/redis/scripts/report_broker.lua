-- Reports a broker as alive, and makes it the chief if there is none.
-- Keys: brokers, broker_deadlines, chief
-- Arguments: name, incarnation, lease_ms, encoded facts
-- Returns: the chief's name, its fence if it is this broker or 0, then name and encoded facts of each live broker
-- Atomic because only one of two brokers that find no chief at the same time may become it.
if not run_exists() then return NORUN end
allow_when_full()
local name, incarnation, at, lease = ARGV[2], ARGV[3], now(), tonumber(ARGV[4])

-- A deadline further away than a lease dates from before the clock was set back, and is not being renewed.
local function is_live(deadline) return deadline > at and deadline <= at + lease end

redis.call('HSET', key('brokers'), name, ARGV[5])
redis.call('HSET', key('broker_deadlines'), name, at + lease)
local chief = redis.call('HMGET', key('chief'), 'name', 'incarnation', 'deadline', 'fence')
local is_own, fence = chief[1] == name and chief[2] == incarnation, tonumber(chief[4] or 0)
-- The previous process is dead, or must no longer act.
if not is_live(tonumber(chief[3] or 0)) or (chief[1] == name and not is_own) then
  chief[1], is_own, fence = name, true, fence + 1
  redis.call('HSET', key('chief'), 'name', name, 'incarnation', incarnation, 'fence', fence)
end
if is_own then redis.call('HSET', key('chief'), 'deadline', at + lease) end

local answer, deadlines = {chief[1], is_own and fence or 0}, redis.call('HGETALL', key('broker_deadlines'))
for i = 1, #deadlines, 2 do
  if is_live(tonumber(deadlines[i + 1])) then
    answer[#answer + 1] = deadlines[i]
    answer[#answer + 1] = redis.call('HGET', key('brokers'), deadlines[i])
  end
end
return answer
