"""The "random" constants of CosyVoice 2 and 3: upstream draws them once, from a generator seeded with 0.

Upstream's flow seeds torch with 0 in its constructor, then draws the flow's noise; what the vocoder draws afterwards
continues the same sequence, behind the draws of the weights' initial values of the full-size model. They belong to the
trained model, so they are made here from the same Mersenne Twister, by numpy: MT19937(0) gives 32-bit words w, torch
makes (w & 0xffffff) / 2^24 of one, and its normal numbers from such by Box and Muller, in blocks of 16.
"""

import functools

import numpy as np

FRAMES = 15000  # mel frames of the flow's noise: 300 s
BINS = 80
HARMONICS = 9
# Draws between the flow's noise and the vocoder's: initial values of the full-size model's layers, then rand_ini.
SKIPPED = 6561 * 80 + (192 * 80 + 80) + (512 * 80 * 4 + 512) + 4 * (512 * 512 * 3 + 512) + (512 + 1)
BLOCK = 24000  # samples that are drawn together


def _uniform(generator, count):
    words = generator.randint(0, 2**32, size=count, dtype=np.uint32)  # the raw words: the range is theirs
    return (words & 0xFFFFFF).astype(np.float32) * np.float32(2**-24)


@functools.lru_cache(1)
def _cfm_noise():
    u = _uniform(np.random.RandomState(0), BINS * FRAMES).reshape(-1, 2, 8)
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - u[:, 0]))
    angle = np.float32(2 * np.pi) * u[:, 1]
    noise = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(BINS, FRAMES).T.copy()
    noise.flags.writeable = False
    return noise


def cfm_noise(frames):
    """Where the flow starts: float32 [1, frames, 80], frames <= FRAMES."""
    return _cfm_noise()[None, :frames]


@functools.lru_cache(None)
def _state(block):
    """The generator's state before block `block` of the sine noise."""
    generator = np.random.RandomState(0)
    if block == 0:
        for count in (BINS * FRAMES, SKIPPED, HARMONICS):
            generator.randint(0, 2**32, size=count, dtype=np.uint32)
    else:
        generator.set_state(_state(block - 1))
        generator.randint(0, 2**32, size=BLOCK * HARMONICS, dtype=np.uint32)
    return generator.get_state()


@functools.lru_cache(16)
def _sine_block(block):
    for earlier in range(block):  # in order, so that none calls the one before it at great depth
        _state(earlier)
    generator = np.random.RandomState(0)
    generator.set_state(_state(block))
    noise = _uniform(generator, BLOCK * HARMONICS).reshape(BLOCK, HARMONICS)
    noise.flags.writeable = False
    return noise


def sine_noise(start, stop):
    """What CosyVoice 3's vocoder adds to its sines, uniform in [0, 1): float32 [stop - start, 9], by sample and harmonic."""
    blocks = range(start // BLOCK, -(-stop // BLOCK))
    if not blocks:
        return np.zeros((0, HARMONICS), np.float32)
    noise = np.concatenate([_sine_block(b) for b in blocks])
    return noise[start - blocks[0] * BLOCK :][: stop - start]


def rand_ini():
    """Initial phases of the harmonics, in turns: float32 [9]. (They have no effect in CosyVoice 2 and 3.)"""
    generator = np.random.RandomState(0)
    for count in (BINS * FRAMES, SKIPPED):
        generator.randint(0, 2**32, size=count, dtype=np.uint32)
    phases = _uniform(generator, HARMONICS)
    phases[0] = 0
    return phases
