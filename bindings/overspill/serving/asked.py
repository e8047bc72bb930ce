"""A request's body, checked: what is not known is refused by name, since a client believes what it was not told."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from ..config.files import parse_json
from .errors import ApiError

# They change no answer.
IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Fields that are understood where they have one of these values, which ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
STOPS_MAX = 4
STOP_LENGTH_MAX = 1000
TOP_MAX = {"chat": 20, "text": 5}  # log-probabilities at each token
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE_NEUTRAL = (
    "annotations",
    "audio",
    "function_call",
    "name",
    "reasoning_content",
    "refusal",
    "tool_calls",
)

Message = dict[str, str]


@dataclass(frozen=True)
class Asked:
    """What a client wants. None stands for what it leaves to the server."""

    kind: str  # "chat" or "text"
    model: str
    prompt: str | list[int] | list[Message]
    stream: bool = False
    usage: bool = False  # at the end of a stream
    max_new_tokens: int | None = None
    stops: tuple[str, ...] = ()
    log_probabilities: int | None = None  # of so many tokens beside the one that was drawn
    seed: int | None = None
    bias: dict[int, float] = field(default_factory=dict)
    sampling: dict[str, float] = field(default_factory=dict)  # by the names of inference.Model.tokens
    json_schema: dict[str, Any] | None = None  # that the answer is to fit


def parse(data: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises ApiError."""
    try:
        body = parse_json(data)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError is one
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object")
    return body


def chat(body: dict[str, Any]) -> Asked:
    """Of /v1/chat/completions. Raises ApiError."""
    fields = _Fields(body)
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, TOP_MAX["chat"])
    if top is not None and not wanted:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    tokens = fields.integer("max_completion_tokens", 1, 2**31 - 1)
    older = fields.integer("max_tokens", 1, 2**31 - 1)
    return fields.finish(
        "chat",
        prompt=_messages(fields.take("messages")),
        max_new_tokens=older if tokens is None else tokens,
        log_probabilities=(top or 0) if wanted else None,
        json_schema=_format(fields.take("response_format")),
    )


def text(body: dict[str, Any]) -> Asked:
    """Of /v1/completions. Raises ApiError."""
    fields = _Fields(body)
    tokens = fields.integer("max_tokens", 1, 2**31 - 1)
    return fields.finish(
        "text",
        prompt=_prompt(fields.take("prompt")),
        max_new_tokens=16 if tokens is None else tokens,  # OpenAI's default
        log_probabilities=fields.integer("logprobs", 0, TOP_MAX["text"]),
    )


class _Fields:
    """The fields of a body, taken one after the other. null is as good as absent."""

    def __init__(self, body: dict[str, Any]):
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise _wrong(name, value, "true or false")

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (
            isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        ):
            return value
        raise _wrong(name, value, f"an integer from {least} to {most}")

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most:
            return float(value)
        raise _wrong(name, value, f"a number from {least} to {most}")

    def finish(self, kind: str, **own: Any) -> Asked:
        """With the fields that both kinds of request have. What is left then is not known."""
        model = self.take("model")
        if not isinstance(model, str):
            raise _wrong("model", model, "the name of a model that /v1/models lists")
        stream, usage = self.flag("stream"), _usage(self.take("stream_options"))
        if usage and not stream:
            raise ApiError("stream_options needs stream to be true", param="stream_options")
        sampling = {
            "temperature": self.number("temperature", 0, 2),
            "top_p": self.number("top_p", 0, 1),
            "top_k": self.integer("top_k", 0, 2**31 - 1),
            "min_p": self.number("min_p", 0, 1),
            "repetition": self.number("repetition_penalty", 0.01, 100),
        }
        if sampling["top_p"] == 0:
            sampling["top_p"] = 1e-6  # the likeliest token, as OpenAI takes it
        asked = Asked(
            kind=kind,
            model=model,
            stream=stream,
            usage=usage,
            stops=_stops(self.take("stop")),
            seed=self.integer("seed", -(2**63), 2**64 - 1),
            bias=_bias(self.take("logit_bias")),
            sampling={name: value for name, value in sampling.items() if value is not None},
            **own,
        )
        for name, value in self._left.items():
            if name in IGNORED or any(
                value == each and type(value) is type(each) for each in NEUTRAL.get(name, ())
            ):
                continue
            if name in ("frequency_penalty", "presence_penalty") and value == 0:
                continue
            if name in NEUTRAL:
                can = " or ".join(json.dumps(each) for each in NEUTRAL[name]) or "null"
                raise ApiError(
                    f"{name} is {_shown(value)}, and only {can} is known here; leave it out", param=name
                )
            raise _unknown(name, code="unknown_parameter")
        return asked


def _unknown(name: str, code: str | None = None) -> ApiError:
    """A client may choose a name that is no text at all: one with half a surrogate pair."""
    name = name.encode("utf-8", "backslashreplace").decode()[:80]
    return ApiError(f"{name} is not known here; leave it out", param=name, code=code)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return ApiError(f"{name} is {_shown(value)}, and is to be {wanted}", param=name)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(f"{name} has half a surrogate pair, which is no character", param=name) from None
    return value


def _usage(options: Any) -> bool:
    if options is None:
        return False
    known = {"include_usage", "include_obfuscation"}
    if not isinstance(options, dict) or not options.keys() <= known:
        raise _wrong("stream_options", options, 'an object with "include_usage"')
    usage = options.get("include_usage")
    if usage is not None and not isinstance(usage, bool):
        raise _wrong("stream_options.include_usage", usage, "true or false")
    return bool(usage)


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > STOPS_MAX:
        raise _wrong("stop", value, f"a text or a list of at most {STOPS_MAX}")
    for stop in stops:
        if not 0 < len(_text("stop", stop)) <= STOP_LENGTH_MAX:
            raise _wrong("stop", stop, f"of 1 to {STOP_LENGTH_MAX} characters")
    return tuple(stops)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong("logit_bias", value, 'an object like {"50256": -100}')
    bias = {}
    for token, number in value.items():
        right = isinstance(number, (int, float)) and not isinstance(number, bool) and abs(number) <= 100
        if not (token.isascii() and token.isdigit() and len(token) < 10 and right and math.isfinite(number)):
            raise _wrong("logit_bias", {token: number}, "a token's number with a bias from -100 to 100")
        bias[int(token)] = float(number)
    return bias


def _prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list):
        if not value or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
            raise _wrong("prompt", value, "one text, or the tokens of one")
        return value
    return _text("prompt", value)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a list of messages")
    return [_message(f"messages[{i}]", each) for i, each in enumerate(value)]


def _message(name: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise _wrong(name, value, 'an object like {"role": "user", "content": "…"}')
    for key, each in value.items():
        if key in ("role", "content") or (key in MESSAGE_NEUTRAL and (not each or key == "name")):
            continue
        raise _unknown(f"{name}.{key}")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    content = value.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list):
        parts = []
        for i, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
                raise _wrong(f"{name}.content[{i}]", part, 'a part of text, {"type": "text", "text": "…"}')
            parts.append(_text(f"{name}.content[{i}].text", part["text"]))
        content = "".join(parts)
    return {"role": ROLES[role], "content": _text(f"{name}.content", content)}


def _format(value: Any) -> dict[str, Any] | None:
    """The JSON schema that an answer is to fit."""
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return {"type": "object"}
    if (
        isinstance(value, dict)
        and value.get("type") == "json_schema"
        and value.keys() == {"type", "json_schema"}
    ):
        described = value["json_schema"]
        known = {"name", "description", "schema", "strict"}
        if (
            isinstance(described, dict)
            and described.keys() <= known
            and isinstance(described.get("schema"), dict)
        ):
            return described["schema"]
    wanted = 'one of type "text" or "json_object", or {"type": "json_schema", "json_schema": {"schema": {…}}}'
    raise _wrong("response_format", value, wanted)
