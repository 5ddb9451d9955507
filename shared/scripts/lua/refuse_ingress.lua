--@include lib/common.lua
--@include lib/queue.lua
--@include lib/finish.lua
--@include lib/ingress.lua
-- refuse_ingress: an entry of an intake stream that is no valid request gets its End and is gone, once.
-- Runs at maxmemory.
--
-- KEYS  1 in or in:<tenant>  stream   2 r:<id>  hash   3 t:<id>  stream   4 r:<own name>  hash
--       5 t:<own name>  stream   6 cnt  hash
-- ARGV  1 prefix   2 entry   3 id   4 own name: the id that nobody else may have   5 state
--       6 reason   7 message   8 'json' if the answer is to be JSON   9 retention_ms
-- Reply {'refused', id answered} | {'gone', ''} another worker was first
local prefix, entry = ARGV[1], ARGV[2]
allow_oom(prefix)
local reply = {'gone', ''}
if entry_exists(KEYS[1], entry) then
  reply = {'refused', answer_refusal(prefix, ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7],
    ARGV[8] == 'json', tonumber(ARGV[9]))}
end
remove_entry(KEYS[1], entry)
return reply
