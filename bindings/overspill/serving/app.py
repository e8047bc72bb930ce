"""The routes: who may ask, how much, and what happens to a client that vanishes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .._core import OverspillError
from ..extras import MissingExtra
from . import asked as requests
from .answering import Piece, Written
from .asked import Asked
from .errors import ApiError
from .formats import Form, event
from .schema import Schema, Schemas

if TYPE_CHECKING:
    from ..inference import Model
    from ..inference_batch import Answer, Batch

PAGE = Path(__file__).with_name("page.html")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    positions: int  # tokens of a prompt and its answer
    tokens: int  # of an answer
    texts: int  # computed at once
    waiting: int  # beside those
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0  # in which a body has to come
    retry_seconds_max: int = 60


class App:
    """A model's answers. `asgi` is the application; `cut` ends all answers, `answering` counts them."""

    def __init__(
        self,
        model: Model,
        batch: Batch,
        name: str,
        limits: Limits,
        *,
        key: str | None = None,
        hosts: frozenset[str] | None = None,
        sampling: dict[str, float] | None = None,
    ):
        """name: what clients call the model. key: what they show to be let in. hosts: names by which they may call
        this machine, any where None: else a page elsewhere can make a browser ask, and read the answer (DNS rebinding).
        sampling: how tokens are drawn where a request does not say; by the names of Model.tokens.
        """
        self._model, self._batch, self._name, self._limits = model, batch, name, limits
        self._key, self._hosts = key, hosts
        self._sampling = {"temperature": 1.0, **(sampling or {})}
        # A tokenizer cannot be used by two threads at a time: one makes tokens, the event loop makes texts.
        self._schemas = Schemas(model)  # the encoder's
        self._encoder = ThreadPoolExecutor(1, "overspill-encode")
        self._tokenizer = copy.deepcopy(model.tokenizer)
        self._threads = ThreadPoolExecutor(limits.texts + limits.waiting + 1, "overspill-answer")
        self._running: set[Written] = set()
        self._started, self._last_seconds = time.time(), 1.0
        self._failure: str | None = None  # what ended the batch
        self._page, self._policy = _page()
        routes = [
            Route("/", self._get_page),
            Route("/health", self._get_health),
            Route("/v1/models", self._guarded(self._get_models)),
            Route("/v1/models/{name:path}", self._guarded(self._get_model)),
            Route("/v1/chat/completions", self._guarded(self._post(requests.chat)), methods=["POST"]),
            Route("/v1/completions", self._guarded(self._post(requests.text)), methods=["POST"]),
        ]
        handlers: Any = {HTTPException: _no_route, Exception: _our_fault}
        self._routed = Starlette(routes=routes, exception_handlers=handlers)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, by ASGI."""
        if scope["type"] == "http" and (error := self._wrong_host(Request(scope))):
            await _error(error)(scope, receive, send)
            return
        await self._routed(scope, receive, send)

    @property
    def answering(self) -> int:
        """Answers that are written or wait."""
        return len(self._running)

    def cut(self) -> None:
        """Ends all answers where they are."""
        for written in list(self._running):
            written.cut()

    def close(self) -> None:
        """Ends its threads. Close the batch before: they wait for it."""
        self._encoder.shutdown()
        self._threads.shutdown()

    # ---- who may ask

    def _wrong_host(self, request: Request) -> ApiError | None:
        host = request.headers.get("host", "")
        name = re.sub(r":\d*$", "", host).lower()
        if self._hosts is None or name in self._hosts:
            return None
        return ApiError(
            f"this server does not answer to the name {host!a:.300}; call it by {' or '.join(sorted(self._hosts))} "
            "(a proxy has to send one of them as Host)",
            status=403,
        )

    def _guarded(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """With the key, and errors in OpenAI's form."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handle(request)
            except ApiError as error:
                return _error(error)

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            what = "the API key is wrong" if given else "an API key is needed"
            raise ApiError(
                f"{what}; send the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    # ---- what is there

    async def _get_page(self, request: Request) -> Response:
        return HTMLResponse(
            self._page,
            headers={
                "content-security-policy": self._policy,
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
                "cache-control": "no-store",
            },
        )

    async def _get_health(self, request: Request) -> Response:
        if self._failure is not None:
            return JSONResponse({"status": "failed", "error": self._failure}, 503)
        return JSONResponse({"status": "ok", "model": self._name, "answers": self.answering})

    async def _get_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _get_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": int(self._started),
            "owned_by": "overspill",
            "max_model_len": self._limits.positions,
        }

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise ApiError(
                f"model is {name[:200]!r}, and this server has {self._name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    # ---- answers

    def _post(self, parse: Callable[[dict[str, Any]], Asked]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            asked = parse(requests.parse(await self._body(request)))
            self._check_model(asked.model)
            loop = asyncio.get_running_loop()
            ids, schema = await loop.run_in_executor(self._encoder, self._encode, asked)
            written = self._submit(asked, ids, schema)
            form = Form(
                asked.kind, self._name, self._tokenizer, asked.log_probabilities is not None, asked.usage
            )
            return _Answering(self, written, form, len(ids), asked.stream)

        return handle

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a form of a page elsewhere cannot send
            raise ApiError(
                f"content-type is {kind!r}, and is to be 'application/json'", status=415, headers=_CLOSE
            )
        most = self._limits.body_bytes
        too_large = ApiError(f"the body is larger than {most} bytes", status=413, headers=_CLOSE)
        # One that is not much larger is read to its end and not kept: a client that still sends when the connection is
        # closed may lose the answer.
        read_most = 2 * most
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > read_most:
            raise too_large
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > read_most:
                        raise too_large
                    if size <= most:
                        body += part
        except TimeoutError:
            raise ApiError("the body did not come in time", status=408, headers=_CLOSE) from None
        except ClientDisconnect:  # nobody reads this
            raise ApiError("the client has gone", status=400, headers=_CLOSE) from None
        if size > most:
            raise too_large
        return bytes(body)

    def _encode(self, asked: Asked) -> tuple[list[int], Schema | None]:
        """The prompt's tokens, and what the answer has to fit."""
        from jinja2 import TemplateError

        try:
            ids = self._model.encode(asked.prompt)
        except (ValueError, TemplateError) as error:
            raise ApiError(str(error), param="messages" if asked.kind == "chat" else "prompt") from None
        if not ids:
            raise ApiError("the prompt has no tokens to go on from", param="prompt")
        if asked.json_schema is None:
            return ids, None
        try:
            return ids, self._schemas.constraint(asked.json_schema)
        except (ValueError, MissingExtra) as error:
            raise ApiError(f"response_format: {error}", param="response_format") from None

    def _submit(self, asked: Asked, ids: list[int], schema: Schema | None) -> Written:
        """Raises ApiError: what is too long, out of range, or too much at once."""
        count = self._count(asked, len(ids))
        drawn = {**self._sampling, **asked.sampling}
        seed = secrets.randbits(64) if asked.seed is None else asked.seed & (2**64 - 1)
        likeliest, bias = asked.log_probabilities, self._checked(asked.bias)
        try:
            answer: Answer = self._batch.submit(
                ids,
                max_new_tokens=count,
                seed=seed,
                bias=bias,
                constraint=schema,
                log_probabilities=0 if likeliest is None else max(1, likeliest),
                **drawn,
            )
        except _queue_full():
            seconds = round(max(1, min(self._limits.retry_seconds_max, self._last_seconds)))
            raise ApiError(
                f"{self._limits.texts} answers are written and {self._limits.waiting} wait; ask again later",
                status=429,
                code="queue_full",
                headers={"retry-after": str(seconds)},
            ) from None
        except ValueError as error:
            raise ApiError(str(error)) from None
        except (OverspillError, RuntimeError) as error:
            self._failure = str(error)
            raise ApiError(str(error), status=503) from None
        return Written(answer, self._tokenizer, asked.stops, likeliest)

    def _count(self, asked: Asked, prompt_tokens: int) -> int:
        """How many tokens the answer may have. The last one is drawn and never read."""
        limits, wanted = self._limits, asked.max_new_tokens
        room = limits.positions - prompt_tokens + 1
        if room < 1 or (wanted is not None and wanted > room):
            more = "" if wanted is None else f" and {wanted} of the answer"
            raise ApiError(
                f"{prompt_tokens} tokens of the prompt{more} are more than the {limits.positions} that this server has "
                "room for",
                param="messages" if asked.kind == "chat" else "prompt",
                code="context_length_exceeded",
            )
        if wanted is not None and wanted > limits.tokens:
            raise ApiError(
                f"max_tokens is {wanted}, and this server's answers have at most {limits.tokens}",
                param="max_tokens",
            )
        return min(room, limits.tokens) if wanted is None else wanted

    def _checked(self, bias: dict[int, float]) -> dict[int, float]:
        for token in bias:
            if token >= self._model.vocabulary:
                raise ApiError(
                    f"logit_bias: token {token} is not one of the vocabulary's {self._model.vocabulary}",
                    param="logit_bias",
                )
        return bias

    @contextlib.asynccontextmanager
    async def pieces(self, written: Written) -> AsyncIterator[AsyncIterator[Piece]]:
        """The answer's pieces, while it counts as one that is written. Raises ApiError where it cannot be ended."""
        self._running.add(written)
        begun = time.monotonic()
        try:
            async with contextlib.aclosing(written.pieces(self._threads)) as pieces:
                yield pieces
            if written.finish_reason not in ("stop", "length"):
                raise ApiError("the server is ending, and the answer was cut off", status=503)
            self._last_seconds = time.monotonic() - begun
        except ApiError:
            raise
        except ValueError as error:  # logits that are no numbers
            raise ApiError(str(error), status=500) from None
        except OverspillError as error:
            self._failure = str(error)
            raise ApiError(str(error), status=500) from None
        finally:
            written.cut()
            self._running.discard(written)


class _Answering(Response):
    """An answer on its way to a client, whole or as events. When the client vanishes, the answer ends."""

    def __init__(self, app: App, written: Written, form: Form, prompt_tokens: int, stream: bool):
        super().__init__()
        self._app, self._written, self._form = app, written, form
        self._prompt_tokens, self._stream = prompt_tokens, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(receive, self._send(scope, receive, send))
        finally:
            self._written.cut()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_events(send)
            return
        try:
            response: Response = JSONResponse(await self._whole())
        except ApiError as error:
            response = _error(error)
        await response(scope, receive, send)

    async def _whole(self) -> dict[str, Any]:
        async with self._app.pieces(self._written) as pieces:
            found = [piece async for piece in pieces]
        return self._form.whole(
            found, self._written.finish_reason or "", self._prompt_tokens, self._written.tokens
        )

    async def _send_events(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def put(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            if first := self._form.first():
                await put(event(first))
            async with self._app.pieces(self._written) as pieces:
                async for piece in pieces:
                    await put(event(self._form.piece(piece)))
            written = self._written
            for chunk in self._form.last(written.finish_reason or "", self._prompt_tokens, written.tokens):
                await put(event(chunk))
            await put(event("[DONE]"), more=False)
        except ApiError as error:  # the status is sent
            await put(event(error.body), more=False)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, Found]) -> Found | None:
    """What the work returns; None where the client has gone before it was done, and then the work is cancelled."""
    done = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        for task in (done, gone):
            task.cancel()
        await asyncio.gather(done, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


_CLOSE = {"connection": "close"}  # the rest of the body is not read


def _queue_full() -> type[Exception]:
    from .. import inference

    return inference.QueueFull


def _error(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


async def _no_route(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path[:200]}"
    return _error(
        ApiError(f"{what}: {error.detail}", status=error.status_code, headers=dict(error.headers or {}))
    )


async def _our_fault(request: Request, error: Exception) -> Response:
    return _error(ApiError(f"{type(error).__name__}: {error}", status=500))


def _page() -> tuple[str, str]:
    """The page, and the policy by which a browser runs its own script and style and nothing else."""
    text = PAGE.read_text(encoding="utf-8")
    hashes = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        hashes[tag] = f"'sha256-{digest}'"
    return text, (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
