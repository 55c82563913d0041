"""What the README shows works: its Python, its commands on the model that comes along, its files."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_cosyh3.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def environment():
    return os.environ | {"PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"}


@pytest.mark.parametrize("n", range(len(blocks("python"))))
def test_python(n, tmp_path):
    done = subprocess.run([sys.executable, "-c", blocks("python")[n]], cwd=tmp_path, capture_output=True, text=True,
                          env=environment())  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


COMMANDS = [line for block in blocks("sh") for line in block.strip().splitlines()]
# These need the hub, or a recording of yours.
FETCH = [c for c in COMMANDS if "H3-" in c or "Fun-CosyVoice3" in c]


@pytest.mark.parametrize("line", [c for c in COMMANDS if c not in FETCH])
def test_commands(line, tmp_path):
    """Run as they stand, by the program of this Python."""
    done = subprocess.run(["sh", "-c", line.replace("mlx_cosyh3", f"{shlex.quote(sys.executable)} -m mlx_cosyh3")],
                          cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment())  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", FETCH)
def test_commands_with_downloads_are_understood(line, capsys):
    """They need the hub: here only that every option exists."""
    program, *args = shlex.split(line)
    assert program == "mlx_cosyh3"
    with pytest.raises(SystemExit) as e:
        main([*args, "--help"])
    assert e.value.code == 0
    options = capsys.readouterr().out
    assert all(a in options for a in args if a.startswith("-"))


def test_links_and_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
    for name in re.findall(r"`((?:[\w/]+)\.py)`", README):
        assert any((ROOT / part / name).exists() for part in ("", "mlx_cosyh3", "mlx_cosyh3/cosyvoice")), name


def test_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
