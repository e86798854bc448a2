"""Builds the files that machines are made of into the cache: kernels, images, QEMU, guest agent.

Each product is a file named by the digest of its content, and is built again only if the digest of
its inputs changes. Entry points: `build_assets` (`assets.py`), `build_qemu_assets` (`qemu.py`) and
`build_layer` (`layer.py`).
"""
