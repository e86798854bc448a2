"""`penstock run`: configuration, launcher, processes, progress, and the end of a run.

```
 infra/config ──▶ command.py ──▶ prepare.py, launcher.py
 launcher.py ──▶ one process.py per entry of `[processes]` ──▶ roles.py builds its actors
 closing.py ◀── the log: replay.py, summary.py, report.html
```
`runs.py` holds the folder layout of a run and the connection to its log. To add a role, write a
builder in `roles.py`, list it in `ROLES`, and add its settings as a field of `RunConfig`
(`penstock.infra.config.settings`).
"""
