-- enqueue: store a request and put it into its queue. Included after queue.lua. What brings new
-- bytes into Redis must not run allow_oom before it, so that at maxmemory the first write refuses
-- it as a whole.
--
--   req   lane, tenant, payload, digest, cost, out, life (ms to the deadline), wait (ms it may
--         queue, 0: no bound), epoch (claims in a former life, whose owners stay fenced),
--         answer ('json' if its log is to be JSON), on_disconnect ('cancel' if it is to end when
--         its last reader has left), inbox (where it is published; '' or nil: its own channel)
-- Returns nil, or an error reply; then nothing was stored.

local function enqueue(prefix, rid, req, now, retention)
  local record, log = prefix .. 'r:' .. rid, prefix .. 't:' .. rid
  local queue = prefix .. 'q:' .. req.lane .. ':' .. req.tenant
  local bytes = string.len(req.payload)
  local deadline = now + req.life
  local leaves = 0
  if req.wait > 0 then leaves = now + req.wait end

  -- First what a sweep or a claim clears away if nothing follows.
  join_lane(prefix, req.lane, req.tenant)
  local entry = push_entry(queue, rid, req.lane, req.tenant, req.cost, bytes)
  if is_error(entry) then return entry end
  redis.call('ZADD', prefix .. 'dl', leaves > 0 and math.min(deadline, leaves) or deadline, rid)
  redis.call('DEL', record, log)
  local values = {'st', 'queued', 'ep', req.epoch, 'n', 0, 'att', 0, 'bad', 0,
    'lane', req.lane, 'ten', req.tenant, 'pay', req.payload, 'len', bytes, 'dg', req.digest,
    'cost', req.cost, 'out', req.out, 'dl', deadline, 'mq', leaves, 't0', now, 'sk', queue,
    'sid', entry}
  if req.answer == 'json' then
    values[#values + 1], values[#values + 2] = 'ans', 'json'
  end
  if req.on_disconnect == 'cancel' then
    values[#values + 1], values[#values + 2] = 'od', 'cancel'
  end
  if req.inbox and req.inbox ~= '' then
    values[#values + 1], values[#values + 2] = 'ib', req.inbox
  end
  redis.call('HSET', record, unpack(values))
  redis.call('PEXPIREAT', record, deadline + retention + ABANDONED_MS)
  count_queued(prefix, 1, req.lane, req.tenant, req.cost, bytes)
  wake_workers(prefix)
  return nil
end

-- accept: the verdict on a new request, and if it is 'ok' its place in the queue. A request that is
-- known already changes nothing: same payload, one run.
--
--   bounds  most requests, tokens, bytes, requests of this tenant that may wait; 0: no bound
-- Returns {'ok', waiting requests} | {'dup', state, n} | {'conflict'} | {'full', bound, limit}, or
-- an error reply; unless it is 'ok', nothing was stored.
local function accept(prefix, rid, req, bounds, now, retention)
  local known = redis.pcall('HMGET', prefix .. 'r:' .. rid, 'dg', 'st', 'n')
  if is_error(known) then return known end
  if known[2] then
    if known[1] ~= req.digest then return {'conflict'} end
    return {'dup', known[2], tonumber(known[3]) or 0}
  end
  local used = redis.call('HMGET', prefix .. 'cnt', 'requests', 'tokens', 'bytes',
    'tenant:' .. req.tenant)
  local names = {'requests', 'tokens', 'bytes', 'tenant_requests'}
  local adds = {1, req.cost, string.len(req.payload), 1}
  for i = 1, 4 do
    local limit = bounds[i]
    if limit > 0 and (tonumber(used[i]) or 0) + adds[i] > limit then
      return {'full', names[i], limit}
    end
  end
  local refused = enqueue(prefix, rid, req, now, retention)
  if refused then return refused end
  return {'ok', (tonumber(used[1]) or 0) + 1}
end
