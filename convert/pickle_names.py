"""Which names a checkpoint may hold: the rule that tells a plain checkpoint from a pickle that wants to run code.

Nothing in a stream is ever imported or called here, so a name cannot do harm. Refusing is about telling the user
that the file is not what it says: whoever opens it with Python's own pickle would run it.

1. Naming. A name is refused at sight when a holder of state would never need it:
   - its module belongs to Python's standard library (or is one that loads or runs code, RUNNERS) and is not
     listed in STDLIB;
   - any later part of it is a way to such a module or function (DOORS: `torch.serialization` + `os.system`,
     `random` + `_os`), or a double-underscore attribute (`__globals__`, `__subclasses__`);
   - it reaches through something that is not written like a class (`Outer.Inner` is fine, `codecs.open` is not).
   Everything else may be named: classes and functions of foreign packages are recorded as words.
2. Instances (NEWOBJ). Only a class can stand there, and the record holds its name and state: any name that
   passed 1.
3. Calls (REDUCE, INST, OBJ). A call can run any function, so it is recorded only if
   - the name is one of CALLS, functions and lower-case classes that well-known packages pickle, or
   - its package is in PACKAGES and its last part is written like a class (Capital first);
   all other calls are refused by name.
The pure-data names (OrderedDict, set, ...) and torch's own rebuilders never get here: torch_tensor.py makes
their values itself.
"""

import sys

from mlx_cosyh3.errors import CheckpointError

# Standard-library names that hold state. None: every class of the module, by rules 2 and 3.
STDLIB = {
    "__main__": None,
    "argparse": {"Namespace"},
    "builtins": {"dict", "list", "tuple", "set", "frozenset", "str", "bytes", "bytearray", "int", "float", "bool",
                 "complex", "object", "type", "slice", "range", "Ellipsis", "NotImplemented"},
    "collections": None,
    "copyreg": {"_reconstructor", "__newobj__"},
    "dataclasses": {"_MISSING_TYPE", "_HAS_DEFAULT_FACTORY_CLASS", "MISSING"},
    "datetime": None,
    "decimal": {"Decimal"},
    "enum": None,
    "fractions": {"Fraction"},
    "functools": {"partial"},
    "logging": {"Logger", "getLogger"},
    "numbers": None,
    "pathlib": None,
    "random": {"Random"},
    "re": {"_compile"},
    "types": {"GenericAlias", "SimpleNamespace"},
    "typing": None,
    "uuid": {"UUID", "SafeUUID"},
    "_codecs": {"encode"},
    "_operator": {"getitem"},
    "operator": {"getitem"},
}
# Not in the standard library of every Python, or not in any: modules whose purpose is to load or run things.
RUNNERS = frozenset((
    "IPython", "_pickle", "asyncore", "cPickle", "cloudpickle", "commands", "dill", "distutils", "execjs",
    "fabric", "httpx", "imp", "invoke", "ipykernel", "joblib", "jupyter_client", "nt", "numexpr",
    "paramiko", "pexpect", "pip", "pipes", "pkg_resources", "plumbum", "popen2", "posix", "psutil", "pwn",
    "requests", "setuptools", "sh", "telnetlib", "urllib2", "urllib3", "wget", "winreg", "yaml",
))
DOORS = frozenset((
    "builtins", "ctypes", "importlib", "marshal", "multiprocessing", "nt", "os", "pickle", "posix", "pty", "runpy",
    "shutil", "socket", "subprocess", "sys",
))
DOOR_CALLS = frozenset(("eval", "exec", "execfile", "getattr", "popen", "setattr", "system"))
DUNDERS = frozenset((
    "__newobj__", "__randomstate_ctor", "__generator_ctor", "__bit_generator_ctor", "__pyx_unpickle_SeedSequence",
))
PACKAGES = frozenset((
    "__main__", "__torch__", "accelerate", "addict", "apex", "argparse", "box", "clip", "collections", "config",
    "configs", "cosyvoice", "data", "datasets", "datetime", "decimal", "deepspeed", "diffusers", "easydict",
    "enum", "espnet", "espnet2", "fairscale", "fairseq", "flash_attn", "fractions", "hydra", "hyperpyyaml",
    "lightning", "lightning_fabric", "lightning_utilities", "logging", "main", "matcha", "ml_collections",
    "model", "models", "modelscope", "modules", "monai", "munch", "nemo", "numpy", "omegaconf", "open_clip",
    "pandas", "pathlib", "peft", "pl_bolts", "pytorch_lightning", "random", "safetensors", "scipy",
    "sentencepiece", "sklearn", "speechbrain", "src", "timm", "tokenizers", "torch", "torchaudio",
    "torchmetrics", "torchtext", "torchvision", "train", "trainer", "transformers", "trl", "types", "typing",
    "ultralytics", "utils", "uuid", "vocos", "wandb", "yacs",
))
CALLS = frozenset((
    "collections.defaultdict", "collections.deque", "datetime.date", "datetime.datetime", "datetime.time",
    "datetime.timedelta", "datetime.timezone", "functools.partial", "logging.getLogger", "re._compile",
    "torch.device", "torch.serialization._get_layout", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_wrapper_subclass", "torch._utils._rebuild_device_tensor_from_numpy",
    "torch._utils._rebuild_xla_tensor", "builtins.object", "builtins.range", "builtins.slice",
    "numpy.dtype", "numpy.ndarray", "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
    "numpy.random._pickle.__randomstate_ctor", "numpy.random._pickle.__generator_ctor",
    "numpy.random._pickle.__bit_generator_ctor",
))
# Protocols 0 to 2 use the names of Python 2, whoever writes them.
PYTHON2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
PYTHON2_NAMES = {"long": "int", "unicode": "str", "xrange": "range"}


def refused(name, verb="names"):
    return CheckpointError(
        f"not a plain checkpoint: it {verb} {name}, which a holder of weights does not need (nothing was run). "
        "Ask its author for a state dict, torch.save(model.state_dict(), ...), or for safetensors")


def check_name(module, name):
    """Rule 1. Returns "module.name" with Python 2's names brought up to date, or raises CheckpointError."""
    if module == "__builtin__":
        name = PYTHON2_NAMES.get(name, name)
    module = PYTHON2.get(module, module)
    full = f"{module}.{name}"
    if not all(part.isidentifier() for part in full.split(".")):
        raise CheckpointError(f"damaged pickle: {full!r} is no name of Python")
    root, *inner = module.split(".")
    *outer, last = name.split(".")
    if root in RUNNERS or root in sys.stdlib_module_names or root in STDLIB:
        listed = STDLIB.get(root, ())
        if listed is not None and (inner or name not in listed) and not _is_exception(module, name):
            raise refused(full)
    words = [part.strip("_") for part in (*outer, last)]
    if not DOORS.isdisjoint((*inner, *words)) or not DOOR_CALLS.isdisjoint(words):
        raise refused(full)
    if any(part.startswith("__") and part not in DUNDERS for part in (*outer, last)):
        raise refused(full)
    if not all(_like_a_class(part) for part in outer):
        raise refused(full)
    return full


def check_call(full):
    """Rule 3, for a name that passed rule 1."""
    if full in CALLS or _is_exception(*full.rsplit(".", 1)):
        return
    if full.split(".")[0] in PACKAGES and _like_a_class(full.split(".")[-1]):
        return
    raise refused(full, "calls")


def _like_a_class(name):
    return name.lstrip("_")[:1].isupper()


def _is_exception(module, name):
    """Exceptions are state too: `ValueError("...")` in the record of a training run."""
    return module == "builtins" and name.endswith(("Error", "Exception", "Warning"))
