"""The long-running shim: one event loop that serves the Task API until containerd shuts it down."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import socket

from base.config import load
from runtime import syscalls
from shim import log
from shim.container import Host
from shim.events import Publisher
from shim.reaper import Reaper
from shim.server import Server
from shim.service import TaskService


def serve(
    *,
    namespace: str,
    containerd_address: str,
    events_address: str,
    listener: socket.socket,
    address: str,
    debug: bool,
) -> int:
    """Serve on `listener` (which is bound to `address`) to the end of the last container."""
    log.debugging = debug
    syscalls.set_child_subreaper()
    syscalls.set_name("containerd-shim")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.pop("NOTIFY_SOCKET", None)
    asyncio.run(_serve(namespace, containerd_address, events_address, listener, address))
    return 0


async def _serve(
    namespace: str, containerd_address: str, events_address: str, listener: socket.socket, address: str
) -> None:
    reaper = Reaper()
    publisher = Publisher(events_address, namespace)
    environment = {
        **os.environ,
        "CONTAINERD_ADDRESS": containerd_address,
        "CONTAINERD_NAMESPACE": namespace,
    }
    service = TaskService(Host(namespace, load, reaper, environment), publisher)
    server = Server(service.services())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, service.shutdown.set)
    await server.listen(listener)
    await service.shutdown.wait()
    # Before the listener closes: the next `start` may already bind the same path.
    os.unlink(address.removeprefix("unix://"))
    server.close()
    await publisher.close()
    reaper.close()
