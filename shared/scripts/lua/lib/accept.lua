-- Accept a request, or refuse it. Included after queue.lua. A script that brings new bytes into
-- Redis must not run allow_oom before it, so that at maxmemory the first write refuses the whole.
--
--   request  lane, tenant, payload, digest, cost, output_cost, deadline_ms, max_queue_ms (0: no
--            bound), epoch (claims in a former life, whose owners stay fenced), answer ('json' if
--            its log is to be JSON), on_disconnect ('cancel' if it is to end when its last reader
--            has left), inbox (where it is published; '' or nil: its own channel), note (kept for
--            its readers; '' or nil: none)

-- Store a request and put it into its queue. Returns nil, or an error reply; then nothing was
-- stored.
local function enqueue(id, request, now, retention)
  local record, log = PREFIX .. 'request:' .. id, PREFIX .. 'log:' .. id
  local queue = PREFIX .. 'queue:' .. request.lane .. ':' .. request.tenant
  local bytes = string.len(request.payload)
  local deadline = now + request.deadline_ms

  -- First what a sweep or a claim clears away if nothing follows.
  join_lane(request.lane, request.tenant)
  local entry = push_entry(queue, id, request.lane, request.tenant, request.cost, bytes)
  if is_error(entry) then return entry end
  local values = {'state', 'queued', 'epoch', request.epoch, 'tokens', 0, 'lane', request.lane,
    'tenant', request.tenant, 'payload', request.payload, 'bytes', bytes, 'digest', request.digest,
    'cost', request.cost, 'output_cost', request.output_cost, 'deadline', deadline,
    'accepted_at', now, 'retention', retention, 'queue', queue, 'entry', entry}
  local function set(field, value) values[#values + 1], values[#values + 2] = field, value end
  local due = deadline
  if request.max_queue_ms > 0 then
    set('queue_deadline', now + request.max_queue_ms)
    due = math.min(due, now + request.max_queue_ms)
  end
  if request.answer == 'json' then set('answer', 'json') end
  if request.on_disconnect == 'cancel' then set('on_disconnect', 'cancel') end
  if request.inbox and request.inbox ~= '' then set('inbox', request.inbox) end
  if request.note and request.note ~= '' then set('note', request.note) end
  redis.call('ZADD', PREFIX .. 'deadlines', due, id)
  redis.call('DEL', record, log)
  redis.call('HSET', record, unpack(values))
  redis.call('PEXPIREAT', record, deadline + retention + ABANDONED_MS)
  count_queued(1, request.lane, request.tenant, request.cost, bytes)
  wake_workers()
  return nil
end

-- Part of a bound that a lane may use: the rest is room of the more urgent ones.
local ROOM = {critical = 1, normal = 0.95, batch = 0.8}

-- What keeps a tenant from filling the queue for all others. What its requests add up to may be at
-- most the free room times the lane's weight (8, 4, 1) times `share` percent: dynamic thresholds
-- (Choudhury, Hahne, 1998). The fewer hold something, the more each may hold, and some room stays
-- free for whoever comes next. An empty queue takes whatever fits, and so does a tenant that holds
-- nothing take its lane's room.
--
--   used, held, add  what all hold, what the tenant holds, what the request adds
-- Returns nil, or which bound is reached: '' (the lane's) or 'tenant_', and its value.
local function exceeded_share(lane, limit, share, used, held, add)
  if share == 0 or used == 0 then return nil end
  local room = math.ceil(limit * ROOM[lane])
  if used + add > room then return '', room end
  local most = math.floor(share * WEIGHT[lane] * (room - used) / 100)
  if held > 0 and held + add > most then return 'tenant_', most end
  return nil
end

-- Since when the oldest entry of a queue waits that no worker has read; nil without one.
local function waits_since(queue)
  local groups = attempt('no such key', 'XINFO', 'GROUPS', queue)
  if not groups or not groups[1] then return nil end
  local last = '0-0'
  for i = 1, #groups[1], 2 do
    if groups[1][i] == 'last-delivered-id' then last = groups[1][i + 1] end
  end
  local next_one = redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', '1')[1]
  return next_one and tonumber(string.match(next_one[1], '^%d+'))
end

-- How many tenants of a lane are asked: those that are served next.
local NEXT_TENANTS = 3

-- When `need` of what waits will have left the queue: Little's law, where `held` is what waits, and
-- whoever is served next has waited for as long as it takes to serve that.
local function room_in(now, need, held)
  local oldest = now
  for lane in pairs(WEIGHT) do
    local tenants = attempt(nil, 'ZRANGE', PREFIX .. 'tenants:' .. lane, '0', NEXT_TENANTS - 1)
    for _, tenant in ipairs(tenants or {}) do
      local since = waits_since(PREFIX .. 'queue:' .. lane .. ':' .. tenant)
      oldest = math.min(oldest, since or now)
    end
  end
  return math.ceil((now - oldest) * math.min(1, need / math.max(1, held)))
end

-- The verdict on a new request, and if it is 'ok' its place in the queue. A request that is known
-- already changes nothing: same payload, one run.
--
--   bounds  most requests, tokens, bytes, requests of this tenant that may wait, and its share in
--           percent; 0: no bound
-- Returns {'ok', waiting requests, now} | {'dup', state, tokens, accepted_at} | {'conflict'} |
-- {'full', bound, limit, ms until there may be room}, or an error reply; unless it is 'ok', nothing
-- was stored.
local function accept(id, request, bounds, now, retention)
  local known = redis.pcall('HMGET', PREFIX .. 'request:' .. id, 'digest', 'state', 'tokens',
    'accepted_at')
  if is_error(known) then return known end
  if known[2] then
    if known[1] ~= request.digest then return {'conflict'} end
    return {'dup', known[2], tonumber(known[3]) or 0, tonumber(known[4]) or now}
  end
  local used = redis.call('HMGET', PREFIX .. 'counters', 'requests', 'tokens', 'bytes',
    'tenant:' .. request.tenant, 'tenant_tokens:' .. request.tenant,
    'tenant_bytes:' .. request.tenant)
  local names = {'requests', 'tokens', 'bytes', 'tenant_requests'}
  local adds = {1, request.cost, string.len(request.payload), 1}
  for i = 1, 4 do
    local limit, all = bounds[i], tonumber(used[i]) or 0
    if limit > 0 then
      if all + adds[i] > limit then
        return {'full', names[i], limit, room_in(now, all + adds[i] - limit, all)}
      end
      if i < 4 then
        local held = tonumber(used[i + 3]) or 0
        local whose, most = exceeded_share(request.lane, limit, bounds[5], all, held, adds[i])
        if whose then
          local known = whose == '' and all or held
          return {'full', whose .. names[i], most, room_in(now, known + adds[i] - most, known)}
        end
      end
    end
  end
  local refused = enqueue(id, request, now, retention)
  if refused then return refused end
  return {'ok', (tonumber(used[1]) or 0) + 1, now}
end
