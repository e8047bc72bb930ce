"""A model behind HTTP, in OpenAI's form: /v1/chat/completions, /v1/completions, /v1/models; a page at /, /health.

`errors` is what a client is told, `asked` reads a request, `answering` makes an answer of a batch's tokens, `formats`
writes it, `app` joins them, `server` listens and ends. Beside the page nothing here knows a browser.
"""
