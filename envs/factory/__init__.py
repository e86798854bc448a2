"""The task factory: gated coding tasks from local repositories, without a network or a model.

```
 TaskSource.plans() ─▶ Plan.draft(lab) ─▶ Candidate ─▶ gates (fresh machines) ─▶ task set, page
   ladder              records calls      task, hidden  null fails, gold         and Harbor
   library, package    and tries bugs     tests,        passes, again            folders
   commits             in machines        origin
```
A source yields cheap plans; a plan drafts candidates, and may run code for it, but only in the
lab's machines. To add a source: one file with a class that has `name` and `plans()`, and a line in
`factory.open_source`.
"""
