-- Accept a request, or refuse it. Included after queue.lua. A script that brings new bytes into
-- Redis must not run allow_oom before it, so that at maxmemory the first write refuses the whole.
--
--   request  lane, tenant, payload, digest, cost, output_cost, deadline_ms, max_queue_ms (0: no
--            bound), epoch (claims in a former life, whose owners stay fenced), answer ('json' if
--            its log is to be JSON), on_disconnect ('cancel' if it is to end when its last reader
--            has left), inbox (where it is published; '' or nil: its own channel)

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
    'accepted_at', now, 'queue', queue, 'entry', entry}
  local function set(field, value) values[#values + 1], values[#values + 2] = field, value end
  local due = deadline
  if request.max_queue_ms > 0 then
    set('queue_deadline', now + request.max_queue_ms)
    due = math.min(due, now + request.max_queue_ms)
  end
  if request.answer == 'json' then set('answer', 'json') end
  if request.on_disconnect == 'cancel' then set('on_disconnect', 'cancel') end
  if request.inbox and request.inbox ~= '' then set('inbox', request.inbox) end
  redis.call('ZADD', PREFIX .. 'deadlines', due, id)
  redis.call('DEL', record, log)
  redis.call('HSET', record, unpack(values))
  redis.call('PEXPIREAT', record, deadline + retention + ABANDONED_MS)
  count_queued(1, request.lane, request.tenant, request.cost, bytes)
  wake_workers()
  return nil
end

-- The verdict on a new request, and if it is 'ok' its place in the queue. A request that is known
-- already changes nothing: same payload, one run.
--
--   bounds  most requests, tokens, bytes, requests of this tenant that may wait; 0: no bound
-- Returns {'ok', waiting requests} | {'dup', state, tokens} | {'conflict'} |
-- {'full', bound, limit}, or an error reply; unless it is 'ok', nothing was stored.
local function accept(id, request, bounds, now, retention)
  local known = redis.pcall('HMGET', PREFIX .. 'request:' .. id, 'digest', 'state', 'tokens')
  if is_error(known) then return known end
  if known[2] then
    if known[1] ~= request.digest then return {'conflict'} end
    return {'dup', known[2], tonumber(known[3]) or 0}
  end
  local used = redis.call('HMGET', PREFIX .. 'counters', 'requests', 'tokens', 'bytes',
    'tenant:' .. request.tenant)
  local names = {'requests', 'tokens', 'bytes', 'tenant_requests'}
  local adds = {1, request.cost, string.len(request.payload), 1}
  for i = 1, 4 do
    local limit = bounds[i]
    if limit > 0 and (tonumber(used[i]) or 0) + adds[i] > limit then
      return {'full', names[i], limit}
    end
  end
  local refused = enqueue(id, request, now, retention)
  if refused then return refused end
  return {'ok', (tonumber(used[1]) or 0) + 1}
end
