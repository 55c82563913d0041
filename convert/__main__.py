"""python -m mlx_cosyh3.convert"""

import sys

from mlx_cosyh3.convert import main

if __name__ == "__main__":
    sys.exit(main())
