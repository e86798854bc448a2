"""Container images without a daemon: from a registry, an archive, a folder or a Dockerfile.

```
 registry.py, sources.py ─▶ blobs, verified ─▶ layer_tar.py ─▶ erofs.py ─▶ image.py: the store
 dockerfile.py (text) ─▶ build.py: a machine per step ─────────┘
```
`prepare.py` is what readers of tasks call. A further kind of source
implements `sources.ImageSource`.
"""
