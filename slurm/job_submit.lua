-- Slurm's job_submit plugin for Ondeck: tells a user at once, at sbatch, what is wrong with the #RSA_ lines of a
-- script, holds a job that must not start before its input is there, and has one that is I/O-heavy start a moment later, so that
-- the scheduler can see it before.
--
-- Put it beside slurm.conf and write `JobSubmitPlugins=lua` there. If you have a job_submit.lua, load this one from it:
--     dofile("/etc/slurm/ondeck_job_submit.lua")
--     function slurm_job_submit(job_desc, part_list, submit_uid)
--         if ondeck.submit(job_desc) ~= slurm.SUCCESS then return slurm.ERROR end
--         ...
--
-- It runs inside slurmctld, which waits for it: it reads the head of the script and runs no command. It understands the
-- lines as Ondeck does (crates/directive); a job without them is none of its business, and an error of its own is
-- logged and the job accepted. Lua 5.1 to 5.4.

local M = {}

-- The daemon knows its hold by this word in AdminComment.
M.HELD_FOR_INPUT = "ondeck:hold"

-- What the user of a heterogeneous job is told. The daemon tells it, too.
M.HETEROGENEOUS = "no RAM disk: this job is heterogeneous, and its components can't share one yet; all of them work on "
    .. "disk. To have one, submit it as one job, without `:` and `#SBATCH hetjob`"
M.NO_SCRIPT = "no RAM disk: only a batch script (sbatch) can have one; this job works on disk, and its #RSA_ lines are not obeyed"
M.STAGE_IN_IS_NOT_RUN = ". Its stage-in script is not run"

-- The bounds of the parser: slurmctld has other things to do. Lines that begin beyond so many bytes are not looked at,
-- longer lines are refused, so many messages are given, and a job has so many directories with paths of so many bytes.
local MOST_HEAD = 1024 * 1024
local MOST_LINE = 4608
local MOST_MESSAGES = 20
local MOST_DIRECTORIES = 64
local MOST_PATH = 4095

-- The most bytes of a layout in a line.
local MOST_OPTIONS = 1024

local HUNDRED_YEARS = 100 * 366 * 86400

-- Comparisons with 2^63 and 2^64 must not overflow where numbers are integers (Lua 5.3 and later).
local TWO_64 = 18446744073709551616.0

-- Lua's %s and %d depend on the locale; these sets are those of the parser.
local BLANK = "[ \t\n\f\r]"
local VALUE_BLANK = "[ \t\n\v\f\r]"

local function trim(text, blank)
    blank = blank or BLANK
    local from = 1
    while from <= #text and text:sub(from, from):find(blank) do from = from + 1 end
    local to = #text
    while to >= from and text:sub(to, to):find(blank) do to = to - 1 end
    return text:sub(from, to)
end

-- Part of a value, fit for a terminal.
local function preview(text)
    local shown = text:sub(1, 120):gsub("[%z\1-\31\127]", "?"):gsub("\194[\128-\159]", "?")
    return shown
end

-- Whether a text is UTF-8, as sizes, durations, numbers and words must be.
local function is_utf8(text)
    local at, length = 1, #text
    while at <= length do
        local c = text:byte(at)
        local more, low, high
        if c < 0x80 then more = 0
        elseif c >= 0xC2 and c <= 0xDF then more, low, high = 1, 0x80, 0xBF
        elseif c == 0xE0 then more, low, high = 2, 0xA0, 0xBF
        elseif c == 0xED then more, low, high = 2, 0x80, 0x9F
        elseif c >= 0xE1 and c <= 0xEF then more, low, high = 2, 0x80, 0xBF
        elseif c == 0xF0 then more, low, high = 3, 0x90, 0xBF
        elseif c >= 0xF1 and c <= 0xF3 then more, low, high = 3, 0x80, 0xBF
        elseif c == 0xF4 then more, low, high = 3, 0x80, 0x8F
        else return false end
        for step = 1, more do
            local b = text:byte(at + step)
            if not b or b < low or b > high then return false end
            low, high = 0x80, 0xBF
        end
        at = at + 1 + more
    end
    return true
end

-- A value's check answers nothing if it is right, or what is wrong and what to do.

local function path(value)
    if value:find("%z") or value:find("\0", 1, true) then
        return "a path can't hold a NUL byte", "write the path as `ls` prints it"
    end
    if value:find("^[~$]") then
        return "`" .. preview(value) .. "` is not expanded here", "write the whole path, as `pwd` prints it"
    end
    if not is_utf8(value) then
        return "the path is not UTF-8 text", "rename it, or use another"
    end
    if #value > MOST_PATH then
        return "the path is longer than " .. MOST_PATH .. " bytes", "use a directory nearer to the root"
    end
    if value:find("[\1-\31\127]") or value:find("\194[\128-\159]") then
        return "the path holds control characters", "rename it, or use another"
    end
    if ("/" .. value .. "/"):find("/../", 1, true) then
        return "the path holds `..`", "write it without"
    end
end

local NOT_TEXT = "retype the line"

local UNITS = {
    [""] = 1, b = 1, k = 2 ^ 10, kib = 2 ^ 10, m = 2 ^ 20, mib = 2 ^ 20, g = 2 ^ 30, gib = 2 ^ 30,
    t = 2 ^ 40, tib = 2 ^ 40, p = 2 ^ 50, pib = 2 ^ 50,
    kb = 1e3, mb = 1e6, gb = 1e9, tb = 1e12, pb = 1e15,
}

local function size(value)
    local function wrong(why)
        return "`" .. preview(value) .. "` is not a size: " .. why, "write it like 4GiB, 500MB or 1.5T"
    end
    if not is_utf8(value) then return wrong("it is not UTF-8 text") end
    local number, unit = trim(value, VALUE_BLANK):match("^([0-9.]*)(.*)$")
    local factor = UNITS[trim(unit, VALUE_BLANK):lower()]
    if not factor then return wrong("the unit is not known") end
    if number == "" then return wrong("the number is missing") end
    local whole, dot, fraction = number:match("^([0-9]*)(%.?)([0-9]*)$")
    if not whole or whole .. fraction == "" then return wrong("the number is malformed") end
    if dot == "" then
        -- Compared as text where floating point could not tell 2^64 - 1 from 2^64.
        local digits = whole:gsub("^0+", "")
        if digits == "" then return "a size of zero holds nothing", "write a size like 4GiB" end
        if #digits > 20 or (#digits == 20 and digits > "18446744073709551615") then return wrong("it is too large") end
        if factor > 1 and tonumber(digits .. ".0") * factor >= TWO_64 then return wrong("it is too large") end
        return
    end
    local bytes = tonumber("0" .. whole .. "." .. fraction .. "0") * factor
    if bytes >= TWO_64 then return wrong("it is too large") end
    if bytes < 1 then return "a size of zero holds nothing", "write a size like 4GiB" end
end

local SECONDS = { s = 1, sec = 1, m = 60, min = 60, h = 3600, d = 86400 }

-- `bare` is what a number without a unit counts, in seconds.
local function duration(bare, not_zero)
    return function(value)
        local function wrong(why)
            return "`" .. preview(value) .. "` is not a duration: " .. why, "write it like 90s, 5m or 1h30m"
        end
        if not is_utf8(value) then return wrong("it is not UTF-8 text") end
        local text = trim(value, VALUE_BLANK)
        if text == "" then return wrong("it is empty") end
        local at, seconds = 1, 0
        while at <= #text do
            local _, stop, digits, unit = text:find("^([0-9]+)([^0-9]*)", at)
            if not digits then return wrong("the number is missing, too large or no whole number") end
            local significant = digits:gsub("^0+", "")
            if #significant > 20 or (#significant == 20 and significant > "18446744073709551615") then
                return wrong("the number is missing, too large or no whole number")
            end
            local factor = SECONDS[trim(unit, VALUE_BLANK)]
            if digits == text then factor = bare end
            if not factor then return wrong("the unit is not known") end
            seconds = seconds + tonumber(digits .. ".0") * factor
            if seconds > HUNDRED_YEARS then return wrong("it is longer than a hundred years") end
            at = stop + 1
        end
        if not_zero and seconds == 0 then
            return "an interval of zero would copy without end", "write minutes, like 5"
        end
    end
end

local function nodes(value)
    local digits = value:match("^%+?([0-9]+)$")
    local significant = digits and digits:gsub("^0+", "")
    local right = digits and significant ~= ""
        and (#significant < 10 or (#significant == 10 and significant <= "4294967295"))
    if not right then
        return "`" .. preview(value) .. "` is not a number of nodes", "write a whole number from 1"
    end
end

local function text(value)
    if not is_utf8(value) then return "`" .. preview(value) .. "` is not UTF-8 text", NOT_TEXT end
end

local function one_of(...)
    local words = { ... }
    return function(value)
        for _, word in ipairs(words) do
            if value == word then return end
        end
        return "`" .. preview(value) .. "` is not one of its values", "write " .. table.concat(words, ", ")
    end
end

local CHOICES = { "auto", "shared", "file-per-process", "single", "unknown", "none" }

-- How files are to be striped. Of options only the form is looked at: which of them describe a layout, Ondeck knows.
local function layout(value)
    if not is_utf8(value) then return text(value) end
    for _, word in ipairs(CHOICES) do
        if value == word then return end
    end
    if value:sub(1, 1) ~= "-" then
        return "`" .. preview(value) .. "`: it is neither a word for a layout nor options of `lfs setstripe`",
            "write " .. table.concat(CHOICES, ", ") .. ", or options like -c 4"
    end
    if #value > MOST_OPTIONS then
        return "`" .. preview(value) .. "`: the options are longer than " .. MOST_OPTIONS .. " bytes",
            "a layout needs less than " .. MOST_OPTIONS
    end
    if value:find("[^A-Za-z0-9 ._=,+%-]") then
        return "`" .. preview(value) .. "`: options of a layout have letters, digits, blanks and `-._=,+` only",
            "write options like -E 16M -c 1 -E -1 -c 4"
    end
end

-- DIR, DIR:PATTERN, DIR:keep or DIR:PATTERN:keep. No pattern holds a colon, so the last one divides.
local function layout_directory(value)
    local REMEDY = "write DIR, DIR:PATTERN or DIR:PATTERN:keep; of a name with a colon, DIR:auto"
    if value:sub(-5) == ":keep" then value = value:sub(1, -6) end
    local directory, choice = value:match("^(.*):(.*)$")
    value = directory or value
    if value == "" then return "it names no directory", REMEDY end
    local wrong = choice and layout(choice)
    if wrong then return wrong, REMEDY end
    return path(value)
end

-- name, what it means (two names may mean the same), its check, and what it counts among if it may be given again
local KEYS = {
    { "RSA_DATA_IN", "data_in", path, "directories" },
    { "RSA_DATA_OUT", "data_out", path, "directories" },
    { "RSA_STAGE_IN", "stage_in", path },
    { "RSA_PREPROCESS", "stage_in", path },
    { "RSA_STAGE_OUT", "stage_out", path },
    { "RSA_POSTPROCESS", "stage_out", path },
    { "RSA_DELAY", "delay", duration(1, false) },
    { "RSA_CAPACITY", "capacity", size },
    { "RSA_NODES", "nodes", nodes },
    { "RSA_POOL", "pool", text },
    { "RSA_ENGINE", "engine", one_of("tmpfs", "gluster", "ceph") },
    { "RSA_PACK", "pack", one_of("tar", "tar.zst") },
    { "RSA_WAIT", "wait", one_of("disk", "hold", "union") },
    { "RSA_OUT_SIZE", "out_size", size },
    { "RSA_COPY_OUT_INTERVAL", "copy_out_interval", duration(60, true) },
    { "RSA_LAYOUT", "layout", layout },
    { "RSA_LAYOUT_DIR", "layout_dir", layout_directory, "layout_directories" },
    { "RSA_IO", "io", one_of("heavy", "normal") },
}

-- The names that RSA_DATAIN and RSA_DATA-IN may be meant for: the same letters.
local function nearest(word)
    local function letters(name)
        local only = name:upper():gsub("[^A-Z]", "")
        return only
    end
    for _, key in ipairs(KEYS) do
        if letters(word) == letters(key[1]) then return "did you mean " .. key[1] .. "?" end
    end
    local names = {}
    for _, key in ipairs(KEYS) do names[#names + 1] = key[1] end
    return "write one of " .. table.concat(names, ", ")
end

-- Takes quotes, a trailing comment and surrounding blanks off a value; answers nothing and why if that can't be done.
local function value_of(raw)
    raw = trim(raw)
    local quote = raw:match("^[\"']")
    local value
    if quote then
        local stop = raw:find(quote, 2, true)
        if not stop then return nil, "its quote is not closed" end
        local tail = trim(raw:sub(stop + 1))
        if tail ~= "" and tail:sub(1, 1) ~= "#" then return nil, "something follows the closing quote" end
        value = raw:sub(2, stop - 1)
    else
        local comment = raw:find(BLANK .. "#")
        value = comment and trim(raw:sub(1, comment - 1)) or raw
    end
    if value == "" then return nil, "its value is empty" end
    return value
end

-- Checks one directive; `rest` is what follows `#RSA_`, or the beginning of it if the line is too long. Answers a message
-- if it is malformed.
local function directive(number, rest, too_long, seen)
    local equals = rest:find("=", 1, true)
    local word = "RSA_" .. trim(equals and rest:sub(1, equals - 1) or rest, VALUE_BLANK)
    local function fail(problem, remedy)
        return string.format("line %d: %s: %s; %s", number, preview(word), problem, remedy)
    end
    if too_long then return fail("the line is longer than " .. MOST_LINE .. " bytes", "shorten it") end
    local key
    for _, candidate in ipairs(KEYS) do
        if candidate[1] == word then key = candidate end
    end
    if not key then return fail("there is no such directive", nearest(word)) end
    local name, meaning, check, counted = key[1], key[2], key[3], key[4]
    if not equals then return fail("it has no value", "write #" .. name .. "=VALUE") end
    local value, problem = value_of(rest:sub(equals + 1))
    if not value then
        return fail(problem, "write #" .. name .. "=VALUE or #" .. name .. "=\"VALUE\"")
    end
    if seen[meaning] and not counted then
        return fail("it was given before, in line " .. seen[meaning].line, "remove one of the two")
    end
    if counted then
        if seen[counted] == MOST_DIRECTORIES then
            return fail("a job has at most " .. MOST_DIRECTORIES .. " directories",
                "name a directory that holds several of them")
        end
    end
    seen[meaning] = { line = number, value = value }
    local wrong, remedy = check(value)
    if wrong then return fail(wrong, remedy) end
    if counted then seen[counted] = seen[counted] + 1 end
end

-- Answers a message if the directives make no sense together.
local function contradiction(seen)
    local name, why
    if seen.stage_in and not seen.data_in then
        name, why = "stage_in", "a stage-in script needs an input directory to read from; name one"
    elseif seen.stage_out and not seen.data_out then
        name, why = "stage_out", "a stage-out script needs an output directory to write to; name one"
    elseif seen.stage_out and seen.pack then
        name, why = "stage_out", "a stage-out script and packing exclude each other; let the script pack"
    elseif seen.wait and seen.wait.value == "hold" and seen.directories == 0 then
        name, why = "wait", "there is no data directory to wait for; name one"
    else
        return nil
    end
    return string.format("line %d: RSA_%s: %s", seen[name].line, name:upper(), why)
end

-- What begins a line that Slurm's own plugin would read a size or a pool from, and wait for what nobody has: it takes each line that
-- begins with `#RSA` for one of its own.
local SLURMS_OWN = {
    "\n#RSAcapacity=", "\n#RSApool=", "\n#RSA[^_\n][^\n]*capacity=", "\n#RSA[^_\n][^\n]*pool=",
}

-- Where the next such line begins in the head, as if it began with a newline.
local function next_of_slurms_own(head, at)
    local first
    for _, pattern in ipairs(SLURMS_OWN) do
        local found = head:find(pattern, at)
        if found and (not first or found < first) then first = found end
    end
    return first
end

local function slurms_own(number, line)
    return string.format("line %d: %s: Slurm would take it for its own, and have the job wait for space that Slurm does not count; "
        .. "write #RSA_CAPACITY=SIZE and #RSA_POOL=NAME", number, preview(line))
end

-- Checks the head of a script. Answers a list of messages, empty if all is well, and the directives by what they mean;
-- the latter is nothing if there is none.
function M.check(script)
    local messages, seen, any = {}, { directories = 0, layout_directories = 0 }, false
    -- Only directives are looked at one by one: a head of a million other lines is passed over by Lua's own functions. So
    -- that every line follows a newline there is one more in front: a line that begins at a place of `script` has its newline at that
    -- place of `head`.
    local head = "\n" .. script:sub(1, MOST_HEAD + MOST_LINE)
    local command = head:find("\n[ \t\f\r]*[^ \t\f\r\n#]") or #head
    local number, counted = 0, 0
    local ours, others = head:find("\n#RSA_", 1, true), next_of_slurms_own(head, 1)
    while ours or others do
        local is_ours = ours and (not others or ours < others)
        local from = is_ours and ours or others
        if from >= command or from > MOST_HEAD or #messages >= MOST_MESSAGES then break end
        any = any or is_ours
        local _, lines = head:sub(counted + 1, from):gsub("\n", "")
        number, counted = number + lines, from
        local stop = script:find("\n", from, true) or #script + 1
        local last = stop - 1
        if script:sub(last, last) == "\r" then last = last - 1 end
        local too_long = last - from + 1 > MOST_LINE
        if too_long then last = from + 4 + MOST_LINE end
        if is_ours then
            messages[#messages + 1] = directive(number, script:sub(from + 5, last), too_long, seen)
            ours = head:find("\n#RSA_", stop + 1, true)
        else
            messages[#messages + 1] = slurms_own(number, script:sub(from, last))
            others = next_of_slurms_own(head, stop + 1)
        end
    end
    if #messages == 0 then messages[1] = contradiction(seen) end
    return messages, any and seen or nil
end

-- Whether a job with these directives must not start before its input is there.
function M.must_wait(seen)
    local wait = seen.wait and seen.wait.value
    return wait == "hold" or (wait == nil and seen.stage_in ~= nil)
end

-- Whether a file beside slurm.conf says this, in a line by itself.
local function says(name, pattern)
    local directory = ((os.getenv("SLURM_CONF") or ""):match("^(.*)/[^/]*$")) or "/etc/slurm"
    local file = io.open(directory .. "/" .. name)
    if not file then return false end
    local found = false
    for line in file:lines() do found = found or line:lower():find(pattern) ~= nil end
    file:close()
    return found
end

-- Whether Slurm itself keeps jobs waiting for their input, by burst_buffer.lua: then nothing is held here.
M.INSIDE = says("slurm.conf", "^%s*burstbuffertype%s*=%s*burst_buffer/lua%s*$")
    and says("burst_buffer.conf", "^%s*directive%s*=%s*rsa%s*$")

-- What Slurm itself would read out of the directives as a burst buffer's capacity, wherever it stands in them; nothing if
-- it would not.
function M.misread(script)
    for line in ("\n" .. script:sub(1, MOST_HEAD)):gmatch("\n(#RSA_[^\r\n]*)") do
        if line:find("capacity=", 1, true) then
            return "`" .. preview(line) .. "`: Slurm takes `capacity=` for its own; use a path without it"
        end
    end
end

-- So many seconds after its submission a job whose user calls it I/O-heavy may start at the earliest: Slurm starts what fits at once,
-- before the scheduler could see how busy the job's filesystem is. A site that delays no such jobs sets it to 0.
M.HEAVY_PAUSE = 5

-- What Slurm has for a number that is not set.
local NO_NUMBER = 4294967294

-- Whether a job is a component of a heterogeneous one. The script comes with the first of them, nothing with the others.
local function is_component(job_desc)
    local offset = job_desc.het_job_offset
    return type(offset) == "number" and offset < NO_NUMBER
end

local function submit(job_desc)
    local script = job_desc.script
    if type(script) ~= "string" then
        -- `salloc` and `srun`, with what `--bb` says; but not the later components of a batch job, whose script comes with the first.
        local asked = job_desc.burst_buffer
        if type(asked) == "string" and asked:find("#RSA", 1, true) and not is_component(job_desc) then
            slurm.log_user("%s", M.NO_SCRIPT)
        end
        return slurm.SUCCESS
    end
    if not script:find("#RSA", 1, true) then return slurm.SUCCESS end
    local messages, seen = M.check(script)
    if #messages == 0 and M.INSIDE then messages[1] = M.misread(script) end
    if #messages > 0 then
        slurm.log_user("%s", "the #RSA_ lines of this script can't be obeyed:\n  " .. table.concat(messages, "\n  "))
        return slurm.ERROR
    end
    -- Held it would wait for what never comes.
    if seen and seen.directories > 0 and is_component(job_desc) then
        slurm.log_user("%s", M.HETEROGENEOUS .. (seen.stage_in and M.STAGE_IN_IS_NOT_RUN or ""))
        return slurm.SUCCESS
    end
    -- A job that its user holds already is left alone: the daemon must not release it.
    if seen and M.must_wait(seen) and job_desc.priority ~= 0 and not M.INSIDE then
        local comment = job_desc.admin_comment
        if type(comment) == "string" and comment ~= "" then
            job_desc.admin_comment = comment .. " " .. M.HELD_FOR_INPUT
        else
            job_desc.admin_comment = M.HELD_FOR_INPUT
        end
        job_desc.priority = 0
    end
    -- One with data directories has a RAM disk; and who has said when the job begins means it.
    local is_heavy = seen and seen.io and seen.io.value == "heavy" and seen.directories == 0
    if is_heavy and M.HEAVY_PAUSE > 0 and (job_desc.begin_time or 0) == 0 and not is_component(job_desc) then
        job_desc.begin_time = os.time() + M.HEAVY_PAUSE
    end
    return slurm.SUCCESS
end

function M.submit(job_desc)
    local fine, result = pcall(submit, job_desc)
    if fine then return result end
    pcall(slurm.log_info, "%s", "ondeck: job_submit.lua: accepted without a check: " .. tostring(result))
    return slurm.SUCCESS
end

-- For a script that loads this one.
ondeck = M

-- Outside slurmctld, in tests, only the module is wanted.
if type(slurm) ~= "table" then return M end

function slurm_job_submit(job_desc, part_list, submit_uid)
    return M.submit(job_desc)
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
