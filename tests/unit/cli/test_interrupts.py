from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from base.trace import Step, Trace
from cli.operation import Operation
from cli.progress import ProgressDisplay


def run_and_signal(number: int, at: str, steps: tuple[str, ...]) -> list[str]:
    """Run the steps, with the signal arriving during the step `at`; returns what was done and undone."""
    done: list[str] = []

    def work(trace: Trace) -> str:
        for name in steps:
            try:
                with trace.step(name):
                    if name == at:
                        os.kill(os.getpid(), number)
                        time.sleep(0.1)
                    done.append(name)
            except BaseException:
                done.append("undone")
                raise
        return "result"

    operation = Operation(lambda event: None)
    assert operation.run(work) == "result"
    return done


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests run in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_operation_at_its_next_step(number: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_and_signal(number, "dump", ("probe", "dump", "commit"))


def test_signal_ends_a_step_that_reports_progress() -> None:
    def work(trace: Trace) -> None:
        with trace.step("memory"):
            os.kill(os.getpid(), signal.SIGINT)
            for done in range(1000):
                time.sleep(0.01)
                trace.progress("memory", done, 1000)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Operation(lambda event: None).run(work)
    assert time.monotonic() - began < 5


def test_what_cannot_be_undone_is_finished() -> None:
    steps = ("commit", "destroy", "remove task")
    assert run_and_signal(signal.SIGINT, "destroy", steps) == list(steps)


def test_end_of_a_step_does_not_hide_its_own_error() -> None:
    def work(trace: Trace) -> None:
        with trace.step("dump"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            raise ValueError("its own")

    with pytest.raises(KeyboardInterrupt) as caught:
        Operation(lambda event: None).run(work)
    assert isinstance(caught.value.__cause__, ValueError)


def test_handlers_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert Operation(lambda event: None).run(lambda trace: 1) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_programs_an_operation_starts_do_not_see_ctrl_c() -> None:
    script = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"

    def work(trace: Trace) -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert Operation(lambda event: None).run(work) == "True"


def test_error_of_an_operation_is_raised_as_it_is() -> None:
    def work(trace: Trace) -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        Operation(lambda event: None).run(work)


def test_short_steps_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(sys.stderr) as display:
        trace = Trace(display)
        with trace.step("probe"):
            trace.progress("probe", 1, 2)
    assert capsys.readouterr().err == ""


def test_long_steps_show_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(sys.stderr) as display:
        trace = Trace(display)
        with trace.step("memory"):
            trace.progress("memory", 1 << 20, 4 << 20)
            time.sleep(1.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "memory: 1.0 MiB of 4.0 MiB …"
    assert lines[1].startswith("memory: 1.5")


def test_long_steps_show_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Terminal:
        def __init__(self) -> None:
            self.text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.text += text
            return len(text)

        def flush(self) -> None:
            pass

    terminal = Terminal()
    with ProgressDisplay(terminal) as display:  # type: ignore[arg-type]
        trace = Trace(display)
        with trace.step("memory"):
            trace.progress("memory", 1 << 20, 4 << 20)
            time.sleep(1.6)
    assert "memory" in terminal.text
    assert "1.0 MiB of 4.0 MiB" in terminal.text


def test_listener_may_be_called_from_any_thread() -> None:
    with ProgressDisplay(sys.stderr) as display:
        display("memory")
        threads = [
            threading.Thread(target=lambda: [display(Step("memory", 0, 0)) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
