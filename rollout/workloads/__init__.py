"""Workloads: batches of scripted episodes whose work is fixed beforehand, for measurements."""

from .description import describe
from .sections import Scale
from .workload import Workload, load_workload, workload_names

__all__ = ["Scale", "Workload", "describe", "load_workload", "workload_names"]
