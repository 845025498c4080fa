"""The stream of a model you already have: find it, prove it, record it, take it apart."""

from addnorm.stream.ablate import ablate, ablate_each, scale_write
from addnorm.stream.decompose import decompose
from addnorm.stream.find import inspect
from addnorm.stream.record import record
from addnorm.stream.recording import Recording

__all__ = ["Recording", "ablate", "ablate_each", "decompose", "inspect", "record", "scale_write"]
