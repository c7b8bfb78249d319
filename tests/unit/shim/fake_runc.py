#!/usr/bin/python3 -IS
"""runc without containers: the same command line, log, pid files and state directory, plain processes.

`<root>/<verb>.fails` holds the error that the verb is to end with; `<root>/calls` lists what was called.
A container's init waits for `start`, then becomes `process.args` of the bundle's config.json.
"""

import array
import json
import os
import pty
import shutil
import signal
import socket
import sys
import time

VALUES = ("--root", "--log", "--log-format", "--bundle", "--pid-file", "--console-socket", "--process",
          "--format", "--resources")  # fmt: skip


def main(words):
    options, rest = {}, []
    while words:
        word = words.pop(0)
        if word in VALUES:
            options[word] = words.pop(0)
        elif word.startswith("--"):
            options[word] = True
        else:
            rest.append(word)
    verb, *arguments = rest
    if verb == "features":
        print('{"ociVersionMin":"1.0.0"}')
        return
    root = options["--root"]
    os.makedirs(root, exist_ok=True)
    with open(f"{root}/calls", "a") as calls:
        calls.write(f"{verb} {' '.join(arguments)}\n")
    state = f"{root}/{arguments[0]}"
    try:
        if os.path.exists(f"{root}/{verb}.fails"):
            with open(f"{root}/{verb}.fails") as file:
                raise RuntimeError(file.read())
        if verb != "create" and not os.path.isdir(state):
            raise RuntimeError("container does not exist")
        globals()[f"do_{verb}"](state, options, *arguments[1:])
    except RuntimeError as error:
        with open(options["--log"], "a") as log:
            log.write(json.dumps({"level": "error", "msg": str(error), "time": "now"}) + "\n")
        sys.exit(1)


def do_create(state, options):
    with open(f"{options['--bundle']}/config.json") as file:
        process = json.load(file)["process"]
    if process["args"][0] == "/nope":
        raise RuntimeError('runc create failed: unable to start container process: exec: "/nope"')
    os.makedirs(state)
    os.mkfifo(f"{state}/start")
    pid = launch(options, process["args"], state)
    write(f"{state}/init", pid)
    write(options["--pid-file"], pid)


def do_start(state, options):
    if not alive(state):
        raise RuntimeError("cannot start a container that has stopped")
    with open(f"{state}/start", "w") as fifo:
        fifo.write("go")


def do_exec(state, options):
    with open(options["--process"]) as file:
        process = json.load(file)
    if process["args"][0] == "/nope":
        raise RuntimeError('exec failed: unable to start container process: exec: "/nope"')
    pid = launch(options, process["args"])
    with open(f"{state}/execs", "a") as file:
        file.write(f"{pid}\n")
    write(options["--pid-file"], pid)


def do_kill(state, options, number):
    pids = [read(f"{state}/init")]
    if "--all" in options:
        pids += execs(state)
    elif not alive(state):
        raise RuntimeError("container not running")
    for pid in pids:
        try:
            os.kill(pid, int(number))
        except ProcessLookupError:
            continue


def do_pause(state, options):
    os.kill(read(f"{state}/init"), signal.SIGSTOP)


def do_resume(state, options):
    if alive(state):
        os.kill(read(f"{state}/init"), signal.SIGCONT)


def do_ps(state, options):
    pids = [pid for pid in (read(f"{state}/init"), *execs(state)) if os.path.exists(f"/proc/{pid}")]
    for pid in tuple(pids):
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            pids += [int(word) for word in children.read().split()]
    print(json.dumps(pids or None))


def do_update(state, options):
    with open(f"{state}/resources", "w") as file:
        file.write(sys.stdin.read())


def do_delete(state, options):
    if alive(state):
        os.kill(read(f"{state}/init"), signal.SIGKILL)
        while alive(state):
            time.sleep(0.005)
    shutil.rmtree(state)


def launch(options, argv, state=None):
    """Start `argv` (when `state` is started); its parent ends, so that it becomes the sub-reaper's child."""
    master, slave = pty.openpty() if "--console-socket" in options else (-1, -1)
    pid = os.fork()
    if pid:
        if master >= 0:
            send_master(options["--console-socket"], master)
        return pid
    os.setsid()
    if slave >= 0:
        os.login_tty(slave) if hasattr(os, "login_tty") else tty(slave)
    if state:
        with open(f"{state}/start") as fifo:
            fifo.read()
    os.execv(argv[0], argv)


def tty(slave):
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(slave, number)


def send_master(path, master):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        fds = array.array("i", [master])
        connection.sendmsg([b"pty"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])


def alive(state):
    pid = read(f"{state}/init")
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def execs(state):
    if not os.path.exists(f"{state}/execs"):
        return []
    with open(f"{state}/execs") as file:
        return [int(line) for line in file]


def read(path):
    with open(path) as file:
        return int(file.read())


def write(path, pid):
    with open(path, "w") as file:
        file.write(str(pid))


main(sys.argv[1:])
