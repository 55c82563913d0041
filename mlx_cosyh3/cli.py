"""The command `mlx_cosyh3`: say, clone, vc, voices, generate, repl, serve, convert, verify, info, doctor, bench ...

Data goes to stdout, everything else to stderr, where progress and statistics only appear in a terminal (or with
--stats). An error that a user can mend is one line on stderr and exit status 2; --debug shows where it came from.
"""

import argparse
import codecs
import contextlib
import os
import secrets
import sys
import traceback
from pathlib import Path

import mlx_cosyh3
from mlx_cosyh3 import logs, policy_cli, speech_cli, trace
from mlx_cosyh3.console import DEFAULTS, OPTIONS, check, show, stats_line, unescape
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.kernels import _dispatch

PIECE = 2**16  # bytes read at once from a file


def main(argv=None):
    """Run the command line `argv` (default: the program's own); returns the exit status."""
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character gets its number
    args = _parse(sys.argv[1:] if argv is None else argv)
    if isinstance(args, int):
        return args
    try:
        _dispatch.allowed()  # a misspelt MLX_COSYH3_KERNELS is named before any work is done
        logs.setup()  # likewise MLX_COSYH3_LOG
        with logs.request(), trace.to_file(getattr(args, "trace", None)):
            status = args.run(args)
        sys.stdout.flush()
        return status or 0
    except (KeyboardInterrupt, CosyH3Error, OSError) as e:
        _abandon_stdout()
        if isinstance(e, KeyboardInterrupt):
            return 130
        if isinstance(e, BrokenPipeError):  # the reader of a pipe has had enough, as `| head` has
            return 141
        if args.debug:
            traceback.print_exc()
        message = str(e)
        if isinstance(e, OSError):
            message = f"{e.filename}: {e.strerror}" if e.filename else e.strerror or message
        print(f"mlx_cosyh3: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _abandon_stdout():
    """Let nothing that is still buffered raise again when the interpreter exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line."""

    def error(self, message):
        print(f"mlx_cosyh3: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _parse(argv):
    """Parsed arguments, or an exit status if there is nothing to run."""
    parser = Parser(prog="mlx_cosyh3", description="CosyVoice speech and H3 language models in MLX. "
                    'To begin: mlx_cosyh3 say Hello. Options: mlx_cosyh3 COMMAND --help',
                    allow_abbrev=False)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"mlx_cosyh3 {mlx_cosyh3.__version__}")
    commands = parser.add_subparsers(metavar="command", title="commands", parser_class=Parser)
    known = {}
    for name, add_arguments, run, text in _commands():
        known[name] = sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
        )
        add_arguments(sub)
        sub.add_argument("--debug", action="store_true", help="show where an error came from")
        sub.set_defaults(run=run)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    if not argv[0].startswith("-") and argv[0] not in known:
        parser.error(f"unknown command {argv[0]!r}{nearest(argv[0], known)}")
    argv, sub = _dashes(argv), known.get(argv[0], parser)
    for word in argv[: argv.index("--") if "--" in argv else None]:
        # Before argparse looks: it would rather complain of what is missing than of what is misspelt.
        word = word.partition("=")[0]
        if word.startswith("--") and " " not in word and word not in sub._option_string_actions:
            sub.error(f"unknown option {word}{nearest(word, sub._option_string_actions)}")
    args, extra = parser.parse_known_args(argv)
    if extra and extra[0].startswith("-"):
        hint = f" (a prompt that begins with a dash: --prompt={extra[0]})" if argv[0] == "generate" else ""
        sub.error(f"unknown option {extra[0]}{hint}")
    if extra:
        sub.error(f"unexpected argument {extra[0]!r} (text with spaces needs quotes)")
    return args


def _dashes(argv):
    """Long options may be spelt with underscores: --max_tokens is --max-tokens."""
    out = []
    for i, word in enumerate(argv):
        if word == "--":
            return out + argv[i:]
        name, equals, value = word.partition("=")
        out.append(name.replace("_", "-") + equals + value if word.startswith("--") and " " not in name else word)
    return out


def _commands():
    """(name, function that adds its arguments, function that runs it, help)"""
    from mlx_cosyh3 import bench, convert, info, plot
    from mlx_cosyh3.convert import verify
    from mlx_cosyh3.server import cli as serve

    return [
        ("say", speech_cli.add_say, lambda args: speech_cli.say(args, _spoken), "speak a text; writes an audio file"),
        ("clone", speech_cli.add_clone, speech_cli.clone, "make a voice file from a recording"),
        ("vc", speech_cli.add_vc, speech_cli.vc, "say what a recording says with another voice"),
        ("voices", speech_cli.add_model, speech_cli.voices, "list the voices that a model holds"),
        ("generate", _add_generate, _generate, "continue a prompt; prints the continuation"),
        ("repl", _add_repl, _repl, "type line by line: the model continues the text, or speaks it"),
        ("serve", serve.add_arguments, serve.run, "answer OpenAI-compatible requests over HTTP, with a page to try it"),
        ("perplexity", _add_perplexity, _perplexity, "measure how well a model predicts a text"),
        ("convert", convert.add_arguments, convert.run, "convert a checkpoint to an MLX model folder"),
        ("verify", verify.add_arguments, verify.run, "compare a converted model with the checkpoint it came from"),
        ("info", info.add_arguments, info.run, "show what a model folder holds and can do"),
        ("doctor", _add_doctor, _doctor, "test the kernels on this machine"),
        ("bench", bench.add_arguments, bench.run, "measure a model on this machine, or compare two measurements"),
        ("plot", plot.add_arguments, plot.run, "draw a recording: waveform, mel, pitch, speech tokens"),
    ]


def _add_model(parser):
    parser.add_argument(
        "--model",
        metavar="DIR_OR_REPO",
        help="model folder or hub repo id; default: the small model that comes with the package",
    )
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub repo")


def _add_options(parser):
    """--kv-window and the options of `generate`."""
    parser.add_argument(
        "--kv-window",
        type=int,
        metavar="N",
        help="let attention layers look at the last N tokens only, which bounds memory",
    )
    for name, (kind, placeholder, text) in OPTIONS.items():
        default = DEFAULTS[name]
        flags = ["--" + name.replace("_", "-"), *(["--temp"] if name == "temperature" else [])]
        if name == "stop":
            parser.add_argument(
                *flags,
                action="append",
                default=[],
                metavar=placeholder,
                help=text.replace("%", "%%") + "; may be given several times",
            )
        else:
            parser.add_argument(
                *flags,
                dest=name,
                type=kind,
                default=default,
                metavar=placeholder,
                help=text + ("" if default is None else f" ({default})"),
            )


def _options(args):
    """The options of `generate` from parsed arguments, checked before a model is loaded."""
    options = {name: getattr(args, name) for name in OPTIONS}
    options["stop"] = tuple(unescape(text) for text in args.stop)
    check(options)
    return options


def _load(args):
    """The model of --model, which must be one that continues text."""
    with trace.span("load"):
        lighter = getattr(args, "lighter", None)
        model = mlx_cosyh3.load(args.model, revision=args.revision, kv_window=args.kv_window, lighter=lighter)
    if hasattr(model, "voices"):
        raise CosyH3Error(f"{args.model} is a model that speaks, it does not continue text; use `mlx_cosyh3 say`")
    return model


# ---------------------------------------------------------------- text in


def _text_in(path, what):
    """Yield the text of a file ("-": stdin) in pieces; raises CosyH3Error where it is not UTF-8."""
    name = "stdin" if path == "-" else path
    if path == "-" and sys.stdin is None:
        raise CosyH3Error(f"no {what}: stdin is closed")
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0  # bytes of the pieces read so far
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        while True:
            raw = file.read(PIECE)
            carried = decoder.getstate()[0]  # the beginning of a character, from the last piece
            try:
                text = decoder.decode(raw, final=not raw)
            except UnicodeDecodeError as e:
                at = before - len(carried) + e.start
                byte = e.object[e.start]
                raise CosyH3Error(f"{name} is not UTF-8 text: byte 0x{byte:02x} at position {at}") from None
            before += len(raw)
            if text:
                yield text
            if not raw:
                return


def _prompt(args):
    """The prompt from the argument, --prompt, --file or stdin. Without the line end that `echo` and editors add."""
    given = [p for p in (args.prompt, args.prompt_option, args.file) if p is not None]
    if len(given) > 1:
        raise CosyH3Error("give one prompt: as an argument, with --prompt, or with --file")
    if given and given[0] != "-" and args.file is None:
        return given[0]
    if not given and (sys.stdin is None or sys.stdin.isatty()):
        if args.load_state:
            return ""
        raise CosyH3Error("no prompt: give it as an argument, with --file F, or through a pipe")
    text = "".join(_text_in(given[0] if given else "-", "prompt"))
    return text.removesuffix("\n").removesuffix("\r")


def _spoken(args):
    """The text of `say`, likewise."""
    if args.text is not None and args.file is not None:
        raise CosyH3Error("give one text: as an argument or with --file")
    if args.text not in (None, "-"):
        return args.text
    if args.text is None and args.file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise CosyH3Error("no text: give it as an argument, with --file F, or through a pipe")
    return "".join(_text_in(args.file or "-", "text"))


# ---------------------------------------------------------------- the commands


def _add_generate(parser):
    parser.add_argument(
        "prompt",
        nargs="?",
        help="text to continue; '-' or nothing reads it from a pipe "
        "(a line end at its end is dropped, as with --file)",
    )
    parser.add_argument("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the prompt, as an option")
    trace.add_option(parser)
    parser.add_argument("--file", metavar="F", help="read the prompt from a file")
    _add_model(parser)
    _add_options(parser)
    parser.add_argument("--load-state", metavar="F", help="go on from a state that --save-state wrote")
    parser.add_argument("--save-state", metavar="F", help="write the state after the text to a file")
    parser.add_argument(
        "--stats", action="store_true", help="print speeds and seed to stderr even if not in a terminal"
    )
    policy_cli.add_arguments(parser)


def _generate(args):
    from mlx_cosyh3.cache import H3Cache

    options = _options(args) | policy_cli.options(args)
    if options["seed"] is None:
        options["seed"] = secrets.randbelow(2**32)  # chosen here so that the statistics can name it
    if args.save_state and not Path(args.save_state).parent.is_dir():
        raise CosyH3Error(f"--save-state: there is no folder {Path(args.save_state).parent}")
    if args.lighter and (args.load_state or args.save_state):
        raise CosyH3Error("--lighter goes without --load-state and --save-state: a state belongs to one set of weights")
    prompt = _prompt(args)
    model = _load(args)
    cache = H3Cache.load(args.load_state, model) if args.load_state else model.make_cache() if args.save_state else None
    stream = mlx_cosyh3.stream_generate(model, prompt, cache=cache, **options)
    result, interrupted = show(stream, sys.stdout)
    if args.save_state:
        cache.save(args.save_state)
    if args.stats or (sys.stdout.isatty() and sys.stderr.isatty()):
        print(stats_line(result, options["max_tokens"], options["seed"]), file=sys.stderr)
    return 130 if interrupted else 0


def _add_repl(parser):
    """The options of both kinds of models; which of them were given is only known where the defaults are None."""
    _add_model(parser)
    _add_options(parser)
    spoken = parser.add_argument_group("models that speak")
    speech_cli.add_options(spoken, without=OPTIONS)
    speech_cli.add_voice(spoken)
    spoken.add_argument("--out-dir", metavar="DIR", help="folder for the audio files (this one)")
    spoken.add_argument("--no-play", action="store_true", default=None, help="only save the audio")
    parser.set_defaults(**dict.fromkeys([*OPTIONS, *speech_cli.OPTIONS]))


def _repl(args):
    from mlx_cosyh3 import repl
    from mlx_cosyh3.load import find_model, read_config

    speaks = read_config(find_model(args.model, args.revision))["model_type"].startswith("cosyvoice")
    own, other = (speech_cli.OPTIONS, OPTIONS) if speaks else (OPTIONS, speech_cli.OPTIONS)
    only_spoken = () if speaks else ("voice", "voice_text", "out_dir", "no_play")
    for name in (*other, *only_spoken):
        if name not in own and getattr(args, name) is not None:
            kind = "continue text" if speaks else "speak"
            raise CosyH3Error(f"--{name.replace('_', '-')} goes with models that {kind}; leave it out")
    given = {name: getattr(args, name) for name in own if getattr(args, name) is not None}
    title = args.model or "the small model of the package"
    if speaks:
        repl.run(speech_cli.start_repl(args, given), title)
        return
    if "stop" in given:
        given["stop"] = tuple(unescape(text) for text in given["stop"])
    options = DEFAULTS | given
    check(options)
    repl.run(repl.Repl(_load(args), options), title)


def _add_perplexity(parser):
    parser.add_argument("--file", metavar="F", help="the text, UTF-8; '-' or nothing reads it from a pipe")
    parser.add_argument(
        "--context",
        type=int,
        default=512,
        metavar="N",
        help="tokens per window, each starting afresh; 0 = one window for the whole text (512)",
    )
    parser.add_argument(
        "--kv-window",
        type=int,
        metavar="N",
        help="let attention layers look at the last N tokens only, which bounds memory",
    )
    _add_model(parser)


def _perplexity(args):
    from tqdm import tqdm

    from mlx_cosyh3.perplexity import perplexity

    if args.context < 0:
        raise CosyH3Error(f"--context must be 0 (the whole text) or more tokens, not {args.context}")
    if args.file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise CosyH3Error("no text: give it with --file F or through a pipe")
    path = args.file or "-"
    size = None if path == "-" else os.stat(path).st_size
    model = _load(args)
    with tqdm(total=size, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:

        def counted():
            for piece in _text_in(path, "text"):
                yield piece
                bar.update(len(piece.encode()))

        score = perplexity(model, counted(), context=args.context)
    print(f"tokens         {score.tokens}")
    print(f"bytes          {score.bytes}")
    print(f"mean nll       {score.mean_nll:.6f}")
    print(f"perplexity     {score.perplexity:.4f}")
    print(f"bits per byte  {score.bits_per_byte:.5f}")


def _add_doctor(parser):
    parser.add_argument(
        "--json", metavar="FILE", help="also write a report to attach to a bug; '-' prints it in place of the table"
    )


def _doctor(args):
    from mlx_cosyh3 import doctor

    return doctor.run(args.json)
