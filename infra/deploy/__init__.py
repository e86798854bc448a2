"""Deployment on Kubernetes: plain manifests rendered from a run's configuration.

```
 RunConfig ──layout──▶ workloads ──pods, objects, scaling──▶ manifests ──render──▶ DIR/*.yaml
           └──sizes──▶ memory, processors, storage of each
```
A pod runs the same command lines as any host (docs/hosts.md). To add a kind of workload: a member
of `Kind`, its rule in `layout.py`, its manifest in `render.py`.
"""
