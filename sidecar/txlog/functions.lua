-- The calls of the port `sidecar/txlog/store.py`, each atomic: its rules 1-10, said in the server's language.
--
-- One source, two ways in. As a library the functions are registered under the library's name; where functions are
-- missing (Redis before 7) or forbidden, each is a script of its own. `scripts.py` puts the constants of store.py and
-- codec.py before this text and the way in behind it.
--
-- 1. The server's clock (TIME) is the only one, in microseconds. Numbers are doubles: exact to 2^53, which is the year
--    2255. Replies carry the time as text: a number in a reply is cut to what an integer of the protocol holds.
-- 2. Every key that is touched is in KEYS, and all of a call share one hash tag. What belongs to a register that is
--    forgotten without its key at hand (probes, leases, suspects) has an expiry of its own.
-- 3. Strings are compared byte by byte: Lua's `<` asks the server's locale.
-- 4. A register that cannot be read (another's bytes, another schema) counts as none: the next change makes it anew,
--    with a later epoch.

local REGS, LOG, N, AGE, NOT_CLOSED, SUSPECTS, PROBES, LEASES = 1, 2, 3, 4, 5, 6, 7, 8
local TRANSITION, OVERRIDE, SUSPECT, ROUTE = 1, 2, 3, 4
local CLOSED, HALF_OPEN, OPEN = 0, 1, 2
local HEAD = '>BBBBBHI4I8I8I8I4I4I4I4I8c16'

-- `redis.call` is not there yet while a library is loaded.
local function call(...)
  return redis.call(...)
end

local function clock()
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function decode(data)
  if not data or #data < HEAD_BYTES or string.byte(data, 1) ~= SCHEMA then return nil end
  local r = {}
  local _
  _, r.kind, r.state, r.held, r.doublings, r.proofs, r.epoch, r.version, r.n, r.ts, r.wait, r.base, r.max, r.ramp,
    r.expires, r.tx = struct.unpack(HEAD, data)
  r.body = string.sub(data, HEAD_BYTES + 1)
  return r
end

local function encode(r)
  return struct.pack(HEAD, SCHEMA, r.kind, r.state, r.held, r.doublings, r.proofs, r.epoch, r.version, r.n, r.ts,
    r.wait, r.base, r.max, r.ramp, r.expires, r.tx) .. r.body
end

-- The register, read and as it lies there; nil and '' if there is none.
local function register(keys, key)
  local data = call('HGET', keys[REGS], key)
  local r = decode(data)
  if not r then return nil, '' end
  return r, data
end

local function reply(verdict, now, record, seq, ms, contended)
  return {verdict, string.format('%.0f', now), record or '', seq or 0, ms or 0, contended and 1 or 0}
end

local function is_node(key)
  return string.sub(key, 1, 5) == 'node:'
end

local function is_held(r, now)
  return r.held == 1 and (r.expires == 0 or r.expires > now)
end

local function is_after(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x > y end
  end
  return #a > #b
end

-- When a register, touched now, has been left alone for `ms`; not while it is held.
local function left_alone(r, now, ms)
  local at = now + ms * 1000
  if not is_held(r, now) then return at end
  if r.expires == 0 then return math.huge end
  return math.max(at, r.expires)
end

local function score(at)
  return at == math.huge and '+inf' or string.format('%.0f', at)
end

-- Somebody needs this register: neither gone (rule 2) nor forgotten (rule 8) for a while.
local function touch(keys, key, r, now)
  if string.sub(key, 1, 6) == 'route:' then return end  -- a routing table that never changes is needed all the same
  local ttl = r.state == CLOSED and CLOSED_TTL_MS or OPEN_TTL_MS + 2 * r.max
  call('ZADD', keys[AGE], score(left_alone(r, now, ttl)), key)
  if not is_node(key) then return end
  if r.state == CLOSED then
    call('ZREM', keys[NOT_CLOSED], key)
    return
  end
  call('ZREMRANGEBYSCORE', keys[NOT_CLOSED], '-inf', score(now))
  call('ZADD', keys[NOT_CLOSED], score(left_alone(r, now, 2 * r.max + GONE_SLACK_MS)), key)
  local last = call('ZREVRANGE', keys[NOT_CLOSED], 0, 0, 'WITHSCORES')[2]
  if last == 'inf' then
    call('PERSIST', keys[NOT_CLOSED])
  else
    call('PEXPIREAT', keys[NOT_CLOSED], string.format('%.0f', math.ceil(tonumber(last) / 1000)))
  end
end

local function forget(keys, now)
  local old = call('ZRANGEBYSCORE', keys[AGE], '-inf', score(now), 'LIMIT', 0, PURGE)
  for _, key in ipairs(old) do
    call('HDEL', keys[REGS], key)
    call('ZREM', keys[AGE], key)
  end
end

-- The first record's number is the time, so that a log that was flushed and filled again does not look like the old one.
local function append(keys, r, now)
  r.n = call('INCR', keys[N])
  if r.n == 1 then
    r.n = now
    call('SET', keys[N], score(now))
  end
  local data = encode(r)
  call('XADD', keys[LOG], 'MAXLEN', '~', math.min(LOG_RECORDS, math.floor(LOG_BYTES / #data)), '*', 'r', data)
  return data
end

-- Make `r` the register and tell it. Its bytes.
local function put(keys, key, r, now)
  local data = append(keys, r, now)
  call('HSET', keys[REGS], key, data)
  call('DEL', keys[PROBES], keys[LEASES])
  if r.state ~= CLOSED then call('DEL', keys[SUSPECTS]) end
  touch(keys, key, r, now)
  forget(keys, now)
  return data
end

-- The register moves on by one version, by evidence, by its wait or by its probes. Its bytes.
local function move(keys, key, r, state, now, tx, body)
  r.kind, r.state, r.version, r.ts, r.tx, r.body = TRANSITION, state, r.version + 1, now, tx, body
  if state == HALF_OPEN then r.held, r.expires = 0, 0 end
  return put(keys, key, r, now)
end

local function reopen(keys, key, r, now, tx, body, failed)
  if failed then
    r.doublings = math.min(r.doublings + 1, MAX_DOUBLINGS)
    r.wait = math.min(r.max, r.base * 2 ^ r.doublings)
  end
  return move(keys, key, r, OPEN, now, tx, body)
end

-- Rules 1-3.
local function propose(keys, args)
  local key, tx, body, by, suspect_tx = args[1], args[3], args[4], args[5], args[6]
  local p = {tx = tx, body = body, n = 0}
  local order, overwhelming, epoch, version, size, minimum, quorum
  p.kind, p.state, order, p.held, p.doublings, overwhelming, p.proofs, epoch, version, p.expires, p.wait, p.base,
    p.max, p.ramp, size, minimum, quorum = struct.unpack('>BBBBBBHI4I8I8I4I4I4I4I4I4I4', args[2])
  local now = clock()
  local r, data = register(keys, key)
  if r and r.tx == tx then return reply('already', now, data) end
  if order == 0 then
    p.held, p.expires = 0, 0
    if r and (r.epoch ~= epoch or r.version ~= version) then return reply('stale', now, data) end
    if r and is_held(r, now) then return reply('held', now, data) end
  end
  if order == 0 and p.kind ~= ROUTE then
    local state = r and r.state or CLOSED
    if not (state == CLOSED and p.state == OPEN or state ~= CLOSED and p.state == CLOSED) then
      return reply('illegal', now, data)
    end
    if p.state == OPEN then
      if minimum > 0 and is_node(key) then
        local others = call('ZCOUNT', keys[NOT_CLOSED], '(' .. score(now), '+inf')
        local own = call('ZSCORE', keys[NOT_CLOSED], key)
        if own and (own == 'inf' or tonumber(own) > now) then others = others - 1 end
        if size - others - 1 < minimum then return reply('floor', now, data) end
      end
      if quorum > 1 and overwhelming == 0 then
        call('ZREMRANGEBYSCORE', keys[SUSPECTS], '-inf', score(now - SUSPECT_MS * 1000))
        local observers = call('ZCARD', keys[SUSPECTS])
        local told = call('ZSCORE', keys[SUSPECTS], by)
        if observers + (told and 0 or 1) < quorum then
          if not told then
            call('ZADD', keys[SUSPECTS], score(now), by)
            call('PEXPIRE', keys[SUSPECTS], SUSPECT_MS)
            append(keys, {
              kind = SUSPECT, state = state, held = 0, doublings = 0, proofs = 0, epoch = r and r.epoch or 0,
              version = r and r.version or 0, ts = now, wait = 0, base = 0, max = 0, ramp = 0, expires = 0,
              tx = suspect_tx, body = body,
            }, now)
            forget(keys, now)
          end
          return reply('suspect', now, data)
        end
      end
    end
  end
  p.ts = now
  if r then
    p.epoch, p.version = r.epoch, r.version + 1
  else
    p.epoch, p.version = math.max(math.floor(now / 1000000), epoch + 1), 1
  end
  return reply('ok', now, put(keys, key, p, now))
end

-- `seq`: of the probe lent last, so also how many were lent; `ok`: how many were good; `refused`: `seq` at the last FULL.
local function probes_of(keys)
  local found = call('HMGET', keys[PROBES], 'seq', 'ok', 'refused')
  return {seq = tonumber(found[1] or 0), ok = tonumber(found[2] or 0), refused = tonumber(found[3] or 0)}
end

local function needed_of(r, successes)
  return math.max(successes, r.proofs * math.min(MOST_TIMES, 1 + r.doublings))
end

local function has_lost(keys, now)
  return call('ZCOUNT', keys[LEASES], '-inf', score(now)) > 0
end

local function is_used_up(keys, p, needed)
  return p.seq >= TOTAL_PER_NEEDED * needed + TOTAL_SLACK and call('ZCARD', keys[LEASES]) == 0
end

-- The next probe's number, or 0 if none may be lent now.
local function lend(keys, key, r, p, now, lease_ms, most, successes)
  local needed = needed_of(r, successes)
  if p.ok > 0 and needed > successes then most = math.max(most, MOST_PROBES) end
  most = math.min(most, math.max(1, needed - p.ok))
  if call('ZCARD', keys[LEASES]) >= most or p.seq >= TOTAL_PER_NEEDED * needed + TOTAL_SLACK then return 0 end
  p.seq = p.seq + 1
  call('HSET', keys[PROBES], 'seq', p.seq)
  call('ZADD', keys[LEASES], score(now + lease_ms * 1000), p.seq)
  touch(keys, key, r, now)
  local ttl = OPEN_TTL_MS + 2 * r.max
  call('PEXPIRE', keys[PROBES], ttl)
  call('PEXPIRE', keys[LEASES], ttl)
  return p.seq
end

-- Rule 4.
local function ask(keys, args)
  local key, tx, body = args[1], args[3], args[4]
  local lease_ms, most, successes = struct.unpack('>I4I4I4', args[2])
  local now = clock()
  local r, data = register(keys, key)
  if not r or r.state == CLOSED then return reply('closed', now, data) end
  if is_held(r, now) then return reply('held', now, data) end
  if r.state == OPEN then
    local left = r.ts + r.wait * 1000 - now
    if left > 0 then return reply('wait', now, data, 0, math.ceil(left / 1000)) end
    data = move(keys, key, r, HALF_OPEN, now, tx, body)
  elseif has_lost(keys, now) then
    return reply('reopened', now, reopen(keys, key, r, now, args[5], args[6], true))
  end
  local p = probes_of(keys)
  if is_used_up(keys, p, needed_of(r, successes)) then
    return reply('reopened', now, reopen(keys, key, r, now, args[5], args[6], false))
  end
  local seq = lend(keys, key, r, p, now, lease_ms, most, successes)
  if seq > 0 then return reply('granted', now, data, seq) end
  if p.refused ~= p.seq then call('HSET', keys[PROBES], 'refused', p.seq) end
  return reply('full', now, data)
end

-- The register, if it is half-open as the probe knew it and the probe's lease stands; else nil and the answer.
local function fenced(keys, key, epoch, version, seq, now)
  local r, data = register(keys, key)
  if r and r.epoch == epoch and r.version == version and r.state == HALF_OPEN then
    local lease = call('ZSCORE', keys[LEASES], seq)
    if lease and tonumber(lease) > now then return r, data end
  end
  return nil, reply('fenced', now, data)
end

-- Rule 5.
local function report(keys, args)
  local key, tx, closed_body, reopened_body = args[1], args[3], args[4], args[5]
  local epoch, version, seq, ok, again, lease_ms, most, successes = struct.unpack('>I4I8I8BBI4I4I4', args[2])
  local now = clock()
  local r, data = fenced(keys, key, epoch, version, seq, now)
  if not r then return data end
  call('ZREM', keys[LEASES], seq)
  if ok == 0 or has_lost(keys, now) then
    return reply('reopened', now, reopen(keys, key, r, now, tx, reopened_body, true))
  end
  local p = probes_of(keys)
  local needed = needed_of(r, successes)
  if ok == 1 then
    p.ok = p.ok + 1
    if p.ok >= needed or p.ok >= successes and now - r.ts >= PATIENCE_MS * 1000 then
      r.wait = 0
      return reply('closed', now, move(keys, key, r, CLOSED, now, tx, closed_body))
    end
    call('HSET', keys[PROBES], 'ok', p.ok)
  end
  if is_used_up(keys, p, needed) then
    return reply('reopened', now, reopen(keys, key, r, now, tx, reopened_body, false))
  end
  if ok ~= 1 then return reply('neutral', now, data) end
  return reply('proved', now, data, again == 1 and lend(keys, key, r, p, now, lease_ms, most, successes) or 0)
end

-- Rule 6.
local function renew(keys, args)
  local key = args[1]
  local epoch, version, seq, lease_ms = struct.unpack('>I4I8I8I4', args[2])
  local now = clock()
  local r, data = fenced(keys, key, epoch, version, seq, now)
  if not r then return data end
  call('ZADD', keys[LEASES], score(now + lease_ms * 1000), seq)
  touch(keys, key, r, now)
  local refused = call('HGET', keys[PROBES], 'refused')
  return reply('ok', now, data, 0, 0, refused and tonumber(refused) >= seq)
end

local function release(keys, args)
  local key, tx, body = args[1], args[3], args[4]
  local epoch, version, seq = struct.unpack('>I4I8I8', args[2])
  local now = clock()
  local r, data = fenced(keys, key, epoch, version, seq, now)
  if not r then return data end
  call('ZREM', keys[LEASES], seq)
  local good = tonumber(call('HGET', keys[PROBES], 'ok') or 0)
  if good > 0 or call('ZCARD', keys[LEASES]) > 0 then return reply('ok', now, data) end
  r.wait = 0
  return reply('reopened', now, reopen(keys, key, r, now, tx, body, false))
end

-- Rule 7.
local function restore(keys, args)
  local key, record = args[1], args[2]
  local now = clock()
  local r, data = register(keys, key)
  local lost = decode(record)
  if not lost or lost.kind < 1 or lost.kind > ROUTE or lost.kind == SUSPECT or lost.state > OPEN
    or lost.version >= MAX_EXACT then
    return reply('illegal', now, data)
  end
  local more = 0
  if r and lost.epoch == r.epoch and lost.version == r.version then
    if lost.tx == r.tx then return reply('kept', now, data) end
    if lost.state < r.state or lost.state == r.state and not is_after(lost.tx, r.tx) then
      return reply('kept', now, data)
    end
    more = 1
  elseif r and (lost.epoch < r.epoch or lost.epoch == r.epoch and lost.version < r.version) then
    return reply('kept', now, data)
  end
  if lost.state == HALF_OPEN then
    lost.state, lost.wait, more = OPEN, 0, 1
  end
  lost.version = lost.version + more
  lost.ts = math.min(lost.ts, now)
  return reply('ok', now, put(keys, key, lost, now))
end

-- Rule 9. Its one key is the members.
local function beat(keys, args)
  local now = clock()
  call('ZADD', keys[1], score(now), args[1])
  call('ZREMRANGEBYSCORE', keys[1], '-inf', score(now - MEMBER_TTL_MS * 1000))
  call('PEXPIRE', keys[1], MEMBER_TTL_MS)
  return reply('ok', now, '', 0, call('ZCARD', keys[1]))
end

-- Rule 10. Its one key is the evidence.
local function share(keys, args)
  local now = clock()
  local oldest = math.max(0, math.floor(now / 1000) - tonumber(args[2]))
  call('XADD', keys[1], 'MINID', '~', string.format('%.0f', oldest), '*', 'r', args[1])
  -- As many as there would be if all were as long as this: who writes long ones makes it shorter.
  call('XTRIM', keys[1], 'MAXLEN', '~', math.floor(EVIDENCE_BYTES / (#args[1] + EVIDENCE_OVERHEAD)))
  return reply('ok', now)
end

-- What is kept of a budget, in one hash: 'm', when it was last drawn on, its longest span, all slots that are held, when
-- it was made; 'w' of each window, what was drawn in its parts; 'b' of each sidecar, when it last drew and what it drew of
-- that; 's', its slots. Two more keys say when which sidecar was last here, and with slots. What cannot be read counts as none.
--
-- Parts lie in a row, the oldest first, with 2, 4 or 6 bytes each, behind the last one's number and the sum of all: time
-- goes by as the row moves on, and what a call does not touch is not even looked at.
local DRAWN_SCHEMA, DRAWER_SCHEMA = 1, 2
local PARTS = SPAN_PARTS + 1  -- the part that begins a span ago is in use as long as any of it is
local META, META_BYTES = '>BI6I5I8I8', 28
local NUMBERS, HEADING = '>I8I8I8', '>I8I8I8I8'
local WINDOW, WINDOW_BYTES = '>BI4I8I8I8I8I8I8', 53
local ROW, ROW_BYTES = '>I6BI8', 15
local FORMAT, BEYOND = {[2] = '>I2', [4] = '>I4', [6] = '>I6'}, {[2] = 65536, [4] = 4294967296, [6] = 281474976710656}

local DRAWER, DRAWER_BYTES = '>BI6', 7

local function is_drawn(data, bytes)
  return data and #data >= bytes and string.byte(data, 1) == DRAWN_SCHEMA
end

local function is_drawer(data, bytes)
  return data and #data >= bytes and string.byte(data, 1) == DRAWER_SCHEMA
end

local function no_parts(now)
  return {now = now, width = 2, sum = 0, row = string.rep('\0', 2 * PARTS)}
end

-- The parts that are kept at a place of `data`, and the place behind them; nil if there are none.
local function parts_at(data, at)
  if #data < at + ROW_BYTES - 1 then return nil end
  local now, width, sum = struct.unpack(ROW, data, at)
  local after = at + ROW_BYTES + width * PARTS
  if not FORMAT[width] or #data < after - 1 then return nil end
  return {now = now, width = width, sum = sum, row = string.sub(data, at + ROW_BYTES, after - 1)}, after
end

local function packed(parts)
  return struct.pack(ROW, parts.now, parts.width, parts.sum) .. parts.row
end

local function part(parts, i)
  return (struct.unpack(FORMAT[parts.width], parts.row, (i - 1) * parts.width + 1))
end

local function set_part(parts, i, drawn)
  parts.sum = parts.sum - part(parts, i) + drawn
  if drawn >= BEYOND[parts.width] then
    local width = drawn < BEYOND[4] and 4 or 6
    local wider = {}
    for j = 1, PARTS do wider[j] = struct.pack(FORMAT[width], part(parts, j)) end
    parts.width, parts.row = width, table.concat(wider)
  end
  local width = parts.width
  parts.row = string.sub(parts.row, 1, (i - 1) * width) .. struct.pack(FORMAT[width], drawn)
    .. string.sub(parts.row, i * width + 1)
end

-- The parts as of now. What is ahead of now, since the clock went back, is of now.
local function turned(parts, now)
  local by = parts and now - parts.now or PARTS
  if by >= PARTS then return no_parts(now) end
  local width = parts.width
  if by > 0 then
    for i = 1, by do parts.sum = parts.sum - part(parts, i) end
    parts.row = string.sub(parts.row, by * width + 1) .. string.rep('\0', by * width)
  elseif by < 0 then
    by = math.min(-by, PARTS)
    local ahead = 0
    for i = PARTS - by + 1, PARTS do ahead = ahead + part(parts, i) end
    parts.row = string.rep('\0', by * width) .. string.sub(parts.row, 1, (PARTS - by) * width)
    parts.sum = parts.sum - ahead
    set_part(parts, PARTS, math.min(MOST_DRAWN, part(parts, PARTS) + ahead))
  end
  parts.now = now
  return parts
end

local function part_of(span, ms)
  return math.floor(ms * SPAN_PARTS / span)
end

local function field_of(unit, span)
  return string.format('w%d:%.0f', unit, span)
end

-- What a sidecar drew, by the windows' fields; and what is in use of windows that are not in `called`, as it is kept.
local function mine_of(data, called, now_ms)
  local mine, rest, at = {}, {}, DRAWER_BYTES + 1
  while is_drawer(data, at + 4) do
    local unit, span = struct.unpack('>BI4', data, at)
    local parts, after = parts_at(data, at + 5)
    if not parts then break end
    local field = field_of(unit, span)
    if called[field] then
      mine[field] = parts
    elseif parts.now > part_of(span, now_ms) - PARTS then
      rest[#rest + 1] = string.sub(data, at, after - 1)
    end
    at = after
  end
  return mine, rest
end

-- How long until `rest` fits below the limit.
local function wait_of(w, parts, rest, now_ms)
  if rest <= 0 then return 0 end
  if rest > w.limit then return w.span end
  local sum = parts.sum
  for i = 1, PARTS do
    sum = sum - part(parts, i)
    if sum + rest <= w.limit then return math.ceil((parts.now + i) * w.span / SPAN_PARTS) - now_ms end
  end
end

-- One window: what is to be kept of all and of the sidecar, and what it gave as the reply says it.
local function draw_window(w, parts, own, now_ms)
  local now = part_of(w.span, now_ms)
  parts, own = turned(parts, now), turned(own, now)
  local i = PARTS
  if w.back_us > 0 then i = math.min(PARTS, PARTS + part_of(w.span, math.floor(w.back_us / 1000)) - now) end
  while w.back > 0 and i > 0 and own.sum > 0 do
    local mine = part(own, i)
    if mine > 0 then
      local off, all = math.min(w.back, mine), part(parts, i)
      set_part(own, i, mine - off)
      set_part(parts, i, all - math.min(off, all))
      w.back = w.back - off
    end
    i = i - 1
  end
  local last = part(parts, PARTS)
  local must = math.min(w.must, MOST_DRAWN - last)
  local room = math.min(w.limit - parts.sum, MOST_DRAWN - last) - must
  local granted = math.min(w.want, room)
  if granted < 0 or room < math.min(w.least, w.want) then granted = 0 end
  local drawn = must + granted
  if drawn > 0 then
    set_part(parts, PARTS, last + drawn)
    set_part(own, PARTS, math.min(MOST_DRAWN, part(own, PARTS) + drawn))
  end
  return string.char(DRAWN_SCHEMA) .. packed(parts), struct.pack('>BI4', w.unit, w.span) .. packed(own),
    struct.pack('>I8I8I4', granted, parts.sum, wait_of(w, parts, w.want - granted, now_ms))
end

-- The windows of a call, the fields that they are kept in, and the same by field; nil if there may be no such windows.
local function windows_of(numbers)
  local windows, fields, called = {}, {}, {}
  for at = 25, #numbers, WINDOW_BYTES do
    local w = {}
    w.unit, w.span, w.limit, w.must, w.want, w.back, w.least, w.back_us = struct.unpack(WINDOW, numbers, at)
    local field = field_of(w.unit, w.span)
    if #windows == MAX_WINDOWS or called[field] or w.span < MIN_SPAN_MS or w.span > MAX_SPAN_MS then return nil end
    windows[#windows + 1], fields[#fields + 1], called[field] = w, field, true
  end
  return windows, fields, called
end

-- Sidecars that were not here for long: the slots that they had, and whether this one is among them.
local function leave(budget, key, what, before_ms, by)
  local slots, is_own = 0, false
  for _, each in ipairs(call('ZRANGEBYSCORE', key, '-inf', score(before_ms))) do
    if what == 's' then slots = slots + (tonumber(call('HGET', budget, 's' .. each)) or 0) end
    call('HDEL', budget, what .. each)
    call('ZREM', key, each)
    is_own = is_own or each == by
  end
  return slots, is_own
end

-- The clock went back: who was here later was here now.
local function set_back(key, now_ms)
  for _, by in ipairs(call('ZRANGEBYSCORE', key, '(' .. score(now_ms), '+inf')) do
    call('ZADD', key, score(now_ms), by)
  end
end

local function ttl_of(longest)
  return math.ceil(longest * PARTS / SPAN_PARTS) + MEMBER_TTL_MS
end

-- Rule 11. Its keys: the budget, who draws on it, who has slots of it.
local function draw(keys, args)
  local budget, drawers, holders, numbers, by = keys[1], keys[2], keys[3], args[1], args[2]
  local limit, used, want = struct.unpack(NUMBERS, numbers)
  local now = clock()
  local now_ms = math.floor(now / 1000)
  local windows, fields, called = windows_of(numbers)
  if not windows then return reply('illegal', now) end
  local kept = call('HMGET', budget, 'm', 'b' .. by, 's' .. by, unpack(fields))
  local meta, mine, had = kept[1], kept[2], tonumber(kept[3] or 0) or 0
  local _, longest, slots, at, born = 0, 0, 0, 0, now
  if is_drawn(meta, META_BYTES) then
    _, at, longest, slots, born = struct.unpack(META, meta)
    if at > now_ms then
      set_back(drawers, now_ms)
      set_back(holders, now_ms)
    end
    local lost, is_own
    _, is_own = leave(budget, drawers, 'b', now_ms - DRAWER_TTL_MS, by)
    if is_own then mine = nil end
    if slots > 0 then
      lost, is_own = leave(budget, holders, 's', now_ms - MEMBER_TTL_MS, by)
      slots = slots - lost
      if is_own then had = 0 end
    end
    if now_ms - at >= ttl_of(longest) then longest, born = 0, now end  -- nothing of it is in use
  end
  local own_parts, drawn = mine_of(mine, called, now_ms)
  local before = 0
  if is_drawer(mine, DRAWER_BYTES) then _, before = struct.unpack(DRAWER, mine) end
  slots = math.max(0, slots - had)
  local own = math.max(used, math.min(want, limit - slots))
  local written, answer = {}, {struct.pack(HEADING, own, slots + own, born, math.min(before, now_ms) * 1000)}
  for i, w in ipairs(windows) do
    longest = math.max(longest, w.span)
    local data = kept[i + 3]
    local parts = is_drawn(data, 1) and parts_at(data, 2) or nil
    written[2 * i - 1] = fields[i]
    written[2 * i], drawn[#drawn + 1], answer[i + 1] = draw_window(w, parts, own_parts[fields[i]], now_ms)
  end
  call('HSET', budget, 'm', struct.pack(META, DRAWN_SCHEMA, now_ms, longest, slots + own, born), 'b' .. by,
    struct.pack(DRAWER, DRAWER_SCHEMA, now_ms) .. table.concat(drawn), unpack(written))
  call('ZADD', drawers, score(now_ms), by)
  local ttl = score(ttl_of(longest))
  call('PEXPIRE', budget, ttl)
  call('PEXPIRE', drawers, ttl)
  if own > 0 then
    call('HSET', budget, 's' .. by, score(own))
    call('ZADD', holders, score(now_ms), by)
  elseif had > 0 then
    call('HDEL', budget, 's' .. by)
    call('ZREM', holders, by)
  end
  -- With the budget, however long ago somebody took a slot: who has one must be found while it counts.
  if slots + own > 0 then call('PEXPIRE', holders, ttl) end
  return reply('ok', now, table.concat(answer))
end

local functions = {
  propose = propose, ask = ask, report = report, renew = renew, release = release, restore = restore, beat = beat,
  share = share, draw = draw,
}
