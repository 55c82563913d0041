"""Tempo without pitch: the mel is stretched before the vocoder, as upstream does for speed != 1 (offline there only).

Frame i of the result is a mix of the two input frames around (i + 0.5) * T / n - 0.5, with n = int(T / speed) frames
in all (torch's linear interpolation, align_corners=False).
"""

import math

import mlx.core as mx

from mlx_cosyh3.errors import CosyH3Error

SLOWEST, FASTEST = 0.5, 2.0


def change_speed(mel, speed):
    """mel [B, T, C] -> [B, int(T / speed), C], fp32. Raises CosyH3Error for a speed outside 0.5 .. 2."""
    check_speed(speed)
    frames = mel.shape[1]
    n = int(frames / speed)
    if n == 0:
        raise CosyH3Error(f"{frames} mel frames at speed {speed} leave no frame: give more text, or a lower speed")
    return _mix(mel, [(i + 0.5) * (frames / n) - 0.5 for i in range(n)])


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
        out = _mix(self._mel, [p - self._first for p in where])
        self._made = end
        keep = min(max(0, math.floor(position(end))), self._arrived - 1)  # the first frame still needed
        self._mel, self._first = self._mel[:, keep - self._first :], keep
        return out


def _mix(mel, positions):
    """Linear interpolation of mel [B, T, C] at fractional frames, those outside taken as the ends."""
    last = mel.shape[1] - 1
    positions = [min(max(p, 0.0), last) for p in positions]
    below = [min(int(p), last) for p in positions]
    share = mx.array([p - i for p, i in zip(positions, below)], dtype=mx.float32)[None, :, None]
    a = mel[:, mx.array(below)].astype(mx.float32)
    b = mel[:, mx.array([min(i + 1, last) for i in below])].astype(mx.float32)
    return a * (1 - share) + b * share
