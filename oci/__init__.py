"""Checkpoint artifacts and where they live: registries, image layouts, containerd's content store."""

from oci.stores import open_store

__all__ = ["open_store"]
