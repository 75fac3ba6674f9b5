-- What replicas tell each other of circuits, in one atomic step.
--
-- KEYS: circuits (hash: field -> "trips:until_ms"), probes (hash: field -> "node:until_ms")
-- ARGV: node, lease_ms, keep_ms, updates, then for each update: field, trips, left_ms; then the
--       fields that this node wants to probe.
-- An update of 0 trips closes; of -1 gives the probe back; any other opens, for at least as long
-- as it is open already. Answer: {fields granted, field, trips, left_ms, field, ...}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local node, lease, keep, updates = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])

local function split(text)
  local head, tail = string.match(text, '^(.*):(%d+)$')
  return head, tonumber(tail)
end

local place = 5
for _ = 1, updates do
  local field, trips, left = ARGV[place], tonumber(ARGV[place + 1]), tonumber(ARGV[place + 2])
  place = place + 3
  local probe = redis.call('HGET', KEYS[2], field)
  if trips < 1 or (probe and split(probe) == node) then
    if probe and (trips == 0 or split(probe) == node) then redis.call('HDEL', KEYS[2], field) end
  end
  if trips == 0 then
    redis.call('HDEL', KEYS[1], field)
  elseif trips > 0 then
    local ends = now + left
    local known = redis.call('HGET', KEYS[1], field)
    if known then
      local before, known_ends = split(known)
      trips = math.max(trips, tonumber(before))
      ends = math.max(ends, known_ends)
    end
    redis.call('HSET', KEYS[1], field, trips .. ':' .. ends)
  end
end

local granted = {}
for i = place, #ARGV do
  local probe = redis.call('HGET', KEYS[2], ARGV[i])
  local holder, ends
  if probe then holder, ends = split(probe) end
  if not holder or holder == node or ends < now then
    redis.call('HSET', KEYS[2], ARGV[i], node .. ':' .. (now + lease))
    granted[#granted + 1] = ARGV[i]
  end
end

local answer = { granted }
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local trips, ends = split(all[i + 1])
  if ends + keep < now then
    redis.call('HDEL', KEYS[1], all[i])
    redis.call('HDEL', KEYS[2], all[i])
  else
    answer[#answer + 1] = all[i]
    answer[#answer + 1] = tonumber(trips)
    answer[#answer + 1] = math.max(0, ends - now)
  end
end
return answer
