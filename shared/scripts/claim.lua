--@include lib/common.lua
--@include lib/finish.lua
-- claim: give a worker the next requests, fairly, and renew its lease.
--
-- Order: continued work, one suspect, then lanes by virtual time (weights 8:4:1) and tenants
-- inside a lane by virtual time in tokens.
--
-- KEYS  1 q:!  stream   2 q:?  stream   3 lanes  zset   4 vt  hash   5 act:critical  zset
--       6 act:normal  zset   7 act:batch  zset   8 wl  zset   9 own:<wid>  hash   10 dl  zset
--       11 cnt  hash   12 bell  stream
--       and, found while running: q:<lane>:<tenant>, r:<id>, t:<id> of the claimed requests
-- ARGV  1 prefix   2 worker id   3 lease_ms   4 requests wanted   5 tokens wanted
--       6 '1' if the worker runs no suspect now
-- Reply {now, last bell id, claims}; a claim is
--       {id, epoch, n, attempts, suspect, payload, accepted ms ago, ms queued before the first
--        claim, ms from acceptance to first token or -1, ms to the deadline, log}
--       where log is what XRANGE of t:<id> gives if n > 0, else empty
local prefix, wid = ARGV[1], ARGV[2]
local want, budget = tonumber(ARGV[4]), tonumber(ARGV[5])
allow_oom(prefix)
local now = now_ms()
redis.call('ZADD', KEYS[8], now + tonumber(ARGV[3]), wid)

local claims = {}

local function take(queue)
  local got = redis.pcall('XREADGROUP', 'GROUP', GROUP, wid, 'COUNT', '1', 'STREAMS', queue, '>')
  if not got or got.err then return nil end
  local entry = got[1][2][1]
  return entry[1], entry[2][2]
end

-- Make the entry's request this worker's own. Returns its cost, or nil if it needs no work.
local function adopt(queue, entry, rid, suspect)
  local record = prefix .. 'r:' .. rid
  local rec = read_record(prefix, rid)
  if not rec or rec.st ~= 'queued' then
    drop_entry(queue, entry)
    return nil
  end
  local t = redis.call('HMGET', record, 't0', 't1', 'tf', 'dl')
  local t0, t1, deadline = tonumber(t[1]), tonumber(t[2]) or now, tonumber(t[4])
  redis.call('HSET', record, 'st', 'running', 'ep', rec.ep + 1, 'att', rec.att + 1, 'w', wid,
    'nb', rec.n, 't1', t1, 'sk', queue, 'sid', entry)
  redis.call('HSET', KEYS[9], rid, rec.ep + 1)
  redis.call('ZADD', KEYS[10], deadline, rid)
  count_queued(prefix, -1, rec.lane, rec.ten, rec.cost, rec.len)
  local log = {}
  if rec.n > 0 then log = redis.call('XRANGE', prefix .. 't:' .. rid, '-', '+') end
  claims[#claims + 1] = {
    rid, rec.ep + 1, rec.n, rec.att + 1, suspect, rec.pay, now - t0, t1 - t0,
    t[3] and tonumber(t[3]) - t0 or -1, deadline - now, log,
  }
  return rec.cost
end

while #claims < want and budget > 0 do
  local entry, rid = take(KEYS[1])
  if not entry then break end
  budget = budget - (adopt(KEYS[1], entry, rid, 0) or 0)
end

if ARGV[6] == '1' and #claims < want and budget > 0 then
  local entry, rid = take(KEYS[2])
  if entry then budget = budget - (adopt(KEYS[2], entry, rid, 1) or 0) end
end

-- Bounded: every turn either claims, drops a stale entry or retires an idle tenant or lane.
local turns = 0
while #claims < want and budget > 0 and turns < 512 do
  turns = turns + 1
  local lane = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
  if #lane == 0 then break end
  local name, lane_time = lane[1], tonumber(lane[2])
  local tenants = prefix .. 'act:' .. name
  local tenant = redis.call('ZRANGE', tenants, 0, 0, 'WITHSCORES')
  redis.call('HSET', KEYS[4], '*', lane[2])
  if #tenant == 0 then
    redis.call('ZREM', KEYS[3], name)
  else
    -- The smallest virtual time is what is being served now: a newcomer starts there.
    redis.call('HSET', KEYS[4], name, tenant[2])
    local queue = prefix .. 'q:' .. name .. ':' .. tenant[1]
    local entry, rid = take(queue)
    if not entry then
      redis.call('ZREM', tenants, tenant[1])
    else
      local cost = adopt(queue, entry, rid, 0)
      if cost then
        budget = budget - cost
        redis.call('ZADD', tenants, tonumber(tenant[2]) + cost, tenant[1])
        redis.call('ZADD', KEYS[3], lane_time + cost / WEIGHT[name], name)
      end
    end
  end
end

local bell = redis.call('XREVRANGE', KEYS[12], '+', '-', 'COUNT', '1')
return {now, bell[1] and bell[1][1] or '0-0', claims}
