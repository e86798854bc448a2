"""Container images without a daemon: from a registry, an archive, a folder or a Dockerfile.

```
 registry.py, sources.py ─▶ blobs, verified ─▶ layer_tar.py ─▶ erofs.py ─▶ image.py: the store
 dockerfile.py (text) ─▶ build.py: a machine per step ─────────┘
```
Readers of tasks call `prepare.py`. To add a kind of source, implement `sources.ImageSource`.
"""
