-- requeue: a running request goes back to the queues, to be continued by any worker.
-- Included after finish.lua.
--
--   blame   '1' if the owner died with it: a request that made no progress since its claim is
--           then a suspect, and ends `dead` once it was blamed max_blames times
--
-- The epoch rises with the next claim; until then the state alone fences the former owner.
local function requeue(prefix, rid, rec, blame, now, max_blames, max_attempts, retention_ms)
  local bad = rec.bad
  local suspect = false
  if blame == '1' and rec.n == rec.nb then
    bad = bad + 1
    suspect = true
  end
  local reason = nil
  if bad >= max_blames then reason = 'poison' end
  if rec.att >= max_attempts then reason = 'attempts' end
  if reason then
    local message = 'claimed ' .. rec.att .. ' times, blamed for ' .. bad .. ' crashes'
    redis.call('XADD', prefix .. 'dlq', 'MAXLEN', '~', '10000', '*', 'r', rid, 'why', reason,
      'att', rec.att, 'lane', rec.lane, 'ten', rec.ten, 'pay', rec.pay)
    finish(prefix, rid, 'dead', reason, rec.n, '', message, -1, rec, now, retention_ms)
    return 'dead'
  end
  drop_entry(rec.sk, rec.sid)
  local queue = prefix .. (suspect and 'q:?' or 'q:!')
  local entry = push_entry(queue, rid)
  redis.call('HSET', prefix .. 'r:' .. rid, 'st', 'queued', 'w', '', 'bad', bad,
    'sk', queue, 'sid', entry)
  redis.call('HDEL', prefix .. 'own:' .. rec.w, rid)
  count_queued(prefix, 1, rec.lane, rec.ten, rec.cost, rec.len)
  return 'queued'
end
