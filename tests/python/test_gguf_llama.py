"""GGUF files in llama.cpp itself, where tools/llama_cpp has built it: the same tokens, the same logits."""

import json
import sys
from pathlib import Path

import pytest
import torch

from overspill import export_gguf, gguf_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/gguf"))

import gguf_opened
from gguf_models import FAMILIES, LLAMA3, YARN, made
from gguf_opened import Opened, difference, of_transformers

pytestmark = pytest.mark.skipif(bool(gguf_opened.missing()), reason=gguf_opened.missing())

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
SCALED = [
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": {**YARN, "beta_fast": 32.0, "factor": 1.5}}),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e6, "factor": 2.5}}),
    ("qwen3_moe", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
]
IDS = torch.arange(3, 100).mul(37).remainder(250).tolist()
TEXTS = [
    " a  b\n\nc\t\td  \n   e\r\n",
    "I'll don't WE'LL they'Re x'S 'd",
    "1234567 v2.0 3,14 ½ ²³ ٣٤ x1y22",
    "naïve – “quoted” … №5 ñandú ǅ",
    "日本語のテキスト 텍스트 العربية हिन्दी 🙂👩‍👩‍👧 e\u0301",
    "def f(x):\n    return x**2  # <end> ok\n",
    "",
    "   ",
    "\n\n\n",
]


@pytest.mark.parametrize(("family", "changes"), FAMILIES + SCALED)
def test_llama_cpp_gives_the_models_logits(family, changes, on_disk, tmp_path):
    """Unlike transformers' reader, llama.cpp shares no code with the model that the file is compared with."""
    folder = made(tmp_path / "model", family, on_disk.model, **changes)
    (theirs,) = of_transformers(folder, [IDS])
    found = {}
    for kind in ("f32", "bf16", "q8_0"):
        export_gguf(folder, tmp_path / f"{kind}.gguf", type=kind)
        with Opened(tmp_path / f"{kind}.gguf", "exact") as opened:
            found[kind] = opened.logits(IDS)
    assert torch.allclose(found["f32"], theirs, atol=1e-3)
    assert difference(found["f32"], theirs).mean < 1e-8
    assert difference(found["bf16"], theirs).mean < 1e-3
    most = 1e-2 if family == "qwen3_moe" else 1e-3  # rounded, some tokens go to other experts
    assert difference(found["q8_0"], theirs).mean < most


def test_the_pretrained_model(smollm2, tmp_path):
    from transformers import AutoTokenizer

    text = Path(json.__file__).read_text()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(text)["input_ids"]
    (theirs,) = of_transformers(smollm2, [ids[:256]])
    export_gguf(smollm2, tmp_path / "model.gguf")
    with Opened(tmp_path / "model.gguf") as opened:
        assert opened.tokens(text, around=True) == ids
        assert difference(opened.logits(ids[:256]), theirs).mean < 1e-3


def of_bytes(steps, path: Path) -> None:
    """A tokenizer that cuts texts so, trained on this file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    rules = json.loads(tokenizer.to_str())
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([__file__, json.__file__], trainer)
    tokenizer.save(str(path))


@pytest.mark.parametrize("name", ["gpt-2", "smollm", *gguf_tokenizer._BY_PATTERN.values()])
def test_each_known_way_to_cut_a_text(name, on_disk, tmp_path):
    from tokenizers import Tokenizer

    patterns = {name: pattern for pattern, name in gguf_tokenizer._BY_PATTERN.items()}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps = [{**bytes_alone, "use_regex": name not in patterns}]
    if name == "smollm":
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    if name in patterns:
        pattern = {"Regex": patterns[name]}
        steps.insert(0, {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    kept = tmp_path / "tokenizer"
    kept.mkdir()
    of_bytes(steps, kept / "tokenizer.json")
    folder = made(tmp_path / "model", "llama", kept)
    export_gguf(folder, tmp_path / "model.gguf")
    tokenizer = Tokenizer.from_file(str(kept / "tokenizer.json"))
    with Opened(tmp_path / "model.gguf") as opened:
        for text in [*TEXTS, Path(__file__).read_text()]:
            assert opened.tokens(text) == tokenizer.encode(text, add_special_tokens=False).ids, text


PREPEND = {"type": "Prepend", "prepend": "▁"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


def of_sentencepiece(normalizer, cut, path: Path) -> None:
    """A tokenizer such as transformers makes of SentencePiece's files: bytes for what no piece has."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    trained.train([__file__, json.__file__], trainers.BpeTrainer(vocab_size=600, show_progress=False))
    rules = json.loads(trained.to_str())
    names = ["<unk>", "<s>", "</s>", *gguf_tokenizer._BYTES, *rules["model"]["vocab"]]
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    rules["model"] |= {
        "vocab": {name: index for index, name in enumerate(dict.fromkeys(names))},
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": "<unk>",
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    rules |= {
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "added_tokens": [{"id": index, "content": name, **flags} for index, name in enumerate(names[:3])],
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
    }
    path.write_text(json.dumps(rules))


@pytest.mark.parametrize(
    ("normalizer", "cut"),
    [({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, None), (REPLACE, None), (None, METASPACE)],
)
def test_each_form_of_sentencepiece(normalizer, cut, tmp_path):
    from tokenizers import Tokenizer

    kept = tmp_path / "tokenizer"
    kept.mkdir()
    of_sentencepiece(normalizer, cut, kept / "tokenizer.json")
    special = {"bos_token_id": 1, "eos_token_id": 2}
    folder = made(tmp_path / "model", "mistral", kept, sliding_window=None, **special)
    export_gguf(folder, tmp_path / "model.gguf")
    tokenizer = Tokenizer.from_file(str(kept / "tokenizer.json"))
    # Transformers' Metaspace puts no space before a text that begins with one, nor after a special token, which the
    # source of this test has.
    texts = [text for text in TEXTS if not (cut and text.startswith(" "))]
    with Opened(tmp_path / "model.gguf") as opened:
        for text in [*texts, Path((json if cut else sys.modules[__name__]).__file__).read_text()]:
            assert opened.tokens(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
            assert opened.tokens(text, around=True) == tokenizer.encode(text).ids, text
