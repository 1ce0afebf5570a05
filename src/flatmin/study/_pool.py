"""Worker processes: each runs one job at a time, one torch thread each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

Job = tuple[Any, ...]

#: A job whose worker dies (killed, out of memory) is given to another one once.
_TRIES = 2


@dataclass
class _Worker:
    process: Any  # SpawnProcess has no public type
    pipe: Connection
    job: int | None = None
    ready: bool = False


def run_jobs(
    target: Callable[..., Any], jobs: list[Job], workers: int
) -> Generator[tuple[int, Any | None, str], None, None]:
    """Yield ``(index, result, error)`` as the jobs end; ``result`` is ``None`` where there is an ``error``.

    ``target`` and the jobs' arguments are pickled. Closing the generator, an exception in its consumer and
    the death of this process end the workers. Raises ``RuntimeError`` where processes cannot start.
    """
    context = multiprocessing.get_context("spawn")
    waiting = deque(range(len(jobs)))
    tries = [0] * len(jobs)
    open_jobs = len(jobs)
    crew: list[_Worker] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        # Not a daemon: a task's data loader may have processes of its own.
        process = context.Process(target=_work, args=(theirs, target), daemon=False)
        with _interrupts_ignored():
            process.start()
        theirs.close()
        crew.append(_Worker(process, ours))

    def hand_out(worker: _Worker) -> None:
        if waiting:
            worker.job = waiting.popleft()
            tries[worker.job] += 1
            # A worker that has just died is noticed below, when its pipe reads as closed.
            with contextlib.suppress(OSError):
                worker.pipe.send(jobs[worker.job])

    try:
        for _ in range(min(workers, len(jobs))):
            start()
        while open_jobs:
            ready = wait([worker.pipe for worker in crew])
            for worker in [w for w in crew if w.pipe in ready]:
                index, worker.job = worker.job, None
                try:
                    message = worker.pipe.recv()
                except (EOFError, OSError):
                    crew.remove(worker)
                    worker.process.join()
                    worker.pipe.close()
                    if not worker.ready:
                        raise RuntimeError(
                            f"a worker process did not start (exit code {worker.process.exitcode}); a script that "
                            "uses more than one process must be a file and do its work under "
                            "'if __name__ == \"__main__\":'"
                        ) from None
                    result, error = None, f"its process ended with exit code {worker.process.exitcode}"
                    again = index is not None and tries[index] < _TRIES
                    if index is not None and again:
                        waiting.appendleft(index)
                    if waiting:
                        start()
                    if index is None or again:
                        continue
                else:
                    hand_out(worker)
                    if not worker.ready:
                        worker.ready = True
                        continue
                    result, error = message
                assert index is not None  # an idle worker sends nothing
                open_jobs -= 1
                yield index, result, error
    finally:
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.join()
            worker.pipe.close()


def _work(pipe: Connection, target: Callable[..., Any]) -> None:
    _die_with_the_parent()
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[Any, str] = (target(*job), "")
        except Exception as error:
            answer = (None, f"{type(error).__name__}: {error}")
        try:
            pipe.send(answer)
        except OSError:
            return


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let the process that is started here inherit deafness to Ctrl-C: the parent ends its workers itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
