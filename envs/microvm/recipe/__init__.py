"""The recipe: builds what machines are made of, once, into the cache: kernel, image, guest agent.

Each product is a file named by the digest of its content; its inputs' digest decides whether it
is built again. `build_assets` is the one entry; everything else here is a step of it.
"""
