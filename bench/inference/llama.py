"""llama.cpp as a contender, by llama-cpp-python's plain C calls.   llama.py FILE.gguf THREADS mmap|read CONTEXT"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import llama_cpp as api

from prompts import prompt_of
from turns import serve


def ready():
    path, threads, way, positions = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    api.llama_backend_init()
    of_model = api.llama_model_default_params()
    of_model.use_mmap = way == "mmap"
    began = time.perf_counter()
    model = api.llama_model_load_from_file(path.encode(), of_model)
    if not model:
        raise RuntimeError(f"llama.cpp Error: it cannot load {path}")
    of_context = api.llama_context_default_params()
    of_context.n_ctx = positions
    of_context.n_threads = of_context.n_threads_batch = threads
    context = api.llama_init_from_model(model, of_context)
    if not context:
        raise RuntimeError(f"llama.cpp Error: it has no context of {positions} positions")
    memory = api.llama_get_memory(context)
    likeliest = api.llama_sampler_init_greedy()
    seconds = time.perf_counter() - began

    def read(ids: list[int]) -> int:
        tokens = (api.llama_token * len(ids))(*ids)
        if code := api.llama_decode(context, api.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama.cpp Error: llama_decode returned {code}")
        return api.llama_sampler_sample(likeliest, context, -1)

    def answer(prompt: int, tokens: int) -> dict[str, Any]:
        api.llama_memory_clear(memory, True)
        began = time.perf_counter()
        found = [read(prompt_of(prompt))]
        middle = time.perf_counter()
        for _ in range(tokens):
            found.append(read(found[-1:]))
        ended = time.perf_counter()
        return {"prefill": middle - began, "decode": (ended - middle) / tokens, "tokens": found}

    version = sys.modules["llama_cpp"].__version__
    return {"load_seconds": seconds, "version": version}, {"answer": answer}


if __name__ == "__main__":
    serve(ready)
