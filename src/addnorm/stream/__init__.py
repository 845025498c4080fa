"""The stream of a model you already have: find it, prove it, record it, take it apart."""

from addnorm.stream.record.recording import Recording

__all__ = ["Recording"]
