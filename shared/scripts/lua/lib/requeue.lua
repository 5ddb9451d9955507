-- requeue: a running request goes back to the queues, to be continued by any worker.
-- Included after finish.lua.
--
--   loss    0  none: a drain, a claim that went astray.
--           1  the owner crashed or fell silent. If the request made no progress since its claim, it
--              may be what killed the owner: blamed a second time in a row it becomes a suspect,
--              which workers run one at a time, and blamed max_blames times it ends `dead`. (Not a
--              suspect at once: everything that waits in a killed worker would be one, and run one
--              by one.) Progress clears it. After max_attempts lost owners in all it ends `dead`, too.
--           2  the owner was killed from outside: nobody is blamed, but it is counted as lost.
--              (The system may kill workers for the memory that this very request takes.)
--
-- The epoch rises with the next claim; until then the state alone fences the former owner.
local SUSPECT_FROM = 2
local MAX_DEAD_LETTERS = 10000

local function requeue(prefix, rid, rec, loss, now, max_blames, max_attempts, retention)
  local bad, died = rec.bad, rec.died
  if rec.n > rec.nb then bad = 0 end
  if loss > 0 then died = died + 1 end
  if loss == 1 and rec.n == rec.nb then bad = bad + 1 end
  local reason = nil
  if bad >= max_blames then
    reason = 'poison'
  elseif died >= max_attempts then
    reason = 'attempts'
  end
  if reason then
    local record = prefix .. 'r:' .. rid
    local kept = redis.call('HMGET', record, 'pay', 'dg')
    redis.call('XADD', prefix .. 'dlq', 'MAXLEN', '~', MAX_DEAD_LETTERS, '*', 'r', rid,
      'why', reason, 'ep', rec.ep, 'att', rec.att, 'bad', bad, 'n', rec.n, 'lane', rec.lane,
      'ten', rec.ten, 'ans', rec.json and 'json' or '', 'od', rec.needs_reader and 'cancel' or '',
      'cost', rec.cost, 'out', rec.out, 'life', rec.dl - rec.t0, 'wait', math.max(0, rec.mq - rec.t0),
      'dg', kept[2] or '', 'pay', kept[1] or '')
    local message = died .. ' workers died with it, the last ' .. bad .. ' without progress'
    finish(prefix, rid, rec, {state = 'dead', reason = reason, message = message}, now, retention)
    return
  end
  drop_entry(rec.sk, rec.sid, rec.w)
  local queue = prefix .. (bad >= SUSPECT_FROM and 'q:?' or 'q:!:' .. rec.lane)
  local entry = push_back(queue, rid, rec)
  redis.call('HSET', prefix .. 'r:' .. rid, 'st', 'queued', 'w', '', 'bad', bad, 'died', died,
    'sk', queue, 'sid', entry)
  redis.call('HDEL', prefix .. 'own:' .. rec.w, rid)
  count_queued(prefix, 1, rec.lane, rec.ten, rec.cost, rec.len)
end
