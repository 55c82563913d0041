"""Find a model folder, here or on the hub, and load it."""

import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cosyh3.errors import CheckpointError, CosyH3Error, first_line, nearest
from mlx_cosyh3.floor import check_machine
from mlx_cosyh3.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parent / "models"
DEFAULT_MODEL = "h3-tiny"
FAMILIES = {  # config.json's model_type -> module with `build(config)`
    "h3": "mlx_cosyh3.h3",
    "cosyvoice1": "mlx_cosyh3.cosyvoice.cosyvoice1",
    "cosyvoice2": "mlx_cosyh3.cosyvoice.cosyvoice2",
    "cosyvoice3": "mlx_cosyh3.cosyvoice.cosyvoice3",
}
CONVERT = "turn a checkpoint into a model with: mlx_cosyh3 convert --model PATH_OR_REPO --out DIR"
PATTERNS = ["*.json", "*.safetensors", "voices/*.safetensors", "*.txt", "*.bpe", "*.tiktoken", "*.md"]


def load(path_or_repo=None, *, revision=None, kv_window=None, lighter=None):
    """Load a converted model: a folder, a hub repo id, or None for the small model that comes with the package.

    kv_window   H3: the attention layers look at this many last tokens (None: at all), which bounds memory and time
    lighter     a second folder or hub repo id: the same model quantised, which requests may use that have a deadline
                they could not meet otherwise. It takes its own memory on top; see `lighter.py`
    Returns the model, evaluated, with its `tokenizer` and `config`; any thread may use it.
    Raises CosyH3Error (CheckpointError for a folder that holds no such model)."""
    if lighter is not None:
        from mlx_cosyh3.lighter import join

        other = find_model(lighter)
        read_config(other)  # a wrong one is an error before the model itself is loaded
        return join(load(path_or_repo, revision=revision, kv_window=kv_window), load(other, kv_window=kv_window))
    check_machine()
    if kv_window is not None and (not isinstance(kv_window, int) or kv_window < 1):
        raise CosyH3Error(f"kv_window must be a whole number of tokens from 1, not {kv_window!r}")
    folder = find_model(path_or_repo, revision)
    config = read_config(folder)
    given = None
    if config["model_type"] != "h3" and "mel" not in config:  # CosyVoice as mlx-audio writes it
        from mlx_cosyh3.convert.cosyvoice_mlx import from_mlx_layout

        config, given = from_mlx_layout(folder)
        given = {name: mx.array(np.ascontiguousarray(a)) for name, a in given.items()}
    module = importlib.import_module(FAMILIES[config["model_type"]])
    if config["model_type"] == "h3":
        model = module.build(config, kv_window=kv_window)
    elif kv_window is not None:
        raise CosyH3Error(f"kv_window={kv_window} goes with H3 models; {folder} is a {config['model_type']} model: leave it out")
    else:
        model = module.build(config)
    weights = given or {}
    for file in [] if given else sorted(folder.glob("model*.safetensors")):
        try:
            weights.update(mx.load(str(file)))
        except RuntimeError as e:
            raise CheckpointError(f"cannot read {file}: {first_line(e)}; convert the model again") from e
    if not weights:
        raise CheckpointError(f"{folder} holds no model*.safetensors: convert the model again")
    if hasattr(module, "cast"):
        weights = module.cast(weights, config)
    _check(folder, model, weights)
    try:
        model.load_weights(list(weights.items()))
        if hasattr(model, "finish"):
            model.finish(folder)
    except (RuntimeError, MemoryError) as e:  # only now MLX reads the numbers
        raise CheckpointError(
            f"cannot load {folder}: {first_line(e)}; see that its files are whole, and how much memory is free"
        ) from e
    if not hasattr(model, "finish") and any((folder / name).exists() for name in ("vocab.json", "tokenizer.json")):
        model.tokenizer = Tokenizer.from_dir(folder, config.get("eos_token_id"))
    return model


def find_model(path_or_repo=None, revision=None, allow_patterns=PATTERNS):
    """The local folder of a model: an existing path, an embedded model's name, else a snapshot of a hub repo."""
    if path_or_repo is None:
        return EMBEDDED / DEFAULT_MODEL
    name = str(path_or_repo)
    if Path(name).exists():
        return Path(name)
    if (EMBEDDED / name / "config.json").exists() and "/" not in name:
        return EMBEDDED / name
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise CosyH3Error(f"no such model: {name} is neither a folder here nor a hub repo id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        """Quiet when stderr is not a terminal."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"disable": kwargs.get("disable") or not sys.stderr.isatty()})

    def fetched(patterns):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, tqdm_class=Bar))

    try:
        if allow_patterns is PATTERNS:
            read_config(fetched(["config.json"]))  # a checkpoint is refused before gigabytes of it are here
        return fetched(allow_patterns)
    except HFValidationError as e:
        raise CosyH3Error(f"no such model: {name} is neither a folder here nor a hub repo id (owner/name)") from e
    except LocalEntryNotFoundError as e:
        offline = "HF_HUB_OFFLINE is set: unset it" if HF_HUB_OFFLINE else "the hub cannot be reached: check the network"
        raise CosyH3Error(f"{name} is not in the local cache, and {offline}") from e
    except HfHubHTTPError as e:
        raise CosyH3Error(f"cannot fetch {name} from the hub: {first_line(e)}") from e
    except OSError as e:  # no network, no space
        raise CosyH3Error(f"cannot fetch {name} from the hub: {e}") from e


def read_config(folder):
    """config.json of a converted model, its model_type checked."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(f"{folder} is not a model folder; {CONVERT}")
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; {CONVERT}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config["model_type"]
    except (ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{path} is not a model's config ({type(e).__name__}: {e}); {CONVERT}") from e
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(f"{path}: model type {kind!r} is not one this program runs ({known}){nearest(kind, FAMILIES)}")
    return config


def _check(folder, model, weights):
    """The weights fit the model: MLX's own message would be a list of every name."""
    expected = {name: a.shape for name, a in tree_flatten(model.parameters())}
    for what, names in (("lacks", expected.keys() - weights.keys()), ("has an unknown", weights.keys() - expected.keys())):
        if names:
            first = min(names)
            raise CheckpointError(f"{folder} {what} tensor {first!r} (one of {len(names)}); convert the model again")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(weights[name].shape)}, config.json says {list(shape)}"
            )
