"""Linear state-space layers over many tokens at once, from any state: what a prompt is read with.

A chunk of T tokens is cut into blocks of b. With x the inputs of a block and S the state before it,

    y_t = sum_{j<=t} K_{t-j} x_j + 2 Re(sum_n C_n A_n^(t+1) S_n)    K the impulse response, D on its first tap
    S'  = A^b S + sum_j A^(b-1-j) B x_j

Only the short recurrence over blocks is sequential; the rest are matrix products, batched over channels. The
convolution inside a block is a product with a Toeplitz matrix, or a real FFT of twice the block; the 64-tap shift
filter is one FFT over the chunk, or the same Toeplitz products. The defaults are what measured faster (docs/LOG.md):
Toeplitz, but for the shift filter on a CPU. What lies behind a row's length (batches of ragged prompts) never enters
its state.

Coefficients are made in float64 with numpy. A block's powers of A are the product of two short tables, A^(8 i) and
A^j: one rounding each, and an eighth of the memory.
"""

import mlx.core as mx
import numpy as np

BLOCK = {"toeplitz": 64, "fft": 512}  # convolution method of the diagonal SSM -> longest block
LOW = 8  # blocks are multiples of this


class ShiftScan:
    """The shift SSM, s[n] <- s[n-1] + B[n] x, y = sum_n C[n] s[n] + D x: per channel an FIR filter of N taps.

    B, C [channels, N] and D [channels] in numpy float64. method None: by device."""

    def __init__(self, B, C, D, method=None):
        if method is None:
            # MLX's CUDA FFT must not run in two threads at once (0.32.4: wrong numbers, crashes): none on a GPU.
            method = "fft" if mx.default_device().type == mx.cpu else "toeplitz"
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
        rows = _hankel(mx.pad(self.C[:, 1:], [(0, 0), (0, N)]), reach, N)  # [D, reach, N]
        carried = mx.matmul(rows, s.transpose(1, 2, 0)).transpose(2, 1, 0)  # [B, reach, D]
        y = mx.concatenate([y[:, :reach] + carried, y[:, reach:]], axis=1)

        last = _right_aligned(x, lengths, N).transpose(2, 1, 0)  # [D, N, B], oldest first
        new = mx.matmul(_hankel(mx.pad(self.B, [(0, 0), (N - 1, 0)]), N, N), last)  # sum_i B[n + i - N + 1] last[i]
        return y, new.transpose(2, 0, 1) + _shifted(s, lengths)

    def _fft(self, x):
        T, n = x.shape[1], _power_of_two(x.shape[1] + self.taps.shape[1])
        spectrum = mx.fft.rfft(x, n=n, axis=1) * mx.fft.rfft(self.taps.T, n=n, axis=0)
        return mx.fft.irfft(spectrum, n=n, axis=1)[:, :T]

    def _blocks(self, x):
        B, T, D = x.shape
        b = self.taps.shape[1]
        blocks = -(-T // b)
        x = mx.pad(x, [(0, 0), (b, blocks * b - T), (0, 0)]).reshape(B, blocks + 1, b, D)
        x = x[:, :, ::-1].transpose(3, 1, 0, 2)  # [D, blocks + 1, B, b], newest first
        x = mx.concatenate([x[:, 1:], x[:, :-1]], axis=-1)  # each block, then the one before it
        y = mx.matmul(x.reshape(D, blocks * B, 2 * b), _hankel(mx.pad(self.taps, [(0, 0), (b - 1, b)]), 2 * b, b))
        return y.reshape(D, blocks, B, b).transpose(2, 1, 3, 0).reshape(B, blocks * b, D)[:, :T]


class DiagonalScan:
    """The diagonal SSM, S <- dA S + dB x, y = 2 Re(sum C S) + D x, one scalar sequence a channel.

    dA, dB, C [H, M] numpy complex128, D [H] float64; x carries hd x hd independent sequences a head."""

    def __init__(self, dA, dB, C, D, method="toeplitz"):
        self.method, self.block = method, BLOCK[method]
        low = dA[:, None] ** np.arange(LOW)[:, None]  # [H, 8, M]
        high = dA[:, None] ** (LOW * np.arange(self.block // LOW + 1))[:, None]  # [H, block / 8 + 1, M]
        kernel = 2 * np.matmul(high * (C * dB)[:, None], low.swapaxes(1, 2)).real  # [H, block / 8 + 1, 8]
        kernel = kernel.reshape(len(dA), -1)[:, : self.block]
        kernel[:, 0] += D
        self.high, self.low = mx.array(high.astype(np.complex64)), mx.array(low.astype(np.complex64))
        # pairs (re, im) of low B and of the conjugate of 2 low C A, each also turned by i: see _powers_times
        self.low_in = _pairs(low * dB[:, None])
        self.low_out = _pairs(np.conj(2 * low * (C * dA)[:, None]))
        self.kernel = mx.array(kernel.astype(np.float32))  # [H, block]

    def tables(self):
        return [self.high, self.low, *self.low_in, *self.low_out, self.kernel]

    def __call__(self, x, S, lengths):
        """x [B, T, H, hd, hd], S [B, H, hd, hd, M, 2] (re, im), all fp32 -> (y like x, S after lengths[b] tokens)."""
        B, T, H, hd, _ = x.shape
        M, R = S.shape[4], B * hd * hd
        S = mx.contiguous(S).view(mx.complex64)[..., 0]
        b = min(self.block, max(LOW, _power_of_two(T)))
        blocks = -(-T // b)
        # what an input j tokens old adds to the state, A^j B, as (re, im) pairs; and what the state adds to output t,
        # 2 Re(C A^(t+1) S): a dot product of S's pairs with those of the conjugate
        into = self._powers_times(self.low_in, b)  # [H, b, 2M]
        out_of = self._powers_times(self.low_out, b, conjugate=True).swapaxes(1, 2)  # [H, 2M, b]
        decay = self.high[:, b // LOW, None]  # A^b [H, 1, M]

        x = mx.pad(x, [(0, 0), (0, blocks * b - T)] + [(0, 0)] * 3)
        newest_first = x.reshape(B, blocks, b, H, hd * hd)[:, :, ::-1]
        X = newest_first.transpose(3, 1, 0, 4, 2).reshape(H, blocks * R, b)
        gained = mx.matmul(X, into).view(mx.complex64).reshape(H, blocks, R, M)
        S = S.swapaxes(0, 1).reshape(H, R, M)
        before = []  # the state at the start of each block
        for i in range(blocks):
            before.append(S)
            n = np.clip(lengths - i * b, 0, b)  # tokens of this block that count, per row
            if (n == b).all():
                S = decay * S + gained[:, i]
            elif n.any():
                S = self._partial(S, x[:, i * b : (i + 1) * b], n, into)
        y = mx.matmul(mx.stack(before, axis=1).reshape(H, blocks * R, M).view(mx.float32), out_of)
        y = y + self._convolve(X, b)
        y = y.reshape(H, blocks, B, hd * hd, b).transpose(2, 1, 4, 0, 3).reshape(B, blocks * b, H, hd, hd)
        S = mx.contiguous(S.reshape(H, B, hd, hd, M).swapaxes(0, 1))
        return y[:, :T], S[..., None].view(mx.float32)

    def _powers_times(self, low, b, conjugate=False):
        """A^(8 i) low[j] (or the conjugate of A^(8 i)) as pairs [H, b, 2M]; row 8 i + j.

        Real arithmetic, (re) low + (im) (i low): MLX's complex product takes 14 times as long on a CPU."""
        low, turned = low
        high = self.high[:, : b // LOW, None, :, None]  # [H, b / 8, 1, M, 1]
        imag = -mx.imag(high) if conjugate else mx.imag(high)
        return (mx.real(high) * low + imag * turned).reshape(low.shape[0], b, -1)

    def _partial(self, S, x, n, into):
        """S [H, R, M] after the first n[b] of a block's inputs x [B, b, H, hd, hd]."""
        B, b, H, hd, _ = x.shape
        x = _right_aligned(x, n, b)[:, ::-1]  # as if the row ended with the block
        gained = mx.matmul(x.transpose(2, 0, 3, 4, 1).reshape(H, -1, b), into).view(mx.complex64)
        n = np.repeat(n, hd * hd)
        decay = mx.take(self.high, mx.array(n // LOW), axis=1) * mx.take(self.low, mx.array(n % LOW), axis=1)
        return decay * S + gained

    def _convolve(self, X, b):
        """X [H, rows, b], newest first, convolved causally with the first b taps of the kernel, oldest first."""
        kernel = self.kernel[:, :b]
        if self.method == "fft":
            spectrum = mx.fft.rfft(X[..., ::-1], n=2 * b) * mx.fft.rfft(kernel, n=2 * b)[:, None]
            return mx.fft.irfft(spectrum, n=2 * b)[..., :b]
        return mx.matmul(X, _hankel(mx.pad(kernel, [(0, 0), (b - 1, 0)]), b, b))


def _pairs(a):
    """numpy complex [H, 8, M] -> (re, im) pairs of a and of i a, fp32 [H, 1, 8, M, 2] each."""
    return tuple(mx.array(np.stack([z.real, z.imag], -1)[:, None].astype(np.float32)) for z in (a, 1j * a))


def _power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def _hankel(v, rows, cols):
    """The matrices [channels, rows, cols] with entries v[:, i + j]: a view of v [channels, >= rows + cols - 1].

    A Toeplitz matrix applied to inputs in reverse order; as a view it costs no index arithmetic."""
    v = mx.contiguous(v)
    return mx.as_strided(v, (v.shape[0], rows, cols), (v.shape[1], 1, 1))


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
