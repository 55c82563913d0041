"""The speaking commands of the program: say, clone, vc, voices."""

import contextlib
import os
import secrets
import sys
import time
from pathlib import Path

import mlx_cosyh3
from mlx_cosyh3 import policy_cli, trace
from mlx_cosyh3.errors import CosyH3Error

DEFAULT_VOICE_MODEL = "cosyvoice3-tiny"

# name -> (type, placeholder, help): the options of `generate` that both `say` and the REPL offer
OPTIONS = {
    "instruct": (str, "TEXT", "how to speak, in words"),
    "mode": (str, "MODE", "zero_shot, cross_lingual, instruct or sft; default: as the other options say"),
    "language": (str, "zh|en", "language of the numbers and signs; default: by the text's own letters"),
    "seed": (int, "S", "the same seed gives the same audio; without one it differs each time"),
    "temperature": (float, "T", "how freely to draw speech tokens; 0 = always the likeliest"),
    "top_k": (int, "K", "draw from the K likeliest tokens only"),
    "top_p": (float, "P", "draw from the smallest set whose probability reaches P"),
    "win_size": (int, "N", "a token drawn again within N tokens is drawn anew from all"),
    "tau_r": (float, "R", "the share of that window it must make up"),
    "speed": (float, "X", "tempo, 0.5 to 2, at the same pitch"),
    "steps": (int, "N", "steps of the flow; more are slower and finer"),
    "chunk_tokens": (int, "N", "streamed: speech tokens of the first chunk; default: 25, in CosyVoice 1 two seconds"),
    "max_chunk_tokens": (int, "N", "streamed: speech tokens of the longest chunk; default: 100, or two seconds"),
    "max_seconds": (float, "S", "stop after this much audio"),
    "pause": (float, "S", "seconds of silence between the segments of a long text"),
}


SOUND = {"instruct", "mode", "language", "seed", "speed", "max_seconds", "pause"}  # the others: how it is computed


def defaults():
    from mlx_cosyh3.cosyvoice.speech import SpeechOptions

    return {name: getattr(SpeechOptions(), name) for name in OPTIONS}


def add_options(parser, without=()):
    """The options of `generate`, in two groups of `parser`, or in `parser` where that is a group."""
    sound = work = parser
    if hasattr(parser, "parse_args"):
        sound = parser.add_argument_group("how it sounds")
        work = parser.add_argument_group("how it is drawn and computed")
    for (name, (kind, placeholder, text)), default in zip(OPTIONS.items(), defaults().values()):
        if name in without:
            continue
        group = sound if name in SOUND else work
        group.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, default=default, metavar=placeholder,
                           help=text + ("" if default is None else f" ({default})"))  # fmt: skip


def add_model(parser):
    parser.add_argument("--model", metavar="DIR_OR_REPO", default=DEFAULT_VOICE_MODEL,
                        help="CosyVoice model folder or hub repo id; default: the small model of the package")  # fmt: skip
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub repo")


def add_voice(parser):
    parser.add_argument("--voice", metavar="V", help="a voice of the model (see `voices`), a voice file, a recording; "
                        "default: the model's first voice")  # fmt: skip
    parser.add_argument("--voice-text", metavar="TEXT", help="what is said in the recording, word for word")


def note(text):
    print(f"note: {text}", file=sys.stderr, flush=True)


def load_speaker(args):
    """The model of --model, which must be one that speaks."""
    with trace.span("load"):
        model = mlx_cosyh3.load(args.model, revision=args.revision, lighter=getattr(args, "lighter", None))
    if not hasattr(model, "voices"):
        raise CosyH3Error(
            f"{args.model} is no CosyVoice model, it cannot speak; `mlx_cosyh3 generate` continues text with it"
        )
    return model


def find_voice(model, name, transcript, note=note, compat=False, policy=None):
    """--voice: a voice of the model, a voice file, or a recording (`compat`, `policy`: see Voice.from_audio)."""
    from mlx_cosyh3.cosyvoice.voice import Voice

    if name is None or name in model.voices:
        if transcript is not None:
            raise CosyH3Error("--voice-text goes with a recording: give one with --voice FILE")
        return name
    path = Path(name).expanduser()
    if path.suffix == ".safetensors":
        if transcript is not None:
            raise CosyH3Error(
                f"--voice-text goes with a recording; {name} is a voice file that holds its own transcript"
            )
        return Voice.load(path)
    if path.exists():
        how = {"note": note, "compat": compat, "policy": policy}
        return Voice.from_audio(model, path, transcript, name=path.stem, **how)
    if path.suffix or "/" in name:
        raise CosyH3Error(f"there is no voice file or recording {name}")
    return model.find_voice(name)  # raises, with the names there are


class Progress:
    """Stages on stderr, on one line, where that is a terminal."""

    def __init__(self, err=None):
        self.err = err or sys.stderr
        self.terminal, self.stage, self.shown = self.err.isatty(), None, 0.0
        self.names = {
            "llm": "speech tokens",
            "flow": "flow",
            "vocoder": "vocoder",
            "speech_tokenizer": "speech tokenizer",
        }

    def __call__(self, stage, done, all):
        now = time.monotonic()
        if not self.terminal or (stage == self.stage and now - self.shown < 0.1 and done != all):
            return
        self.stage, self.shown = stage, now
        print(
            f"\r\x1b[K{self.names.get(stage, stage)} {done}{f'/{all}' if all else ''}",
            end="",
            file=self.err,
            flush=True,
        )

    def clear(self):
        if self.terminal and self.stage is not None:
            print("\r\x1b[K", end="", file=self.err, flush=True)


# ---------------------------------------------------------------- say


def add_compat(parser):
    parser.add_argument("--compat", action="store_true", help="compute as upstream does where it is wrong, for equal "
                        "numbers: see SpeechOptions and Voice.from_audio")  # fmt: skip


def add_output(parser, default):
    parser.add_argument("-o", "--output", metavar="F", help=f"audio file to write (wav, flac); '-' is a wav on stdout; "
                        f"default: {default}, or nothing with --play")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there already")
    parser.add_argument("--stream", action="store_true", help="make the audio chunk by chunk: the first is there soon")
    parser.add_argument("--play", action="store_true", help="play it")
    parser.add_argument("--stats", action="store_true", help="print times to stderr even if not in a terminal")
    parser.set_defaults(default_output=default)


def add_say(parser):
    parser.add_argument("text", nargs="?", help="text to speak; '-' or nothing reads it from a pipe")
    parser.add_argument("--file", metavar="F", help="read the text from a file")
    add_model(parser)
    add_voice(parser)
    add_output(parser, "speech.wav")
    parser.add_argument("--causal", action="store_true", help="without --stream: compute as streaming does")
    parser.add_argument("--no-normalize", action="store_true", help="do not read numbers and signs as words")
    add_compat(parser)
    add_options(parser)
    trace.add_option(parser)
    policy_cli.add_arguments(parser)


def say(args, read_text):
    from mlx_cosyh3.cosyvoice.speech import SpeechOptions

    options = {name: getattr(args, name) for name in OPTIONS} | {"compat": args.compat} | policy_cli.options(args)
    options["seed"] = seed_of(args)
    SpeechOptions(**options)  # bad options before a model is loaded
    if args.stream and args.causal:
        raise CosyH3Error("--causal goes without --stream, which always computes so: leave it out")
    out = output_of(args)
    text = read_text(args)
    model = load_speaker(args)
    voice = find_voice(model, args.voice, args.voice_text, compat=args.compat, policy=options["policy"])
    options |= {"voice": voice, "normalize": not args.no_normalize} | ({} if args.stream else {"causal": args.causal})
    return deliver(
        args, out, model, options["seed"],
        lambda progress: model.start(text, args.stream, note=note, progress=progress, **options),
    )  # fmt: skip


def seed_of(args):
    """--seed; chosen here where none was given, so that the statistics can name it."""
    return secrets.randbelow(2**32) if args.seed is None else args.seed


def output_of(args):
    """Where to write: see `output`."""
    given = args.output is not None
    return output(args.output if given or args.play else args.default_output, args.overwrite or not given)


def deliver(args, out, model, seed, start):
    """Run the stream that `start(progress)` begins, with its audio to `out` and to --play -> the exit status."""
    from mlx_cosyh3.cosyvoice import audio

    player = audio.Player(model.sample_rate) if args.play else None
    progress = Progress()
    try:
        result, interrupted = listen(lambda: start(progress), player)
    finally:
        progress.clear()
    if out is not None and len(result.audio):
        result.save(out)
        if out != "-":
            print(out)
    if args.stats or sys.stderr.isatty():
        print(stats_line(result, seed), file=sys.stderr)
    if interrupted and not len(result.audio):
        note("interrupted before there was any audio; nothing was written")
    return 130 if interrupted else 0


def listen(start, player=None, note=note):
    """Run the stream that `start()` makes -> (SpeechResult, whether Ctrl-C cut it short). What was made is in it.

    player   an audio.Player that plays it; closed at the end
    A stream's work is done in a thread of its own, so that Ctrl-C finds this one waiting."""
    interrupted, stream = False, None

    def play(piece=None):
        """Play a piece; None: wait until all was played."""
        nonlocal player
        try:
            if player is not None:
                player.finish() if piece is None else player.add(piece)
        except CosyH3Error as e:  # a device that fails is no reason to lose the audio
            note(f"{e}; the rest is not played")
            player.close()
            player = None

    try:
        stream = start()
        try:
            for piece in stream:
                play(piece)
        except KeyboardInterrupt:
            interrupted = True
        stream.close()
        if not interrupted:
            with contextlib.suppress(KeyboardInterrupt):
                play()
    finally:
        if stream is not None:
            stream.close()
        if player is not None:
            player.close()
    return stream.result, interrupted


def output(path, overwrite, endings=(".wav", ".flac")):
    """The path to write, checked before any work: Path, "-", or None."""
    if path is None or path == "-":
        if path == "-" and sys.stdout.isatty():
            raise CosyH3Error("-o - writes a wav to stdout, which is a terminal: pipe it to a file or a player")
        return path
    path = Path(path).expanduser()
    if not path.parent.is_dir():
        raise CosyH3Error(f"there is no folder {path.parent} to write {path.name} to")
    if path.is_dir():
        raise CosyH3Error(f"{path} is a folder: give a file name, such as {path}/speech{endings[0]}")
    if path.suffix.lower() not in endings:
        raise CosyH3Error(f"-o {path}: the name must end in {' or '.join(endings)}, which says what to write")
    if path.exists() and not overwrite:
        raise CosyH3Error(f"{path} exists: pass --overwrite to replace it, or choose another -o")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CosyH3Error(f"cannot write {path}: no permission; choose another -o")
    return path


def stats_line(result, seed=None):
    """One line about a SpeechResult."""
    stages = ", ".join(f"{name.replace('_', ' ')} {s:.2f} s" for name, s in result.seconds.items())
    ended = {"stop": "", "length": "; cut off by a limit", "cancelled": "; interrupted"}[result.finish_reason]
    seed = "" if seed is None else f"; seed {seed}"
    return (f"{result.duration:.2f} s of audio, {result.mode}; {stages}; real-time factor {result.rtf:.2f}; "
            f"peak memory {result.peak_memory:.3f} GB{seed}{ended}")  # fmt: skip


# ---------------------------------------------------------------- clone, vc, voices


def add_clone(parser):
    parser.add_argument("recording", help="a recording of the voice: 3 to 30 s, one speaker, 16 kHz or more")
    parser.add_argument("--text", metavar="TEXT", help="what is said in it, word for word: makes a better copy")
    parser.add_argument(
        "-o", "--output", metavar="F", help="voice file to write (default: NAME.voice.safetensors beside you)"
    )
    parser.add_argument("--name", help="name of the voice (default: that of the recording)")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there already")
    add_compat(parser)
    add_model(parser)


def clone(args):
    from mlx_cosyh3.cosyvoice.voice import Voice

    recording = Path(args.recording).expanduser()
    if not recording.is_file():
        raise CosyH3Error(f"there is no recording {args.recording}")
    name = args.name or recording.stem
    out = output(f"{name}.voice.safetensors" if args.output is None else args.output, args.overwrite, (".safetensors",))
    if out == "-":
        raise CosyH3Error(f"-o -: a voice goes to a file, such as {name}.voice.safetensors")
    voice = Voice.from_audio(load_speaker(args), recording, args.text, name=name, note=note, compat=args.compat)
    voice.save(out)
    print(out)
    print(f"{name}: {voice.seconds:.1f} s, {len(voice.prompt_tokens)} speech tokens, "
          f"{'with' if voice.transcript else 'without'} a transcript", file=sys.stderr)  # fmt: skip


def add_vc(parser):
    parser.add_argument("source", help="the recording that says what is to be said")
    add_model(parser)
    add_voice(parser)
    add_output(parser, "converted.wav")
    add_compat(parser)
    add_options(parser, without=OPTIONS.keys() - {"speed", "steps", "seed", "chunk_tokens", "max_chunk_tokens"})
    trace.add_option(parser)
    policy_cli.add_arguments(parser)


def vc(args):
    from mlx_cosyh3.cosyvoice.speech import SpeechOptions

    options = {"steps": args.steps, "speed": args.speed, "seed": seed_of(args)} | policy_cli.options(args)
    if args.stream:
        options |= {name: getattr(args, name) for name in ("chunk_tokens", "max_chunk_tokens", "compat")}
    SpeechOptions(**options)  # bad options before a model is loaded
    out = output_of(args)
    source = Path(args.source).expanduser()
    if not source.is_file():
        raise CosyH3Error(f"there is no recording {args.source}")
    model = load_speaker(args)
    voice = find_voice(model, args.voice, args.voice_text, compat=args.compat, policy=options["policy"])
    return deliver(
        args, out, model, options["seed"],
        lambda progress: model.start_conversion(source, voice, args.stream, note=note, progress=progress, **options),
    )  # fmt: skip


def voices(args):
    model = load_speaker(args)
    for name, voice in model.voices.items():
        prompt = f"{voice.seconds:.1f} s recording" if voice.has_prompt else "speaker embedding alone"
        known = voice.transcript or (
            "transcript stored as tokens" if voice.transcript_ids is not None else "no transcript"
        )
        print(f"{name}\t{prompt}\t{known if voice.has_prompt else '-'}")
    if not model.voices:
        note("this model holds no voices; make one from a recording: mlx_cosyh3 clone me.wav --text '...'")


def start_repl(args, options):
    """A SpeechRepl from the arguments of the `repl` command; `options` are those of `generate` that were given."""
    from mlx_cosyh3.cosyvoice.speech import SpeechOptions
    from mlx_cosyh3.speech_repl import SpeechRepl

    SpeechOptions(**options)  # bad options before a model is loaded
    if args.kv_window is not None:
        raise CosyH3Error("--kv-window goes with models that continue text; leave it out")
    model = load_speaker(args)
    voice = find_voice(model, args.voice, args.voice_text)
    return SpeechRepl(model, options, args.out_dir or ".", voice, play=not args.no_play)
