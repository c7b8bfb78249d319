"""The commands of `cedana`. Each parses, calls one function of `agent.node`, and prints what comes back.

Nothing heavy is imported until a command runs: `cedana --help` must answer at once.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from base.errors import CedanaError, UsageError

if TYPE_CHECKING:
    from base.config import Config
    from base.trace import Trace

INCOMPATIBLE = 4
INTERRUPTED = 130

app = typer.Typer(
    name="cedana",
    help="Save running containers as OCI artifacts, and bring them back on any node.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Steps = Annotated[bool, typer.Option("--trace", help="Show each step and how long it took.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="containerd namespace [env: CONTAINERD_NAMESPACE].")
]


@dataclass
class Settings:
    address: str = ""
    namespace: str = ""
    debug: bool = False
    json: bool = False


settings = Settings()
"""What the options before the command say; one process runs one command."""


@app.callback()
def options(
    address: Annotated[
        str, typer.Option("--address", "-a", help="containerd's socket [env: CONTAINERD_ADDRESS].")
    ] = "",
    namespace: Namespace = "",
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    global settings
    settings = Settings(address, namespace, debug)


@app.command()
def checkpoint(
    container: Annotated[str, typer.Argument(help="Id, beginning of an id, or name of a running container.")],
    to: Annotated[
        str, typer.Option("--to", metavar="REF|oci:DIR", help="Where to; this node's own store if left out.")
    ] = "",
    leave_running: Annotated[
        bool, typer.Option("--leave-running", help="Let the container go on afterwards.")
    ] = False,
    tcp: Annotated[
        str, typer.Option("--tcp", metavar="established|close", help="What becomes of TCP connections.")
    ] = "established",
    namespace: Namespace = "",
    trace: Steps = False,
    as_json: Json = False,
) -> None:
    """Save a running container; it ends, unless told to go on."""
    with _command(namespace, as_json) as config:
        from agent import node
        from cli import report
        from runtime.checkpoint import CheckpointOptions

        wishes = CheckpointOptions(leave_running=leave_running, tcp=_tcp(tcp, ("established", "close")))
        done, steps = _run(lambda t: node.checkpoint(container, to, wishes, config, t))
        _print(report.checkpointed_json(done, steps), report.checkpointed(done, steps, trace))
        for warning in done.warnings:
            print(f"cedana: warning: {warning}", file=sys.stderr)


@app.command()
def restore(
    reference: Annotated[str, typer.Argument(metavar="REF|oci:DIR[:TAG]|NAME", help="The checkpoint.")],
    name: Annotated[str, typer.Option("--name", help="Name of the container here.")] = "",
    on_node: Annotated[str, typer.Option("--node", help="Restore on this node of the configuration.")] = "",
    tcp: Annotated[
        str, typer.Option("--tcp", metavar="established|close", help="What becomes of TCP connections.")
    ] = "",
    bridge: Annotated[str, typer.Option("--bridge", help="Bridge of this node to join.")] = "",
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", metavar="WHAT", help="Grant what the checkpoint asks for beyond the usual."),
    ] = None,
    namespace: Namespace = "",
    trace: Steps = False,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint back as a running container."""
    with _command(namespace, as_json) as config:
        if on_node:
            from cli import remote

            remote.run(on_node, sys.argv[1:], config)
        from agent import node
        from agent.restore import RestoreOptions
        from agent.spec import parse_allow
        from cli import report

        wishes = RestoreOptions(
            name=name,
            tcp=_tcp(tcp, ("", "established", "close")),
            bridge=_bridge(bridge),
            allow=parse_allow(allow or ()),
        )
        done, steps = _run(lambda t: node.restore(reference, wishes, config, t))
        _print(report.restored_json(done, steps), report.restored(done, steps, trace))


@app.command()
def push(
    checkpoint: Annotated[str, typer.Argument(metavar="NAME|REF|oci:DIR[:TAG]", help="The checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="REF|oci:DIR[:TAG]", help="Where to.")],
    trace: Steps = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint to a registry or another store."""
    with _command("", as_json) as config:
        from agent import node
        from cli import report

        done, steps = _run(lambda t: node.push(checkpoint, target, config, t))
        _print(report.copied_json(done, steps), report.copied(done, steps, trace))


@app.command()
def pull(
    checkpoint: Annotated[str, typer.Argument(metavar="REF|oci:DIR[:TAG]", help="The checkpoint.")],
    target: Annotated[
        str, typer.Argument(metavar="NAME|oci:DIR[:TAG]", help="Where to; this node's own store if left out.")
    ] = "",
    trace: Steps = False,
    as_json: Json = False,
) -> None:
    """Copy a checkpoint from a registry to this node."""
    with _command("", as_json) as config:
        from agent import node
        from cli import report

        done, steps = _run(lambda t: node.pull(checkpoint, target, config, t))
        _print(report.copied_json(done, steps), report.copied(done, steps, trace))


@app.command()
def ls(
    store: Annotated[
        str, typer.Argument(metavar="REPOSITORY|oci:DIR", help="This node's own store if left out.")
    ] = "",
    as_json: Json = False,
) -> None:
    """List checkpoints."""
    with _command("", as_json) as config:
        from agent import node
        from cli import report

        where, entries = node.ls(store, config)
        _print(report.entries_json(where, entries), report.entries(where, entries))


@app.command()
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar="NAME|REF|oci:DIR[:TAG]", help="The checkpoint.")],
    as_json: Json = False,
) -> None:
    """Show what is in a checkpoint: processes, memory, sockets, files, sizes, timings."""
    with _command("", as_json) as config:
        from agent import node
        from cli import report

        found = node.inspect(checkpoint, config)
        _print(report.inspection_json(found), report.inspection(found))


@app.command()
def rm(
    checkpoints: Annotated[list[str], typer.Argument(metavar="NAME|REF|oci:DIR[:TAG]...")],
    as_json: Json = False,
) -> None:
    """Delete checkpoints."""
    with _command("", as_json) as config:
        from agent import node

        deleted = [str(reference) for reference in node.rm(checkpoints, config)]
        _print({"deleted": deleted}, "\n".join(deleted))


@app.command()
def check(as_json: Json = False) -> None:
    """Say what this node can do, and what to do about what it cannot."""
    with _command("", as_json) as config:
        from agent import node
        from cli import report

        features = node.check(config)
        _print(report.features_json(features), report.features(features))
        if any(feature.required and not feature.ok for feature in features):
            raise typer.Exit(INCOMPATIBLE)


@contextmanager
def _command(namespace: str, as_json: bool) -> Iterator[Config]:
    """The configuration a command runs with; what it raises is said in words, and becomes the exit status."""
    settings.json = as_json
    try:
        from agent import environment

        yield environment.load(settings.address, namespace or settings.namespace)
    except CedanaError as error:
        _fail(error)
    except KeyboardInterrupt as interruption:
        print("cedana: interrupted; nothing was changed", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from interruption
    except (typer.Exit, SystemExit, BrokenPipeError):
        raise
    except Exception as error:
        if settings.debug:
            traceback.print_exc()
        _fail(
            CedanaError(
                f"this should not have happened: {error!r}",
                hint="run it again with --debug before the command, and report what it prints",
            )
        )


def _run(work: Callable[[Trace], Any]) -> tuple[Any, Any]:
    """Run an operation with progress and a clean Ctrl-C; returns what it returns, and its steps."""
    from cli.operation import Operation
    from cli.progress import ProgressDisplay

    with ProgressDisplay() as display:
        operation = Operation(display)
        return operation.run(work), operation.trace.steps


def _print(value: dict[str, Any], text: str) -> None:
    print(json.dumps(value, indent=2) if settings.json else text)


def _fail(error: CedanaError) -> None:
    from cli.text import printable

    if settings.debug and error.__traceback__ is not None:
        traceback.print_exception(error)
    print(f"cedana: {printable(error.message)}", file=sys.stderr)
    for label, text in (("cause", error.details), ("try", error.hint)):
        if text:
            print(f"  {label}: {printable(text)}", file=sys.stderr)
    if settings.json:
        body = {"message": error.message, "details": error.details, "hint": error.hint}
        print(json.dumps({"error": {**body, "code": error.exit_code}}, indent=2))
    raise typer.Exit(error.exit_code) from error


def _tcp(value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"--tcp {value}: no such choice", hint="established or close")
    return value


def _bridge(value: str) -> str:
    if value and (len(value) > 15 or "/" in value or not value.isprintable() or " " in value):
        raise UsageError(f"--bridge {value!r} is not the name of a network interface")
    return value


def main() -> None:
    app()


if __name__ == "__main__":
    main()
