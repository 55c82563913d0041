"""Linear state-space layers over many tokens at once, from any state: what a prompt is read with.

A chunk of T tokens is cut into blocks of b. With X the inputs of a block and S the state before it,

    y_t = sum_{j<=t} K_{t-j} X_j + 2 Re(sum_n C_n A_n^(t+1) S_n)    K the impulse response, D on its first tap
    S'  = A^b S + sum_j A^(b-1-j) B X_j

Only the short recurrence over blocks is sequential; the rest are matrix products, batched over channels. The
convolution inside a block is a product with a Toeplitz matrix or a real FFT of twice the block (`BLOCK`; docs/LOG.md
tells which is faster where). What lies behind a row's length (batches of ragged prompts) never enters its state.

Tables are made in float64 with numpy. The powers A^0..A^b are kept as two short tables, A^(8 i) and A^j, whose
product gives every power with one rounding, in an eighth of the memory.
"""

import mlx.core as mx
import numpy as np

BLOCK = {"toeplitz": 64, "fft": 512}  # convolution method -> tokens in a block
LOW = 8


class ShiftScan:
    """The shift SSM, s[n] <- s[n-1] + B[n] x, y = sum_n C[n] s[n] + D x: per channel an FIR filter of N taps.

    B, C [channels, N] and D [channels] in numpy float64."""

    def __init__(self, B, C, D, method="toeplitz"):
        N = B.shape[1]
        taps = np.stack([(C[:, j:] * B[:, : N - j]).sum(1) for j in range(N)], axis=1)
        taps[:, 0] += D
        self.B, self.C, self.taps = (mx.array(a.astype(np.float32)) for a in (B, C, taps))  # [D, N]
        self.method = method

    def tables(self):
        return [self.B, self.C, self.taps]

    def __call__(self, x, s, lengths):
        """x [B, T, D] fp32, s [B, D, N] -> (y [B, T, D], s after lengths[b] tokens)."""
        T, N = x.shape[1], s.shape[2]
        y = (self._fft if self.method == "fft" else self._blocks)(x)
        # the old state reaches N - 1 tokens far: y_t += sum_n C[n + t + 1] s[n]
        reach = min(T, N - 1)
        index = np.minimum(np.arange(reach)[:, None] + np.arange(1, N + 1)[None, :], N)
        hankel = mx.take(_with_zero(self.C), mx.array(index), axis=1)  # [D, reach, N]
        carried = mx.matmul(hankel, s.transpose(1, 2, 0)).transpose(2, 1, 0)  # [B, reach, D]
        y = mx.concatenate([y[:, :reach] + carried, y[:, reach:]], axis=1)

        last = _right_aligned(x, lengths, N)[:, ::-1]  # [B, N, D], newest first
        new = mx.matmul(_toeplitz(self.B, N, N), last.transpose(2, 1, 0))  # s[n] = sum_j B[n - j] last[j]
        return y, new.transpose(2, 0, 1) + _shifted(s, lengths)

    def _blocks(self, x):
        B, T, D = x.shape
        b = max(BLOCK["toeplitz"], self.taps.shape[1])
        blocks = -(-T // b)
        x = mx.pad(x, [(0, 0), (b, blocks * b - T), (0, 0)]).reshape(B, blocks + 1, b, D)
        x = x.transpose(3, 1, 0, 2)  # [D, blocks + 1, B, b]
        x = mx.concatenate([x[:, :-1], x[:, 1:]], axis=-1)  # each block behind the one before it
        y = mx.matmul(x.reshape(D, blocks * B, 2 * b), _toeplitz(self.taps, b, 2 * b, shift=b).swapaxes(1, 2))
        return y.reshape(D, blocks, B, b).transpose(2, 1, 3, 0).reshape(B, blocks * b, D)[:, :T]

    def _fft(self, x):
        T, n = x.shape[1], _power_of_two(x.shape[1] + self.taps.shape[1])
        spectrum = mx.fft.rfft(x, n=n, axis=1) * mx.fft.rfft(self.taps.T, n=n, axis=0)
        return mx.fft.irfft(spectrum, n=n, axis=1)[:, :T]


class DiagonalScan:
    """The diagonal SSM, S <- dA S + dB x, y = 2 Re(sum C S) + D x, one scalar sequence a channel.

    dA, dB, C [H, M] numpy complex128, D [H] float64; x carries hd x hd independent sequences a head."""

    def __init__(self, dA, dB, C, D, method="toeplitz"):
        self.method, self.block = method, BLOCK[method]
        low = dA[:, None, :] ** np.arange(LOW)[:, None]  # [H, 8, M]
        high = dA[:, None, :] ** (LOW * np.arange(self.block // LOW + 1))[:, None]  # [H, block / 8 + 1, M]
        kernel = 2 * np.matmul(high * (C * dB)[:, None, :], low.swapaxes(1, 2)).real  # [H, block / 8 + 1, 8]
        kernel = kernel.reshape(len(dA), -1)[:, : self.block]
        kernel[:, 0] += D
        self.low, self.high, self.dB, self.CdA = (mx.array(a.astype(np.complex64)) for a in (low, high, dB, C * dA))
        self.kernel = mx.array(kernel.astype(np.float32))  # [H, block]

    def tables(self):
        return [self.low, self.high, self.dB, self.CdA, self.kernel]

    def __call__(self, x, S, lengths):
        """x [B, T, H, hd, hd] fp32, S [B, H, hd, hd, M] complex64 -> (y like x, S after lengths[b] tokens)."""
        B, T, H, hd, _ = x.shape
        M, R = S.shape[-1], B * hd * hd
        b = min(self.block, max(LOW, _power_of_two(T)))
        blocks = -(-T // b)
        powers = self._powers(b + 1)  # [H, b + 1, M]
        into = _as_pairs(powers[:, :b][:, ::-1] * self.dB[:, None])  # [H, b, 2M]: input j -> (re, im) of the state
        out_of = _as_pairs(mx.conj(2 * powers[:, :b] * self.CdA[:, None])).swapaxes(1, 2)  # [H, 2M, b]

        x = mx.pad(x, [(0, 0), (0, blocks * b - T)] + [(0, 0)] * 3)
        X = x.reshape(B, blocks, b, H, hd * hd).transpose(3, 1, 0, 4, 2).reshape(H, blocks * R, b)
        gained = mx.matmul(X, into).view(mx.complex64).reshape(H, blocks, R, M)
        S = S.swapaxes(0, 1).reshape(H, R, M)
        before = []  # the state at the start of each block
        for i in range(blocks):
            before.append(S)
            n = np.clip(lengths - i * b, 0, b)  # tokens of this block that count, per row
            if (n == b).all():
                S = powers[:, b][:, None] * S + gained[:, i]
            elif n.any():
                part = _right_aligned(x[:, i * b : (i + 1) * b], n, b)  # ends where the row ends
                part = part.transpose(2, 0, 3, 4, 1).reshape(H, R, b)
                decay = mx.take(powers, mx.array(np.repeat(n, hd * hd)), axis=1)  # [H, R, M]
                S = decay * S + mx.matmul(part, into).view(mx.complex64)

        y = mx.matmul(_as_pairs(mx.stack(before, axis=1)).reshape(H, blocks * R, 2 * M), out_of)
        y = y + self._convolve(X, b)
        y = y.reshape(H, blocks, B, hd * hd, b).transpose(2, 1, 4, 0, 3).reshape(B, blocks * b, H, hd, hd)
        return y[:, :T], S.reshape(H, B, hd, hd, M).swapaxes(0, 1)

    def _convolve(self, X, b):
        """X [H, rows, b] convolved causally with the first b taps of the kernel."""
        kernel = self.kernel[:, :b]
        if self.method == "fft":
            spectrum = mx.fft.rfft(X, n=2 * b) * mx.fft.rfft(kernel, n=2 * b)[:, None]
            return mx.fft.irfft(spectrum, n=2 * b)[..., :b]
        return mx.matmul(X, _toeplitz(kernel, b, b).swapaxes(1, 2))

    def _powers(self, n):
        """A^0 .. A^(n-1), complex64 [H, n, M]."""
        H, _, M = self.low.shape
        high = self.high[:, : -(-n // LOW)]
        return (high[:, :, None] * self.low[:, None]).reshape(H, -1, M)[:, :n]


def _as_pairs(a):
    """complex64 [..., M] -> fp32 [..., 2M], re and im side by side."""
    return mx.contiguous(a).view(mx.float32)


def _power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def _with_zero(a):
    return mx.pad(a, [(0, 0), (0, 1)])


def _toeplitz(taps, rows, cols, shift=0):
    """[channels, rows, cols] with entries taps[:, i - j + shift], 0 outside of taps [channels, n]."""
    n = taps.shape[1]
    index = np.arange(rows)[:, None] - np.arange(cols)[None, :] + shift
    index = np.where((index < 0) | (index >= n), n, index)
    return mx.take(_with_zero(taps), mx.array(index), axis=1)


def _right_aligned(x, lengths, width):
    """The last `width` of row b's first lengths[b] entries along axis 1 of x [B, T, ...], zeros in front if fewer."""
    rest = x.ndim - 2
    if (lengths == lengths[0]).all():
        end = int(lengths[0])
        x = x[:, max(0, end - width) : end]
        return mx.pad(x, [(0, 0), (width - x.shape[1], 0)] + [(0, 0)] * rest)
    index = lengths[:, None] - width + np.arange(width)  # [B, width]
    shape = (*index.shape, *[1] * rest)
    taken = mx.take_along_axis(x, mx.array(np.clip(index, 0, x.shape[1] - 1).reshape(shape)), axis=1)
    return mx.where(mx.array((index >= 0).reshape(shape)), taken, 0)


def _shifted(s, lengths):
    """s [B, D, N] moved lengths[b] places up along its last axis, zeros coming in."""
    N = s.shape[2]
    if (lengths >= N).all():
        return mx.zeros_like(s)
    index = np.arange(N)[None, :] - lengths[:, None]  # [B, N]
    taken = mx.take_along_axis(s, mx.array(np.maximum(index, 0)[:, None]), axis=2)
    return mx.where(mx.array((index >= 0)[:, None]), taken, 0)
