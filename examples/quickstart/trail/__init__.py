"""Tasks that need more context than a window holds: files one after the other, each readable once.

```
 task: "Follow the trail from b4 ..."
   b4/1  "amber field one olga next d2"  ─▶  d2/1 "... next k9"  ─▶ ... ─▶  "... end"
 answer.txt: "names" and the numbered names in the order of the trail
```
The files are pages (`Task.pages`): the harness shows each once and no machine holds them, so what
the policy does not carry along is gone.
"""
