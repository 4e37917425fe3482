"""Stand-in for sacct -o FIELDS -j ID[,ID...] --parsable2 [--noheader]: answers from slurmctld's memory."""

import re
import subprocess
import sys

fields, ids, header, words = "JobID,JobName,Partition,State,ExitCode", [], True, iter(sys.argv[1:])
for word in words:
    name, equals, value = word.partition("=")
    if name in ("-j", "--jobs", "-o", "--format"):
        value = value if equals else next(words)
        if "j" in name:
            ids += value.split(",")
        else:
            fields = value
    header = header and word not in ("-n", "--noheader")
names = {"state": "jobstate", "elapsed": "runtime", "start": "starttime", "end": "endtime"}
fields = [field.split("%")[0] for field in fields.split(",")]
if header:
    print("|".join(fields))
for job_id in ids:
    shown = subprocess.run(["scontrol", "-ao", "show", "job", job_id], capture_output=True, text=True).stdout
    for line in shown.splitlines():
        job = {key.lower(): value for key, value in re.findall(r"(?:^| )(\w+)=(\S*)", line)}
        if "jobid" not in job:
            continue
        if "arraytaskid" in job:
            index = job["arraytaskid"]
            job["jobid"] = job["arrayjobid"] + ("_" + index if index.isdigit() else f"_[{index}]")
        if job.get("nodelist", "") in ("", "(null)"):
            job["nodelist"] = "None assigned"
        print("|".join(job.get(names.get(field.lower(), field.lower()), "") for field in fields))
