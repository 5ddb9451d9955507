--@include lib/common.lua
--@include lib/queue.lua
--@include lib/accept.lua
--@include lib/usage.lua
--@include lib/finish.lua
--@include lib/ingress.lua
-- accept_ingress: an entry of an ingress stream becomes a request, exactly once, with the verdicts
-- and bounds of submit; or its End says why not. Its time counts from when it was added.
--
-- For worker; runs at maxmemory. (What it stores is in Redis already. It may use a kilobyte more
-- per request than it frees; how many there may be is bounded.)
--
-- KEYS
--   <ingress>               stream  ingress or ingress:<tenant>
--   request:<id>            hash
--   log:<id>                stream
--   queue:<lane>:<tenant>   stream
--   tenants:<lane>          zset
--   lanes                   zset
--   virtual_time            hash
--   deadlines               zset
--   counters                hash
--   bell                    stream
--   request:<own_id>        hash
--   log:<own_id>            stream
-- ARGV
--   entry                   entry   in the ingress stream
--   id                      name
--   own_id                  name    the id that no other request may have, see lib/ingress.lua
--   lane                    critical|normal|batch
--   tenant                  name
--   payload                 text
--   digest                  text    of the payload
--   cost                    whole   estimated tokens in all
--   output_cost             whole   of these, output tokens
--   deadline_ms             whole   from when the entry was added
--   max_queue_ms            whole   the same; 0: no bound
--   retention_ms            whole   how long the record outlives its end
--   max_requests            whole   bounds, as in submit
--   max_tokens              whole
--   max_bytes               whole
--   max_tenant_requests     whole
--   tenant_share            whole
--   answer                  |msgpack|json     form of the log
--   on_disconnect           |continue|cancel  cancel: ends when its last reader has left
-- Reply {verdict, id answered}; verdict is 'ok', 'dup' (nothing changed), 'conflict', 'full' or
--       'late' (it got an End), 'broken' (the same: a key of its own has another type), 'gone'
--       (another worker was first)
local entry, id, own_id, lane, tenant, payload, digest, cost, output_cost, deadline_ms,
  max_queue_ms, retention_ms, max_requests, max_tokens, max_bytes, max_tenant_requests,
  tenant_share, answer, on_disconnect =
  arguments(12, 19)
local ingress = KEYS[1]
entry_id('entry', entry)
name('id', id)
name('own_id', own_id)
deadline_ms, retention_ms = whole('deadline_ms', deadline_ms), whole('retention_ms', retention_ms)
local request = {
  lane = lane_name(lane), tenant = name('tenant', tenant), payload = payload, digest = digest,
  cost = whole('cost', cost), output_cost = whole('output_cost', output_cost),
  deadline_ms = deadline_ms, max_queue_ms = whole('max_queue_ms', max_queue_ms), epoch = 0,
  answer = one_of('answer', answer, '', 'msgpack', 'json'),
  on_disconnect = one_of('on_disconnect', on_disconnect, '', 'continue', 'cancel'),
}
local bounds = {
  whole('max_requests', max_requests), whole('max_tokens', max_tokens),
  whole('max_bytes', max_bytes), whole('max_tenant_requests', max_tenant_requests),
  whole('tenant_share', tenant_share),
}
allow_oom()
if not entry_exists(ingress, entry) then
  remove_entry(ingress, entry)
  return {'gone', ''}
end

local row = nil

local function no(verdict, state, reason, message)
  local answered
  answered, row = answer_refusal(id, own_id, state, reason, message, answer, retention_ms, lane,
    tenant)
  return {verdict, answered}
end

local function judge()
  local now = now_ms()
  local added = added_at(entry, now)
  if added + deadline_ms <= now and redis.call('EXISTS', PREFIX .. 'request:' .. id) == 0 then
    return no('late', 'expired', 'deadline', 'its deadline passed before a worker looked')
  end
  local verdict = accept(id, request, bounds, added, retention_ms)
  if is_error(verdict) then
    if not string.find(verdict.err, 'WRONGTYPE', 1, true) then error(verdict.err) end
    return no('broken', 'failed', 'engine_error',
      'a key of this request holds another type in Redis')
  end
  if verdict[1] == 'conflict' then
    return no('conflict', 'failed', 'invalid', 'id: ' .. id ..
      ' was already submitted with another payload; use a new id')
  end
  if verdict[1] == 'full' then
    return no('full', 'failed', 'queue_full', 'the bound on queued ' .. verdict[2] .. ' (' ..
      verdict[3] .. ') is reached; try again later')
  end
  return {verdict[1], id}
end

local reply = judge()
remove_entry(ingress, entry, row)
return reply
