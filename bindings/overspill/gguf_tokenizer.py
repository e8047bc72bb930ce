"""The tokenizer of a Hugging Face folder in the words of a GGUF file: byte-level BPE, which Llama 3, SmolLM and Qwen
have, and SentencePiece's BPE, which Llama 2 and Mistral have."""

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
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # kinds of tokens
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # SentencePiece's tokens of what has no other


def add(writer: Any, folder: Path, config: Mapping[str, Any], pre: str | None) -> None:
    """`pre`: as of export_gguf. Raises CheckpointError."""
    rules = _read(folder / "tokenizer.json")
    model = rules.get("model")
    is_bpe = isinstance(model, dict) and model.get("type") == "BPE"
    if is_bpe and (prefix := _space_before(rules)) is not None:
        _add_sentencepiece(writer, rules, config["vocab_size"], folder, prefix)
    elif is_bpe and _is_byte_level(rules):
        _add_byte_level(writer, rules, config["vocab_size"], folder, pre)
    else:
        raise CheckpointError(
            f"overspill: {folder}/tokenizer.json is neither a byte-level BPE nor SentencePiece's BPE with bytes, the "
            "kinds of which a GGUF file is written; use llama.cpp's convert_hf_to_gguf.py"
        )
    _add_special(writer, folder, config)


def _add_byte_level(writer: Any, rules: Mapping[str, Any], size: int, folder: Path, pre: str | None) -> None:
    changed = rules.get("normalizer")
    if changed and changed.get("type") != "NFC":  # Qwen's, which llama.cpp leaves out
        raise CheckpointError(
            f"overspill: {folder}/tokenizer.json changes texts before it cuts them ({json.dumps(changed):.200}), which "
            "llama.cpp does not do for a byte-level BPE; use llama.cpp's convert_hf_to_gguf.py"
        )
    tokens, kinds = _tokens(rules, size, folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or _cut_by(rules, folder))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in _merges(rules)])


def _add_sentencepiece(writer: Any, rules: Mapping[str, Any], size: int, folder: Path, prefix: bool) -> None:
    """llama.cpp joins what makes the token with the highest score; tokenizer.json has the order of the merges."""
    tokens, kinds = _tokens(rules, size, folder)
    rank: dict[str, int] = {}
    for number, merge in enumerate(_merges(rules)):
        rank.setdefault("".join(merge), number)
    for index, token in enumerate(tokens):
        if token in _BYTES and kinds[index] == _NORMAL:
            kinds[index] = _BYTE
        if token == (rules["model"].get("unk_token") or "<unk>"):
            kinds[index] = _UNKNOWN
            writer.add_unk_token_id(index)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(rank.get(token, len(rank))) for token in tokens])
    writer.add_token_types(kinds)
    writer.add_add_space_prefix(prefix)


def _merges(rules: Mapping[str, Any]) -> list[list[str]]:
    """Pairs; older files have texts with a space between the two."""
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in rules["model"]["merges"]]


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


def _space_before(rules: Mapping[str, Any]) -> bool | None:
    """Whether a text gets a space before it; None where this is no BPE of SentencePiece's with all bytes, or has other
    rules than that spaces become "▁"."""
    model = rules["model"]
    if (
        not model.get("byte_fallback")
        or model.get("ignore_merges")
        or not set(_BYTES) <= set(model.get("vocab") or ())
    ):
        return None
    normalizer, cut = rules.get("normalizer") or {}, rules.get("pre_tokenizer") or {}
    if cut.get("type") == "Metaspace" and not normalizer:
        scheme = cut.get("prepend_scheme", "always")
        known = cut.get("replacement") == "▁" and cut.get("split") is False
        return scheme != "never" if known else None
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if cut or not steps or steps[-1] != replaced:
        return None
    if len(steps) == 1:
        return False
    return True if steps[:-1] == [{"type": "Prepend", "prepend": "▁"}] else None


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
