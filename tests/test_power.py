"""The power that powermetrics tells: with a stand-in that prints what it prints, or may not run."""

import os
import platform
import shutil
import time

import pytest

from mlx_cosyh3 import power
from mlx_cosyh3.power import Power

SAMPLE = """*** Sampled system activity (Mon Nov 30 09:00:00 2026 +0000) (200.00ms elapsed) ***
CPU Power: 900 mW
GPU Power: 300 mW
ANE Power: 0 mW
Combined Power (CPU + GPU + ANE): {mw} mW
"""


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """mac(script): a Mac whose powermetrics is this shell script."""

    def make(script):
        program = tmp_path / "powermetrics"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(platform, "system", lambda: "Darwin")
        monkeypatch.setattr(shutil, "which", lambda name: str(program))
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    return make


def wait(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not come")


def printing(*samples):
    return "cat <<'EOF'\n" + "".join(SAMPLE.format(mw=mw) for mw in samples) + "EOF\n"


def test_samples(mac):
    mac(printing(1000, 5000, 1200) + "while :; do echo; sleep 0.05; done")
    with Power() as p:
        mark = p.mark()
        wait(lambda: p.mark() == 3)
        assert p.since(mark) == 1.2 and p.since(p.mark()) is None and p.trouble is None
    assert p._process.returncode is not None and p.trouble is None


def test_it_may_not_run(mac):
    mac("exit 1")
    with Power() as p:
        wait(lambda: p._process.poll() is not None)
    assert "may not run (exit 1)" in p.trouble and p.since(0) is None


def test_it_cannot_be_started(mac, monkeypatch):
    mac("")
    monkeypatch.setattr(shutil, "which", lambda name: "/nowhere/powermetrics")
    with Power() as p:
        assert p.trouble == "powermetrics cannot run: No such file or directory" and p.since(0) is None


def test_without_root_sudo_is_asked_but_no_password(mac, monkeypatch):
    mac("")
    called = []

    def popen(command, **options):
        called.append(command)
        raise FileNotFoundError(2, "No such file or directory", "sudo")

    monkeypatch.setattr(os, "geteuid", lambda: 501)
    monkeypatch.setattr(power.subprocess, "Popen", popen)
    with Power() as p:
        assert p.trouble
    assert called[0][:2] == ["sudo", "-n"] and "cpu_power,gpu_power" in called[0]


def test_elsewhere_there_is_none(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with Power() as p:
        assert "a program of macOS" in p.trouble and p.mark() == 0
