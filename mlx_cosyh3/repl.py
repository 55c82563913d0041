"""`mlx_cosyh3 repl`: type text, the model continues it, and keeps what was said as its state.

Model text goes to stdout, all else to stderr, so piped input gives clean output. Nothing is added between what you
type and what the model wrote: the line breaks on the screen are not part of the text.
"""

import contextlib
import os
import sys
from collections import deque
from pathlib import Path

from mlx_cosyh3 import stream_generate
from mlx_cosyh3.cache import H3Cache
from mlx_cosyh3.console import OPTIONS, check, parse_option, show, stats_line
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.sampling import MAX_SEED

UNDO_TURNS = 16  # turns that /undo can take back; each keeps one copy of the state
HISTORY_LINES = 1000

HELP = """\
Text is given to the model, which continues it. An empty line lets it go on.
A backslash at the end of a line joins the next line to it, with a line break between. //text begins with one slash.
/set [name [value]]  show or change a generation option: {options}
                     (a stop text is not shown, but the state holds it)
/seed N              make what follows repeatable: turn n from here draws with seed N + n (none = off)
/undo                take back the last turn, /reset or /load ({undo} at most)
/reset               forget everything
/save FILE           write the state to a file
/load FILE           go on from a saved state
/stats               about the last turn and the state
/help                this text
/quit                leave (as Ctrl-D does). Ctrl-C stops a generation and keeps what was written
"""


class Shell:
    """Lines from a user: commands, and text for `turn`. Subclasses bring `commands` ({"/name": method}) and `turn`."""

    commands = {}

    def __init__(self, out=None, err=None):
        self.out, self.err = out or sys.stdout, err or sys.stderr

    def turn(self, text):
        """Carry out a line of text."""
        raise NotImplementedError

    def run(self, read):
        """Take lines from `read()` until it gives None or /quit comes. An error in a line is one line on stderr."""
        while True:
            try:
                if (line := read()) is None or not self.take(line):
                    return
            except KeyboardInterrupt:  # at the prompt, or in a command
                self.say("")
            except BrokenPipeError:
                raise
            except UnicodeDecodeError as e:
                self.say(
                    f"mlx_cosyh3: the line is not UTF-8: byte 0x{e.object[e.start]:02x} at position {e.start}"
                )
            except CosyH3Error as e:
                self.say(f"mlx_cosyh3: {e}")
            except OSError as e:
                self.say(f"mlx_cosyh3: {e.strerror or e}{f': {e.filename}' if e.filename else ''}")

    def take(self, line):
        """Carry out one line; False after /quit."""
        if not line.startswith("/") or line.startswith("//"):
            self.turn(line[1:] if line.startswith("//") else line)
            return True
        name, _, rest = line.strip().partition(" ")
        if name not in self.commands:
            raise CosyH3Error(f"unknown command {name}{nearest(name, self.commands)}; /help lists all")
        if name == "/quit":
            return False
        self.commands[name](rest.strip())
        return True

    def say(self, text):
        print(text, file=self.err, flush=True)

    @staticmethod
    def nothing_after(name, rest):
        if rest:
            raise CosyH3Error(f"{name} takes nothing after it, not {rest!r}")

    @staticmethod
    def path(name, rest):
        if not rest:
            raise CosyH3Error(f"{name} needs a file name")
        return Path(os.path.expanduser(rest))


class Repl(Shell):
    """One conversation with a model. `options`: the options of `generate`, by name."""

    def __init__(self, model, options, out=None, err=None):
        super().__init__(out, err)
        self.model, self.options = model, dict(options)
        self.cache = model.make_cache()
        self.before = deque(maxlen=UNDO_TURNS)  # copies of the state, for /undo
        self.drawn = 0  # turns since the seed was set
        self.stats = None
        self.commands = {
            "/set": self.set, "/seed": self.seed, "/undo": self.undo, "/reset": self.reset, "/save": self.save,
            "/load": self.load, "/stats": self.show_stats, "/help": self.help, "/quit": None,
        }  # fmt: skip

    def turn(self, text):
        """Give `text` to the model and show how it goes on. After an error the state is what it was before."""
        before, options = self.cache.copy(), dict(self.options)
        if options["seed"] is not None:
            options["seed"] = (options["seed"] + self.drawn) % (MAX_SEED + 1)
        try:
            result, _ = show(stream_generate(self.model, text, cache=self.cache, **options), self.out)
        except BaseException:
            self.cache = before
            raise
        self.drawn += 1
        self.before.append(before)
        self.stats = stats_line(result, options["max_tokens"], options["seed"])
        if self.err.isatty():
            self.say(self.stats)

    def set(self, rest):
        name, _, text = rest.partition(" ")
        if text:
            name, value = parse_option(name, text.strip())
            check({**self.options, name: value})
            self.options[name] = value
            if name == "seed":
                self.drawn = 0
        elif name:
            name, _ = parse_option(name, "0")
        for key in [name] if name else OPTIONS:
            value = self.options[key]
            if key == "stop":
                value = ", ".join(map(repr, value)) or None
            self.say(f"{key} = {'none' if value is None else value}")

    def seed(self, rest):
        self.set(f"seed {rest}")

    def undo(self, rest):
        self.nothing_after("/undo", rest)
        if not self.before:
            raise CosyH3Error("there is nothing to undo")
        self.cache = self.before.pop()
        self.say(f"taken back; the state holds {self.cache.length} tokens")

    def reset(self, rest):
        self.nothing_after("/reset", rest)
        self.before.append(self.cache)
        self.cache = self.model.make_cache()
        self.say("the state is empty")

    def save(self, rest):
        path = self.path("/save", rest)
        self.cache.save(path)
        self.say(f"{self.cache.length} tokens saved to {path}")

    def load(self, rest):
        path = self.path("/load", rest)
        cache = H3Cache.load(path, self.model)
        if cache.batch_size != 1:
            raise CosyH3Error(f"{path} holds {cache.batch_size} texts; a conversation can go on from one only")
        self.before.append(self.cache)
        self.cache = cache
        self.say(f"the state holds {cache.length} tokens")

    def show_stats(self, rest):
        self.nothing_after("/stats", rest)
        if self.stats:
            self.say(self.stats)
        self.say(f"the state holds {self.cache.length} tokens, {self.cache.nbytes / 1e6:.1f} MB")

    def help(self, rest):
        self.nothing_after("/help", rest)
        self.say(HELP.format(options=", ".join(OPTIONS), undo=UNDO_TURNS).rstrip())


def run(repl, title):
    """The `repl` command: a Shell with editing and history in a terminal, line by line from a pipe."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        repl.run(lambda: _joined(_piped_line))
        return
    repl.say(f"{title}. /help lists the commands, Ctrl-D leaves.")
    with _history():
        repl.run(lambda: _joined(_typed_line))


def _joined(read):
    """One line, with those that follow while it ends in a backslash; None at the end of input."""
    lines = []
    while True:
        line = read(".. " if lines else ">> ")
        if line is None:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _piped_line(prompt):
    raw = sys.stdin.buffer.readline()
    return raw.removesuffix(b"\n").removesuffix(b"\r").decode() if raw else None


def _typed_line(prompt):
    try:
        return input(prompt)
    except EOFError:
        print(file=sys.stderr)
        return None


@contextlib.contextmanager
def _history():
    """Line editing, and a history file in the user's state folder; goes without either where there is none."""
    try:
        import readline
    except ImportError:  # a Python built without it: plain input() still works
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    path = Path(state) / "mlx_cosyh3" / "history"
    with contextlib.suppress(OSError):  # no history yet, or not readable: start with an empty one
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a folder that cannot be written to is no reason to fail
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
