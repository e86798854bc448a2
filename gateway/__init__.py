"""The OpenAI-compatible API, user feedback and the live page.

`Gateway` (`actor.py`) is an actor: it serves HTTP and talks to other actors only through messages.
To add an endpoint, write an async function of `(Services, web.Request)` in the module of its
topic, register it in `app.py`, and raise `ApiError` for every failure that the client should see.
"""
