"""The commands of `cedana`: each parses, calls one function of `agent.node`, and prints what comes back.

Nothing heavy is imported until a command needs it, and the parser is argparse because it costs 2 ms: the
start of this program is part of every move (docs/dependencies.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from base import __version__
from base.errors import CedanaError, UsageError

if TYPE_CHECKING:
    from base.config import Config
    from base.trace import Trace

INCOMPATIBLE = 4
INTERRUPTED = 130

CHECKPOINT = "NAME|REF|oci:DIR[:TAG]"

Arguments = argparse.Namespace


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ours, and look like all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")


def parser() -> Parser:
    top = Parser(
        prog="cedana",
        description="Save running containers as OCI artifacts, and bring them back on any node.",
        allow_abbrev=False,
    )
    top.add_argument("-a", "--address", metavar="SOCKET", default="", help="containerd's socket")
    _namespace(top, "")
    top.add_argument("--version", action="version", version=f"cedana {__version__}")
    top.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[[Arguments, Config], None], text: str) -> Parser:
        added = commands.add_parser(run.__name__, help=text, description=text, allow_abbrev=False)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    added = command(checkpoint, "Save a running container; it ends, unless told to go on.")
    added.add_argument("container", metavar="CONTAINER", help="id, beginning of an id, or name")
    added.add_argument(
        "--to", metavar="REF|oci:DIR", default="", help="where to; this node's own store if left out"
    )
    added.add_argument("--leave-running", action="store_true", help="let the container go on afterwards")
    added.add_argument(
        "--tcp",
        choices=("established", "close"),
        default="established",
        help="what becomes of TCP connections (default: they stay established)",
    )
    _trace(added)
    _namespace(added, argparse.SUPPRESS)

    added = command(restore, "Bring a checkpoint back as a running container.")
    added.add_argument("checkpoint", metavar=CHECKPOINT, help="the checkpoint")
    added.add_argument("--name", default="", help="the container's name here")
    added.add_argument("--node", default="", help="restore on this node of the configuration")
    added.add_argument(
        "--tcp",
        choices=("established", "close"),
        default="",
        help="what becomes of TCP connections (default: what the checkpoint says)",
    )
    added.add_argument("--bridge", default="", help="bridge of this node to join")
    added.add_argument(
        "--allow",
        metavar="WHAT",
        action="append",
        default=[],
        help="grant what the checkpoint asks for beyond the usual",
    )
    _trace(added)
    _namespace(added, argparse.SUPPRESS)

    added = command(push, "Copy a checkpoint to a registry or another store.")
    added.add_argument("checkpoint", metavar=CHECKPOINT, help="the checkpoint")
    added.add_argument("target", metavar="REF|oci:DIR[:TAG]", help="where to")
    _trace(added)

    added = command(pull, "Copy a checkpoint from a registry to this node.")
    added.add_argument("checkpoint", metavar=CHECKPOINT, help="the checkpoint")
    added.add_argument(
        "target",
        metavar="NAME|oci:DIR[:TAG]",
        nargs="?",
        default="",
        help="where to; this node's own store if left out",
    )
    _trace(added)

    added = command(ls, "List checkpoints.")
    added.add_argument(
        "store",
        metavar="REPOSITORY|oci:DIR",
        nargs="?",
        default="",
        help="this node's own store if left out",
    )

    added = command(inspect, "Show what is in a checkpoint: processes, memory, sockets, files, timings.")
    added.add_argument("checkpoint", metavar=CHECKPOINT, help="the checkpoint")

    added = command(rm, "Delete checkpoints.")
    added.add_argument("checkpoints", metavar=CHECKPOINT, nargs="+", help="the checkpoints")

    command(check, "Say what this node can do, and what to do about what it cannot.")
    return top


def checkpoint(arguments: Arguments, config: Config) -> None:
    from agent import node
    from cli import report
    from runtime.checkpoint import CheckpointOptions

    wishes = CheckpointOptions(leave_running=arguments.leave_running, tcp=arguments.tcp)
    done, steps = _operate(lambda t: node.checkpoint(arguments.container, arguments.to, wishes, config, t))
    text = report.checkpointed(done, steps, arguments.trace)
    _print(arguments, report.checkpointed_json(done, steps), text)
    for warning in done.warnings:
        print(f"cedana: warning: {warning}", file=sys.stderr)


def restore(arguments: Arguments, config: Config) -> None:
    if arguments.node:
        from cli import remote

        remote.run(arguments.node, arguments.argv, config)
    from agent import node
    from agent.restore import RestoreOptions
    from agent.spec import parse_allow
    from cli import report

    wishes = RestoreOptions(
        name=arguments.name,
        tcp=arguments.tcp,
        bridge=_interface(arguments.bridge),
        allow=parse_allow(arguments.allow),
    )
    done, steps = _operate(lambda t: node.restore(arguments.checkpoint, wishes, config, t))
    _print(arguments, report.restored_json(done, steps), report.restored(done, steps, arguments.trace))


def push(arguments: Arguments, config: Config) -> None:
    from agent import node

    _copy(arguments, lambda t: node.push(arguments.checkpoint, arguments.target, config, t))


def pull(arguments: Arguments, config: Config) -> None:
    from agent import node

    _copy(arguments, lambda t: node.pull(arguments.checkpoint, arguments.target, config, t))


def ls(arguments: Arguments, config: Config) -> None:
    from agent import node
    from cli import report

    where, entries = node.ls(arguments.store, config)
    _print(arguments, report.entries_json(where, entries), report.entries(where, entries))


def inspect(arguments: Arguments, config: Config) -> None:
    from agent import node
    from cli import report

    found = node.inspect(arguments.checkpoint, config)
    _print(arguments, report.inspection_json(found), report.inspection(found))


def rm(arguments: Arguments, config: Config) -> None:
    from agent import node

    deleted = [str(reference) for reference in node.rm(arguments.checkpoints, config)]
    _print(arguments, {"deleted": deleted}, "\n".join(deleted))


def check(arguments: Arguments, config: Config) -> None:
    from agent import node
    from cli import report

    features = node.check(config)
    _print(arguments, report.features_json(features), report.features(features))
    if any(feature.required and not feature.ok for feature in features):
        sys.exit(INCOMPATIBLE)


def run(argv: Sequence[str]) -> int:
    """Run the command line `argv`; what goes wrong is said in words. Returns the exit status."""
    debug, as_json = "--debug" in argv, "--json" in argv
    try:
        arguments = parser().parse_args(argv, Arguments(argv=argv))
        from agent import environment

        try:
            arguments.run(arguments, environment.load(arguments.address, arguments.namespace))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone is no surprise
    except CedanaError as error:
        return _fail(error, debug, as_json)
    except KeyboardInterrupt:
        print("cedana: interrupted; nothing was changed", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; the interpreter must not try to flush it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        hint = "run it as root" if isinstance(error, PermissionError) else ""
        failure = CedanaError(f"{error.filename or 'a file'}: {error.strerror or error}", hint=hint)
        return _fail(failure.with_traceback(error.__traceback__), debug, as_json)
    except Exception as error:
        hint = "run it again with --debug before the command, and report what it prints"
        unexpected = CedanaError(f"this should not have happened: {error!r}", hint=hint)
        return _fail(unexpected.with_traceback(error.__traceback__), debug, as_json)
    return 0


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def _copy(arguments: Arguments, work: Callable[[Trace], Any]) -> None:
    from cli import report

    done, steps = _operate(work)
    _print(arguments, report.copied_json(done, steps), report.copied(done, steps, arguments.trace))


def _operate(work: Callable[[Trace], Any]) -> tuple[Any, Any]:
    """Run an operation with progress and a clean Ctrl-C; returns what it returns, and its steps."""
    from cli.operation import Operation
    from cli.progress import ProgressDisplay

    with ProgressDisplay(sys.stderr) as display:
        operation = Operation(display)
        return operation.run(work), operation.trace.steps


def _print(arguments: Arguments, value: dict[str, Any], text: str) -> None:
    print(json.dumps(value, indent=2) if arguments.json else text)


def _fail(error: CedanaError, debug: bool, as_json: bool) -> int:
    from cli.text import printable

    if debug:
        traceback.print_exception(error)
    print(f"cedana: {printable(error.message)}", file=sys.stderr)
    for label, text in (("cause", error.details), ("try", error.hint)):
        if text:
            print(f"  {label}: {printable(text)}", file=sys.stderr)
    if as_json:
        body = {"message": error.message, "details": error.details, "hint": error.hint}
        print(json.dumps({"error": {**body, "code": error.exit_code}}, indent=2))
    return error.exit_code


def _trace(added: Parser) -> None:
    added.add_argument("--trace", action="store_true", help="show each step and how long it took")


def _namespace(added: Parser, default: str) -> None:
    added.add_argument("-n", "--namespace", metavar="NAME", default=default, help="containerd's namespace")


def _interface(name: str) -> str:
    if name and (len(name) > 15 or "/" in name or " " in name or not name.isprintable()):
        raise UsageError(f"--bridge {name!r} is not the name of a network interface")
    return name


if __name__ == "__main__":
    main()
