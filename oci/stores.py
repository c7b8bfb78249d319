"""Opens the store that a reference names."""

from __future__ import annotations

from base.config import Config
from oci.reference import LayoutReference, Reference
from oci.store import Store


def open_store(reference: Reference | LayoutReference, config: Config) -> Store:
    """The registry repository or image layout of `reference`. Nothing is read, made or connected yet."""
    if isinstance(reference, LayoutReference):
        from oci.layout import Layout

        return Layout(reference.directory)
    # urllib3 costs tens of milliseconds to import: only where a registry is meant.
    from oci.registry import Repository

    return Repository(reference, config)
