"""The tokenizer of a Hugging Face folder in the words of a GGUF file: byte-level BPE, which Llama 3, SmolLM and Qwen
have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._core import CheckpointError
from .model_files import SMALL_FILE_BYTES

# llama.cpp's name of how a text is cut into words, by what tokenizer.json says of it.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BY_PATTERN = {
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # kinds of tokens


def add(writer: Any, folder: Path, config: Mapping[str, Any], pre: str | None) -> None:
    """`pre`: as of export_gguf. Raises CheckpointError."""
    rules = _read(folder / "tokenizer.json")
    model = rules.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not _is_byte_level(rules):
        raise CheckpointError(
            f"overspill: {folder}/tokenizer.json is no byte-level BPE, the only kind of which a GGUF file is written; "
            "use llama.cpp's convert_hf_to_gguf.py"
        )
    if (changed := rules.get("normalizer")) and changed.get(
        "type"
    ) != "NFC":  # Qwen's, which llama.cpp leaves out
        raise CheckpointError(
            f"overspill: {folder}/tokenizer.json changes texts before it cuts them ({json.dumps(changed):.200}), which "
            "llama.cpp does not do for a byte-level BPE; use llama.cpp's convert_hf_to_gguf.py"
        )
    tokens, kinds = _tokens(rules, config["vocab_size"], folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or _cut_by(rules, folder))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    _add_special(writer, folder, config)


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > SMALL_FILE_BYTES:
            raise ValueError(f"it has more than {SMALL_FILE_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"overspill: {path} cannot be read ({reason}); add the model's tokenizer"
        ) from None
    return values


def _steps(rules: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What cuts a text, in order."""
    found = rules.get("pre_tokenizer") or {}
    return list(found["pretokenizers"]) if found.get("type") == "Sequence" else [found]


def _is_byte_level(rules: Mapping[str, Any]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _steps(rules))


def _cut_by(rules: Mapping[str, Any], folder: Path) -> str:
    steps = _steps(rules)
    kinds = [step.get("type") for step in steps]
    words = bool(steps[-1].get("use_regex", True)) and not steps[-1].get("add_prefix_space")
    if kinds == ["ByteLevel"] and words:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and words and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = (steps[0].get("pattern") or {}).get("Regex")
        if pattern in _BY_PATTERN and steps[0].get("behavior") == "Isolated":
            return _BY_PATTERN[pattern]
    raise CheckpointError(
        f"overspill: {folder}/tokenizer.json cuts texts in a way that has no name here "
        f"({json.dumps(rules.get('pre_tokenizer')):.200}); give llama.cpp's name of it (--pre NAME; in a "
        "script pre=NAME)"
    )


def _tokens(rules: Mapping[str, Any], size: int, folder: Path) -> tuple[list[str], list[int]]:
    """As many as the embedding has rows: those that no text gives get names of their own."""
    added = {each["id"]: each for each in rules.get("added_tokens") or []}
    named = {index: token for token, index in rules["model"]["vocab"].items()}
    named |= {index: each["content"] for index, each in added.items()}
    if named and max(named) >= size:
        raise CheckpointError(
            f"overspill: {folder}/tokenizer.json has the token {max(named)}, and the model {size} rows of embeddings; "
            "they are of two models"
        )
    tokens = [named.get(index, f"[PAD{index}]") for index in range(size)]
    kinds = []
    for index in range(size):
        if index in added:
            kinds.append(_CONTROL if added[index].get("special") else _USER_DEFINED)
        else:
            kinds.append(_NORMAL if index in named else _UNUSED)
    return tokens, kinds


def _add_special(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    from tokenizers import Tokenizer

    generation = (
        _read(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    )
    ids = {}
    for name in ("bos", "eos", "pad"):
        given = generation.get(f"{name}_token_id", config.get(f"{name}_token_id"))
        found = given[0] if isinstance(given, list) and given else given
        if type(found) is int:
            ids[name] = found
            getattr(writer, f"add_{name}_token_id")(found)
    around = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("").ids
    writer.add_add_bos_token(bool(around) and around[0] == ids.get("bos"))
    writer.add_add_eos_token(len(around) > 1 and around[-1] == ids.get("eos"))
    if (template := _chat_template(folder)) is not None:
        writer.add_chat_template(template)


def _chat_template(folder: Path) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if not (folder / "tokenizer_config.json").exists():
        return None
    found = _read(folder / "tokenizer_config.json").get("chat_template")
    return found if isinstance(found, str) else None
