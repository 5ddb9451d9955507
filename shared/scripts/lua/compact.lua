--@include lib/common.lua
-- compact: the log of an ended request takes no more memory than it must.
--
-- Two things are saved. A stream keeps room for more, some 4 kB, which a copy does not have. And
-- most entries hold one token in a frame of several times its size: given one chunk that says the
-- same as all, the log becomes one entry with this chunk and the end.
--
-- The caller has read the log and packed the one chunk: a script would hold the server for a
-- microsecond per token. So the log must be what was read: it is not if a redrive has given the
-- request a new life meanwhile.
--
-- The new log is made beside the old one and takes its place in one command. So readers see the one
-- or the other, and a script cut short before that has changed nothing.
--
-- For worker; runs at maxmemory.
--
-- KEYS
--   request:<id>            hash
--   log:<id>                stream
--   compacting:<id>         stream  used by this script alone
--   ended                   zset
-- ARGV
--   id                      name
--   entries                 whole   how many were read
--   last_chunk              text    the last one that was read, or empty
--   chunk                   text    the chunk in place of all; empty: the entries stay as they are
-- Reply 1 it is compact now; 0 it stays as it is
local id, entries, last_chunk, chunk = arguments(4, 4)
name('id', id)
entries = whole('entries', entries)
local log, new = PREFIX .. 'log:' .. id, PREFIX .. 'compacting:' .. id
allow_oom()

-- The entry with the end if the log is what was read, else nil.
local function read_last()
  local v = attempt(nil, 'HMGET', PREFIX .. 'request:' .. id, 'state', 'tokens')
  if not v or not v[1] or is_alive(v[1]) then return nil end
  local last = attempt(nil, 'XREVRANGE', log, '+', '-', 'COUNT', '2') or {}
  if #last == 0 or last[1][1] ~= v[2] .. '-1' or #last[1][2] ~= 2 then return nil end
  if redis.call('XLEN', log) ~= entries then return nil end
  if (last[2] and last[2][2][2] or '') ~= last_chunk then return nil end
  return last[1]
end

local function compact()
  local last = read_last()
  local left = last and redis.call('PTTL', log) or 0
  if left <= 0 then return 0 end
  if chunk == '' then
    redis.call('COPY', log, new, 'REPLACE')
    redis.call('RENAME', new, log)
    return 1
  end
  redis.call('DEL', new)
  redis.call('XADD', new, last[1], 'chunk', chunk, 'end', last[2][2])
  local bounded = redis.pcall('PEXPIRE', new, left)
  if not is_error(bounded) then bounded = redis.pcall('COPY', new, log, 'REPLACE') end
  redis.call('DEL', new)
  if is_error(bounded) then error(bounded.err) end
  return 1
end

local done = compact()
attempt(nil, 'ZREM', PREFIX .. 'ended', id)
return done
