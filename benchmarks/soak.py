"""On this GPU against the CPU, in threads, and for a long time: small random models of the golden sizes.

    MLX_ENABLE_TF32=0 python benchmarks/soak.py [--only compare,threads,memory,h3,speech] [--runs 1000]
    [--seconds N]

compare   texts of random length, the likeliest token always: the speech tokens of both devices are the same up to the first
          place where the two likeliest tokens lie within GAP (such places are counted), the audio within WAV
threads   requests of all kinds in eight threads, and the same ones alone: the same bytes
memory    utterances one after the other in one process, some streamed, some given up
h3        ten times as many short completions from eight threads, through a scheduler and past it (tests/soaking.py)
speech    as many utterances, likewise
In the last three active memory must stay within 1 % from the 20th on, files and threads as many as then, every answer
as alone. Few different requests, again and again: CUDA prepares each convolution anew for each length, which takes a
second an utterance.
Exits with 1 if anything is beyond.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from mlx_cosyh3 import load  # noqa: E402
from mlx_cosyh3.errors import CosyH3Error  # noqa: E402
from mlx_cosyh3.scheduler import Scheduler  # noqa: E402
from tests.small_model import write_model  # noqa: E402
from tests.small_voice_model import write_voice_model  # noqa: E402
from tests.soaking import GOLDEN_H3, Request, soak, speech_requests, text_requests  # noqa: E402
from tests.test_cosyvoice_speech_threads import request  # noqa: E402

GAP, WAV = 1e-4, 1e-2
WORDS = "the cat sat on a mat and it was warm so they went home in good time for tea".split()


def speak(model, text):
    """(tokens, audio, text ids and prompt ids), greedy; no audio where the model ends its speech at once."""
    try:
        r = model.generate(text, temperature=0, seed=0, max_seconds=2, note=lambda text: None)
        return r.tokens, r.audio
    except CosyH3Error as e:
        if "made no speech" not in str(e):
            raise
        return [], np.zeros(0, np.float32)


def gaps(model, text, tokens):
    """The distance of the two largest logits, on the CPU, at each of `tokens` and behind the last."""
    from mlx_cosyh3.cosyvoice.utterance import Utterance
    from mlx_cosyh3.cosyvoice.speech import SpeechOptions

    (s,) = Utterance(model, text, SpeechOptions(seed=0), False, lambda text: None, None).segments
    lm = model.llm
    prefix = lm.embed_prefix(s.text_ids, s.prompt_ids, s.prompt_speech)
    x = mx.concatenate([prefix, lm.embed_speech(tokens)], axis=1) if tokens else prefix
    logits = np.array(lm(x)[0, prefix.shape[1] - 1 :])
    # The rule of the least length, as in `SpeechLM.generate`: some id is not drawn before it.
    logits[: int(2 * len(s.text_ids)), lm.config.speech_token_size] = -np.inf
    two = np.sort(logits, axis=1)[:, -2:]
    return two[:, 1] - two[:, 0]


def compare(folder, runs, job, jobs):
    """One process's share of the runs, as a dict of counts."""
    model = load(folder)
    out = {"runs": 0, "same": 0, "near": 0, "beyond": [], "worst": 0.0, "tokens": 0}
    for run in range(job, runs, jobs):
        draw = random.Random(run)
        text = " ".join(draw.choices(WORDS, k=draw.randint(1, 12))) + "."
        tokens, audio = speak(model, text)
        with mx.stream(mx.cpu):
            other, reference = speak(model, text)
            out["runs"], out["tokens"] = out["runs"] + 1, out["tokens"] + len(other)
            if tokens != other:
                at = next((i for i, (a, b) in enumerate(zip(tokens, other)) if a != b), min(len(tokens), len(other)))
                gap = float(gaps(model, text, other[:at])[at])
                out["near"] += gap < GAP
                if gap >= GAP:
                    out["beyond"].append([run, at, gap])
                continue
        error = float(np.abs(audio - reference).max()) if len(audio) == len(reference) and len(audio) else 0.0
        if len(audio) != len(reference) or error > WAV:
            out["beyond"].append([run, len(audio), error])
        out["same"], out["worst"] = out["same"] + 1, max(out["worst"], error)
    return out


def bench_compare(folder, args):
    command = [sys.executable, __file__, "--share", str(folder), "--runs", str(args.runs), "--jobs", str(args.jobs)]
    running = [subprocess.Popen([*command, "--job", str(j)], stdout=subprocess.PIPE) for j in range(args.jobs)]
    shares = [json.loads(p.communicate()[0].splitlines()[-1]) for p in running]
    total = {name: sum((s[name] for s in shares), start=[] if name == "beyond" else 0) for name in shares[0] if name != "worst"}
    print(f"compare: {total['runs']} texts, {total['tokens']} speech tokens: {total['same']} with the same tokens, worst audio "
          f"{max(s['worst'] for s in shares):.2e} (bound {WAV:g}); {total['near']} part where the two likeliest lie within {GAP:g}; "
          f"{len(total['beyond'])} beyond {total['beyond'][:3]}", flush=True)  # fmt: skip
    return not total["beyond"]


def say(text):
    print(text, flush=True)


def bench_threads(folder, args):
    model, n = load(folder), min(args.runs, args.requests)
    made = [Request(str(i), lambda i=i: request(model, i)) for i in range(n)]
    figures = soak(made, n, seconds=args.seconds, say=say)
    say(f"threads: {figures}")
    return not figures.wrong


def bench_memory(folder, args):
    return soaked("memory", load(folder), speech_requests, args.runs, 1, args)


def bench_h3(folder, args):
    model = load(write_model(folder.parent / "h3", **GOLDEN_H3))
    return soaked("h3", model, text_requests, 10 * args.runs, 8, args)


def bench_speech(folder, args):
    return soaked("speech", load(folder), speech_requests, args.runs, 8, args)


def soaked(name, model, requests, count, threads, args):
    with Scheduler(model, workers=4, max_queue=1000) as scheduler:
        figures = soak(requests(model, scheduler), count, threads, args.seconds, say)
    say(f"{name}: {figures}" + ("" if figures.fine else " NOT FINE"))
    return figures.fine


def main():
    parts = {"compare": bench_compare, "threads": bench_threads, "memory": bench_memory, "h3": bench_h3, "speech": bench_speech}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200, help="of `threads`")
    parser.add_argument("--jobs", type=int, default=4, help="processes of `compare`")
    parser.add_argument("--seconds", type=float, help="stop each part but `compare` after so many, with the figures so far")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share:
        print(json.dumps(compare(args.share, args.runs, args.job, args.jobs)))
        return
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', 'CPU')}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_voice_model(Path(folder) / "voice")
        fine = [parts[name](Path(folder) / "voice", args) for name in args.only.split(",")]
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()
