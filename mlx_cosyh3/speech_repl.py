"""`mlx_cosyh3 repl` with a model that speaks: each line becomes audio, played where that is possible, always saved.

The names of the files go to stdout, all else to stderr.
"""

from pathlib import Path

from mlx_cosyh3 import speech_cli
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.speech import SpeechOptions
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.repl import Shell
from mlx_cosyh3.sampling import MAX_SEED
from mlx_cosyh3.speech_cli import OPTIONS

HELP = """\
Text is spoken, and saved as speech-001.wav and so on in {folder}. //text begins with one slash.
A backslash at the end of a line joins the next line to it.
/voice [V [WORDS]]   speak as V: a voice of the model, a voice file, or a recording, whose words may follow; alone: list
/instruct TEXT|off   how to speak
/speed X             tempo, 0.5 to 2
/seed N              make what follows repeatable: line n from here draws with seed N + n (none = off)
/stream on|off       make and play the audio chunk by chunk
/play on|off         play what is spoken
/set [name [value]]  show or change an option: {options}
/save FILE           write the last audio to a file, too (wav, flac)
/replay              play the last audio again
/stats               about the last line
/help                this text
/quit                leave (as Ctrl-D does). Ctrl-C stops the speech and keeps the audio made so far
"""


class SpeechRepl(Shell):
    """Lines spoken by `model`. `options`: those of `generate` that speech_cli.OPTIONS names.

    folder   where the audio files go
    play     play them where something can; False: only save them"""

    def __init__(self, model, options=None, folder=".", voice=None, play=True, out=None, err=None):
        super().__init__(out, err)
        self.model, self.options = model, speech_cli.defaults() | (options or {})
        SpeechOptions(**self.options).settle(model)
        self.folder, self.voice = Path(folder).expanduser(), voice
        if not self.folder.is_dir():
            raise CosyH3Error(f"there is no folder {self.folder} to save audio in")
        self.streamed, self.playing = False, play
        self.drawn = 0  # lines since the seed was set
        self.result = self.stats = None
        self.commands = {
            "/voice": self.set_voice, "/instruct": self.instruct, "/speed": self.speed, "/seed": self.seed,
            "/stream": self.stream, "/play": self.play, "/set": self.set, "/save": self.save, "/replay": self.replay,
            "/stats": self.show_stats, "/help": self.help, "/quit": None,
        }  # fmt: skip

    def turn(self, text):
        options = dict(self.options)
        if options["seed"] is not None:
            options["seed"] = (options["seed"] + self.drawn) % (MAX_SEED + 1)
        player = self.player() if self.playing else None
        progress = speech_cli.Progress(self.err)
        try:
            options["voice"] = self.voice
            options |= {"note": self.note, "progress": progress}
            start = lambda: self.model.start(text, self.streamed, **options)  # noqa: E731
            result, interrupted = speech_cli.listen(start, player, self.note)
        finally:
            progress.clear()
        self.drawn += 1
        self.result, self.stats = result, speech_cli.stats_line(result, options["seed"])
        if len(result.audio):
            path = self.next_file()
            result.save(path)
            print(path, file=self.out, flush=True)
        elif interrupted:
            self.say("interrupted before there was any audio")
        if self.err.isatty():
            self.say(self.stats)

    def player(self):
        """An audio.Player; None, said once, where nothing can play."""
        try:
            return audio.Player(self.model.sample_rate)
        except CosyH3Error as e:
            self.playing = False
            if self.err.isatty():
                self.say(f"note: {e}; audio is only saved")
            return None

    def next_file(self):
        """The first name of speech-001.wav, speech-002.wav ... after all that are there."""
        used = [
            int(n) for file in self.folder.glob("speech-*.wav") if (n := file.stem.removeprefix("speech-")).isdigit()
        ]
        return self.folder / f"speech-{max(used, default=0) + 1:03d}.wav"

    # Commands

    def set_voice(self, rest):
        if not rest:
            now = (
                self.voice.name if isinstance(self.voice, Voice) else self.voice or next(iter(self.model.voices), None)
            )
            if isinstance(self.voice, Voice):
                self.say(f"* {now} (from a file)")
            for name in self.model.voices:
                self.say(f"{'*' if name == now and not isinstance(self.voice, Voice) else ' '} {name}")
            return
        name, transcript = self.name_and_words(rest)
        self.voice = speech_cli.find_voice(self.model, name, transcript, self.note)
        self.say(f"voice = {name}")

    def name_and_words(self, rest):
        """ "FILE words" -> (FILE, words or None); blanks in the name of a file that exists are part of it."""
        words = rest.split(" ")
        for n in range(len(words), 0, -1):
            name = " ".join(words[:n])
            if name in self.model.voices or Path(name).expanduser().exists():
                break
        else:
            name = words[0]
        return name, rest[len(name) :].strip() or None

    def instruct(self, rest):
        if not rest:
            self.show("instruct")
        else:
            self.change("instruct", None if rest.lower() in ("off", "none") else rest)

    def speed(self, rest):
        self.set(f"speed {rest}")

    def seed(self, rest):
        self.set(f"seed {rest}")

    def stream(self, rest):
        self.streamed = self.on_or_off("/stream", rest, self.streamed)

    def play(self, rest):
        self.playing = self.on_or_off("/play", rest, self.playing)

    def on_or_off(self, name, rest, now):
        if rest not in ("", "on", "off"):
            raise CosyH3Error(f"{name} takes on or off, not {rest!r}")
        now = now if not rest else rest == "on"
        self.say(f"{name[1:]} = {'on' if now else 'off'}")
        return now

    def set(self, rest):
        name, _, text = rest.partition(" ")
        name, text = name.strip("-").replace("-", "_"), text.strip()
        if name and name not in OPTIONS:
            raise CosyH3Error(f"unknown option {name!r}{nearest(name, OPTIONS)}")
        if text:
            self.change(name, self.value(name, text))
        for key in [name] if name and not text else OPTIONS if not name else []:
            self.show(key)

    @staticmethod
    def value(name, text):
        kind = OPTIONS[name][0]
        if text.lower() == "none" and speech_cli.defaults()[name] is None:
            return None
        try:
            return kind(text)
        except ValueError:
            raise CosyH3Error(f"{name} must be a {'whole ' if kind is int else ''}number, not {text!r}") from None

    def change(self, name, value):
        changed = self.options | {name: value}
        SpeechOptions(**changed).settle(self.model)
        self.options = changed
        if name == "seed":
            self.drawn = 0
        self.show(name)

    def show(self, name):
        value = self.options[name]
        self.say(f"{name} = {'none' if value is None else value}")

    def save(self, rest):
        path = self.path("/save", rest)
        self.last().save(path)
        self.say(f"{self.result.duration:.2f} s saved to {path}")

    def replay(self, rest):
        self.nothing_after("/replay", rest)
        samples, player = self.last().audio, audio.Player(self.model.sample_rate)
        try:
            player.add(samples)
            player.finish()
        finally:
            player.close()

    def last(self):
        if self.result is None or not len(self.result.audio):
            raise CosyH3Error("nothing was spoken yet")
        return self.result

    def show_stats(self, rest):
        self.nothing_after("/stats", rest)
        self.say(self.stats or "nothing was spoken yet")

    def help(self, rest):
        self.nothing_after("/help", rest)
        self.say(HELP.format(options=", ".join(OPTIONS), folder=self.folder.resolve()).rstrip())

    def note(self, text):
        self.say(f"note: {text}")
