"""Which implementation of an operation runs on which device."""

import mlx.core as mx


def pick(kernels, reference, stream):
    """The entry of `kernels` (device type -> function) for the device of `stream` (None: the default), else `reference`."""
    if not kernels:
        return reference
    if stream is None:
        device = mx.default_device()
    else:
        device = stream.device if isinstance(stream, mx.Stream) else stream
    return kernels.get(device.type if isinstance(device, mx.Device) else device, reference)
