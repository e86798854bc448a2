"""The OpenAI-compatible API, user feedback and the live page."""
