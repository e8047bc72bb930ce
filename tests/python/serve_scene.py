"""A server with a small model as fixtures of pytest, and what tests ask it for."""

import http_server
import pytest

from overspill import inference

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NAME = "tiny-model"


@pytest.fixture(scope="module")
def served_folder(tmp_path_factory):
    return http_server.make_model(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def server(served_folder):
    with http_server.Server(served_folder, "--texts", 3, "--waiting", 2, "--positions", 500_000) as started:
        yield started


@pytest.fixture
def model(served_folder):
    return inference.load(served_folder)


def chat(text="the bird", **more):
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **more}


def text(prompt="the bird", **more):
    return {"model": NAME, "prompt": prompt, **more}


LONGER = {"max_tokens": 150_000, **http_server.ENDLESS}  # on a busy machine too
LONG = {"max_tokens": 50_000, **http_server.ENDLESS}  # an answer that lasts until it is ended
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 20}


def wanted(model, prompt, **drawn):
    options = {
        "temperature": drawn["temperature"],
        "seed": drawn["seed"],
        "max_new_tokens": drawn["max_tokens"],
    }
    return list(model.tokens(prompt, **options))
