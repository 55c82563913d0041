"""docs/integrations.md: its examples run as they stand, its links and extras exist."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "integrations.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)


@pytest.mark.parametrize("n", range(len(BLOCKS)))
def test_examples(n, tmp_path):
    """In an empty folder, beside the node pack."""
    needed = "langchain_core" if "langchain" in BLOCKS[n] else "torch"
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    (tmp_path / "comfyui").symlink_to(ROOT / "comfyui")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS[n]], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links():
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


def test_extras():
    """Those that the page and the error of a missing one name are extras of the package."""
    project = (ROOT / "pyproject.toml").read_text()
    sources = [PAGE, *(ROOT / "mlx_cosyh3" / "integrations").glob("*.py")]
    text = "".join(path.read_text() for path in sources)
    named = re.findall(r"'\.\[([\w,]+)\]'", text) + re.findall(r'MissingExtra\("[\w-]+", "(\w+)"\)', text)
    extras = {extra for names in named for extra in names.split(",")}
    assert extras >= {"torch", "langchain", "cpu"}
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, re.M), extra
