"""What docs/ shows works: every command and every program of a page is run, in its order, in one folder.

The full models that the pages speak of are stood in for by small random ones of the same kind; what would be fetched
from the hub, or installed, is only checked for its options and names.
"""

import contextlib
import importlib.util
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mlx_cosyh3.cli import main
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PAGES = ("quickstart", "voices", "streaming", "quantisation", "serving", "kernels", "troubleshooting")
HUB = ("FunAudioLLM/", "danfu09/")  # what is fetched
PROGRAM = f"{shlex.quote(sys.executable)} -m mlx_cosyh3"


def text(page):
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def steps(page):
    """("sh", line) and ("python", program) of a page, in order."""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text(page), re.S | re.M):
        if language == "python":
            yield language, block
        else:
            assert language == "sh", f"{page}.md: a block of {language!r} would not be tested"
            yield from (("sh", line) for line in block.strip().splitlines())


COMMANDS = [(page, line) for page in PAGES for language, line in steps(page) if language == "sh"]


def words(line):
    """(environment, words) of a simple command."""
    parts = shlex.split(line)
    first = next(i for i, word in enumerate(parts) if not re.match(r"[A-Z_0-9]+=", word))
    return parts[:first], parts[first:]


def is_fetched(line):
    return any(name in line for name in HUB)


def is_installed(line):
    return words(line)[1][:2] == ["pip", "install"]


# ---------------------------------------------------------------- where they run


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder with the models that the pages name, and recordings."""
    folder = tmp_path_factory.mktemp("docs")
    write_voice_model(folder / "Fun-CosyVoice3", special_tokens={})
    write_model(folder / "H3-125M")
    write_model(folder / "H3-125M-int8")
    t = np.arange(4 * 16000) / 16000
    for name, hz in (("me", 150), ("someone", 220)):
        voice = sum(np.sin(2 * np.pi * hz * k * t) / k for k in range(1, 9)) * (1 + np.sin(2 * np.pi * 3 * t)) / 8
        soundfile.write(folder / f"{name}.wav", voice.astype(np.float32), 16000)
    # A random model may end at once, and says then that it made no speech: the seeds that nobody chose are all one.
    (folder / "seeds").mkdir()
    (folder / "seeds" / "sitecustomize.py").write_text("import secrets\nsecrets.randbelow = lambda n: 1\n")
    (folder / "book.txt").write_text("It was the best of times, it was the worst of times.\n" * 3)
    return folder


@pytest.fixture
def place(models, tmp_path):
    for path in models.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def environment(place):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLX_COSYH3")}
    return kept | {
        "PYTHONPATH": f"{place / 'seeds'}{os.pathsep}{ROOT}", "MLX_COSYH3_CACHE": str(place / "cache"),
        "MLX_DISABLE_COMPILE": "1", "TOKEN": "not-needed", "HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "hub"),
    }  # fmt: skip


class Server:
    """The server that a line of a page starts, at a free port; `ports` says which one it took."""

    def __init__(self, line, place):
        env, args = words(line)
        at = args.index("--port") + 1
        asked, args[at] = args[at], str(free_port())
        if "--host" in args:
            args[args.index("--host") + 1] = "127.0.0.1"
        self.ports = {asked: args[at]}
        self.process = subprocess.Popen([sys.executable, "-m", *args], cwd=place, text=True, stderr=subprocess.PIPE,
                                        env=environment(place) | dict(word.split("=", 1) for word in env))  # fmt: skip
        self.said = self.process.stderr.readline()
        assert "listening at" in self.said, self.said + self.process.stderr.read()
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{args[at]}/health", timeout=10).close()
                return
            time.sleep(0.1)
        pytest.fail("the server does not answer")

    def close(self):
        """As a supervisor ends it."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=60)[1]
        assert self.process.returncode == 0, said


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def needs(page):
    """Skip a page whose extras are not installed here."""
    wanted = {"serving": ("starlette", "uvicorn", "openai"), "troubleshooting": ("starlette", "uvicorn", "matplotlib"),
              "voices": ("matplotlib",)}  # fmt: skip
    for name in wanted.get(page, ()):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{page}.md needs {name}")


@pytest.mark.parametrize("page", PAGES)
def test_page(page, place, monkeypatch, capsys):
    """Every step of the page, in order, in one folder. A plain command runs in this process, which saves its start."""
    needs(page)
    monkeypatch.chdir(place)
    monkeypatch.setattr(secrets, "randbelow", lambda n: 1)
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(place / "cache"))
    ports, first = {}, None
    with contextlib.ExitStack() as stack:
        for language, step in steps(page):
            if language == "sh" and (is_fetched(step) or is_installed(step)):
                continue
            if language == "sh" and words(step)[1][:2] == ["mlx_cosyh3", "serve"]:
                server = Server(step, place)
                stack.callback(server.close)
                ports |= server.ports
                continue
            for asked, taken in ports.items():
                step = step.replace(f"127.0.0.1:{asked}", f"127.0.0.1:{taken}")
            if page == "troubleshooting" and "127.0.0.1:8000" in step:  # of a server that runs elsewhere
                first = first or Server("mlx_cosyh3 serve --port 8000 --model h3-tiny", place)
                stack.callback(first.close)
                step = step.replace("127.0.0.1:8000", f"127.0.0.1:{first.ports['8000']}")
            if language == "sh" and re.fullmatch(r"mlx_cosyh3 [^|<>&;$]+", step):
                status = main(shlex.split(step)[1:])
                assert status == 0, f"{step}\n{capsys.readouterr().err}"
                continue
            command = [sys.executable, "-c", step]
            if language == "sh":
                command = ["sh", "-c", re.sub(r"(?<![\w/.])mlx_cosyh3(?= )", lambda _: PROGRAM, step)]
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, stdin=subprocess.DEVNULL,
                                  env=environment(place), timeout=300)  # fmt: skip
            assert done.returncode == 0, f"{step}\n{done.stderr}"
            if language == "python":
                assert done.stdout.strip(), step


# ---------------------------------------------------------------- what cannot be run here


@pytest.mark.parametrize("page, line", [c for c in COMMANDS if is_fetched(c[1])])
def test_what_is_fetched_is_understood(page, line, capsys):
    """Each option exists."""
    program, *args = words(line)[1]
    assert program == "mlx_cosyh3"
    with pytest.raises(SystemExit) as e:
        main([args[0], "--help"])
    assert e.value.code == 0
    told = capsys.readouterr().out
    for arg in args:
        if arg.startswith("-"):
            assert re.search(rf"(?<![\w-]){re.escape(arg)}(?![\w-])", told), arg


def extras():
    """The names of the package's extras."""
    project = (ROOT / "pyproject.toml").read_text()
    part = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return re.findall(r"^(\w+) = ", part, re.M)


@pytest.mark.parametrize("page", PAGES)
def test_extras_exist(page):
    named = [e for names in re.findall(r"'[\w-]*\.?\[([\w,]+)\]'", text(page)) for e in names.split(",")]
    assert set(named) <= set(extras()), named


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text(page)):
        if not target.startswith("http"):
            assert (ROOT / "docs" / target).exists(), target


def test_variables_exist():
    """Each environment variable that a page names is one that the program reads."""
    sources = source()
    for page in PAGES:
        for name in re.findall(r"\bMLX_COSYH3_\w+", text(page)):
            short = name.removeprefix("MLX_COSYH3_").lower()
            knob = re.search(rf'^    "{short}": \(', sources, re.M)  # of runtime.KNOBS
            assert f'"{name}"' in sources or knob, name


def test_options_in_the_text_exist(capsys):
    """Also those that are only spoken of."""
    told = []
    for command in ("say", "generate", "convert", "serve", "bench", "plot", "clone", "vc"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        told.append(capsys.readouterr().out)
    for page in PAGES:
        for option in re.findall(r"`(--[a-z-]+)", text(page)):
            assert any(re.search(rf"{option}(?![\w-])", page) for page in told), option


def source():
    folders = ("mlx_cosyh3", "kernels", "convert")
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py"))


# ---------------------------------------------------------------- troubleshooting


ENTRIES = re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", text("troubleshooting"), re.S | re.M)


@pytest.mark.parametrize("symptom, entry", ENTRIES, ids=[s for s, _ in ENTRIES])
def test_entry_has_symptom_cause_command(symptom, entry):
    assert entry.lstrip().startswith("Cause: ") and "\n```sh\n" in entry


def test_quoted_messages_are_what_the_program_says():
    # A message may be put together of several strings in the source.
    sources = re.sub(r'"\s*\n\s*f?"', "", source())
    for symptom, _ in ENTRIES:
        for quoted in re.findall(r"`(.*?)`", symptom):
            assert quoted in sources, quoted
    assert len(ENTRIES) > 20
