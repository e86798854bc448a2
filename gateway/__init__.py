"""The OpenAI-compatible API, user feedback and the live page.

`Gateway` (actor.py) is an actor like any other: it listens over HTTP and speaks to the rest by
messages alone. To add an endpoint: an async function of `(Services, web.Request)` in the
module of its topic, one line in `app.py`, and errors as `ApiError`.
"""
