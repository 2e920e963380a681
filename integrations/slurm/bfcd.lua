-- Asks for the GRES of --bfcd-mem. /etc/slurm/job_submit.lua calls it:
--
--   dofile("/usr/share/bfcd/slurm/bfcd.lua")
--
--   function slurm_job_submit(job_desc, part_list, submit_uid)
--      return bfcd_job_submit(job_desc)
--   end
--
-- SPDX-License-Identifier: Apache-2.0

-- The SPANK plugin passes "BFCD_GRES=bfcd:PARTITION:MIB" in the job's control environment. A user can change
-- that, which is as if another size had been asked for: the lease is as large as the GRES.
local function gres_of(job_desc)
   local found

   for _, entry in pairs(job_desc.spank_job_env or {}) do
      local name, value = string.match(entry, "^([%w_]*BFCD_GRES)=(.*)$")

      if name then
         found = value
      end
   end
   return found
end

function bfcd_job_submit(job_desc)
   local gres = gres_of(job_desc)
   local others = job_desc.tres_per_node

   if gres == nil then
      return slurm.SUCCESS
   end
   if not string.match(gres, "^bfcd:[%w_.-]+:%d+$") then
      slurm.log_user("--bfcd-mem: '" .. gres .. "' is not PARTITION:SIZE")
      return slurm.ERROR
   end
   if others ~= nil and string.match(others, "bfcd") then
      slurm.log_user("--bfcd-mem asks for the GRES 'bfcd' itself: leave it out of --gres")
      return slurm.ERROR
   end
   if others == nil or others == "" then
      job_desc.tres_per_node = "gres:" .. gres
   else
      job_desc.tres_per_node = others .. ",gres:" .. gres
   end
   return slurm.SUCCESS
end
