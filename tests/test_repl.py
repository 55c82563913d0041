"""The REPL: state between turns, its commands, Ctrl-C and Ctrl-D in a terminal, pipes.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_repl.py
"""

import io
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from mlx_cosyh3 import generate, load, repl
from mlx_cosyh3.console import DEFAULTS
from mlx_cosyh3.repl import Repl
from tests.small_model import write_model

GREEDY = {**DEFAULTS, "temperature": 0.0, "max_tokens": 8}


class Session:
    """A Repl whose lines are given one by one; say(line) -> (stdout, stderr) of that line."""

    def __init__(self, model, options=GREEDY, out=None):
        self.out, self.err = out or io.StringIO(), io.StringIO()
        self.repl = Repl(model, options, self.out, self.err)

    def say(self, line):
        self.out.seek(0), self.out.truncate(), self.err.seek(0), self.err.truncate()
        lines = iter([line])
        self.repl.run(lambda: next(lines, None))
        return self.out.getvalue(), self.err.getvalue()

    def text(self, line):
        out, err = self.say(line)
        assert err == ""
        return out.strip("\n")


def tokens(model, ids, n=8, **options):
    return generate(model, ids, **{"temperature": 0, "max_tokens": n, **options}).tokens


def test_turns_continue_each_other_exactly(model):
    session, encode = Session(model), model.tokenizer.encode
    first = tokens(model, encode("the a"))
    assert session.text("the a") == model.tokenizer.decode(first).strip("\n")
    so_far = encode("the a") + first + encode(" theatre 字")
    second = tokens(model, so_far)
    assert session.text(" theatre 字") == model.tokenizer.decode(second).strip("\n")
    third = tokens(model, so_far + second)
    assert session.text("") == model.tokenizer.decode(third).strip("\n")  # an empty line goes on


def test_an_empty_line_first_starts_from_end_of_text(model):
    assert Session(model).text("") == generate(model, "", temperature=0, max_tokens=8).text.strip("\n")


def test_undo_takes_back_turn_after_turn(model):
    session = Session(model)
    texts = [session.text(line) for line in ("the", " a", "x")]
    for line, text in zip(("x", " a", "the"), reversed(texts)):
        assert "taken back" in session.say("/undo")[1]
        assert session.text(line) == text
        session.say("/undo")
    assert session.say("/undo")[1] == "mlx_cosyh3: there is nothing to undo\n"
    assert session.repl.cache.length == 0


def test_undo_keeps_a_bounded_number_of_turns(model):
    session = Session(model, {**GREEDY, "max_tokens": 1})
    for _ in range(repl.UNDO_TURNS + 3):
        session.say("a")
    replies = [session.say("/undo")[1] for _ in range(repl.UNDO_TURNS + 1)]
    assert all("taken back" in reply for reply in replies[:-1]) and "nothing to undo" in replies[-1]


def test_reset_and_its_undo(model):
    session = Session(model)
    first = session.text("the a")
    second = session.text("x")
    session.say("/undo")
    session.say("/reset")
    assert session.text("the a") == first
    session.say("/undo"), session.say("/undo")  # the turn, the reset
    assert session.text("x") == second


def test_save_and_load(model, tmp_path):
    session, path = Session(model), tmp_path / "my state"
    session.say("the a")
    assert f"tokens saved to {path}" in session.say(f"/save {path}")[1]
    second = session.text("x")
    other = Session(model)
    other.say("something else")
    assert "the state holds" in other.say(f"/load {path}")[1]
    assert other.text("x") == second
    other.say("/undo"), other.say("/undo")  # the turn, the load
    fresh = Session(model)
    fresh.say("something else")
    assert other.text("x") == fresh.text("x")


def test_a_state_of_another_model_is_refused(model, tmp_path):
    other = Session(load(write_model(tmp_path / "other", seed=1)))
    other.say("the a")
    other.say(f"/save {tmp_path / 'state'}")
    session = Session(model)
    first = session.text("the a")
    out, err = session.say(f"/load {tmp_path / 'state'}")
    assert out == "" and err.startswith("mlx_cosyh3: ") and err.count("\n") == 1
    session.say("/undo")
    assert session.text("the a") == first


def test_seed_makes_turns_repeatable(model):
    options = {**DEFAULTS, "max_tokens": 12}
    one, two = Session(model, options), Session(model, options)
    one.say("/seed 7"), two.say("/set seed 7")
    same = [one.text(line) for line in ("the", "a", "x")]
    assert same == [two.text(line) for line in ("the", "a", "x")]
    assert same[0] == generate(model, "the", seed=7, max_tokens=12).text.strip("\n")
    for _ in range(3):
        one.say("/undo")
    another = generate(
        model, "the", seed=10, max_tokens=12
    ).text  # turn 3 since the seed was set: not turn 0 again
    assert one.text("the") == another.strip("\n")
    assert one.say("/seed none")[1] == "seed = none\n"
    assert one.repl.options["seed"] is None


def test_set_changes_and_lists_options(model):
    session = Session(model, dict(DEFAULTS))
    listing = session.say("/set")[1]
    assert [line.split(" = ")[0] for line in listing.splitlines()] == list(DEFAULTS)
    for line, shown in [
        ("/set top_p 0.8", "top_p = 0.8"), ("/set max-tokens 5", "max_tokens = 5"), ("/set top_k 0", "top_k = 0"),
        ("/set repetition_penalty 1.3", "repetition_penalty = 1.3"),
        ("/set repetition_penalty none", "repetition_penalty = none"),
        (r"/set stop \n", r"stop = '\n'"), ("/set stop", r"stop = '\n'"), ("/set stop none", "stop = none"),
        ("/set temperature 0", "temperature = 0.0"),
    ]:  # fmt: skip
        assert session.say(line) == ("", shown + "\n")
    assert session.text("the") == generate(model, "the", temperature=0, max_tokens=5).text.strip("\n")


@pytest.mark.parametrize(
    "line, words",
    [
        ("/set top_p 2", "top_p must be more than 0"),
        ("/set top_p high", "top_p must be a number, not 'high'"),
        ("/set top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("/set tpo_p 1", "nearest known: 'top_p'"),
        ("/set nothing", "unknown option 'nothing'"),
        ("/set max_tokens none", "max_tokens must be a whole number"),
        ("/seed -1", "seed must be"),
        ("/resett", "unknown command /resett, nearest known: '/reset'"),
        ("/save", "/save needs a file name"),
        ("/load /no/such/state", "no saved state at /no/such/state"),
        ("/save /no/such/folder/state", "/no/such/folder/state"),
        ("/undo 3", "/undo takes nothing after it, not '3'"),
        ("/", "unknown command /"),
        ("ab\udcff", "byte 0xff at character 2"),
    ],
)
def test_an_error_is_one_line_and_leaves_state_and_options(model, line, words):
    session = Session(model)
    session.text("the a")
    before = dict(session.repl.options)
    out, err = session.say(line)
    assert err.startswith("mlx_cosyh3: ") and err.count("\n") == 1 and words in err and out.strip() == ""
    assert session.repl.options == before
    control = Session(model)
    control.text("the a")
    assert session.text("x") == control.text("x")


def test_help_names_every_command_and_option(model):
    text = Session(model).say("/help")[1]
    assert all(name in text for name in (*Session(model).repl.commands, *DEFAULTS))


def test_stats(model):
    session = Session(model)
    session.text("the a")
    first, second = session.say("/stats")[1].splitlines()
    assert "prompt 2 tokens" in first and "generation 8 tokens" in first and "cut off by --max-tokens 8" in first
    assert second.startswith("the state holds 10 tokens")


def test_two_slashes_give_one_to_the_model(model):
    assert Session(model).text("//help") == generate(model, "/help", temperature=0, max_tokens=8).text.strip("\n")


class FullOut(io.StringIO):
    """There is no space left at the fourth piece of text."""

    writes = 0

    def write(self, text):
        self.writes += 1
        if 4 <= self.writes <= 6:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_an_error_in_the_middle_of_a_turn_undoes_the_turn(model):
    session = Session(model, out=FullOut())
    err = session.say("the a")[1]
    assert err == "mlx_cosyh3: No space left on device\n"
    assert session.repl.cache.length == 0 and not session.repl.before
    session.out.writes = 10
    assert session.text("the a") == Session(model).text("the a")


class InterruptedOut(io.StringIO):
    """Ctrl-C comes at the fourth piece of text."""

    writes = 0

    def write(self, text):
        super().write(text)
        self.writes += 1
        if self.writes == 4:
            raise KeyboardInterrupt  # where Python raises it: when the call that was under way returns


def test_ctrl_c_keeps_what_was_written_on_screen_and_in_the_state(model):
    session = Session(model, {**GREEDY, "max_tokens": 100_000}, out=InterruptedOut())
    shown = session.text("the a")
    length = session.repl.cache.length - 2
    ids = tokens(model, "the a", n=length)
    assert 3 <= length < 100_000 and shown == model.tokenizer.decode(ids).strip("\n")
    session.say("/set max_tokens 8")
    after = tokens(model, model.tokenizer.encode("the a") + ids + model.tokenizer.encode("x"))
    assert session.text("x") == model.tokenizer.decode(after).strip("\n")
    assert "interrupted" not in session.say("/stats")[1]


def test_ctrl_c_at_the_prompt_goes_on(model):
    session, steps = Session(model), iter([KeyboardInterrupt, "the a", None])

    def read():
        step = next(steps)
        if step is KeyboardInterrupt:
            raise step
        return step

    session.repl.run(read)
    assert session.out.getvalue().strip("\n") == generate(model, "the a", temperature=0, max_tokens=8).text.strip(
        "\n"
    )


# ---------------------------------------------------------------- as a process


def command(folder, *words):
    return [sys.executable, "-m", "mlx_cosyh3", "repl", "--model", str(folder), *words]


def test_through_a_pipe(model, folder):
    lines = b"the \\\na\n/nonsense\n\xff\xfe\n/quit\nnever read\n"
    done = subprocess.run(
        command(folder, "--temperature", "0", "--max-tokens", "8"), input=lines, capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.decode().strip("\n") == generate(model, "the \na", temperature=0, max_tokens=8).text.strip(
        "\n"
    )
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 2 and "unknown command /nonsense" in errors[0] and "byte 0xff at position 0" in errors[1]


def test_a_reader_that_leaves_early_is_no_error(folder):
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(command(folder, "--max-tokens", "1000000"), **pipes)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    process.stdin.write(b"the\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 141
    watchdog.cancel()
    process.stdin.close()


pty = pytest.importorskip("pty", reason="no pseudo-terminals here")


class Terminal:
    """The program in a pseudo-terminal of its own."""

    def __init__(self, words, **environment):
        import fcntl
        import termios

        def own_the_terminal():
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the tests themselves may run with it ignored

        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={**os.environ, "TERM": "dumb", **environment},
            preexec_fn=own_the_terminal,
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def send(self, keys):
        os.write(self.master, keys.encode())

    def wait_for(self, pattern, seconds=60):
        """Text up to and with the first match of `pattern`, which is then behind us."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"{pattern!r} did not come; the terminal shows {self.seen[-500:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # how Linux says that the other side is gone
                    assert re.search(pattern, self.seen), f"it ended without {pattern!r}: {self.seen[-500:]!r}"
        text, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return text

    def send_until(self, keys, pattern):
        """Send `keys` until `pattern` comes: readline may miss a Ctrl-C in the instant before it starts to wait."""
        for _ in range(20):
            self.send(keys)
            try:
                return self.wait_for(pattern, seconds=2)
            except AssertionError:
                continue
        return self.wait_for(pattern, seconds=0)

    def close(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal():
    opened = []

    def start(*words, **environment):
        opened.append(Terminal(*words, **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_in_a_terminal(terminal, folder, tmp_path):
    t = terminal(command(folder, "--max-tokens", "1000000"), XDG_STATE_HOME=str(tmp_path))
    t.wait_for(">> ")
    t.send("the a\n")
    t.wait_for("(?s)the a\r\n.{40}")  # the echo, then text of a generation without end
    t.send("\x03")
    stats = t.wait_for(r"generation (\d+) tokens.*interrupted\r\n>> ")
    count = int(re.search(r"generation (\d+) tokens", stats)[1])
    t.send("/stats\n")
    assert f"the state holds {count + 2} tokens" in t.wait_for(r"state holds \d+ tokens[^\n]*\n>> ")
    t.send("half a line")
    t.wait_for("half a line")
    t.send_until("\x03", r"\n>> ")
    t.send("/set top_p 9\n")
    t.wait_for(r"mlx_cosyh3: top_p must be [^\n]*\n>> ")
    t.send("/set max_tokens 3\n")
    t.wait_for(r"max_tokens = 3\r\n>> ")
    t.send(" x\n")
    t.wait_for(r"generation 3 tokens[^\n]*\n>> ")
    t.send("\x04")
    assert t.process.wait(timeout=60) == 0
    history = (tmp_path / "mlx_cosyh3" / "history").read_text()
    assert "the a\n" in history and "/set top_p 9\n" in history


def test_a_history_that_cannot_be_kept_is_no_error(terminal, folder):
    t = terminal(command(folder, "--max-tokens", "3"), XDG_STATE_HOME="/dev/null")
    t.wait_for(">> ")
    t.send("/quit\n")
    assert t.process.wait(timeout=60) == 0
    assert "Error" not in t.seen and "Traceback" not in t.seen
