"""Tempo without pitch: the mel is stretched before the vocoder, as upstream does for speed != 1 (offline there only).

T frames become n = int(T / speed), each a mix of two: see `interpolate.py`.
"""

import math

import mlx.core as mx
import numpy as np

from mlx_cosyh3.cosyvoice.interpolate import between, interpolate
from mlx_cosyh3.errors import CosyH3Error

SLOWEST, FASTEST = 0.5, 2.0


def change_speed(mel, speed):
    """mel [B, T, C] -> [B, int(T / speed), C], fp32. Raises CosyH3Error for a speed outside 0.5 .. 2."""
    check_speed(speed)
    frames = mel.shape[1]
    n = int(frames / speed)
    if n == 0:
        raise CosyH3Error(f"{frames} mel frames at speed {speed} leave no frame: give more text, or a lower speed")
    return interpolate(mel.astype(mx.float32), n)


def check_speed(speed):
    if not (isinstance(speed, (int, float)) and SLOWEST <= speed <= FASTEST):
        raise CosyH3Error(f"speed must be a number from {SLOWEST} to {FASTEST}, not {speed!r}")


def speed_stream(speed):
    """A SpeedStream, whose add(mel, last) gives the stretched mel chunk by chunk."""
    return SpeedStream(speed)


class SpeedStream:
    """`change_speed` for a mel that arrives in chunks.

    The step between output frames is `speed`; offline it is T / int(T / speed), which is the same whenever T / speed
    is whole. Else offline stretches the whole by what int() cuts off, and that cannot be known before the end: a
    position here lags behind by at most the fraction of one output frame. The count of frames is the same."""

    def __init__(self, speed):
        check_speed(speed)
        self._speed = speed
        self._mel = None  # input frames from index self._first on
        self._first = self._arrived = self._made = 0

    def add(self, mel, last=False):
        """mel [B, n, C] -> the frames [B, m, C] that are known now; `last`: no more will come."""
        self._mel = mel if self._mel is None else mx.concatenate([self._mel, mel], axis=1)
        self._arrived += mel.shape[1]
        end = int(self._arrived / self._speed)
        position = lambda i: (i + 0.5) * self._speed - 0.5  # noqa: E731
        if not last:  # the frame behind a position must be there: it may be any mix of the two
            end = min(end, max(0, math.floor((self._arrived - 0.5) / self._speed + 0.5)))
        where = [position(i) for i in range(self._made, end)]
        if not where:
            return mel[:, :0].astype(mx.float32)
        out = between(self._mel.astype(mx.float32), np.array(where) - self._first)
        self._made = end
        keep = min(max(0, math.floor(position(end))), self._arrived - 1)  # the first frame still needed
        self._mel, self._first = self._mel[:, keep - self._first :], keep
        return out
