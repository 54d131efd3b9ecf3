"""Metrics of a stack: the final names, their help texts, and one pure function from figures to metric families.

Nothing here exports metrics. An integration passes the families to the client library that its engine uses.
"""

from kvtier.metrics.families import DEFINITIONS, MetricDefinition, metric_families

__all__ = ["DEFINITIONS", "MetricDefinition", "metric_families"]
