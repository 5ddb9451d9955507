-- requeue: a running request goes back to the queues, to be continued by any worker.
-- Included after finish.lua.
--
--   policy  max_blames, max_attempts
--   loss    0  none: a drain, or a claim whose reply was lost.
--           1  the owner crashed or fell silent. If the request made no progress since its claim,
--              it may have killed its owner. Blamed a second time in a row it becomes a suspect,
--              which workers run one at a time; blamed max_blames times it ends `dead`. (Not a
--              suspect at once: everything that waits in a killed worker would be one, and run one by
--              one.)
--              Progress clears it. After max_attempts lost owners in all it ends `dead`, too.
--           2  the owner was killed from outside: the request is not blamed, but the loss counts.
--              (The system may kill workers for the memory that this very request takes.)
--
-- The epoch rises with the next claim; until then the state alone fences the former owner.
local MAX_DEAD_LETTERS = 10000

local function add_dead_letter(id, rec, reason, blames, retention)
  local kept = redis.call('HMGET', PREFIX .. 'request:' .. id, 'payload', 'digest', 'note')
  local max_queue_ms = 0
  if rec.queue_deadline > 0 then max_queue_ms = rec.queue_deadline - rec.accepted_at end
  redis.call('XADD', PREFIX .. 'dead_letters', 'MAXLEN', '~', MAX_DEAD_LETTERS, '*', 'id', id,
    'reason', reason, 'epoch', rec.epoch, 'attempts', rec.attempts, 'blames', blames,
    'tokens', rec.tokens, 'lane', rec.lane, 'tenant', rec.tenant, 'answer', rec.answer or '',
    'on_disconnect', rec.on_disconnect or '', 'retention', retention_of(rec, retention),
    'cost', rec.cost, 'output_cost', rec.output_cost,
    'deadline_ms', rec.deadline - rec.accepted_at, 'max_queue_ms', max_queue_ms,
    'digest', kept[2] or '', 'payload', kept[1] or '', 'note', kept[3] or '')
end

local function requeue(id, rec, loss, now, policy, retention)
  local blames, deaths = rec.blames, rec.deaths
  if rec.tokens > rec.claimed_tokens then blames = 0 end
  if loss > 0 then deaths = deaths + 1 end
  if loss == 1 and rec.tokens == rec.claimed_tokens then blames = blames + 1 end
  local reason = nil
  if blames >= policy.max_blames then
    reason = 'poison'
  elseif deaths >= policy.max_attempts then
    reason = 'attempts'
  end
  if reason then
    add_dead_letter(id, rec, reason, blames, retention)
    local message = deaths .. ' workers died with it, the last ' .. blames .. ' without progress'
    finish(id, rec, {state = 'dead', reason = reason, message = message}, now, retention)
    return
  end
  drop_entry(rec.queue, rec.entry, rec.worker)
  local queue = PREFIX .. (blames >= SUSPECT_FROM and 'suspects' or 'continued:' .. rec.lane)
  local entry = push_back(queue, id, rec)
  redis.call('HSET', PREFIX .. 'request:' .. id, 'state', 'queued', 'worker', '', 'blames', blames,
    'deaths', deaths, 'queue', queue, 'entry', entry)
  redis.call('HDEL', PREFIX .. 'owned:' .. rec.worker, id)
  count_queued(1, rec.lane, rec.tenant, rec.cost, rec.bytes)
end
