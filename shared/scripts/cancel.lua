--@include lib/common.lua
--@include lib/finish.lua
-- cancel: end a request at once, queued or running. The owner of a running one learns it by the
-- status of its next append: fencing is the only way anything is stopped.
--
-- KEYS  1 r:<id>  hash   2 t:<id>  stream   3 dl  zset   4 cnt  hash
--       and, found in the record: its queue q:..., own:<wid>
-- ARGV  1 prefix   2 id   3 reason ('client' or 'disconnected')   4 retention_ms
-- Reply {'cancelled', n} | {'ended', state} if it was terminal already | {'unknown'}
allow_oom(ARGV[1])
local rec = read_record(ARGV[1], ARGV[2])
if not rec then return {'unknown'} end
if rec.st ~= 'queued' and rec.st ~= 'running' then return {'ended', rec.st} end
finish(ARGV[1], ARGV[2], 'cancelled', ARGV[3], rec.n, '', '', -1, rec, now_ms(), tonumber(ARGV[4]))
return {'cancelled', rec.n}
