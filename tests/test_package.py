"""The package as a wheel: everything in it, kernels/ and convert/ in their places, the embedded model along."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USE = """
import mlx_cosyh3, mlx_cosyh3.kernels, mlx_cosyh3.convert
from mlx_cosyh3.convert import convert
print(mlx_cosyh3.__file__, mlx_cosyh3.kernels.__file__, mlx_cosyh3.convert.__file__)
assert callable(convert) and "kernels" not in __import__("sys").modules
print(mlx_cosyh3.generate(mlx_cosyh3.load(), "It was", max_tokens=3, seed=1).text)
print(mlx_cosyh3.generate(mlx_cosyh3.load("cosyvoice3-tiny"), "Yes.", seed=1).duration)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if importlib.util.find_spec("setuptools") is None or importlib.util.find_spec("wheel") is None:
        pytest.skip("needs setuptools and wheel in this environment to build without a network")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("mlx_cosyh3", "kernels", "convert"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "mlx_cosyh3/h3.py",
        "mlx_cosyh3/kernels/h3_step.py",
        "mlx_cosyh3/convert/torch_file.py",
        "mlx_cosyh3/models/h3-tiny/model.safetensors",
        "mlx_cosyh3/models/h3-tiny/README.md",
        "mlx_cosyh3/cosyvoice/cosyvoice3.py",
        "mlx_cosyh3/models/cosyvoice3-tiny/model.safetensors",
        "mlx_cosyh3/models/cosyvoice3-tiny/voices/slt.safetensors",
    ):
        assert name in names
    assert not [n for n in names if n.split("/")[0] in ("kernels", "convert", "tests", "benchmarks")]
    sources = {str(p.relative_to(ROOT / d)) for d in ("kernels", "convert") for p in (ROOT / d).glob("*.py")}
    packed = {n.split("/", 2)[2] for n in names if n.startswith(("mlx_cosyh3/kernels/", "mlx_cosyh3/convert/"))}
    assert sources == packed


def test_runs_installed(wheel, tmp_path):
    """Unpacked somewhere else, started somewhere else, with a folder named kernels in the way."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    (elsewhere / "kernels").mkdir(parents=True)
    (elsewhere / "kernels" / "__init__.py").write_text("raise ImportError('the wrong one')")
    done = subprocess.run([sys.executable, "-c", USE], cwd=elsewhere, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(site), "MLX_DISABLE_COMPILE": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    files, text = done.stdout.splitlines()[:2]
    assert all(f.startswith(str(site)) for f in files.split())
    assert text.strip()


def test_runs_from_the_source_tree(tmp_path):
    """Nothing installed: the root of the tree on the path is enough."""
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(ROOT / "kernels") in done.stdout and str(ROOT / "convert") in done.stdout


def test_one_version():
    """pyproject.toml and the package agree."""
    import mlx_cosyh3

    assert f'version = "{mlx_cosyh3.__version__}"' in (ROOT / "pyproject.toml").read_text()
