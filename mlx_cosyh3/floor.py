"""The machines that this program runs on: what MLX needs is what it needs."""

import platform

from mlx_cosyh3.errors import CosyH3Error

OLDEST_DARWIN = 23  # the kernel of macOS 14


def check_machine():
    """Raise CosyH3Error, in one sentence, on a Mac that is older than MLX's oldest or has no Apple silicon."""
    if platform.system() != "Darwin":
        return
    silicon = platform.machine() == "arm64"
    # The kernel's version, since a Python built long ago is told that every newer macOS is 10.16.
    if silicon and int(platform.release().split(".")[0]) >= OLDEST_DARWIN:
        return
    here = f"macOS {platform.mac_ver()[0]} on {platform.machine()}"
    advice = "" if silicon else "; on Apple silicon use a Python that is built for arm64, not for Intel"
    raise CosyH3Error(f"mlx_cosyh3 needs macOS 14 or newer on Apple silicon, as MLX does; this is {here}{advice}")
