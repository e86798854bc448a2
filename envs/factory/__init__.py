"""The task factory: gated coding tasks from local repositories, without a network or a model.

```
 TaskSource.plans() ─▶ TaskPlan.draft(lab) ─▶ TaskCandidate ─▶ gates (machines) ─▶ task set
   own code              records calls          task,           null fails,          page
   library, package      and tries bugs         hidden tests,   gold passes,         Harbor
   commits               in machines            origin          twice                folders
```
A source yields cheap plans; a plan drafts candidates, and may run code for it, but only in the
lab's machines. To add a source: one file with a class that has `name` and `plans()`, and a line in
`factory.open_source`.
"""
