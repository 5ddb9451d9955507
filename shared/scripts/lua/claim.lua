--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
-- claim: give a worker the next requests, fairly, and renew its lease. Runs at maxmemory.
--
-- Order: continued work by lane, one suspect, then lanes by virtual time (weights 8:4:1) and tenants
-- inside a lane by virtual time in tokens. What is past its time is ended here, not handed out.
--
-- One claim takes no more than what waits divided by the living workers, rounded up: guided
-- self-scheduling (Polychronopoulos, Kuck, 1987). Chance decides who hears of a burst first, and
-- that one would take all of it, to be served one after the other beside idle workers.
--
-- KEYS  1 q:!:critical  stream   2 q:?  stream   3 lanes  zset   4 vt  hash   5 act:critical  zset
--       6 act:normal  zset   7 act:batch  zset   8 wl  zset   9 own:<wid>  hash   10 dl  zset
--       11 cnt  hash   12 bell  stream   13 q:!:normal  stream   14 q:!:batch  stream
--       and, found while running: q:<lane>:<tenant>, r:<id>, t:<id> of the claimed requests
-- ARGV  1 prefix   2 worker id   3 lease_ms   4 requests wanted   5 tokens wanted
--       6 '1' if the worker runs no suspect now   7 retention_ms
--       8 the least urgent lane to claim from: 'batch' for all; with another one, only work of this
--         lane and those before it, for a worker that would displace less urgent work; fresh work
--         only while that is not far ahead of its share
-- Reply {now, last bell id, claims, more}; more is 1 if nothing but the share ended the claiming,
--       and whoever has room is to claim again at once; a claim is
--       {id, epoch, n, attempts, suspect, payload, accepted ms ago, ms queued before the first
--        claim, ms from acceptance to first token or -1, ms to the deadline, log}
--       where log is what XRANGE of t:<id> gives if n > 0, else empty. The reply's size is bounded
--       by the tokens wanted, plus one request.
local prefix, wid, retention = ARGV[1], ARGV[2], tonumber(ARGV[7])
local want, budget = tonumber(ARGV[4]), tonumber(ARGV[5])
allow_oom(prefix)
local now = now_ms()
redis.call('ZADD', KEYS[8], now + tonumber(ARGV[3]), wid)

-- By how much virtual time (tokens over weight) work that displaces other work may be ahead of a
-- less urgent lane that waits: a burst of it is served at once, a flood gets its share.
local MAX_AHEAD = 1024

-- Bounded: every turn claims, ends or drops one entry, or retires an idle tenant or lane.
local MAX_TURNS = 1024
local turns = 0
local claims = {}

local all_lanes = ARGV[8] == 'batch'
local least_weight = WEIGHT[ARGV[8]]

local waiting = 0
local function share()
  for lane, weight in pairs(WEIGHT) do
    if weight >= least_weight then
      local count = attempt(nil, 'HGET', KEYS[11], 'requests:' .. lane)
      waiting = waiting + (tonumber(count or 0) or 0)
    end
  end
  -- Itself among them: its lease was renewed just now.
  local workers = redis.call('ZCOUNT', KEYS[8], '(' .. now, '+inf')
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
  local got = attempt('NOGROUP', 'XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', '1', 'STREAMS', queue,
    '>')
  if got == nil then
    -- Not a stream, or one that somebody made without a group.
    if not attempt(nil, 'XGROUP', 'CREATE', queue, GROUP, '0') then return nil end
    got = redis.call('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', '1', 'STREAMS', queue, '>')
  end
  if not got then
    -- From Redis 7.2 on, reading nothing makes a consumer, too. An empty stream is what a script
    -- cut short left behind.
    drop_entry(queue, '0-1', wid)
    return nil
  end
  local entry, values = got[1][2][1][1], {}
  for i = 1, #got[1][2][1][2], 2 do values[got[1][2][1][2][i]] = got[1][2][1][2][i + 1] end
  return entry, values
end

-- An entry whose request has no record: end it for its readers, and give back what it counted.
local function drop_missing(queue, entry, values)
  local cost, bytes = tonumber(values.c), tonumber(values.b)
  if cost and bytes and values.l and values.t then
    count_queued(prefix, -1, values.l, values.t, cost, bytes)
  end
  if values.r then end_orphan(prefix, values.r, nil, nil, now, retention) end
  drop_entry(queue, entry, wid)
end

local function fail(rid, rec, state, reason, message)
  finish(prefix, rid, rec, {state = state, reason = reason, message = message}, now, retention)
end

-- The log of a request to be continued, and whether it holds n tokens; the log is the truth.
local function read_log(rid, rec)
  local log = attempt(nil, 'XRANGE', prefix .. 't:' .. rid, '-', '+')
  if not log or #log == 0 then return log, log and rec.n == 0 end
  local count = tonumber(string.match(log[#log][1], '^(%d+)-'))
  if count < rec.n then return log, false end
  rec.n = count
  return log, true
end

-- Make the entry's request this worker's own. Returns its cost, or nil if it needs no work.
local function assign(queue, entry, values, suspect)
  local rid = values.r or ''
  local record = prefix .. 'r:' .. rid
  local rec = read_record(prefix, rid)
  if not rec then return drop_missing(queue, entry, values) end
  if rec.st ~= 'queued' or rec.sid ~= entry or rec.sk ~= queue then
    return drop_entry(queue, entry, wid)
  end
  -- From here on the entry is pending for us, and finish is to forget us as its consumer.
  rec.w = wid
  if rec.dl <= now then return fail(rid, rec, 'expired', 'deadline') end
  if not rec.t1 and rec.mq > 0 and rec.mq <= now then
    return fail(rid, rec, 'expired', 'queue_timeout')
  end
  local log = {}
  if rec.t1 then
    local whole
    log, whole = read_log(rid, rec)
    if not whole then
      return fail(rid, rec, 'failed', 'engine_error', 'the log of this request was lost in Redis')
    end
  end
  local epoch, t1 = rec.ep + 1, rec.t1 or now
  redis.call('HSET', KEYS[9], rid, epoch .. ' ' .. entry .. ' ' .. queue)
  redis.call('HSET', record, 'st', 'running', 'ep', epoch, 'att', rec.att + 1, 'w', wid,
    'n', rec.n, 'nb', rec.n, 't1', t1)
  if not rec.t1 and rec.mq > 0 then redis.call('ZADD', KEYS[10], rec.dl, rid) end
  count_queued(prefix, -1, rec.lane, rec.ten, rec.cost, rec.len)
  claims[#claims + 1] = {
    rid, epoch, rec.n, rec.att + 1, suspect, redis.call('HGET', record, 'pay') or '',
    now - rec.t0, t1 - rec.t0, rec.tf and rec.tf - rec.t0 or -1, rec.dl - now, log,
  }
  return rec.cost
end

-- Its tokens were charged when it was first claimed: it goes first, whatever else has its turn.
for _, continued in ipairs({
  {KEYS[1], 'critical'}, {KEYS[13], 'normal'}, {KEYS[14], 'batch'},
}) do
  local queue, lane = continued[1], continued[2]
  while WEIGHT[lane] >= least_weight and wants_more() do
    local entry, values = read_next(queue)
    if not entry then break end
    budget = budget - (assign(queue, entry, values, 0) or 0)
  end
end

local seeks_suspect = all_lanes and ARGV[6] == '1'
while seeks_suspect and wants_more() do
  local entry, values = read_next(KEYS[2])
  if not entry then break end
  local cost = assign(KEYS[2], entry, values, 1)
  if cost then
    budget = budget - cost
    seeks_suspect = false
  end
end

-- Whether a queue has an entry that was never handed out. (Those that were stay in it for as long
-- as their requests have not ended.)
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
  local rows = redis.call('ZRANGE', KEYS[3], '0', '-1', 'WITHSCORES')
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
-- work which waits is to be next. Without this bound it would displace whatever runs, for as long
-- as more of it comes, and lanes behind would get nothing.
local function is_too_far_ahead(lane_time)
  while turns < MAX_TURNS do
    local lane, time = next_lane(0)
    if not lane or lane_time <= time + MAX_AHEAD then return false end
    local tenants = prefix .. 'act:' .. lane
    local tenant = redis.call('ZRANGE', tenants, '0', '0')[1]
    if not tenant then
      redis.call('ZREM', KEYS[3], lane)
    elseif has_fresh(prefix .. 'q:' .. lane .. ':' .. tenant) then
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
  if all_lanes then redis.call('HSET', KEYS[4], '*', lane_time) end
  local tenants = prefix .. 'act:' .. lane
  local first = redis.call('ZRANGE', tenants, '0', '0', 'WITHSCORES')
  if #first == 0 then
    redis.call('ZREM', KEYS[3], lane)
  else
    redis.call('HSET', KEYS[4], lane, first[2])
    local queue = prefix .. 'q:' .. lane .. ':' .. first[1]
    local entry, values = read_next(queue)
    if not entry then
      redis.call('ZREM', tenants, first[1])
    else
      local cost = assign(queue, entry, values, 0)
      if cost then
        budget = budget - cost
        redis.call('ZADD', tenants, tonumber(first[2]) + cost, first[1])
        redis.call('ZADD', KEYS[3], lane_time + cost / weight, lane)
      end
    end
  end
end

-- Cut off by the bound with nothing found: let whoever listens look again.
if turns >= MAX_TURNS and #claims == 0 then wake_workers(prefix) end
local bell = redis.call('XREVRANGE', KEYS[12], '+', '-', 'COUNT', '1')
local more = #claims == most and most < want and most < waiting and budget > 0
return {now, bell[1] and bell[1][1] or '0-0', claims, more and 1 or 0}
