"""The power that a Mac draws, from `powermetrics`, where that may run: it is Apple's, and wants to be root."""

import contextlib
import os
import platform
import re
import shutil
import statistics
import subprocess
import threading

EVERY = 200  # ms between samples
LINE = re.compile(r"^Combined Power \(.*\): (\d+) mW")


class Power:
    """`with Power() as power:` samples while it is open.

    trouble   why there is no power to tell, in words; None if there is"""

    def __init__(self):
        self.trouble, self._watts = None, []
        self._process = self._thread = None
        self._stop = threading.Event()

    def mark(self):
        """A place in the samples, for `since`."""
        return len(self._watts)

    def since(self, mark):
        """Watts: the median of the samples since `mark`; None where there was none."""
        samples = self._watts[mark:]
        return statistics.median(samples) if samples else None

    def __enter__(self):
        program = shutil.which("powermetrics")
        if platform.system() != "Darwin" or program is None:
            self.trouble = "there is no powermetrics here (a program of macOS)"
            return self
        # -n: sudo asks for no password, it fails; nobody sits there to type it.
        command = [program, "--samplers", "cpu_power,gpu_power", "-i", str(EVERY)]
        command = command if os.geteuid() == 0 else ["sudo", "-n", *command]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, text=True, errors="replace")  # fmt: skip
        except OSError as e:
            self.trouble = f"powermetrics cannot run: {e.strerror}"
            return self
        self._thread = threading.Thread(target=self._read, name="mlx_cosyh3 power", daemon=True)
        self._thread.start()
        return self

    def _read(self):
        for line in self._process.stdout:
            found = LINE.match(line)
            if found:
                self._watts.append(int(found[1]) / 1000)
            if self._stop.is_set():
                break
        # Closed, it ends powermetrics with its next line. What runs by sudo takes no signal of ours.
        self._process.stdout.close()

    def __exit__(self, *exc):
        if self._process is None:
            return
        ended = self._process.poll()
        self._stop.set()
        self._thread.join(5)
        with contextlib.suppress(PermissionError):  # root's: see _read
            self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self.trouble = "powermetrics does not end"
        if ended and not self._watts:
            self.trouble = f"powermetrics may not run (exit {ended}): be root, or let sudo run it without a password"
