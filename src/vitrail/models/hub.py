"""Repositories on the Hugging Face hub: their revisions, and the commits that its cache on this machine holds."""

from __future__ import annotations

from pathlib import Path

from vitrail.errors import VitrailError


def split_revision(name: str) -> tuple[str, str | None]:
    """``NAME@REVISION`` → the name and the branch, tag or commit; None = that which the hub has as its default."""
    base, at, revision = name.partition("@")
    if at and (not base or not revision or "@" in revision):
        raise VitrailError(f"a revision is written NAME@REVISION (a branch, tag or commit), but got {name!r}.")
    return base, revision or None


def cached_commit(repository: str, revision: str | None, cache: str | Path | None = None) -> str | None:
    """The commit of a repository's revision in the cache, ``refs/REVISION``; None where the cache does not hold it."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model")
    reference = folder / "refs" / (revision or constants.DEFAULT_REVISION)
    if reference.is_file():
        return reference.read_text(encoding="utf-8").strip()
    return revision if revision is not None and (folder / "snapshots" / revision).is_dir() else None
