--@include lib/common.lua
-- compact: the log of an ended request takes no more memory than it must. Runs at maxmemory.
--
-- Two things are saved. Streams keep room for more, some 4 kB each, which a copy does not have.
-- And most entries hold one token in a frame of several times its size: given one chunk that says
-- the same as all, the log becomes one entry with this chunk and the end.
--
-- Whoever calls this has read the log and packed the one chunk: here that would hold the server for
-- a microsecond per token, and all others with it. So the log must be what was read: it was not if
-- a redrive has given the request a new life meanwhile.
--
-- The new log is made beside the old one and takes its place in one command. So readers see the one
-- or the other, and a script cut short before that has changed nothing.
--
-- KEYS  1 r:<id>  hash   2 t:<id>  stream   3 z:<id>  stream, here only   4 fin  zset
-- ARGV  1 prefix   2 id   3 entries that were read   4 the last chunk that was read, or empty
--       5 the chunk in place of all; empty if the entries are to stay as they are
-- Reply 1 it is compact now; 0 it stays as it is
local prefix, log, new = ARGV[1], KEYS[2], KEYS[3]
allow_oom(prefix)

-- The entry with the end if the log is what was read, else nil.
local function read_last()
  local v = attempt(nil, 'HMGET', KEYS[1], 'st', 'n')
  if not v or not v[1] or v[1] == 'queued' or v[1] == 'running' then return nil end
  local last = attempt(nil, 'XREVRANGE', log, '+', '-', 'COUNT', '2') or {}
  if #last == 0 or last[1][1] ~= v[2] .. '-1' or #last[1][2] ~= 2 then return nil end
  if redis.call('XLEN', log) ~= tonumber(ARGV[3]) then return nil end
  if (last[2] and last[2][2][2] or '') ~= ARGV[4] then return nil end
  return last[1]
end

local function compact()
  local last = read_last()
  local left = last and redis.call('PTTL', log) or 0
  if left <= 0 then return 0 end
  if ARGV[5] == '' then
    redis.call('COPY', log, new, 'REPLACE')
    redis.call('RENAME', new, log)
    return 1
  end
  redis.call('DEL', new)
  redis.call('XADD', new, last[1], 'd', ARGV[5], 'e', last[2][2])
  local bounded = redis.pcall('PEXPIRE', new, left)
  if not is_error(bounded) then bounded = redis.pcall('COPY', new, log, 'REPLACE') end
  redis.call('DEL', new)
  if is_error(bounded) then error(bounded.err) end
  return 1
end

local done = compact()
attempt(nil, 'ZREM', KEYS[4], ARGV[2])
return done
