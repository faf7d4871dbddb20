"""The weights of a checkpoint as the files that other programs read: safetensors, and config.json where it is known.

It runs in one plain process, whatever plan saved the checkpoint: its files are read one tensor at a time and written as
they come, so that memory holds the largest tensor and never the model. Nothing is unpickled, and torch is not imported.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evenly.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter
from evenly.checkpoint.config import ModelConfig, read_model_config
from evenly.checkpoint.folder import CheckpointFolder
from evenly.checkpoint.manifest import AVERAGE, MODEL, Manifest, TensorForm, Unsound, first_of
from evenly.checkpoint.pieces import METADATA, Piece, find_pieces, read_tensor, size_bytes, stored_type
from evenly.errors import CheckpointError, UserError
from evenly.observe.run_folder import RunFolder

SHARD_BYTES = 5 * 10**9
INDEX, CONFIG, GENERATION = "model.safetensors.index.json", "config.json", "generation_config.json"
# Of a tokenizer or processor, as transformers saves them.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
FLOATS = ("float64", "float32", "bfloat16", "float16")

Step = int | Literal["best"] | None


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    step:        of the checkpoint.
    files:       names of the files with tensors, in order.
    tensors, bytes: their number and their bytes, headers not counted.
    model_class: the transformers class that loads them; None of another model, whose own names they have.
    averaged:    whether they are the averaged weights; None where the checkpoint has no averages.
    adapter:     whether they are those of a peft adapter.
    """

    step: int
    files: tuple[str, ...]
    tensors: int
    bytes: int
    model_class: str | None
    averaged: bool | None = None
    adapter: bool = False


@dataclass(frozen=True)
class _Source:
    """The weights to write: name in the target -> form, and -> pieces in the checkpoint."""

    forms: dict[str, TensorForm]
    pieces: dict[str, list[Piece]]


def export(
    root: Path,
    to: Path,
    *,
    step: Step = None,
    average: bool = False,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: Path | None = None,
    adapter: bool = False,
) -> Exported:
    """Writes the weights of a checkpoint of the run in `root` to the folder `to`, which is made if need be.

    step:        the checkpoint's: a number, "best" for the least evaluation loss, or None for the newest.
    average:     whether to write the averages of the parameters in the place of these, with the model's own buffers.
    shard_bytes: beyond, the tensors are spread over several files with an index.
    tokenizer:   a folder whose files of a tokenizer or processor are copied.
    adapter:     whether to write the adapter of a peft model alone, which is one file.

    Raises `UserError` if `to` is not empty or there is no such checkpoint or average, and `CheckpointError` if it is
    unsound or `to` cannot be written, which is then left as it was.
    """
    _check_target(to)
    folder = CheckpointFolder(root)
    chosen = choose_step(folder, step)
    copied = [] if tokenizer is None else _tokenizer_files(tokenizer)
    manifest, pieces = _checked_pieces(folder, chosen)
    averages = _averages(manifest)
    if average and not averages:
        found = f"the checkpoint of step {chosen} has none: the job keeps no average, or it begins later"
        raise UserError(f"export the averaged weights in {root}", found, "leave --average out, or choose another step")
    source = _weights(manifest, pieces, averages if average else {})
    if adapter:
        config = None
        source, text = _of_adapter(source, root)
        shards, texts = {ADAPTER_WEIGHTS: [*source.forms]}, {ADAPTER_CONFIG: text}
    else:
        config = read_model_config(RunFolder(root).model_config)
        source = _renamed(source, root, config)
        shards = split(source.forms, shard_bytes)
        texts = _texts(source, shards, config)
    _write_all(to, source, shards, texts, copied)
    return Exported(
        step=chosen,
        files=tuple(shards),
        tensors=len(source.forms),
        bytes=sum(map(size_bytes, source.forms.values())),
        model_class=config and config.model_class,
        averaged=average if averages else None,
        adapter=adapter,
    )


def choose_step(folder: CheckpointFolder, step: Step) -> int:
    """The step that is asked for. Raises `UserError` if it has no checkpoint."""
    which = f"the {step or 'newest'} checkpoint" if step in (None, "best") else f"the checkpoint of step {step}"
    asked, steps = f"export {which} in {folder.root}", folder.steps()
    if not steps:
        raise UserError(asked, "it has no checkpoints", "give the folder of a run: runs/NAME-N")
    there = ", ".join(map(str, steps))
    chosen = steps[-1] if step is None else folder.best() if step == "best" else step
    if chosen is None:
        raise UserError(asked, "none was evaluated when it was saved", f"choose a step: {there}")
    if chosen not in steps:
        raise UserError(asked, f"there are those of {there}", "choose one of them")
    return chosen


def split(forms: Mapping[str, TensorForm], shard_bytes: int) -> dict[str, list[str]]:
    """File -> names of its tensors: filled in order, each file up to `shard_bytes` or of one tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, form in forms.items():
        if shards[-1] and filled + size_bytes(form) > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size_bytes(form)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": names for i, names in enumerate(shards, start=1)}


def _check_target(to: Path) -> None:
    if to.exists() and not to.is_dir():
        raise UserError(f"export to {to}", "it is a file", "give a folder")
    if to.is_dir() and any(to.iterdir()):
        raise UserError(f"export to {to}", "it is not empty", "give a new folder, or empty this one")


def _checked_pieces(folder: CheckpointFolder, step: int) -> tuple[Manifest, Mapping[str, list[Piece]]]:
    try:
        manifest = folder.manifest(step)
        folder.check_files(manifest, manifest.files)
        if not any(name.startswith(MODEL) for name in manifest.tensors):
            raise Unsound("it holds no model")
        return manifest, find_pieces(folder.path(step), manifest.files, manifest.tensors)
    except Unsound as reason:
        sound = folder.newest_sound()
        other = "there is no other sound checkpoint in this folder"
        do = other if sound is None else f"export step {sound}, the newest sound checkpoint"
        raise CheckpointError(f"export {folder.path(step)}", str(reason), do) from None


def _averages(manifest: Manifest) -> dict[str, str]:
    """Name of a parameter in the checkpoint -> name of its average."""
    found = (name for name in manifest.tensors if name.startswith(AVERAGE))
    return {f"{MODEL}{name.removeprefix(AVERAGE)}": name for name in found}


def _weights(manifest: Manifest, pieces: Mapping[str, list[Piece]], averages: Mapping[str, str]) -> _Source:
    names = {name.removeprefix(MODEL): averages.get(name, name) for name in manifest.tensors if name.startswith(MODEL)}
    return _Source(
        {name: manifest.tensors[there] for name, there in names.items()},
        {name: pieces[there] for name, there in names.items()},
    )


def _renamed(source: _Source, root: Path, config: ModelConfig | None) -> _Source:
    if config is None or not config.prefix:
        return source
    others = [f"{name} is not in it" for name in source.forms if not name.startswith(config.prefix)]
    if others:
        raise UserError(
            f"export the submodule {config.prefix.removesuffix('.')} that {RunFolder(root).model_config} tells of",
            first_of(others),
            "it is of another model: remove it to export the weights by the names they have",
        )
    cut = len(config.prefix)
    forms = {name[cut:]: form for name, form in source.forms.items()}
    return _Source(forms, {name[cut:]: pieces for name, pieces in source.pieces.items()})


def _tokenizer_files(folder: Path) -> list[Path]:
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise UserError(
            f"export the tokenizer of {folder}",
            f"it has none of {', '.join(TOKENIZER_FILES[:3])} ...",
            "give the folder that tokenizer.save_pretrained has written",
        )
    return found


def _of_adapter(source: _Source, root: Path) -> tuple[_Source, str]:
    adapter = read_adapter(RunFolder(root).adapter)
    lacking = [name for name in adapter.names.values() if name not in source.forms]
    if lacking or adapter.left_out:
        found = f"the checkpoint does not have {first_of(lacking)}"
        if not lacking:
            found = f"the run trains {first_of(adapter.left_out)}, which no adapter has"
        raise UserError("export an adapter", found, "export the whole model, or name it in modules_to_save of peft")
    names = adapter.names.items()
    text = json.dumps(adapter.config, indent=2, sort_keys=True) + "\n"
    forms = {there: source.forms[name] for there, name in names}
    return _Source(forms, {there: source.pieces[name] for there, name in names}), text


def _write_all(
    to: Path, source: _Source, shards: Mapping[str, Sequence[str]], texts: Mapping[str, str], copied: Sequence[Path]
) -> None:
    made = [folder for folder in (to, *to.parents) if not folder.exists()]
    try:
        to.mkdir(parents=True, exist_ok=True)
        for file, names in shards.items():
            _write_shard(to / file, names, source)
        for path in copied:
            shutil.copyfile(path, to / path.name)
        for file, text in texts.items():
            (to / file).write_text(text, encoding="utf-8")
    except BaseException as error:
        _remove([to / file for file in (*shards, *texts, *(path.name for path in copied))], made)
        if isinstance(error, OSError | ValueError):  # also a shape that no array can have
            raise CheckpointError(f"export to {to}", str(error), "") from error
        raise


def _write_shard(path: Path, names: Sequence[str], source: _Source) -> None:
    # Wider elements first, as safetensors does it: so each tensor begins at a multiple of its element.
    ordered = sorted(names, key=lambda name: -size_bytes(TensorForm(source.forms[name].dtype, ())))
    with path.open("xb") as file:
        file.write(_header({name: source.forms[name] for name in ordered}))
        for name in ordered:
            file.write(read_tensor(source.forms[name], source.pieces[name]).data)


def _header(forms: Mapping[str, TensorForm]) -> bytes:
    """Length and table of a safetensors file whose tensors are packed one after the other."""
    rows: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for name, form in forms.items():
        start, end = end, end + size_bytes(form)
        rows[name] = {"dtype": stored_type(form), "shape": form.shape, "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _texts(source: _Source, shards: Mapping[str, Sequence[str]], config: ModelConfig | None) -> dict[str, str]:
    """File -> text of the files other than those with tensors."""
    texts: dict[str, str] = {}
    if len(shards) > 1:
        total = {"total_size": sum(map(size_bytes, source.forms.values()))}
        places = {name: file for file, names in shards.items() for name in names}
        texts[INDEX] = json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n"
    if config is not None and config.generation is not None:
        texts[GENERATION] = json.dumps(config.generation, indent=2) + "\n"
    if config is not None:
        texts[CONFIG] = json.dumps(_config(config, source.forms), indent=2) + "\n"
    return texts


def _config(config: ModelConfig, forms: Mapping[str, TensorForm]) -> dict[str, Any]:
    floats = [form.dtype for form in forms.values() if form.dtype in FLOATS]
    return {**config.config, "architectures": [config.model_class], **({"dtype": floats[0]} if floats else {})}


def _remove(files: Sequence[Path], folders: Sequence[Path]) -> None:
    """Those files, and the folders, deepest first; what is not there, or cannot go, stays away or stays."""
    for remove, paths in ((Path.unlink, files), (Path.rmdir, folders)):
        for path in paths:
            try:
                remove(path)
            except OSError:
                pass
