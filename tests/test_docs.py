"""What the README and docs/ show works: every command and every program of a page is run, in order, in one folder.

The full models that the pages speak of are stood in for by small random ones of the same kind. What would be fetched
from the hub lies in folders of the same names, small and in upstream's layout. `pip install` alone is not run: that the
extras it names exist is checked. The README's programs are run in test_readme.py, integrations.md in
test_integrations_docs.py.
"""

import contextlib
import http.server
import importlib.util
import io
import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import load
from mlx_cosyh3.cli import main
from tests.golden_data import cosyvoice_golden
from tests.h3_checkpoints import state_dict
from tests.make_cosyvoice_folder import make_folder, write_torch
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model

ROOT = Path(__file__).parent.parent
PAGES = ("README", "quickstart", "voices", "streaming", "quantisation", "serving", "kernels", "troubleshooting")
ELSEWHERE = ("LOG", "integrations")  # no commands; see above
HUB = ("FunAudioLLM/", "danfu09/")  # what is fetched
PROGRAM = f"{shlex.quote(sys.executable)} -m mlx_cosyh3"


def file(page):
    return ROOT / "README.md" if page == "README" else ROOT / "docs" / f"{page}.md"


def text(page):
    return file(page).read_text(encoding="utf-8")


def steps(page):
    """("sh", line) and ("python", program) of a page, in order."""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text(page), re.S | re.M):
        if language == "python":
            if page != "README":
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
    (folder / "bin").mkdir()
    (folder / "bin" / "aplay").write_text("#!/bin/sh\nexec cat > /dev/null\n")
    (folder / "bin" / "aplay").chmod(0o755)
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
              "voices": ("matplotlib",), "quickstart": ("matplotlib",)}  # fmt: skip
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
    monkeypatch.setenv("PATH", str(place / "bin"), prepend=os.pathsep)  # something to play with
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))  # what asks, hears nothing
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


# ---------------------------------------------------------------- what is fetched, installed, or runs elsewhere


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder whose folders are named like the hub repos of the pages, with checkpoints as upstream writes them."""
    folder = tmp_path_factory.mktemp("hub")
    front_ends = {
        "campplus": cosyvoice_golden("campplus") / "campplus_tiny.onnx",
        "speech_tokenizer": cosyvoice_golden("s3_v3") / "tokenizer_lookalike.onnx",
    }
    make_folder(folder / "FunAudioLLM" / "Fun-CosyVoice3-0.5B-2512", **front_ends)
    for name, path in (("campplus", "campplus"), ("speech_tokenizer", "speech_tokenizer_v3")):
        (folder / f"{path}.onnx").symlink_to(front_ends[name])  # as --campplus and --speech-tokenizer name them
    tensors = state_dict(d_model=16, d_state=8, rows=264)
    for repo, name in (("H3-125M", "model.pt"), ("H3-2.7B", "model-3attn.pt")):
        write_model(folder / "danfu09" / repo)  # for its tokenizer
        (folder / "danfu09" / repo / "model.safetensors").unlink()
        (folder / "danfu09" / repo / "config.json").write_text(json.dumps({"num_heads": 2}))
        write_torch(folder / "danfu09" / repo / name, tensors)
    return folder


@pytest.mark.parametrize("page", sorted({page for page, line in COMMANDS if is_fetched(line)}))
def test_what_is_fetched(page, hub, tmp_path, monkeypatch, capsys):
    """Conversions, and what verifies them, one after the other."""
    for path in hub.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for line in (line for name, line in COMMANDS if name == page and is_fetched(line)):
        env, (program, *args) = words(line)
        assert program == "mlx_cosyh3" and not env
        status = main(args)
        told = capsys.readouterr()
        assert status == 0, f"{line}\n{told.out}{told.err}"
        if args[0] == "convert":
            assert load(args[args.index("--out") + 1])


def test_every_page_is_one_of_these():
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} | {"README"} == {*PAGES, *ELSEWHERE}
    for page in ELSEWHERE:
        assert not re.search(r"^```(?!python|$)", text(page), re.M)


class Host(http.server.BaseHTTPRequestHandler):
    """Takes what is sent to it, as ComfyUI does."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_comfyui_page(tmp_path):
    """The link, and the graph that is sent."""
    page = (ROOT / "comfyui" / "README.md").read_text()
    install, link, send = re.findall(r"^    (\S.*?)(?:  +#.*)?$", page, re.M)
    assert install == "python -m pip install /path/to/this/repository"
    (tmp_path / "ComfyUI" / "custom_nodes").mkdir(parents=True)
    link = link.replace("/path/to/this/repository", shlex.quote(str(ROOT)))
    subprocess.run(["sh", "-c", link], cwd=tmp_path, check=True)
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "mlx_cosyh3_nodes"
    assert (pack / "__init__.py").is_file()
    with http.server.HTTPServer(("127.0.0.1", 0), Host) as host:
        host.asked = []
        thread = threading.Thread(target=host.handle_request)
        thread.start()
        send = send.replace("127.0.0.1:8188", f"127.0.0.1:{host.server_port}")
        subprocess.run(["sh", "-c", send], cwd=pack, check=True, timeout=60)
        thread.join(60)
    assert host.asked == [("/prompt", {"prompt": json.loads((pack / "speak.json").read_text())})]


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
            assert (file(page).parent / target).exists(), target


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
    for command in ("say", "generate", "convert", "serve", "bench", "plot", "clone", "vc", "repl", "doctor"):
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
