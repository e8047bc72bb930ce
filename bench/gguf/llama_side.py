"""llama.cpp with a GGUF file, by llama-cpp-python's plain C calls: its tokens of a text, its logits of tokens.

llama_side.py FILE.gguf THREADS WAY      WAY: "usual", as llama.cpp comes; "exact": attention in fp32, not in halves
"""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import llama_cpp as api
import numpy

from turns import serve

POSITIONS = 1024  # of the context
F32, DISABLED = 0, 0  # of ggml_type, of llama_flash_attn_type


def ready():
    path, threads, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    api.llama_backend_init()
    model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp Error: it cannot load {path}")
    of_context = api.llama_context_default_params()
    of_context.n_ctx = of_context.n_batch = of_context.n_ubatch = POSITIONS
    of_context.n_threads = of_context.n_threads_batch = threads
    if way == "exact":
        of_context.type_k = of_context.type_v = F32
        of_context.flash_attn_type = DISABLED
    context = api.llama_init_from_model(model, of_context)
    if not context:
        raise RuntimeError(f"llama.cpp Error: it has no context of {POSITIONS} positions")
    vocabulary = api.llama_model_get_vocab(model)
    words = api.llama_vocab_n_tokens(vocabulary)

    def tokens(text: str, around: bool) -> dict[str, Any]:
        """Special tokens in the text count as such, as for transformers. `around`: adds those around a text."""
        data = text.encode()
        found = (api.llama_token * (len(data) + 8))()
        count = api.llama_tokenize(vocabulary, data, len(data), found, len(found), around, True)
        return {"tokens": list(found[:count])}

    def logits(tokens: list[int], file: str) -> dict[str, Any]:
        """Of each token, into a file of numpy's."""
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch = api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        code = api.llama_decode(context, batch)
        api.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama.cpp Error: llama_decode returned {code}")
        values = ctypes.cast(api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        numpy.save(file, numpy.ctypeslib.as_array(values, (len(tokens), words)))
        return {}

    return {"version": api.__version__, "words": words}, {"tokens": tokens, "logits": logits}


if __name__ == "__main__":
    serve(ready)
