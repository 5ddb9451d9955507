-- probe: run commands that change nothing, to learn which of them this user may run in a script.
--
-- A user may do in a script what it may do outside. But a script is not rolled back when a command
-- in its middle is denied. So `penstock doctor` asks beforehand.
--
-- For doctor; runs at maxmemory.
--
-- KEYS
--   request:<id>            hash    an id that no request has
-- More keys, named by the commands
-- ARGV
--   words...                text    for each command: how many words it has, then its words
-- Reply one text per command: the error it gave, or '' if it gave none
local replies = {}
local at = 1
while ARGV[at] do
  local last = at + tonumber(ARGV[at])
  local reply = redis.pcall(unpack(ARGV, at + 1, last))
  replies[#replies + 1] = type(reply) == 'table' and reply.err or ''
  at = last + 1
end
return replies
