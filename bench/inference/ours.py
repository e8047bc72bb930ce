"""Overspill as a contender: a model that answers when it is asked to.   ours.py FOLDER OPTIONS

OPTIONS are those of `load`, as JSON; `process` gives the model what is left of so many bytes for the whole process.
`answer`: the tokens that follow `prompt` tokens, the likeliest each time; `batch`: so many such answers at once;
`perplexity`: of a text of so many tokens.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))

from prompts import prompt_of
from turns import serve


def ready():
    from overspill import inference
    from overspill.memory import left_of

    began = time.perf_counter()
    options = json.loads(sys.argv[2])
    if "process" in options:
        options["budget"] = left_of(options.pop("process"))
    model = inference.load(sys.argv[1], **options)
    seconds = time.perf_counter() - began

    def answer(prompt: int, tokens: int) -> dict[str, Any]:
        began = time.perf_counter()
        written = model.tokens(prompt_of(prompt), max_new_tokens=tokens + 1, end_tokens=[])
        found = [next(written)]
        read = time.perf_counter()
        found += written
        return {"prefill": read - began, "decode": (time.perf_counter() - read) / tokens, "tokens": found}

    def batch(texts: int, prompt: int, tokens: int) -> dict[str, Any]:
        with inference.Batch(model, texts=texts) as together:
            answers = [
                together.submit(prompt_of(prompt, text), max_new_tokens=tokens, end_tokens=[])
                for text in range(texts)
            ]
            for each in answers:
                each.next()
            began = time.perf_counter()
            rest = sum(len(list(each)) for each in answers)
            return {"decode": (time.perf_counter() - began) / rest}

    def perplexity(tokens: int) -> dict[str, Any]:
        began = time.perf_counter()
        found = model.perplexity(prompt_of(tokens), window=tokens)
        return {"reading": time.perf_counter() - began, "perplexity": found}

    said = {
        "load_seconds": seconds,
        "streamed_bytes": model.streamed_bytes,
        "expected": model.expected_tokens_per_second(),
        "can_batch": hasattr(inference, "Batch"),
    }
    return said, {"answer": answer, "batch": batch, "perplexity": perplexity}


if __name__ == "__main__":
    serve(ready)
