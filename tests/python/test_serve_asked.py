"""serve: the fields of a request, what is refused by name, and where stops cut an answer."""

import random

import pytest
from serve_scene import chat, text

from overspill.serving import asked, errors, stops

# ---- a request's fields


@pytest.mark.parametrize(
    ("more", "said", "param"),
    [
        ({"n": 2}, "n is 2, and only 1 is known here", "n"),
        ({"n": True}, "n is true, and only 1", "n"),
        ({"tools": [{"type": "function"}]}, "tools is", "tools"),
        ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5, and only 0", "frequency_penalty"),
        ({"audio": {"voice": "x"}}, "audio is", "audio"),
        ({"temprature": 1}, "temprature is not known here; leave it out", "temprature"),
        ({"temperature": 2.1}, "temperature is 2.1, and is to be a number from 0 to 2", "temperature"),
        ({"temperature": "1"}, 'temperature is "1"', "temperature"),
        ({"top_p": True}, "top_p is true", "top_p"),
        ({"top_k": 1.5}, "top_k is 1.5, and is to be an integer", "top_k"),
        ({"max_tokens": 0}, "max_tokens is 0, and is to be an integer from 1", "max_tokens"),
        ({"max_completion_tokens": "9"}, 'max_completion_tokens is "9"', "max_completion_tokens"),
        ({"seed": 2**64}, "seed is", "seed"),
        ({"stop": ["a"] * 5}, "at most 4", "stop"),
        ({"stop": ""}, "of 1 to 1000 characters", "stop"),
        ({"stop": [1]}, "stop is 1, and is to be a text", "stop"),
        ({"stream": 1}, "stream is 1, and is to be true or false", "stream"),
        ({"stream_options": {"include_usage": True}}, "needs stream to be true", "stream_options"),
        ({"stream_options": {"x": 1}}, "stream_options is", "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "true"}},
            'include_usage is "true", and is to be true or false',
            "stream_options.include_usage",
        ),
        ({"\ud800": 1}, "\\ud800 is not known here", "\\ud800"),
        ({"messages": [{"role": "user", "content": "a", "\ud800": 1}]}, "[0].\\ud800", "messages[0].\\ud800"),
        ({"logit_bias": {"a": 1}}, "logit_bias is", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias is", "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias is [1]", "logit_bias"),
        ({"logprobs": 3}, "logprobs is 3, and is to be true or false", "logprobs"),
        ({"top_logprobs": 3}, "needs logprobs to be true", "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20", "top_logprobs"),
        ({"messages": []}, "messages is []", "messages"),
        ({"messages": None}, "messages is null", "messages"),
        ({"messages": ["a"]}, 'messages[0] is "a"', "messages[0]"),
        ({"messages": [{"role": "tool", "content": "a"}]}, 'messages[0].role is "tool"', "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role is", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is null", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a", "x": 1}]},
            "messages[0].x is not known",
            "messages[0].x",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is",
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate", "messages[0].content"),
        ({"model": None}, "model is null", "model"),
        ({"response_format": {"type": "x"}}, "response_format is", "response_format"),
    ],
)
def test_what_is_not_known_is_refused_by_name(more, said, param):
    with pytest.raises(errors.ApiError) as found:
        asked.chat(chat() | more)
    assert said in found.value.message and found.value.param == param and found.value.status == 400


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"prompt": None}, "prompt is null"),
        ({"prompt": ["a", "b"]}, "one text, or the tokens of one"),
        ({"prompt": []}, "prompt is []"),
        ({"prompt": [1, True]}, "prompt is [1, true]"),
        ({"prompt": [[1]]}, "prompt is"),
        ({"echo": True}, "echo is true, and only false"),
        ({"suffix": "x"}, "suffix is"),
        ({"best_of": 2}, "best_of is 2"),
        ({"logprobs": 6}, "from 0 to 5"),
        ({"messages": []}, "messages is not known here"),
    ],
)
def test_what_is_not_known_of_a_completion_is_refused_by_name(more, said):
    with pytest.raises(errors.ApiError) as found:
        asked.text(text() | more)
    assert said in found.value.message


def test_what_changes_nothing_is_taken():
    neutral = {"n": 1, "user": "x", "store": True, "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto"}
    neutral |= {"frequency_penalty": 0.0, "presence_penalty": 0, "logprobs": None, "stop": None, "top_p": 0}
    found = asked.chat(chat(**neutral, max_tokens=3, max_completion_tokens=4.0, seed=-1))
    assert found.max_new_tokens == 4 and found.stops == () and found.log_probabilities is None
    assert found.sampling == {"top_p": 1e-6} and found.seed == -1
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
        {"role": "user", "content": "c", "name": "somebody"},
    ]
    assert asked.chat(chat(messages=messages)).prompt == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "c"},
    ]
    assert asked.text(text(["a"])).prompt == "a" and asked.text(text([1, 2])).prompt == [1, 2]
    assert asked.text(text()).max_new_tokens == 16


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"a": NaN}',
        b'{"seed": 1, "seed": 2}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
    ],
)
def test_a_body_that_is_no_json_is_said(body):
    with pytest.raises(errors.ApiError, match="body"):
        asked.parse(body)


# ---- stops


def test_stops_cut_as_a_search_in_the_whole_text_would():
    rng = random.Random(3)
    for _ in range(3000):
        written = "".join(rng.choice("ab") for _ in range(rng.randrange(20)))
        wanted_stops = [
            "".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(0, 3))
        ]
        passing, sent, at = stops.Stops(wanted_stops), "", 0
        while at < len(written) and not passing.found:
            step = rng.randint(1, 3)
            sent += passing.add(written[at : at + step])
            assert written.startswith(sent)
            at += step
        ends = [i for s in wanted_stops if (i := written[:at].find(s)) >= 0]
        assert passing.found == bool(ends)
        if not passing.found:
            sent += passing.end()
        assert sent == (written[: min(ends)] if ends else written)
