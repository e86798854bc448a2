"""The runtime shared by all actors: the `Actor` base class, its `Context`, and the actor host.

To add an actor, create a folder `actors/<role>/` with a subclass of `Actor` that lists the event
types it follows or consumes and has one `on_<event>` handler for each. Then add one line to
`infra/run/roles.py`.
"""
