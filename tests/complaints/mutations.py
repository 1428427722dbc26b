"""All fixes that can be disabled, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.complaints import of_comm, of_environments, of_rollout, of_versions
from tests.complaints.mutation import Mutation

ALL = (
    *of_comm.MUTATIONS,
    *of_environments.MUTATIONS,
    *of_rollout.MUTATIONS,
    *of_versions.MUTATIONS,
)

MUTATIONS: Mapping[str, Mutation] = {mutation.name: mutation for mutation in ALL}
