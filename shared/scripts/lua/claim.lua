--@include lib/common.lua
--@include lib/queue.lua
--@include lib/usage.lua
--@include lib/finish.lua
-- claim: give a worker the next requests, fairly, and renew its lease.
--
-- A stream that has tokens continues only on a worker of the model that made them: both have the
-- same fingerprint. A worker of another one leaves it in a queue for its own, see leave_to_its_own.
--
-- Order: continued work by lane, one suspect, then lanes by virtual time (weights 8:4:1) and
-- tenants inside a lane by virtual time in tokens. A request past its time is ended here, not
-- handed out.
--
-- One claim takes no more than what waits divided by the living workers, rounded up: guided
-- self-scheduling (Polychronopoulos, Kuck, 1987). Chance decides which worker hears of a burst
-- first; that one would take all of it and serve it in turn, beside idle workers.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   leases                  zset
--   owned:<worker>          hash
--   continued:critical      stream
--   continued:normal        stream
--   continued:batch         stream
--   suspects                stream
--   lanes                   zset
--   tenants:critical        zset
--   tenants:normal          zset
--   tenants:batch           zset
--   virtual_time            hash
--   deadlines               zset
--   counters                hash
--   bell                    stream
--   fingerprints            zset
-- More keys, found while running: queue:<lane>:<tenant>, continued:<lane>:<fingerprint>,
-- suspects:<fingerprint>, and request:<id>, log:<id> of each claim
-- ARGV
--   worker                  name
--   lease_ms                whole
--   requests                whole   how many at most
--   tokens                  whole   of about so many tokens
--   suspect                 0|1     1: it may get a suspect, because it runs none now
--   retention_ms            whole
--   least_urgent            critical|normal|batch  only work of this lane and of more urgent ones;
--                           unless batch: no suspects, and fresh work only while its lane is not
--                           far ahead of its share (for a worker that would displace other work)
--   fingerprint             text    of the worker's model; empty: it continues any stream
-- Reply {now, last bell id, claims, more}; more is 1 if only the worker's share ended the claiming:
--       a worker with room claims again at once. A claim is
--       {id, epoch, tokens, attempts, suspect, payload, accepted ms ago, ms queued before the first
--        claim, ms from acceptance to first token or -1, ms to the deadline, log, usage}
--       where log is what XRANGE of log:<id> gives if there are tokens, else empty, and usage what
--       its workers said last that it has used, see append. The tokens wanted bound the reply's
--       size, plus one request.
local worker, lease_ms, want, budget, suspect, retention_ms, least_urgent,
  fingerprint = arguments(15, 8)
name('worker', worker)
lease_ms, retention_ms = whole('lease_ms', lease_ms), whole('retention_ms', retention_ms)
want, budget = whole('requests', want), whole('tokens', budget)
one_of('suspect', suspect, '0', '1')
lane_name(least_urgent)
local OWNED, LANES = PREFIX .. 'owned:' .. worker, PREFIX .. 'lanes'
local VIRTUAL_TIME = PREFIX .. 'virtual_time'
allow_oom()
local now = now_ms()
redis.call('ZADD', PREFIX .. 'leases', now + lease_ms, worker)

-- By how much virtual time (tokens over weight) displacing work may be ahead of a less urgent lane
-- that waits: a burst of it is served at once, a flood gets its share.
local MAX_AHEAD = 1024

-- Bounded: every turn claims, ends or drops one entry, or retires an idle tenant or lane.
local MAX_TURNS = 1024
local turns = 0
local claims = {}

local all_lanes = least_urgent == 'batch'
local least_weight = WEIGHT[least_urgent]

local waiting = 0
local function share()
  for lane, weight in pairs(WEIGHT) do
    if weight >= least_weight then
      local count = attempt(nil, 'HGET', PREFIX .. 'counters', 'requests:' .. lane)
      waiting = waiting + (tonumber(count or 0) or 0)
    end
  end
  -- This worker among them: its lease was renewed just now.
  local workers = redis.call('ZCOUNT', PREFIX .. 'leases', '(' .. now, '+inf')
  return math.max(1, math.ceil(waiting / workers))
end

local most = want > 0 and math.min(want, share()) or 0

local function wants_more()
  if #claims >= most or budget <= 0 or turns >= MAX_TURNS then return false end
  turns = turns + 1
  return true
end

-- Read the next entry of a queue: its id and fields as a table, or nil.
local function read_next(queue)
  if redis.call('EXISTS', queue) == 0 then return nil end
  local got = attempt('NOGROUP', 'XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', '1', 'STREAMS',
    queue, '>')
  if got == nil then
    -- Not a stream, or one that was made by hand, without a group.
    if not attempt(nil, 'XGROUP', 'CREATE', queue, GROUP, '0') then return nil end
    got = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', '1', 'STREAMS', queue, '>')
  end
  if not got then
    -- From Redis 7.2 on, reading nothing makes a consumer, too. An empty stream is what a script
    -- cut short left behind.
    drop_entry(queue, '0-1', worker)
    return nil
  end
  local entry, values = got[1][2][1][1], {}
  for i = 1, #got[1][2][1][2], 2 do values[got[1][2][1][2][i]] = got[1][2][1][2][i + 1] end
  return entry, values
end

-- An entry whose request has no record: end it for its readers, and give back what it counted.
local function drop_missing(queue, entry, values)
  local cost, bytes = tonumber(values.cost), tonumber(values.bytes)
  if cost and bytes and values.lane and values.tenant then
    count_queued(-1, values.lane, values.tenant, cost, bytes)
  end
  if values.id then end_orphan(values.id, nil, nil, now, retention_ms, values) end
  drop_entry(queue, entry, worker)
end

local function fail(id, rec, state, reason, message)
  finish(id, rec, {state = state, reason = reason, message = message}, now, retention_ms)
end

-- The log of a request to be continued, and whether it holds all its tokens; the log is the truth.
local function read_log(id, rec)
  local log = attempt(nil, 'XRANGE', PREFIX .. 'log:' .. id, '-', '+')
  if not log or #log == 0 then return log, log and rec.tokens == 0 end
  local count = tonumber(string.match(log[#log][1], '^(%d+)-'))
  if count < rec.tokens then return log, false end
  rec.tokens = count
  return log, true
end

-- A stream whose tokens another model made waits for a worker of that model. The sweep ends it if
-- none comes.
local function leave_to_its_own(queue, entry, id, rec)
  drop_entry(queue, entry, worker)
  local own = own_queue(rec.blames >= SUSPECT_FROM and 'suspects' or 'continued:' .. rec.lane,
    rec.fingerprint)
  local moved = push_back(own, id, rec)
  redis.call('HSET', PREFIX .. 'request:' .. id, 'queue', own, 'entry', moved)
  redis.call('ZADD', PREFIX .. 'fingerprints', 'NX', now, rec.fingerprint)
  wake_workers()
end

-- Make the entry's request this worker's own. Returns its cost, or nil if it needs no work.
local function assign(queue, entry, values, is_suspect)
  local id = values.id or ''
  local record = PREFIX .. 'request:' .. id
  local rec = read_record(id)
  if not rec then return drop_missing(queue, entry, values) end
  if rec.state ~= 'queued' or rec.entry ~= entry or rec.queue ~= queue then
    return drop_entry(queue, entry, worker)
  end
  -- From here on the entry is pending for this worker: finish must forget it as a consumer.
  rec.worker = worker
  local late = overdue(rec, now)
  if late then return fail(id, rec, 'expired', late) end
  local log = {}
  if rec.claimed_at then
    local is_whole
    log, is_whole = read_log(id, rec)
    if not is_whole then
      return fail(id, rec, 'failed', 'engine_error', 'the log of this request was lost in Redis')
    end
  end
  if rec.tokens > 0 and fingerprint ~= '' and rec.fingerprint and rec.fingerprint ~= fingerprint then
    return leave_to_its_own(queue, entry, id, rec)
  end
  local epoch, claimed_at = rec.epoch + 1, rec.claimed_at or now
  redis.call('HSET', OWNED, id, epoch .. ' ' .. entry .. ' ' .. queue)
  redis.call('HSET', record, 'state', 'running', 'epoch', epoch, 'attempts', rec.attempts + 1,
    'worker', worker, 'tokens', rec.tokens, 'claimed_tokens', rec.tokens, 'claimed_at', claimed_at)
  if fingerprint ~= '' then redis.call('HSET', record, 'fingerprint', fingerprint) end
  if not rec.claimed_at and rec.queue_deadline > 0 then
    redis.call('ZADD', PREFIX .. 'deadlines', rec.deadline, id)
  end
  count_queued(-1, rec.lane, rec.tenant, rec.cost, rec.bytes)
  claims[#claims + 1] = {
    id, epoch, rec.tokens, rec.attempts + 1, is_suspect,
    redis.call('HGET', record, 'payload') or '',
    now - rec.accepted_at, claimed_at - rec.accepted_at,
    rec.first_token_at and rec.first_token_at - rec.accepted_at or -1, rec.deadline - now, log, rec.usage or '',
  }
  return rec.cost
end

local function queues_of(name)
  if fingerprint == '' then return {PREFIX .. name} end
  return {own_queue(name, fingerprint), PREFIX .. name}
end

-- Continued work was charged when it was first claimed: it goes first, whatever else has its turn.
-- What only workers of this model may continue is first of all.
for _, lane in ipairs({'critical', 'normal', 'batch'}) do
  for _, queue in ipairs(queues_of('continued:' .. lane)) do
    while WEIGHT[lane] >= least_weight and wants_more() do
      local entry, values = read_next(queue)
      if not entry then break end
      budget = budget - (assign(queue, entry, values, 0) or 0)
    end
  end
end

local seeks_suspect = all_lanes and suspect == '1'
for _, queue in ipairs(queues_of('suspects')) do
  while seeks_suspect and wants_more() do
    local entry, values = read_next(queue)
    if not entry then break end
    local cost = assign(queue, entry, values, 1)
    if cost then
      budget = budget - cost
      seeks_suspect = false
    end
  end
end

-- Whether a queue has an entry that was never handed out. (An entry that was handed out stays until
-- its request has ended.)
local function has_fresh(queue)
  if redis.call('EXISTS', queue) == 0 then return false end
  local groups = attempt(nil, 'XINFO', 'GROUPS', queue)
  for _, fields in ipairs(groups or {}) do
    local group = {}
    for i = 1, #fields, 2 do group[fields[i]] = fields[i + 1] end
    if group.name == GROUP then
      local last = group['last-delivered-id']
      return #redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', '1') > 0
    end
  end
  return false
end

-- The lane with the smallest virtual time of those with at least that weight; of equals the most
-- urgent.
local function next_lane(least)
  local rows = redis.call('ZRANGE', LANES, '0', '-1', 'WITHSCORES')
  local name, time, weight
  for i = 1, #rows, 2 do
    local row_time, row_weight = tonumber(rows[i + 1]), WEIGHT[rows[i]] or 1
    local first = not name or row_time < time or (row_time == time and row_weight > weight)
    if row_weight >= least and first then
      name, time, weight = rows[i], row_time, row_weight
    end
  end
  return name, time, weight
end

-- Whether urgent work of that virtual time has had so much more than its share that less urgent
-- work, which waits, is next. Without this bound a stream of urgent work would displace whatever
-- runs, and the lanes behind it would get nothing.
local function is_too_far_ahead(lane_time)
  while turns < MAX_TURNS do
    local lane, time = next_lane(0)
    if not lane or lane_time <= time + MAX_AHEAD then return false end
    local tenants = PREFIX .. 'tenants:' .. lane
    local tenant = redis.call('ZRANGE', tenants, '0', '0')[1]
    if not tenant then
      redis.call('ZREM', LANES, lane)
    elseif has_fresh(PREFIX .. 'queue:' .. lane .. ':' .. tenant) then
      return true
    else
      redis.call('ZREM', tenants, tenant)
    end
    turns = turns + 1
  end
  return true
end

while wants_more() do
  local lane, lane_time, weight = next_lane(least_weight)
  if not lane or (not all_lanes and is_too_far_ahead(lane_time)) then break end
  -- The smallest virtual time is what is being served now: a newcomer starts there.
  if all_lanes then redis.call('HSET', VIRTUAL_TIME, 'lanes', lane_time) end
  local tenants = PREFIX .. 'tenants:' .. lane
  local first = redis.call('ZRANGE', tenants, '0', '0', 'WITHSCORES')
  if #first == 0 then
    redis.call('ZREM', LANES, lane)
  else
    redis.call('HSET', VIRTUAL_TIME, lane, first[2])
    local queue = PREFIX .. 'queue:' .. lane .. ':' .. first[1]
    local entry, values = read_next(queue)
    if not entry then
      redis.call('ZREM', tenants, first[1])
    else
      local cost = assign(queue, entry, values, 0)
      if cost then
        budget = budget - cost
        redis.call('ZADD', tenants, tonumber(first[2]) + cost, first[1])
        redis.call('ZADD', LANES, lane_time + cost / weight, lane)
      end
    end
  end
end

-- Cut off by the bound with nothing found: wake the idle workers, to look again.
if turns >= MAX_TURNS and #claims == 0 then wake_workers() end
local bell = redis.call('XREVRANGE', PREFIX .. 'bell', '+', '-', 'COUNT', '1')
local more = #claims == most and most < want and most < waiting and budget > 0
return {now, bell[1] and bell[1][1] or '0-0', claims, more and 1 or 0}
