-- enqueue: store a request and put it into its queue. Included after queue.lua; what runs this
-- must not run allow_oom, so that at maxmemory the first write refuses it as a whole.
--
--   req   lane, tenant, payload, digest, cost, out, life (ms to the deadline), wait (ms it may
--         queue, 0: no bound), epoch (claims in a former life, whose owners stay fenced)
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
  redis.call('HSET', record, 'st', 'queued', 'ep', req.epoch, 'n', 0, 'att', 0, 'bad', 0,
    'lane', req.lane, 'ten', req.tenant, 'pay', req.payload, 'len', bytes, 'dg', req.digest,
    'cost', req.cost, 'out', req.out, 'dl', deadline, 'mq', leaves, 't0', now, 'sk', queue,
    'sid', entry)
  redis.call('PEXPIREAT', record, deadline + retention + ABANDONED_MS)
  count_queued(prefix, 1, req.lane, req.tenant, req.cost, bytes)
  ring(prefix)
  return nil
end
