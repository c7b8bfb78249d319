"""epoll, eventfd, timerfd, signalfd and inotify, each with something pending."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
from collections.abc import Callable

import workload


class Timer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


def prepare() -> Callable[[], None]:
    event = os.eventfd(7)

    periodic = workload.call("timerfd_create", 1, 0)
    workload.call("timerfd_settime", periodic, 0, ctypes.byref(Timer(0, 50_000_000, 0, 50_000_000)), None)
    far = workload.call("timerfd_create", 1, 0)
    workload.call("timerfd_settime", far, 0, ctypes.byref(Timer(0, 0, 3600, 0)), None)

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    mask = struct.pack("Q", 1 << (signal.SIGUSR1 - 1) | 1 << (signal.SIGUSR2 - 1))
    signals = workload.call("signalfd", -1, ctypes.create_string_buffer(mask, 8), 0)
    os.kill(os.getpid(), signal.SIGUSR1)

    os.makedirs("/watched", exist_ok=True)
    inotify = workload.call("inotify_init1", os.O_NONBLOCK)
    watch = workload.call("inotify_add_watch", inotify, b"/watched", 0x100 | 0x200)  # create, delete

    reader, writer = os.pipe()
    epoll = select.epoll()
    epoll.register(reader, select.EPOLLIN)
    epoll.register(event, select.EPOLLIN)
    edge_reader, edge_writer = os.pipe()
    epoll.register(edge_reader, select.EPOLLIN | select.EPOLLET)

    def verify() -> None:
        workload.expect(dict(epoll.poll(1)), {event: select.EPOLLIN}, "epoll before")
        os.write(writer, b"x")
        os.write(edge_writer, b"x")
        workload.expect(
            set(dict(epoll.poll(1))), {event, reader, edge_reader}, "epoll with both pipes readable"
        )
        workload.expect(os.eventfd_read(event), 7, "eventfd")
        if struct.unpack("Q", os.read(periodic, 8))[0] < 1:
            raise AssertionError("the periodic timer did not fire")
        left = Timer()
        workload.call("timerfd_gettime", far, ctypes.byref(left))
        if not 3300 < left.first_s <= 3600:
            raise AssertionError(f"the far timer has {left.first_s} s left")
        os.kill(os.getpid(), signal.SIGUSR2)
        pending = {struct.unpack_from("I", os.read(signals, 128))[0] for _ in "12"}
        workload.expect(pending, {int(signal.SIGUSR1), int(signal.SIGUSR2)}, "signalfd")
        workload.write("/watched/file", "")
        found = struct.unpack_from("iIII", os.read(inotify, 4096))
        workload.expect((found[0], found[1] & 0x100), (watch, 0x100), "inotify event")

    return verify


workload.run(prepare)
