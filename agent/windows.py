"""Runs one program of a tool on Windows: in a job object, which ends all that it started, also when we die.

The job is told to kill what is in it when its last handle closes, and only we have one. The program starts
suspended, so that nothing can be started before it is in the job. There is no SIGTERM: a deadline ends
everything at once. Written from the documentation of the system calls; nobody has run it yet.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    import contextlib
    import ctypes
    import subprocess
    import threading
    import time
    from ctypes import wintypes
    from typing import IO

    from .output import Stream
    from .process import Ended, Launch

    _CREATE_SUSPENDED = 0x4
    _EXTENDED_LIMITS = 9  # JobObjectExtendedLimitInformation
    _KILL_ON_CLOSE, _DIE_ON_EXCEPTION = 0x2000, 0x400
    _PROCESS_TIME, _PROCESS_MEMORY = 0x2, 0x100
    _TICKS_PER_S = 10_000_000  # of 100 ns
    _DRAIN_S = 0.5
    _REAP_S = 1.2

    class _Basic(ctypes.Structure):
        _fields_ = [
            ("PerProcessUserTimeLimit", ctypes.c_int64),
            ("PerJobUserTimeLimit", ctypes.c_int64),
            ("LimitFlags", wintypes.DWORD),
            ("MinimumWorkingSetSize", ctypes.c_size_t),
            ("MaximumWorkingSetSize", ctypes.c_size_t),
            ("ActiveProcessLimit", wintypes.DWORD),
            ("Affinity", ctypes.c_size_t),
            ("PriorityClass", wintypes.DWORD),
            ("SchedulingClass", wintypes.DWORD),
        ]

    class _Extended(ctypes.Structure):
        _fields_ = [
            ("Basic", _Basic),
            ("IoInfo", ctypes.c_uint64 * 6),
            ("ProcessMemoryLimit", ctypes.c_size_t),
            ("JobMemoryLimit", ctypes.c_size_t),
            ("PeakProcessMemoryUsed", ctypes.c_size_t),
            ("PeakJobMemoryUsed", ctypes.c_size_t),
        ]

    class _Job:
        """A job object with its bounds."""

        def __init__(self, launch: Launch, timeout_s: float) -> None:
            self._kernel = ctypes.WinDLL("kernel32", use_last_error=True)
            self._kernel.CreateJobObjectW.restype = wintypes.HANDLE
            handle = self._kernel.CreateJobObjectW(None, None)
            if not handle:
                raise ctypes.WinError(ctypes.get_last_error())
            self._handle = wintypes.HANDLE(handle)
            limits = _Extended()
            limits.Basic.LimitFlags = _KILL_ON_CLOSE | _DIE_ON_EXCEPTION
            if launch.limits.cpu_seconds(timeout_s):
                limits.Basic.LimitFlags |= _PROCESS_TIME
                limits.Basic.PerProcessUserTimeLimit = launch.limits.cpu_seconds(timeout_s) * _TICKS_PER_S
            if launch.limits.memory_bytes():
                limits.Basic.LimitFlags |= _PROCESS_MEMORY
                limits.ProcessMemoryLimit = launch.limits.memory_bytes()
            self._check(
                self._kernel.SetInformationJobObject(
                    self._handle, _EXTENDED_LIMITS, ctypes.byref(limits), ctypes.sizeof(limits)
                )
            )

        def start(self, process: subprocess.Popen[bytes]) -> None:
            """Put a suspended process into the job and let it run."""
            handle = wintypes.HANDLE(int(process._handle))  # type: ignore[attr-defined]  # it has no public name
            self._check(self._kernel.AssignProcessToJobObject(self._handle, handle))
            if ctypes.WinDLL("ntdll").NtResumeProcess(handle):
                raise OSError("the process could not be resumed")

        def kill(self) -> None:
            self._kernel.TerminateJobObject(self._handle, 1)

        def close(self) -> None:
            self._kernel.CloseHandle(self._handle)

        def _check(self, done: int) -> None:
            if not done:
                raise ctypes.WinError(ctypes.get_last_error())

    def run_job(launch: Launch, timeout_s: float) -> Ended:
        """Run to the end, at most `timeout_s` and a little more. Raises OSError if it cannot be started."""
        deadline = time.monotonic() + timeout_s
        job = _Job(launch, timeout_s)
        try:
            process = subprocess.Popen(
                launch.command(0),
                stdin=subprocess.PIPE if launch.script is not None else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=launch.environment,
                cwd=launch.cwd,
                bufsize=0,
                creationflags=_CREATE_SUSPENDED
                | subprocess.CREATE_NO_WINDOW
                | subprocess.CREATE_NEW_PROCESS_GROUP,
            )
            try:
                job.start(process)
                return _attend(process, job, launch, deadline)
            finally:
                job.kill()
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_REAP_S)
        finally:
            job.close()

    def _attend(process: subprocess.Popen[bytes], job: _Job, launch: Launch, deadline: float) -> Ended:
        """Feed and read by threads, for Windows cannot wait for pipes; then end everything."""
        streams = (Stream(launch.output_limit), Stream(launch.output_limit))
        threads = [threading.Thread(target=_feed, args=(process, launch.script or b""), daemon=True)]
        for pipe, stream in zip((process.stdout, process.stderr), streams, strict=True):
            threads.append(threading.Thread(target=_read, args=(pipe, stream), daemon=True))
        for thread in threads:
            thread.start()
        timed_out = False
        while process.poll() is None and not timed_out:  # short waits, so that Ctrl-C is heard
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            timed_out = process.poll() is None and time.monotonic() > deadline
        if not timed_out:
            _join(threads, _DRAIN_S)
        job.kill()
        _join(threads, _REAP_S)
        out, err = (stream.text() for stream in streams)
        return Ended(out, err, process.returncode if process.returncode is not None else 1, timed_out)

    def _join(threads: list[threading.Thread], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _feed(process: subprocess.Popen[bytes], script: bytes) -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(script)
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _read(pipe: IO[bytes], stream: Stream) -> None:
        with contextlib.suppress(OSError, ValueError), pipe:
            while data := pipe.read(1 << 16):
                stream.push(data)
