-- Slurm's burst_buffer plugin for Ondeck: Slurm itself then keeps a job waiting until its input is in RAM, and keeps it in the
-- queue, without nodes, until its results are on disk.
--
-- Put it beside slurm.conf, together with job_submit.lua, and write there:
--     BurstBufferType=burst_buffer/lua
-- and in burst_buffer.conf beside it:
--     Directive=RSA
--     StageInTimeout=172800
--     StageOutTimeout=172800
--     OtherTimeout=300
-- Flags=TeardownFailure must not stand there: results that nobody has decided on would be torn down.
--
-- It decides nothing: each function runs `ondeck burst-buffer`, which asks the scheduler. slurm_bb_job_process, slurm_bb_pools
-- and slurm_bb_paths are called inside slurmctld, which waits for them: they run no program. Written for the Lua 5.1 that
-- Slurm 22.05 is linked with, and tested with that; later versions of Slurm pass more arguments, which are not needed here. What
-- Slurm calls from 24.05 on was tried with functions that call it as Slurm's documentation says, and with no such version.

-- Settings may stand beside it, in ondeck.env, as for Prolog and Epilog: ONDECK (the binary), ONDECK_CONFIG (the configuration).
local DIRECTORY = ((os.getenv("SLURM_CONF") or ""):match("^(.*)/[^/]*$")) or "/etc/slurm"

-- How many seconds a call may take: less than Slurm's own limits (in burst_buffer.conf), after which it would kill it. A job that
-- waits for its input for longer is held then.
local LIMIT = { data_in = 172000, data_out = 172000 }
local USUAL_LIMIT = 270

-- How many seconds lie between two calls of `ondeck burst-buffer`, if it could not be run: Slurm itself asks for no job's input again.
local PAUSE = 10

local function settings()
    local found = { ONDECK = "/usr/local/bin/ondeck" }
    local file = io.open(DIRECTORY .. "/ondeck.env")
    if not file then return found end
    for line in file:lines() do
        local key, value = line:match("^%s*([%u_]+)=(.-)%s*$")
        if key then found[key] = value:match('^"(.*)"$') or value:match("^'(.*)'$") or value end
    end
    file:close()
    return found
end

-- A word for the shell.
local function quoted(text)
    return "'" .. tostring(text):gsub("'", "'\\''") .. "'"
end

-- Asks the scheduler. Answers what came of it in a word, and what the user should know. A call that was cut off, as by Slurm's
-- time limit, has no last line: that is never taken for done.
local function ask(call, job, script, option, limit)
    local found = settings()
    local line = quoted(found.ONDECK) .. " burst-buffer " .. call .. " " .. quoted(job)
    line = line .. " --limit " .. (limit or LIMIT[call] or USUAL_LIMIT)
    if script then line = line .. " --script " .. quoted(script) end
    if option then line = line .. " " .. option end
    if found.ONDECK_CONFIG then line = line .. " --config " .. quoted(found.ONDECK_CONFIG) end
    local pipe = io.popen(line .. " 2>&1 < /dev/null")
    if not pipe then return "unheard", "no process for `ondeck burst-buffer`" end
    local last = ""
    for said in pipe:lines() do last = said end
    pipe:close()
    local word, message = last:match("^ondeck: ([%l ]+): (.*)$")
    if not word then return "unheard", "`ondeck burst-buffer` was cut off: " .. last end
    return word, message
end

-- From 24.05 on Slurm asks again and again whether it is over (every PollInterval of burst_buffer.conf), and no call has to wait for it.
local function polls() return slurm.SLURM_BB_BUSY ~= nil end

local function log(call, job, word, message)
    slurm.log_info("ondeck: %s of job %s: %s: %s", call, job, word, message)
end

-- What a job's script says; more than the check looks at.
local function text_of(job_script)
    local file = io.open(job_script, "rb")
    if not file then return nil end
    local script = file:read(2 * 1024 * 1024) or ""
    file:close()
    return script
end

-- job_submit.lua, which understands the #RSA_ lines. The site's own may load it under another name.
local function directives()
    for _, name in ipairs({ "ondeck_job_submit.lua", "job_submit.lua" }) do
        local file = io.open(DIRECTORY .. "/" .. name)
        if file then
            file:close()
            if pcall(dofile, DIRECTORY .. "/" .. name) and type(ondeck) == "table" then return ondeck end
        end
    end
end

-- Whether a job must not start without its input; also if that can't be told.
local function must_have_its_input(job_script)
    local script = text_of(job_script)
    if not script then return true end
    local found = directives()
    if found then
        local fine, messages, seen = pcall(found.check, script)
        -- What can't be obeyed is not waited for.
        if fine then return #messages == 0 and seen ~= nil and found.must_wait(seen) end
    end
    for _, key in ipairs({ "WAIT", "STAGE_IN", "PREPROCESS" }) do
        if ("\n" .. script):find("\n#RSA_" .. key, 1, true) then return true end
    end
    return false
end

-- Whether a script of its own makes a job's input, so that it is nowhere else; also if that can't be told.
local function makes_its_input(job_script)
    local script = text_of(job_script)
    if not script then return true end
    script = "\n" .. script
    return script:find("\n#RSA_STAGE_IN", 1, true) ~= nil or script:find("\n#RSA_PREPROCESS", 1, true) ~= nil
end

-- Asks until somebody could be asked, as `ondeck` may be replaced at this moment. A job that may start on disk does not wait for that.
local function ask_for_input(job, script, option)
    local began = os.time()
    while true do
        local limit = LIMIT.data_in - (os.time() - began)
        local word, message = ask("data_in", job, script, option, limit)
        if word ~= "unheard" then return word, message end
        if not must_have_its_input(script) then return "on disk", message .. "; the job works on disk" end
        if option or limit <= 2 * PAUSE then return word, message end
        log("data_in", job, word, message)
        local asked = os.time()
        os.execute("sleep " .. PAUSE)
        -- It was ended, or there is no such program.
        if os.time() - asked < PAUSE / 2 then return word, message end
    end
end

-- A job starts on disk rather than not at all, unless it must have its input.
local function before_the_start(call, job, script, option)
    local word, message
    if call == "data_in" then
        word, message = ask_for_input(job, script, option)
    else
        word, message = ask(call, job, script, option)
    end
    if option and (word == "later" or word == "unheard") then return slurm.SUCCESS, slurm.SLURM_BB_BUSY end
    log(call, job, word, message)
    if word == "done" or word == "on disk" then return slurm.SUCCESS, message end
    if call == "data_in" then return slurm.ERROR, message end
    -- Slurm 22.05 puts it back into its queue then, with this reason, until somebody releases it.
    local is_lost = word == "failed" or word == "unheard" and must_have_its_input(script) and makes_its_input(script)
    if call == "pre_run" and is_lost then return slurm.ERROR, message end
    return slurm.SUCCESS, message
end

-- Only what is done counts as done: results that are not home keep the job in the queue.
local function after_the_end(call, job, script, option)
    local word, message = ask(call, job, script, option)
    if option and (word == "later" or word == "unheard") then return slurm.SUCCESS, slurm.SLURM_BB_BUSY end
    log(call, job, word, message)
    if word == "done" then return slurm.SUCCESS, message end
    return slurm.ERROR, message
end

-- The check of job_submit.lua. An error of its own refuses nobody.
local function check(script)
    local found = directives()
    if not found then return {} end
    local messages = found.check(script)
    if #messages == 0 then messages[1] = found.misread(script) end
    return messages
end

function slurm_bb_job_process(job_script)
    local script = text_of(job_script)
    if not script then return slurm.SUCCESS, "" end
    local fine, messages = pcall(check, script)
    if fine and #messages > 0 then
        return slurm.ERROR, "the #RSA_ lines of this script can't be obeyed:\n  " .. table.concat(messages, "\n  ")
    end
    return slurm.SUCCESS, ""
end

-- Slurm counts no space: the first job that did not fit would keep all others waiting. Without any pool it would complain every 30 s.
function slurm_bb_pools()
    return slurm.SUCCESS, '{"pools":[{"id":"ondeck","quantity":0,"granularity":1048576}]}'
end

function slurm_bb_setup(job_id, uid, gid, pool, bb_size, job_script)
    return before_the_start("setup", job_id, job_script)
end

function slurm_bb_data_in(job_id, job_script)
    if polls() then return slurm.SUCCESS, "" end
    return before_the_start("data_in", job_id, job_script)
end

function slurm_bb_test_data_in(job_id, job_script)
    if not polls() then return slurm.SUCCESS, "" end
    return before_the_start("data_in", job_id, job_script, "--poll")
end

function slurm_bb_real_size(job_id)
    return slurm.SUCCESS, ""
end

function slurm_bb_paths(job_id, job_script, path_file)
    return slurm.SUCCESS, ""
end

function slurm_bb_pre_run(job_id, job_script)
    return before_the_start("pre_run", job_id, job_script)
end

function slurm_bb_post_run(job_id, job_script)
    -- Its Epilogs unmount, and data_out waits for them: this only says that the job is ending.
    local word, message = ask("post_run", job_id, job_script)
    log("post_run", job_id, word, message)
    return slurm.SUCCESS, message
end

function slurm_bb_data_out(job_id, job_script)
    if polls() then return slurm.SUCCESS, "" end
    return after_the_end("data_out", job_id, job_script)
end

function slurm_bb_test_data_out(job_id, job_script)
    if not polls() then return slurm.SUCCESS, "" end
    return after_the_end("data_out", job_id, job_script, "--poll")
end

function slurm_bb_job_teardown(job_id, job_script, hurry)
    local in_a_hurry = hurry == true or hurry == "true"
    local word, message = ask("teardown", job_id, job_script, in_a_hurry and "--hurry" or nil)
    log("teardown", job_id, word, message)
    -- Kept results are safe without a burst buffer: RSA nodes keep them until they are home or abandoned.
    if word == "done" or word == "on disk" or word == "kept" then return slurm.SUCCESS, message end
    return slurm.ERROR, message
end

-- `scontrol show bbstat`: everybody may ask, so it names nobody's jobs.
function slurm_bb_get_status(...)
    return slurm.SUCCESS, "see `ondeck status`\n"
end
