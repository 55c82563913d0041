"""HyperPyYAML files as plain data: nothing that such a file names is imported, made or called.

`!new:a.b.C` with fields becomes {"__new__": "a.b.C", **fields}, likewise `!name:` and `!apply:`; a list of arguments
goes to "args". `!ref <x>` becomes the value of the top-level entry x (`<x[y]>`: of its field y), and arithmetic over
such references, as `<chunk_size> * <token_mel_ratio>`, its result. The format: github.com/speechbrain/HyperPyYAML.
"""

import ast
import operator
import re
from pathlib import Path

import yaml

from mlx_cosyh3.errors import CheckpointError

MAX_BYTES = 1_000_000
MAX_VALUES = 50_000  # with every reference written out; a released file has a few hundred
MAX_DEPTH = 50
MAX_INT = 2**63  # beyond it a number is no size, and arithmetic on it may take for ever
KINDS = ("new", "name", "apply")
REF = re.compile(r"<([^<>\[\]]+)((?:\[[^<>\[\]]+\])*)>")
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Ref(str):
    """What stands after `!ref`."""


class Loader(yaml.SafeLoader):
    """Knows YAML's own tags and the four above; has no aliases, which let a short file become a huge tree."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise CheckpointError(f"line {self.peek_event().start_mark.line + 1}: aliases (*name) are not read")
        if len(self.open) >= MAX_DEPTH:
            raise CheckpointError(f"it is nested more than {MAX_DEPTH} deep")
        self.open.append(index)
        node = super().compose_node(parent, index)
        self.open.pop()
        return node

    def __init__(self, stream):
        super().__init__(stream)
        self.open = []


def _tagged(loader, kind, path, node):
    if isinstance(node, yaml.MappingNode):
        fields = loader.construct_mapping(node, deep=True)
    elif isinstance(node, yaml.SequenceNode):
        fields = {"args": loader.construct_sequence(node, deep=True)}
    else:
        fields = {"args": [node.value]} if node.value else {}
    return {f"__{kind}__": path, **fields}


def _ref(loader, node):
    return Ref(loader.construct_scalar(node))


def _unknown(loader, node):
    raise CheckpointError(f"line {node.start_mark.line + 1}: the tag {_short(node.tag)!r} is not read")


def _integer(loader, node):
    text = loader.construct_scalar(node)
    if len(text) > 20:
        raise CheckpointError(f"line {node.start_mark.line + 1}: the number {_short(text)} is too large")
    return int(text, 0 if text[:2] in ("0x", "0o") else 10)


def _float(loader, node):
    return float(loader.construct_scalar(node))


def _short(text):
    """`text` for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def _prepare():
    """Our tags, and of YAML's own those that give text, numbers, lists and mappings."""
    for kind in KINDS:
        Loader.add_multi_constructor(
            f"!{kind}:", lambda loader, path, node, kind=kind: _tagged(loader, kind, path, node)
        )
    Loader.add_constructor("!ref", _ref)
    Loader.add_constructor("!copy", _ref)
    core = "tag:yaml.org,2002:"
    Loader.add_constructor(core + "int", _integer)
    Loader.add_constructor(core + "float", _float)
    for tag in (*(core + kind for kind in ("binary", "timestamp", "omap", "pairs", "set")), None):
        Loader.add_constructor(tag, _unknown)
    # YAML 1.2's plain scalars, which are HyperPyYAML's: 1e-06 is a number, but dates, 1:30, yes and << are text.
    Loader.yaml_implicit_resolvers = {}
    for kind, pattern, first in (
        ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
        ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
        ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
        ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ):
        Loader.add_implicit_resolver(core + kind, re.compile(pattern), first)


_prepare()


def read_hyperyaml(path):
    """The file `path` as a dict of plain values. Raises CheckpointError for what is not such a file."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise CheckpointError(f"it is larger than {MAX_BYTES:,} bytes")
        return parse(text.decode("utf-8"))
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from e
    except UnicodeDecodeError as e:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {e.start})") from e
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e


def parse(text):
    """`text` as a dict of plain values."""
    try:
        tree = yaml.load(text, Loader)  # a SafeLoader
    except CheckpointError:
        raise
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        raise CheckpointError(f"{where}not valid YAML ({getattr(e, 'problem', None) or type(e).__name__})") from e
    except (ValueError, TypeError, LookupError, RecursionError) as e:  # of a tagged scalar, of a key that is a list
        raise CheckpointError(f"not valid YAML ({type(e).__name__})") from e
    if not isinstance(tree, dict):
        raise CheckpointError("it holds no entries (name: value)")
    return _Resolver(tree).all()


class _Resolver:
    """Writes references out. The number of values is limited, as references to references multiply."""

    def __init__(self, tree):
        self.tree, self.left, self.active = tree, MAX_VALUES, []

    def all(self):
        return {_key(name): self.entry(name) for name in self.tree}

    def entry(self, name):
        """The value of a top-level entry."""
        if name in self.active:
            raise CheckpointError(f"!ref <{_short(name)}> refers to itself")
        if len(self.active) >= MAX_DEPTH:
            raise CheckpointError(f"!ref <{_short(name)}> is one of more than {MAX_DEPTH} references in a row")
        self.active.append(name)
        value = self.value(self.tree[name])
        self.active.pop()
        return value

    def value(self, value):
        self.left -= 1
        if self.left < 0:
            raise CheckpointError(f"it has more than {MAX_VALUES:,} values")
        if isinstance(value, Ref):
            return self.reference(value)
        if isinstance(value, dict):
            return {_key(k): self.value(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.value(v) for v in value]
        return _plain(value)

    def reference(self, text):
        """The value of `text`: one reference, arithmetic over several, or a string that holds some."""
        whole = REF.fullmatch(text.strip())
        if whole:
            return self.target(whole)
        values, names = {}, []

        def named(match):
            names.append(f"ref_{len(names)}")
            values[names[-1]] = self.target(match)
            return names[-1]

        expression = REF.sub(named, text.strip())
        if not values:
            raise CheckpointError(f"!ref {_short(text)!r} has no <name>")
        try:
            return _arithmetic(ast.parse(expression, mode="eval").body, values)
        except ZeroDivisionError as e:
            raise CheckpointError(f"!ref {_short(text)!r} divides by zero") from e
        except OverflowError as e:
            raise CheckpointError(f"!ref {_short(text)!r} is too large a number") from e
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            found = iter(values.values())
            return REF.sub(lambda match: str(next(found)), text)[:MAX_BYTES]

    def target(self, match):
        name = match[1].strip()
        if name not in self.tree:
            raise CheckpointError(f"!ref: there is no entry {_short(name)!r}")
        value = self.entry(name)
        for key in re.findall(r"\[([^\]]+)\]", match[2]):
            if not isinstance(value, dict) or key not in value:
                raise CheckpointError(f"!ref {_short(match[0])}: there is no field {_short(key)!r}")
            value = value[key]
        return value


def _arithmetic(node, values):
    """The number that a parsed expression over numbers gives. TypeError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and type(values.get(node.id)) in (int, float):
        return values[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand, values)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        result = OPERATIONS[type(node.op)](_arithmetic(node.left, values), _arithmetic(node.right, values))
        if not -MAX_INT <= result < MAX_INT:
            raise OverflowError
        return result
    raise TypeError


def _key(key):
    """A mapping's key, which config.json can only hold as text."""
    if not isinstance(key, str):
        raise CheckpointError(f"it has {key!r}, which is not text, as a name")
    return _plain(key)


def _plain(value):
    """A single value, if config.json can hold it."""
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise CheckpointError("it has text that is not Unicode")
    if isinstance(value, (int, float)) and not -MAX_INT <= value < MAX_INT:  # nor NaN
        raise CheckpointError(f"it has a number that is too large or none ({value:g})")
    return value
