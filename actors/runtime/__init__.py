"""What every actor is built on: the `Actor` base, its `Context`, the host that runs it.

To add an actor: a folder `actors/<role>/` with a class that derives from `Actor`, names what
it follows or consumes, and has one `on_<event>` handler each; one line in `infra/run/roles.py`.
"""
