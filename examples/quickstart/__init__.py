"""The quickstart as own code: its tasks, what a small policy learns from first, and its users.

`config.toml` names the functions below as `penstock.examples.quickstart:NAME`; a copy
(`penstock init DIR --from quickstart`) names its own. `ladder/` has short functions with a bug
each, and who demonstrates how to mend them; `trail/` has tasks that need more context than a
window holds; `midtrain_data.py` makes the tokenizer and corpora of mid-training, and
`sample_users.py` comes to the gateway. To add a kind of document, add it to the builders in
`ladder_corpora`.
"""

from .ladder.generate import ladder_tasks
from .midtrain_data import ladder_corpora
from .sample_users import users
from .trail.corpus import trail_corpora
from .trail.tasks import trail_tasks

__all__ = ["ladder_corpora", "ladder_tasks", "trail_corpora", "trail_tasks", "users"]
