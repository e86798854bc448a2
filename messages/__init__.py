"""Typed events, subjects, codec, the Bus protocol and the errors: everything actors say to each other."""
