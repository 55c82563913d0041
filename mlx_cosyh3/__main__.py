"""`python -m mlx_cosyh3` is the command `mlx_cosyh3`."""

from mlx_cosyh3.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
