"""Audit of a model on a folder of images: what it gets wrong, and whether it is right for the wrong reason."""

from vitrail.audit.pairs import compare_pairs
from vitrail.audit.removal import Removal, without_region
from vitrail.audit.run import Audit, audit_images

__all__ = ["Audit", "Removal", "audit_images", "compare_pairs", "without_region"]
