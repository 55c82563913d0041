"""Bridges to other libraries, each an optional extra: nothing here is imported unless it is asked for.

    mlx_cosyh3.integrations.torch       PyTorch tensors in and out (extra `torch`)
    mlx_cosyh3.integrations.langchain   an LLM and a speech tool for LangChain (extra `langchain`)
"""

from mlx_cosyh3.errors import CosyH3Error


class MissingExtra(CosyH3Error, ImportError):
    """The other library is not installed."""

    def __init__(self, package, extra):
        super().__init__(f"{package} is not installed: pip install {package} (the extra {extra!r} of mlx-cosyh3)")
