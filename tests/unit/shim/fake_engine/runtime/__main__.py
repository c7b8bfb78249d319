"""The engine without CRIU: notes what it is asked in $FAKE_ENGINE, and answers from files there.

`VERB.error` is the error to end with; `restore` starts $FAKE_ENGINE/restored, as init, in a process of its
own.
"""

import json
import os
import sys
import time
from pathlib import Path

here = Path(os.environ["FAKE_ENGINE"])
verb = sys.argv[1]
request = json.load(sys.stdin)
with open(here / "calls", "a") as calls:
    calls.write(json.dumps({"verb": verb, **request}) + "\n")
print(json.dumps({"step": verb}), flush=True)
if (here / f"{verb}.hangs").exists():
    time.sleep(60)
if (here / f"{verb}.error").exists():
    print(json.dumps({"error": json.loads((here / f"{verb}.error").read_text())}))
    sys.exit(1)
result = {}
if verb == "prepare":
    result = {"images": str(here / "images")}
if verb == "restore":
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, fd in enumerate(request["stdio"]):
            os.dup2(fd, number)
        os.execv("/bin/sh", ["/bin/sh", str(here / "restored")])
    result = {"pid": pid}
if verb == "dump" and not request["leave_running"]:
    os.kill(request["pid"], 9)
print(json.dumps({"result": result}))
