"""The command line: what goes to stdout and to stderr, exit statuses, and one clear line for every user error.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_cli.py
"""

import io
import os
import signal
import subprocess
import sys
import threading

import mlx.core as mx
import pytest

import mlx_cosyh3
from mlx_cosyh3 import cli, deadline, generate, runtime
from mlx_cosyh3.console import DEFAULTS, unescape

COMMAND = [sys.executable, "-m", "mlx_cosyh3"]
# Unbuffered output would hide a missing flush, and what becomes of a buffer that cannot be written.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


class Stdin(io.TextIOWrapper):
    """Piped stdin with the given bytes; `tty` makes it claim to be a terminal."""

    def __init__(self, raw=b"", tty=False):
        super().__init__(io.BytesIO(raw), encoding="utf-8")
        self._tty = tty

    def isatty(self):
        return self._tty


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*words, stdin=bytes or None for a terminal) -> (status, stdout, stderr), inside this process."""

    def run(*words, stdin=None):
        monkeypatch.setattr(sys, "stdin", Stdin(stdin or b"", tty=stdin is None))
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as e:
            status = e.code
        return (status, *capsys.readouterr())

    return run


def one_line(result):
    """Exit status 2, nothing on stdout, one line on stderr; returns the line."""
    status, out, err = result
    assert status == 2 and out == "", result
    assert err.startswith("mlx_cosyh3: ") and err.count("\n") == 1, err
    return err


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("way", ["argument", "option", "-p", "dash", "pipe", "file", "file -"])
def test_every_way_to_give_a_prompt(run, folder, model, tmp_path, way):
    (tmp_path / "prompt.txt").write_text("the naïve 字\n", encoding="utf-8")
    raw = "the naïve 字\n".encode()
    words, stdin = {
        "argument": (["the naïve 字"], None), "option": (["--prompt", "the naïve 字"], None),
        "-p": (["-p", "the naïve 字"], None), "dash": (["-"], raw), "pipe": ([], raw),
        "file": (["--file", tmp_path / "prompt.txt"], None), "file -": (["--file", "-"], raw),
    }[way]  # fmt: skip
    status, out, err = run("generate", *words, "--model", folder, "--seed", 4, "--max-tokens", 12, stdin=stdin)
    want = generate(model, "the naïve 字", seed=4, max_tokens=12).text
    assert (status, err) == (0, "")
    assert out == want + "\n" * (not want.endswith("\n"))


def test_every_option_reaches_the_model(run, folder, model):
    options = dict(
        max_tokens=25, temperature=1.3, top_k=100, top_p=0.95, min_p=0.001, repetition_penalty=1.2, seed=9
    )
    words = [w for name, value in options.items() for w in ("--" + name.replace("_", "-"), value)]
    full = generate(model, "the a", **options).text
    stop = full[len(full) // 2 :][:2]
    want = generate(model, "the a", stop=[stop, "never"], **options).text
    assert run("generate", "the a", "--model", folder, *words)[1] == full + "\n" * (not full.endswith("\n"))
    got = run("generate", "the a", "--model", folder, *words, "--stop", stop, "--stop", "never")[1]
    assert len(want) < len(full) and got == want + "\n" * (not want.endswith("\n"))
    for name, value in dict(
        temperature=0.2, top_k=3, top_p=0.05, min_p=0.9, repetition_penalty=9, seed=10
    ).items():
        changed = run("generate", "the a", "--model", folder, *words, "--" + name.replace("_", "-"), value)[1]
        assert changed.strip("\n") != full.strip("\n"), f"--{name} changed nothing"


def test_the_help_names_the_defaults_of_the_function(run):
    text = " ".join(run("generate", "--help")[1].split())
    for name, default in DEFAULTS.items():
        assert "--" + name.replace("_", "-") in text
        if isinstance(default, (int, float)):
            assert f"({default})" in text


@pytest.mark.parametrize("words", [["--max_tokens", 5, "--top_k=3"], ["--max-tokens=5", "--top-k", 3]])
def test_underscores_and_dashes(run, folder, model, words):
    want = generate(model, "a_b --c_d", max_tokens=5, top_k=3, seed=1).text
    assert run("generate", "a_b --c_d", "--model", folder, *words, "--seed", 1)[1].strip("\n") == want.strip("\n")


def test_a_prompt_that_begins_with_a_dash(run, folder, model):
    want = generate(model, "-the_a", max_tokens=5, seed=1).text.strip("\n")
    options = ["--model", folder, "--max-tokens", 5, "--seed", 1]
    assert run("generate", *options, "--prompt=-the_a")[1].strip("\n") == want
    assert run("generate", *options, "--", "-the_a")[1].strip("\n") == want
    assert "--prompt=-the_a" in one_line(run("generate", *options, "-the_a"))


def test_state_goes_to_a_file_and_on_from_it(run, folder, model, tmp_path):
    options = ["--model", folder, "--temperature", 0, "--max-tokens", 10]
    first = run("generate", "the a", *options, "--save-state", tmp_path / "state")
    assert first[0] == 0
    then = run("generate", *options, "--load-state", tmp_path / "state")  # from a terminal, without a prompt
    assert then[0] == 0
    whole = generate(model, "the a", temperature=0, max_tokens=20)
    halves = [model.tokenizer.decode(whole.tokens[:10]), model.tokenizer.decode(whole.tokens[10:])]
    assert [first[1].strip("\n"), then[1].strip("\n")] == [half.strip("\n") for half in halves]


def test_statistics_name_the_limit_and_a_seed_that_repeats_the_text(run, folder):
    status, out, err = run("generate", "the a", "--model", folder, "--max-tokens", 20, "--stats")
    assert status == 0 and err.count("\n") == 1 and "cut off by --max-tokens 20" in err
    seed = err.split("seed ")[1].split(";")[0]
    assert run("generate", "the a", "--model", folder, "--max-tokens", 20, "--seed", seed)[1] == out


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("--max-tokens", 0, "max_tokens must be a whole number from 1, not 0"),
        ("--max-tokens", -5, "max_tokens must be"),
        ("--max-tokens", "ten", "invalid int value: 'ten'"),
        ("--temperature", -0.1, "temperature must be"),
        ("--temperature", "nan", "temperature must be"),
        ("--temp", "inf", "temperature must be"),
        ("--top-k", -1, "top_k must be"),
        ("--top-p", 0, "top_p must be"),
        ("--top-p", 2, "top_p must be more than 0 and at most 1 (1 = off), not 2.0"),
        ("--min-p", 1.5, "min_p must be"),
        ("--repetition-penalty", 0, "repetition_penalty must be"),
        ("--seed", -1, "seed must be"),
        ("--seed", 2**64, "seed must be"),
        ("--stop", "", "stop must be"),
        ("--kv-window", 0, "kv_window must be"),
        ("--save-state", "/no/such/folder/state", "there is no folder /no/such/folder"),
        ("--load-state", "/no/such/state", "no saved state at /no/such/state"),
        ("--file", "/no/such/prompt", "give one prompt"),
        ("--temprature", 1, "nearest known: '--temperature'"),
        ("--max-token", 1, "nearest known: '--max-tokens'"),
        ("--max_tokns", 1, "nearest known: '--max-tokens'"),
        ("-z", 1, "unknown option -z"),
        ("--seed", None, "expected one argument"),
    ],
)
def test_bad_options(run, folder, option, value, words):
    line = one_line(run("generate", "the a", "--model", folder, option, *([] if value is None else [value])))
    assert words in line


@pytest.mark.parametrize(
    "words, message",
    [
        (["genrate"], "unknown command 'genrate', nearest known: 'generate'"),
        (["generate", "the", "a"], "unexpected argument 'a'"),
        (["generate"], "no prompt: give it as an argument, with --file F, or through a pipe"),
        (["generate", "a", "-p", "b"], "give one prompt"),
        (["generate", "--file", "/no/such/prompt"], "/no/such/prompt: No such file or directory"),
        (["generate", "--file", "/"], "/: Is a directory"),
        (["generate", "a", "--model", "/no/such/model"], "no such model: /no/such/model"),
        (["perplexity"], "no text: give it with --file F or through a pipe"),
        (["perplexity", "--file", "/no/such/text"], "/no/such/text: No such file or directory"),
        (
            ["perplexity", "--context", "-1", "--file", "x"],
            "--context must be 0 (the whole text) or more tokens, not -1",
        ),
        (["perplexity", "--fle", "x"], "unknown option --fle, nearest known: '--file'"),
        (["convert", "--modle", "x"], "unknown option --modle, nearest known: '--model'"),
        (["info", "--model", "/"], "/ has no config.json"),
    ],
)
def test_user_errors(run, words, message):
    assert message in one_line(run(*words))


def test_text_that_is_not_utf8(run, folder, tmp_path):
    line = one_line(run("generate", "-", "--model", folder, stdin=b"the caf\xe9 and more"))
    assert "stdin is not UTF-8 text: byte 0xe9 at position 7" in line
    raw = "é".encode() * (cli.PIECE // 2) + b"abc\xff"  # in the second piece
    (tmp_path / "text").write_bytes(raw)
    line = one_line(run("generate", "--file", tmp_path / "text", "--model", folder))
    assert f"{tmp_path / 'text'} is not UTF-8 text: byte 0xff at position {cli.PIECE + 3}" in line
    raw = b"x" * (cli.PIECE - 1) + b"\xe5\xad"  # a character that the edge of a piece and then the end cut off
    line = one_line(run("perplexity", "--model", folder, stdin=raw))
    assert f"byte 0xe5 at position {cli.PIECE - 1}" in line
    argument = subprocess.run(
        [*COMMAND, "generate", b"ab\xff", "--model", str(folder)], capture_output=True, env=ENVIRONMENT
    )
    assert argument.returncode == 2 and b"byte 0xff at character 2" in argument.stderr


def test_debug_shows_where_an_error_came_from(run, folder):
    status, out, err = run("generate", "a", "--model", folder, "--top-p", 7, "--debug")
    assert status == 2 and err.startswith("Traceback") and "mlx_cosyh3: top_p must be" in err


def test_version_and_help(run):
    assert run("--version")[:2] == (0, f"mlx_cosyh3 {mlx_cosyh3.__version__}\n")
    status, out, err = run("--help")
    assert status == 0 and all(name in out for name in ("generate", "repl", "perplexity", "convert", "verify"))
    for name in ("generate", "repl", "perplexity", "convert", "verify", "info"):
        assert run(name, "--help")[0] == 0
    status, out, err = run()
    assert (status, out) == (2, "") and "usage" in err


def test_info(run, folder):
    status, out, err = run("info", "--model", folder)
    assert (status, err) == (0, "") and "width       16; MLP 32" in out and "bytes in 4 files\n" in out


def test_unescape():
    assert unescape(r"a\nb\tc\\nd") == "a\nb\tc\\nd" and unescape("plain") == "plain"


# ---------------------------------------------------------------- perplexity


@pytest.mark.parametrize("way", ["file", "pipe", "dash"])
def test_perplexity_prints_figures(run, folder, model, tmp_path, way):
    from mlx_cosyh3.perplexity import perplexity

    text = "the theatre, a naïve thing 字\n" * 5
    (tmp_path / "text").write_text(text, encoding="utf-8")
    words = {"file": ["--file", tmp_path / "text"], "pipe": [], "dash": ["--file", "-"]}[way]
    stdin = None if way == "file" else text.encode()
    status, out, err = run("perplexity", *words, "--model", folder, "--context", 16, stdin=stdin)
    assert (status, err) == (0, "")
    figures = {line[:15].strip(): float(line[15:]) for line in out.splitlines()}
    want = perplexity(model, text, 16)
    assert (figures["tokens"], figures["bytes"]) == (want.tokens, len(text.encode()))
    assert figures["mean nll"] == pytest.approx(want.mean_nll, abs=1e-5)
    assert figures["perplexity"] == pytest.approx(want.perplexity, rel=1e-4)
    assert figures["bits per byte"] == pytest.approx(want.bits_per_byte, abs=1e-4)


def test_perplexity_of_nothing(run, folder):
    assert "the text is empty" in one_line(run("perplexity", "--model", folder, stdin=b""))


# ---------------------------------------------------------------- as a process


def test_the_program_as_users_start_it(folder, model):
    words = ["generate", "-", "--model", str(folder), "--seed", "2", "--max-tokens", "8"]
    done = subprocess.run([*COMMAND, *words], input=b"the a\n", capture_output=True, env=ENVIRONMENT)
    want = generate(model, "the a", seed=2, max_tokens=8).text
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == want + "\n" * (not want.endswith("\n"))


def heed_ctrl_c():
    """A shell starts what it runs in the background with SIGINT ignored, which is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def endless(folder):
    """endless(*options): a `generate` that does not end by itself; killed after a minute, should a test hang."""
    started = []

    def start(*options):
        words = [*COMMAND, "generate", "the a", "--model", str(folder), "--max-tokens", "10000000", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(words, env=ENVIRONMENT, preexec_fn=heed_ctrl_c, **pipes)
        started.append((process, threading.Timer(60, process.kill)))
        started[-1][1].start()
        return process

    yield start
    for process, timer in started:
        timer.cancel()
        process.kill()
        process.wait()


def test_text_arrives_while_it_is_generated_and_ctrl_c_keeps_it(endless, model, tmp_path):
    process = endless("--seed", "5", "--save-state", str(tmp_path / "state"))
    first = process.stdout.read(30)  # comes although the process never ends by itself
    process.send_signal(signal.SIGINT)
    rest, err = process.stdout.read(), process.stderr.read()
    assert (process.wait(), err) == (130, b"")
    text = (first + rest).decode()
    want = generate(model, "the a", seed=5, max_tokens=len(text) + 50).text
    assert len(text) > 10 and want.startswith(text.removesuffix("\n"))
    assert (tmp_path / "state").is_file()


def test_a_reader_that_leaves_early_is_no_error(endless):
    process = endless()
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["generate", "the a"], ["info"]])
def test_a_full_disk_is_one_line(folder, words):
    with open("/dev/full", "wb") as full:
        words = [*COMMAND, *words, "--model", str(folder)]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (2, b"mlx_cosyh3: No space left on device\n")


# ---------------------------------------------------------------- where it runs, and by when


@pytest.mark.parametrize(
    "words, said",
    [
        (["--deadline", "soon"], "argument --deadline: invalid float value: 'soon'"),
        (["--deadline", "0"], "deadline must be more than 0 seconds, not 0.0"),
        (["--deadline", "nan"], "deadline must be more than 0 seconds"),
        (["--late", "best"], "--late goes with --deadline"),
        (["--lighter", "x"], "--lighter goes with --deadline"),
        (["--deadline", "1", "--late", "bst"], "late must be one of refuse, best, not 'bst', nearest known: 'best'"),
        (["--device", "tpu"], "device must be one of auto, gpu, cpu, not 'tpu', nearest known: 'gpu'"),
        (["--max-memory", "lots"], "max_memory must be bytes from 1 MB"),
        (["--on-battery", "off"], "on_battery must be one of reduce, cpu, ignore, not 'off'"),
        (["--at-heat", "cold"], "at_heat must be one of"),
        (["--rest", "x"], "rest must be from 0 to 20, not 'x'"),
        (["--retry-on-cpu", "maybe"], "retry_on_cpu must be 1 (on) or 0 (off)"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "say", "vc"])
def test_bad_values_are_one_line_before_a_model_is_loaded(run, command, words, said):
    assert said in one_line(run(command, "x", *words, "--model", "/nowhere"))


def test_help_names_what_there_is(run):
    for command in ("generate", "say", "vc"):
        status, out, err = run(command, "--help")
        listed = out[out.index("where it runs, and by when") :]
        for name in ("deadline", "late", "lighter", *runtime.KNOBS):
            assert f"--{name.replace('_', '-')} " in listed
        for known in (deadline.LATE, runtime.DEVICES, runtime.SPARING):
            assert all(word in listed for word in known)


def test_generate_in_time_on_the_device_that_was_asked_for(run, folder, monkeypatch):
    asked = {}
    plain = mlx_cosyh3.stream_generate

    def stream_generate(model, prompt, **options):
        asked.update(options)
        return plain(model, prompt, **options)

    monkeypatch.setattr(mlx_cosyh3, "stream_generate", stream_generate)
    words = ["generate", "the cat", "--model", folder, "--seed", 1, "--max-tokens", 5]
    want = run(*words)[1]
    knobs = ["--deadline", 600, "--late", "best", "--device", "cpu", "--on-battery", "cpu", "--retry-on-cpu", "0"]
    status, out, err = run(*words, *knobs)
    policy = asked["policy"]
    assert (status, out) == (0, want) and (asked["deadline"], asked["late"]) == (600, "best")
    assert (policy.device, policy.on_battery, policy.retry_on_cpu) == ("cpu", "cpu", False)
    lighter = [*words, "--deadline", 600, "--lighter", folder]
    assert "lighter: its weights take" in one_line(run(*lighter))
    assert "--lighter goes without" in one_line(run(*lighter, "--save-state", "s"))


def test_max_memory_is_told_to_mlx(run, folder):
    before = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    try:
        run("generate", "the cat", "--model", folder, "--max-tokens", 2, "--max-memory", "3GB")
        assert mx.set_memory_limit(2**40) == 3 * 10**9
    finally:
        mx.set_memory_limit(before[0])
        mx.set_cache_limit(before[1])
