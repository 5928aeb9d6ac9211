"""The native engine: samples in this process, on the policy's own modules and weights."""

from whetstone.engines.native.engine import NativeEngine

__all__ = ["NativeEngine"]
