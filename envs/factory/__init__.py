"""The task factory makes gated coding tasks from local repositories, without network or model.

```
 TaskSource.plans() ─▶ TaskPlan.draft(lab) ─▶ TaskCandidate ─▶ gates (machines) ─▶ task set
   own code              records calls          task,           null fails,          page
   library, package      and tries bugs         hidden tests,   gold passes,         Harbor
   commits               in machines            origin          twice                folders
```
A source yields cheap plans; a plan drafts candidates, for which it may run code, but only in the
lab's machines. To add a source, write a class with `name` and `plans()`, and add a line to
`factory.open_source`.
"""
