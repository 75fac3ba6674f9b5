-- The arithmetic of gateway/limits/arithmetic.py on the server: one call is one atomic step over all
-- limits of one request, by the server's clock. All keys of a tenant share a hash tag, so one slot.
-- KEYS: open holds by expiry, what they reserved, then the state of each limit.
-- ARGV: the step, then its arguments; a limit is kind, limit, amount, period_us, window_us.
local WINDOW, BUCKET, CONCURRENCY, BUDGET = 1, 2, 3, 4
local SLOTS, ROLLING_SLOTS, MINUTE_US = 64, 60, 60000000
local NEVER, RETRY_US, WINDOW_END_US = -1, 1000000, 1000000000000
local KEEP_MS = 40 * 86400000 -- idle state goes; a budget that is gone is read from the ledger anew
local DAY_MS = 86400000
local FEW_HOLDS = 1000
local floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
local holds, data = KEYS[1], KEYS[2]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function whole(value) return string.format('%.0f', value) end

local function demands(first)
  local found = {}
  for i = 3, #KEYS do
    local at = first + (i - 3) * 5
    found[i - 2] = {
      key = KEYS[i], kind = tonumber(ARGV[at]), limit = tonumber(ARGV[at + 1]),
      amount = tonumber(ARGV[at + 2]), period = tonumber(ARGV[at + 3]),
      window = tonumber(ARGV[at + 4]),
    }
  end
  return found
end

local function sorted_slots(fields)
  local slots = {}
  for i = 1, #fields, 2 do
    local slot = tonumber(fields[i])
    if slot then slots[#slots + 1] = { slot, tonumber(fields[i + 1]) } end
  end
  table.sort(slots, function(a, b) return a[1] < b[1] end)
  return slots
end

-- window ------------------------------------------------------------------------------------------

local look, take, settle = {}, {}, {}

look[WINDOW] = function(d)
  local width = floor(d.period / SLOTS)
  local oldest = floor((now - d.period) / width)
  local slots = sorted_slots(redis.call('HGETALL', d.key))
  local count, last, live = 0, -1, {}
  d.gone = {}
  for _, slot in ipairs(slots) do
    if slot[1] < oldest then
      d.gone[#d.gone + 1] = whole(slot[1])
    else
      live[#live + 1] = slot
      count = count + slot[2]
      last = slot[1]
    end
  end
  d.last = last
  local wait = 0
  if count + d.amount > d.limit then
    wait = NEVER
    if d.amount <= d.limit then
      local excess = count + d.amount - d.limit
      for _, slot in ipairs(live) do
        excess = excess - slot[2]
        if excess <= 0 then
          wait = (slot[1] + 1) * width + d.period - now
          break
        end
      end
    end
  else
    last = max(last, floor(now / width))
  end
  local reset = 0
  if last >= 0 then reset = (last + 1) * width + d.period - now end
  return d.limit - count, reset, wait
end

take[WINDOW] = function(d)
  if #d.gone > 0 then redis.call('HDEL', d.key, unpack(d.gone)) end
  local slot = max(floor(now / floor(d.period / SLOTS)), d.last)
  redis.call('HINCRBY', d.key, whole(slot), whole(d.amount))
  redis.call('PEXPIRE', d.key, whole(ceil(d.period / 1000) * 2 + 1000))
end

settle[WINDOW] = function() end

-- bucket ------------------------------------------------------------------------------------------

local function filled(d)
  local found = redis.call('HMGET', d.key, 'l', 'a')
  if not found[1] then return d.limit, now, false end
  local level, at = tonumber(found[1]), tonumber(found[2])
  if d.limit <= 0 then return min(level, 0), now, true end
  local gained = floor(max(0, now - at) * d.limit / d.period)
  if level + gained >= d.limit then return d.limit, max(at, now), true end
  if gained <= 0 then return level, at, true end
  return level + gained, at + ceil(gained * d.period / d.limit), true
end

local function fills_in(at, missing, d)
  if missing <= 0 then return 0 end
  if d.limit <= 0 then return NEVER end
  return max(1, ceil(missing * d.period / d.limit) - (now - at))
end

local function keep_bucket(d, level, at)
  redis.call('HSET', d.key, 'l', whole(level), 'a', whole(at))
  local full_ms = 0
  if d.limit > 0 then full_ms = ceil((d.limit - level) * d.period / d.limit / 1000) end
  redis.call('PEXPIRE', d.key, whole(min(KEEP_MS, max(0, full_ms) * 2 + DAY_MS)))
end

look[BUCKET] = function(d)
  local level, at = filled(d)
  d.level, d.at = level, at
  local wait
  if d.amount > d.limit then wait = NEVER else wait = fills_in(at, d.amount - level, d) end
  local after = level
  if wait == 0 then after = level - d.amount end
  return level, max(0, fills_in(at, d.limit - after, d)), wait
end

take[BUCKET] = function(d) keep_bucket(d, d.level - d.amount, d.at) end

settle[BUCKET] = function(d, amount)
  local level, at, exists = filled(d)
  if exists then keep_bucket(d, min(d.limit, level + d.amount - amount), at) end
end

-- concurrency -------------------------------------------------------------------------------------

look[CONCURRENCY] = function(d)
  local left = d.limit - tonumber(redis.call('GET', d.key) or 0)
  if left < d.amount and redis.call('ZCARD', holds) == 0 then
    redis.call('DEL', d.key)
    left = d.limit
  end
  if left >= d.amount then return left, 0, 0 end
  if d.amount <= d.limit then return left, RETRY_US, RETRY_US end
  return left, RETRY_US, NEVER
end

take[CONCURRENCY] = function(d)
  redis.call('INCRBY', d.key, whole(d.amount))
  redis.call('PEXPIRE', d.key, DAY_MS)
end

settle[CONCURRENCY] = function(d)
  local held = redis.call('GET', d.key)
  if held then redis.call('SET', d.key, whole(max(0, tonumber(held) - d.amount)), 'KEEPTTL') end
end

-- budget: w start of the window, s spent, h held, and what was spent by slot of its end -----------

local function grain(d)
  if d.period > 0 then return floor(d.period / ROLLING_SLOTS) end
  return MINUTE_US
end

local function roll(d)
  redis.call('DEL', d.key)
  redis.call('HSET', d.key, 'w', whole(d.window), 's', 0, 'h', 0)
end

look[BUDGET] = function(d)
  local found = redis.call('HMGET', d.key, 'w', 's', 'h')
  local used = 0
  d.stored = tonumber(found[1])
  if d.stored >= d.window then
    local spent = tonumber(found[2])
    if d.period > 0 then
      local oldest = floor((now - d.period) / grain(d))
      for _, slot in ipairs(sorted_slots(redis.call('HGETALL', d.key))) do
        if slot[1] < oldest then
          redis.call('HDEL', d.key, whole(slot[1]))
          spent = redis.call('HINCRBY', d.key, 's', whole(-slot[2]))
        end
      end
    end
    used = spent + tonumber(found[3])
  end
  local left = d.limit - used
  if left >= d.amount then return left, 0, 0 end
  if d.amount <= d.limit then return left, 0, WINDOW_END_US end
  return left, 0, NEVER
end

take[BUDGET] = function(d)
  if d.stored < d.window then roll(d) else d.window = d.stored end
  redis.call('HINCRBY', d.key, 'h', whole(d.amount))
  redis.call('PEXPIRE', d.key, KEEP_MS)
end

settle[BUDGET] = function(d, amount, ended)
  local found = redis.call('HMGET', d.key, 'w', 'h')
  if not found[1] or tonumber(found[1]) > d.window then return end
  redis.call('HSET', d.key, 'h', whole(max(0, tonumber(found[2]) - d.amount)))
  if amount > 0 then
    redis.call('HINCRBY', d.key, whole(floor(ended / grain(d))), whole(amount))
    redis.call('HINCRBY', d.key, 's', whole(amount))
  end
end

-- the steps ---------------------------------------------------------------------------------------

local function end_hold(id, actual, ended)
  local packed = redis.call('HGET', data, id)
  if not packed then return 0 end
  redis.call('HDEL', data, id)
  redis.call('ZREM', holds, id)
  for i, d in ipairs(cmsgpack.unpack(packed)) do
    local one = { key = d[1], kind = d[2], limit = d[3], amount = d[4], period = d[5], window = d[6] }
    settle[one.kind](one, actual and actual[i] or one.amount, ended)
  end
  return 1
end

local function expire()
  local count = 0
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', holds, '-inf', whole(now), 'LIMIT', 0, 100)) do
    count = count + end_hold(id, nil, now)
  end
  return count
end

local steps = {}

-- hold, lease_us, limits → 1 | 0 | -1, now, binding (0-based), wait, then left and reset of each;
-- -1 is followed by the indexes of budgets that must be read from the ledger first.
steps.admit = function()
  local id, lease = ARGV[2], tonumber(ARGV[3])
  expire()
  if redis.call('HEXISTS', data, id) == 1 then return { 1, now, -1, 0 } end
  local wanted = demands(4)
  local cold = { -1, now }
  for i, d in ipairs(wanted) do
    if d.kind == BUDGET and redis.call('EXISTS', d.key) == 0 then cold[#cold + 1] = i - 1 end
  end
  if #cold > 2 then return cold end
  local answer = { 0, now, -1, 0 }
  local binding, longest = -1, 0
  for i, d in ipairs(wanted) do
    local left, reset, wait = look[d.kind](d)
    answer[3 + i * 2] = max(0, left)
    answer[4 + i * 2] = reset
    if wait ~= 0 and (binding < 0 or (longest ~= NEVER and (wait > longest or wait < 0))) then
      binding, longest = i - 1, wait
    end
  end
  answer[3], answer[4] = binding, longest
  if binding >= 0 then return answer end
  local packed = {}
  for i, d in ipairs(wanted) do
    take[d.kind](d)
    answer[3 + i * 2] = max(0, answer[3 + i * 2] - d.amount)
    packed[i] = { d.key, d.kind, d.limit, d.amount, d.period, d.window }
  end
  redis.call('HSET', data, id, cmsgpack.pack(packed))
  redis.call('ZADD', holds, whole(now + lease), id)
  redis.call('PEXPIRE', data, KEEP_MS)
  redis.call('PEXPIRE', holds, KEEP_MS)
  answer[1] = 1
  return answer
end

-- hold, ended_us, one amount for each limit of the hold → 1, or 0 if there is no such hold
steps.settle = function()
  local actual = {}
  for i = 4, #ARGV do actual[i - 3] = tonumber(ARGV[i]) end
  return end_hold(ARGV[2], actual, tonumber(ARGV[3]))
end

-- hold, then how much more of each limit of the hold → 1, 0: refused, -1: nobody knows
steps.extend = function()
  local packed = redis.call('HGET', data, ARGV[2])
  if not packed then return -1 end
  local limits, extended = cmsgpack.unpack(packed), {}
  for i, d in ipairs(limits) do
    local more = tonumber(ARGV[i + 2])
    if d[2] == BUDGET and more > 0 then
      if redis.call('EXISTS', d[1]) == 0 then return -1 end
      local one = { key = d[1], limit = d[3], amount = more, period = d[5], window = d[6] }
      local _, _, wait = look[BUDGET](one)
      if one.stored <= d[6] then
        if wait ~= 0 then return 0 end
        extended[#extended + 1] = { d, more }
      end
    end
  end
  for _, one in ipairs(extended) do
    local d, more = one[1], one[2]
    redis.call('HINCRBY', d[1], 'h', whole(more))
    d[4] = d[4] + more
  end
  redis.call('HSET', data, ARGV[2], cmsgpack.pack(limits))
  return 1
end

-- lease_us, holds → how many are open
steps.renew = function()
  local count = 0
  for i = 3, #ARGV do
    if redis.call('HEXISTS', data, ARGV[i]) == 1 then
      redis.call('ZADD', holds, 'XX', whole(now + tonumber(ARGV[2])), ARGV[i])
      count = count + 1
    end
  end
  return count
end

steps.expire = expire

local function held_of(key, window)
  local held = 0
  for _, packed in ipairs(redis.call('HVALS', data)) do
    for _, d in ipairs(cmsgpack.unpack(packed)) do
      if d[1] == key and d[6] == tonumber(window) then held = held + d[4] end
    end
  end
  return held
end

-- period_us, window_us, before, cut, then slot and amount of each
steps.rebase = function()
  local d = { key = KEYS[3], period = tonumber(ARGV[2]), window = tonumber(ARGV[3]) }
  local before, cut = tonumber(ARGV[4]), tonumber(ARGV[5])
  local stored = redis.call('HGET', d.key, 'w')
  if not stored or tonumber(stored) < d.window then
    roll(d)
  elseif tonumber(stored) > d.window then
    return 0
  end
  local recent = {}
  for _, slot in ipairs(sorted_slots(redis.call('HGETALL', d.key))) do
    redis.call('HDEL', d.key, whole(slot[1]))
    if slot[1] >= cut then recent[slot[1]] = slot[2] end
  end
  for i = 6, #ARGV, 2 do
    local slot, amount = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
    if slot >= cut then amount = max(amount, recent[slot] or 0) end
    recent[slot] = amount
  end
  local spent = before
  for slot, amount in pairs(recent) do
    redis.call('HSET', d.key, whole(slot), whole(amount))
    spent = spent + amount
  end
  redis.call('HSET', d.key, 's', whole(spent))
  if redis.call('HLEN', data) <= FEW_HOLDS then
    redis.call('HSET', d.key, 'h', whole(held_of(d.key, redis.call('HGET', d.key, 'w'))))
  end
  redis.call('PEXPIRE', d.key, KEEP_MS)
  return 1
end

-- → open holds, then spent and held of a budget, or the number of a concurrency
steps.state = function()
  expire()
  local kind = redis.call('TYPE', KEYS[3]).ok
  local open = redis.call('ZCARD', holds)
  if kind == 'hash' then
    local found = redis.call('HMGET', KEYS[3], 's', 'h')
    return { open, tonumber(found[1] or 0), tonumber(found[2] or 0) }
  end
  return { open, tonumber(redis.call('GET', KEYS[3]) or 0), 0 }
end

return steps[ARGV[1]]()
