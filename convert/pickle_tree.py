"""What a pickle stream turns into: plain values, and placeholders for everything that is not plain."""

from mlx_cosyh3.errors import CheckpointError

MAX_DEPTH = 200  # containers inside containers
TREE_SLACK = 1 << 20  # how many values a tree may have, beyond 64 per byte of stream, when every share is copied


class Opaque:
    """A foreign object of which only the name and the recorded parts exist; nothing of it was imported or run.

    name     "package.module.Class"
    args     the constructor's arguments, or None for a class or function that is only named
    state    what BUILD gave it (mostly the attribute dict), or None
    items    what was appended to it; entries: what was set in it; None where nothing was
    """

    __slots__ = ("name", "args", "state", "items", "entries")

    def __init__(self, name, args=None):
        self.name, self.args = name, args
        self.state = self.items = self.entries = None

    @property
    def fields(self):
        """The attribute dict: {} if there is none; attributes and slots joined if the state has both."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        fields = {}
        for part in parts[:2]:
            if isinstance(part, dict):
                fields.update(part)
        return fields

    def __repr__(self):
        return f"Opaque({self.name!r})"


class Global(Opaque):
    """A name in a stream. `build(machine, *args)` makes the value of a call; without it a call is recorded."""

    __slots__ = ("build",)

    def __init__(self, name, build=None):
        super().__init__(name)
        self.build = build


def damaged(what):
    return CheckpointError(f"damaged pickle: {what}")


def bomb(what):
    return CheckpointError(f"pickle bomb: {what}; refused")


def check_tree(root, stream_bytes):
    """Refuses a value that a plain recursive walk could not finish: cyclic, too deep, or far larger than its
    stream once every shared part is counted as often as it is reached.

    Foreign objects end a branch: real ones often point back at their owner. What they hold is checked by itself.
    """
    limit = TREE_SLACK + 64 * stream_bytes
    known = {}  # id -> (values below it, levels below it)
    seen = set()  # ids of foreign objects
    roots = [root]
    while roots:
        _measure(roots.pop(), known, seen, roots, limit, stream_bytes)


def _measure(root, known, seen, roots, limit, stream_bytes):
    path = set()  # ids of the containers that are open, from the root down
    todo = [root]
    while todo:
        node = todo[-1]
        if isinstance(node, Opaque):
            todo.pop()
            if id(node) not in seen:
                seen.add(id(node))
                roots.extend(part for part in (node.args, node.state, node.items, node.entries) if part)
            continue
        if not isinstance(node, (list, tuple, dict)) or id(node) in known:
            todo.pop()
            continue
        children = [*node.keys(), *node.values()] if isinstance(node, dict) else node
        if id(node) not in path:  # the way down
            path.add(id(node))
            if len(path) > MAX_DEPTH:
                raise bomb(f"more than {MAX_DEPTH} containers inside one another")
            for child in children:
                if isinstance(child, Opaque) or (isinstance(child, (list, tuple, dict)) and child):
                    if id(child) in path:
                        raise CheckpointError(f"a {type(child).__name__} that holds itself; refused")
                    todo.append(child)
            continue
        size, levels = 1, 0  # the way up
        for child in children:
            below = known.get(id(child))
            if below is not None:
                size, levels = size + below[0], max(levels, below[1])
            else:
                size += len(child) if isinstance(child, (set, frozenset)) else 1
        if levels >= MAX_DEPTH:
            raise bomb(f"more than {MAX_DEPTH} containers inside one another")
        if size > limit:
            raise bomb(f"{stream_bytes} bytes that unfold to more than {limit} values")
        known[id(node)] = (size, levels + 1)
        path.discard(id(node))
        todo.pop()
