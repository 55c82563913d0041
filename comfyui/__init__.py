"""ComfyUI node pack: copy or link this folder into ComfyUI's custom_nodes. See README.md beside this file."""

from .nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
